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


def test_a_long_conversation_is_fitted_with_few_counts() -> None:
    counted: list[int] = []

    def count(messages: list[Message]) -> int:
        counted.append(len(messages))
        return len(messages)

    conversation = talk(2000)
    assert conversation.fit(count, 21) == 1989  # ten turns of two messages, and the question
    assert len(conversation.prompt()) == 21
    assert len(counted) < 15 and sum(counted[1:]) < 300  # the first count is of everything


def test_fitting_finds_the_same_turns_as_leaving_out_one_by_one() -> None:
    for count in range(1, 12):
        for room in range(0, 25):
            conversation = talk(count, "be brief")
            left_out = 0
            while left_out < count - 1 and 2 + 2 * (count - left_out - 1) > room:
                left_out += 1
            assert conversation.fit(count_messages, room) == left_out == conversation.num_left_out
            assert conversation.fit(count_messages, room) == 0
