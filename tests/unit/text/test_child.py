"""Tokenizers out of checkpoints: what runs away, panics or grows is stopped, and said in words."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from flashdraft.chat.templates import encode_chat, render_chat
from flashdraft.errors import CheckpointError, FlashdraftError, RequestError
from flashdraft.killable.pool import RefusedError
from flashdraft.models import tokenizer as tokenizer_module
from flashdraft.models.tokenizer import Tokenizer

LETTERS = {chr(code): number for number, code in enumerate(range(32, 127))}
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def backend(**parts: Any) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(LETTERS, []))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def split_by(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def growing(times: int) -> Any:
    return normalizers.Sequence([normalizers.Replace("a", "a" * 16)] * times)


@pytest.mark.parametrize(
    ("parts", "text", "why"),
    [
        ({"pre_tokenizer": split_by("(a+)+b")}, "a" * 40, "fails on this text|was stopped"),
        ({"pre_tokenizer": split_by("(x+x+)+y")}, "x" * 300, "fails on this text|was stopped"),
        ({"normalizer": growing(8)}, "aaaa", "was stopped: it (needed more|ran for)"),
        ({"normalizer": growing(30)}, "aaaa", "was stopped: it (needed more|ran for)"),
        ({}, "half \ud800 a character", "must be text of valid Unicode"),
        ({"model": models.WordPiece({"a": 0}, unk_token="[UNK]")}, "b", r"Missing \[UNK\] token"),
    ],
)
def test_a_text_that_the_tokenizer_fails_on(parts: dict[str, Any], text: str, why: str) -> None:
    tokenizer = Tokenizer(backend(**parts), chat_template="{{ messages[0].content }}")
    begin = time.monotonic()
    with pytest.raises(RequestError, match=why):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match=why):
        encode_chat(tokenizer, [{"role": "user", "content": text}])
    with pytest.raises(RequestError, match=why):
        tokenizer.encode_batch(["a", text])
    assert time.monotonic() - begin < 30
    if not parts:
        assert tokenizer.encode("ab") == [LETTERS["a"], LETTERS["b"]]


def test_a_pattern_that_fails_is_an_exception_of_ours_and_the_next_text_is_encoded() -> None:
    """In this process it would be a panic, which `except Exception` does not catch."""
    tokenizer = Tokenizer(backend(pre_tokenizer=split_by("(a+)+b")))
    with pytest.raises(RequestError):
        tokenizer.encode("a" * 40)
    assert tokenizer.encode("abc") == [LETTERS[letter] for letter in "abc"]


def test_ids_are_those_of_the_library() -> None:
    made = backend(pre_tokenizer=pre_tokenizers.Whitespace())
    tokenizer = Tokenizer(made, chat_template=CHAT)
    texts = ["", "hello world", "x" * 20_000, "a b " * 5]
    assert tokenizer.encode_batch(texts) == [made.encode(text).ids for text in texts]
    assert [tokenizer.encode(text) for text in texts] == tokenizer.encode_batch(texts)
    messages = [{"role": "user", "content": "hello"}]
    text = render_chat(tokenizer, messages)
    assert text == "user:hello;"
    assert encode_chat(tokenizer, messages) == made.encode(text).ids


def test_a_conversation_beyond_a_limit_is_not_encoded() -> None:
    tokenizer = Tokenizer(backend(), chat_template=CHAT)
    messages = [{"role": "user", "content": "hello"}]
    assert len(encode_chat(tokenizer, messages, max_chars=11)) == 11
    with pytest.raises(RefusedError, match="^11$"):
        encode_chat(tokenizer, messages, max_chars=10)


@pytest.mark.parametrize("bad", [object(), {1, 2}, b"x"])
def test_what_is_no_json_is_refused(bad: Any) -> None:
    tokenizer = Tokenizer(backend(), chat_template=CHAT)
    with pytest.raises(RequestError, match="JSON values"):
        render_chat(tokenizer, [{"role": "user", "content": "x", "more": bad}])


def save(folder: Path, content: str | bytes, **files: Any) -> Path:
    data = content.encode() if isinstance(content, str) else content
    (folder / "tokenizer.json").write_bytes(data)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"version": "1.0", "model": {"type": "BPE", "vocab": 3, "merges": []}}',
        "[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_file_is_the_checkpoints_fault(content: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_checkpoint(save(tmp_path, content))


@pytest.mark.parametrize(
    ("decoder", "why"),
    [
        (decoders.Replace(Regex("(a+)+b"), "x"), "its decoder has a regular expression"),
        (
            decoders.Sequence([decoders.Replace("a", "aaaa")] * 30),
            "make a text 1152921504606846976",
        ),
        (decoders.Replace("", "x"), "its decoder Replace replaces an empty text"),
        (decoders.BPEDecoder(""), "its decoder BPEDecoder replaces an empty text"),
        (decoders.Sequence([decoders.CTC(word_delimiter_token="")]), "its decoder CTC replaces an"),
        (decoders.Sequence([decoders.WordPiece()] * 33), "its 33 decoders .at most 32 are taken."),
    ],
)
def test_decoders_that_could_run_away_are_refused(decoder: Any, why: str, tmp_path: Path) -> None:
    """Decoding happens where it cannot be stopped."""
    with pytest.raises(CheckpointError, match=why):
        Tokenizer.from_checkpoint(save(tmp_path, backend(decoder=decoder).to_str()))


def test_usual_decoders_are_not(tmp_path: Path) -> None:
    gemma = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    llama = decoders.Sequence([decoders.Metaspace(), decoders.Strip(" ", 1, 0)])
    words = (decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC())
    for decoder in (gemma, llama, decoders.ByteLevel(), *words, None):
        content = backend(decoder=decoder).to_str()
        assert Tokenizer.from_checkpoint(save(tmp_path, content)) is not None


def test_a_file_that_takes_too_long_to_load_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "_LOAD_CPU_S", 0.05)  # less than Python itself takes
    big = tokenizers.Tokenizer(models.BPE({f"t{n}": n for n in range(100_000)}, []))
    monkeypatch.setattr(tokenizer_module, "_LOAD_CPU_S_PER_BYTE", 0.0)
    with pytest.raises(CheckpointError, match="was not loaded: it ran for more than 0.05 s"):
        Tokenizer.from_checkpoint(save(tmp_path, big.to_str()))


def test_a_panic_while_decoding_is_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    class Panicking:
        def decode(self, *arguments: Any, **named: Any) -> str:
            raise PanicException("index out of bounds")

    tokenizer = Tokenizer(backend())
    monkeypatch.setattr(tokenizer, "_backend", Panicking())
    with pytest.raises(FlashdraftError, match="cannot decode: index out of bounds"):
        tokenizer.decode([1])


def test_many_threads_share_a_tokenizer() -> None:
    tokenizer = Tokenizer(backend(), chat_template=CHAT)
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        for _ in range(10):
            found[number] = tokenizer.encode(str(number) * 50)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = {n: [LETTERS[digit] for digit in str(n) * 50] for n in range(16)}
    assert found == expected


def test_the_processes_import_no_torch() -> None:
    tokenizer = Tokenizer(backend())
    tokenizer.encode("a")
    (process,) = tokenizer.pool._all
    maps = Path(f"/proc/{process._child.pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not show what a process has loaded")
    assert "libtorch" not in maps.read_text()


def test_a_file_that_changes_under_a_model_is_not_loaded_anew(tmp_path: Path) -> None:
    folder = save(tmp_path, backend().to_str())
    tokenizer = Tokenizer.from_checkpoint(folder)
    assert tokenizer is not None and tokenizer.encode("ab")
    save(folder, backend(normalizer=growing(1)).to_str())
    tokenizer.rest()  # as when a process was killed
    with pytest.raises(CheckpointError, match="has changed since the model was loaded"):
        tokenizer.encode("ab")


@pytest.mark.parametrize(
    ("template", "why"),
    [("{{ cycler() }}", "does not accept"), ("{{ 10**5000|string }}", "compiled|accept")],
)
def test_odd_failures_of_a_template_are_its_own(template: str, why: str) -> None:
    tokenizer = Tokenizer(backend(), chat_template=template)
    for _ in range(2):
        with pytest.raises((RequestError, CheckpointError), match=why):
            render_chat(tokenizer, [{"role": "user", "content": "x"}])
    assert len(tokenizer.pool._all) == 1  # no process was lost
