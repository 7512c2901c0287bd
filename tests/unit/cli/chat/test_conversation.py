"""A chat's history, and what of it the model still sees."""

from __future__ import annotations

from flashdraft.cli.chat.conversation import Conversation, Message, Turn


def talk(count: int, system: str | None = None) -> Conversation:
    """Turns q0/a0, q1/a1, …, the last one not answered."""
    turns = [Turn(f"q{n}", f"a{n}") for n in range(count)]
    turns[-1].answer = None
    return Conversation(system, turns)


def contents(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages]


def count_messages(messages: list[Message]) -> int:
    return len(messages)


def test_the_prompt_is_everything_in_order() -> None:
    prompt = talk(2, "be brief").prompt()
    assert contents(prompt) == ["be brief", "q0", "a0", "q1"]
    assert [message["role"] for message in prompt] == ["system", "user", "assistant", "user"]


def test_the_oldest_turns_are_left_out_and_the_system_prompt_stays() -> None:
    conversation = talk(4, "be brief")
    assert conversation.fit(count_messages, 5) == 2
    assert contents(conversation.prompt()) == ["be brief", "q2", "a2", "q3"]
    assert conversation.fit(count_messages, 5) == 0


def test_the_last_question_is_never_left_out() -> None:
    conversation = talk(3, "be brief")
    assert conversation.fit(count_messages, 0) == 2
    assert contents(conversation.prompt()) == ["be brief", "q2"]


def test_undo_takes_back_turns_that_were_left_out_too() -> None:
    conversation = talk(2)
    conversation.fit(count_messages, 1)
    assert conversation.undo() == Turn("q1") and conversation.undo() == Turn("q0", "a0")
    assert conversation.undo() is None
    conversation.turns.append(Turn("new"))
    assert contents(conversation.prompt()) == ["new"]


def test_reset_keeps_the_system_prompt() -> None:
    conversation = talk(3, "be brief")
    conversation.fit(count_messages, 3)
    conversation.reset()
    conversation.turns.append(Turn("new"))
    assert contents(conversation.prompt()) == ["be brief", "new"]
