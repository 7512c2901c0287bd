"""Processes that replace others: what fails in loading them is not blamed on the text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from flashdraft.chat.templates import render_chat
from flashdraft.errors import CapacityError, CheckpointError, FlashdraftError
from flashdraft.models import tokenizer as tokenizer_module
from flashdraft.models.tokenizer import Tokenizer

LETTERS = {chr(code): number for number, code in enumerate(range(32, 127))}
QUESTIONS: list[Callable[[Tokenizer], Any]] = [
    lambda tokenizer: tokenizer.encode("ab"),
    lambda tokenizer: render_chat(tokenizer, [{"role": "user", "content": "x"}]),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(models.BPE(LETTERS, [])).save(str(path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return path


def loaded(file: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_checkpoint(file.parent)
    assert tokenizer is not None and tokenizer.encode("ab")
    return tokenizer


def rewrite(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))


def test_the_same_content_written_anew_is_loaded(file: Path) -> None:
    tokenizer = loaded(file)
    for _ in range(2):
        rewrite(file)
        tokenizer.rest()  # as when a process was killed
        assert tokenizer.encode("ab") == [LETTERS["a"], LETTERS["b"]]
        assert render_chat(tokenizer, [{"role": "user", "content": "x"}]) == "x"


@pytest.mark.parametrize("ask", QUESTIONS)
@pytest.mark.parametrize("is_longer", [False, True])
def test_another_content_is_not_loaded(
    file: Path, ask: Callable[[Tokenizer], Any], is_longer: bool
) -> None:
    tokenizer = loaded(file)
    file.write_text(file.read_text().replace('"~"', '"~~"' if is_longer else '"€"'))
    tokenizer.rest()
    why = r"tokenizer\.json has changed since the model was loaded\. .*[Rr]estart"
    with pytest.raises(CheckpointError, match=why):
        ask(tokenizer)


@pytest.mark.parametrize("ask", QUESTIONS)
def test_a_file_that_is_gone_is_named_until_it_is_back(
    file: Path, ask: Callable[[Tokenizer], Any]
) -> None:
    tokenizer = loaded(file)
    content = file.read_bytes()
    file.unlink()
    tokenizer.rest()
    why = r"^\S*tokenizer\.json cannot be read any more: No such file.*[Rr]estart"
    with pytest.raises(CheckpointError, match=why):
        ask(tokenizer)
    file.write_bytes(content)
    assert ask(tokenizer)


@pytest.mark.parametrize("ask", QUESTIONS)
def test_a_replacement_beyond_its_limits_is_no_fault_of_the_text(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[Tokenizer], Any]
) -> None:
    monkeypatch.setattr(tokenizer_module, "_LOAD_CPU_S", 0.05)  # less than it takes
    monkeypatch.setattr(tokenizer_module, "_LOAD_CPU_S_PER_BYTE", 0.0)
    big = tokenizers.Tokenizer(models.BPE({f"t{n}": n for n in range(100_000)}, []))
    tokenizer = Tokenizer(big, chat_template="x")
    with pytest.raises(CapacityError, match="loading the model's tokenizer: it ran for") as told:
        ask(tokenizer)
    assert "shorter" not in str(told.value)


def test_an_installation_that_cannot_start_a_process_is_not_blamed_on_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_CHILD", "no_such_package.child")
    with pytest.raises(FlashdraftError, match="cannot be started: .*no_such_package") as told:
        Tokenizer.from_checkpoint(file.parent)
    assert not isinstance(told.value, CheckpointError | CapacityError)
    assert "tokenizer.json" not in str(told.value) and "Fetch" not in str(told.value)
