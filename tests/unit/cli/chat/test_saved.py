"""Conversations in files come back as they were; what is no conversation is refused in words."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from flashdraft.cli.chat.conversation import Conversation, Turn
from flashdraft.cli.chat.saved import MAX_BYTES, MAX_MESSAGES, load_chat, save_chat
from flashdraft.cli.chat.settings import (
    NAMES,
    change_setting,
    describe_settings,
    settings_of,
    take_settings,
)
from flashdraft.cli.parser import in_flags
from flashdraft.core import SamplingParams
from flashdraft.errors import RequestError

TALK = Conversation("be brief", [Turn("q\n1 ☕", "a1"), Turn("q2", "")])
PARAMS = SamplingParams(temperature=0.7, top_k=3, seed=5, stop=["x", "\n"], ignore_eos=True)


def test_a_conversation_comes_back_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save_chat(path, TALK, settings_of(PARAMS), "tiny")
    saved = load_chat(path)
    assert (saved.conversation, saved.model) == (TALK, "tiny")
    assert take_settings(SamplingParams(), saved.settings) == PARAMS
    save_chat(tmp_path / "talk.md", TALK, {}, "tiny")
    text = (tmp_path / "talk.md").read_text(encoding="utf-8")
    assert text.startswith("## system\n\nbe brief\n\n## user\n\nq\n1 ☕\n")


def test_messages_alone_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"messages": TALK.messages()}))
    assert load_chat(path).conversation == TALK
    path.write_text('{"messages": []}')
    assert load_chat(path).conversation == Conversation()


def said(role: str, content: Any = "x") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not readable as JSON"),
        ("[" * 100_000, "nested too deeply|not readable as JSON"),
        ("[]", "no list of `messages`"),
        ({"messages": "x"}, "no list of `messages`"),
        ({"messages": [], "tools": []}, "'tools'"),
        ({"messages": [], "settings": 3}, "`settings` must be an object"),
        ({"messages": [], "model": {}}, "`model` a name"),
        ({"messages": [3]}, "message 1 must have `role`"),
        ({"messages": [{**said("user"), "name": "x"}]}, "nothing else"),
        ({"messages": [said("tool")]}, "role 'tool'"),
        ({"messages": [said("user", ["x"])]}, "must be a string"),
        ({"messages": [said("user", "\ud800"), said("assistant")]}, "lone surrogate"),
        ({"messages": [said("assistant")]}, "must be by 'user'"),
        ({"messages": [said("user"), said("user")]}, "must be by 'assistant'"),
        ({"messages": [said("user"), said("system")]}, "must be by 'assistant'"),
        ({"messages": [said("user")]}, "last question has no answer"),
        ({"messages": [said("user")] * (MAX_MESSAGES + 1)}, "are taken"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"messages": []}\0', "zero bytes"),
        (b" " * (MAX_BYTES + 1), "more than"),
        ('{"messages": [], "settings": {"seed": ' + "9" * 5000 + "}}", "not readable as JSON"),
    ],
)
def test_what_is_no_conversation_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "talk.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(RequestError, match=words) as error:
        load_chat(path)
    assert len(str(error.value)) < 500


def test_only_regular_files_are_read_and_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    done = threading.Thread(target=lambda: pytest.raises(RequestError, load_chat, pipe))
    done.start()
    done.join(10)  # nobody writes into it, and nobody waits for that
    assert not done.is_alive()
    for path in (pipe, Path(os.devnull)):
        with pytest.raises(RequestError, match="no regular file"):
            save_chat(path, TALK, {}, "tiny")
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(RequestError):
            load_chat(path)


# -- /set --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        ("temperature 0.8", "temperature", 0.8),
        ("top-p 0.5", "top_p", 0.5),
        ("top_k 7", "top_k", 7),
        ("MAX-TOKENS 9", "max_tokens", 9),
        ("ignore-eos on", "ignore_eos", True),
        ("stop END OF IT", "stop", ["END OF IT"]),
        ('stop ["\\n", "b"]', "stop", ["\n", "b"]),
        ("stop off", "stop", []),
        ("seed default", "seed", None),
    ],
)
def test_a_setting_is_changed(typed: str, name: str, value: Any) -> None:
    params = change_setting(SamplingParams(seed=3, stop=["x"]), typed, SamplingParams())
    assert getattr(params, name) == value


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("temprature 1", r"no setting 'temprature'\. Did you mean temperature\?"),
        ("temperature", "/set temperature needs a value; it is 0.0 now"),
        ("temperature hot", "/set temperature is 'hot'; it must be a finite number"),
        ("max-tokens 0", "/set max-tokens is 0; it must be an integer of at least 1"),
        ("ignore-eos perhaps", "/set ignore-eos is 'perhaps'; it must be True or False"),
        ("stop [1]", "/set stop is"),
        ("top-p nan", "/set top-p is nan"),
        ("logprobs 3", "no setting 'logprobs'.*/set lists them"),
        ("parameter temperature 1", "no setting 'parameter'.*/set temperature 0.8"),
        ("system be brief", "no setting 'system'.*/system TEXT"),
    ],
)
def test_a_wrong_setting_is_refused_as_it_was_typed(typed: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        change_setting(SamplingParams(), typed, SamplingParams())


@pytest.mark.parametrize(
    "given",
    [{"max_tokens": "x" * 10**6}, {"n": 3}, {"stop": ["x"] * 99}, {"seed": 1e999}, {"top_k": [[]]}],
)
def test_settings_of_a_hostile_file_are_refused_in_few_words(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        take_settings(SamplingParams(), given)
    assert len(str(error.value)) < 500


def test_every_setting_is_listed() -> None:
    shown = describe_settings(PARAMS)
    assert [line.split()[0] for line in shown.splitlines()[:-1]] == [
        name.replace("_", "-") for name in NAMES
    ]
    assert "0.7" in shown and '["x", "\\n"]' in shown and "on" in shown


def test_an_answer_may_go_to_the_end_of_the_context_as_the_message_says() -> None:
    with pytest.raises(RequestError, match="or None"):
        change_setting(PARAMS, "max-tokens x", PARAMS)
    changed = change_setting(PARAMS, "max-tokens none", PARAMS)
    assert changed.max_tokens is None
    assert "to the end of the context" in describe_settings(changed)


def test_settings_that_a_file_may_have_are_named_as_a_file_has_them() -> None:
    with pytest.raises(RequestError) as caught:
        take_settings(PARAMS, {"n": 3})
    flags = {"max_tokens": "--max-tokens"}
    assert "known are 'max_tokens', 'temperature'" in in_flags(caught.value, flags)
