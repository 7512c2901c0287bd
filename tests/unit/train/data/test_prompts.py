"""Prompts: every form of row and file, clear errors, and the two filters."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from flashdraft.errors import TrainingError
from flashdraft.train.data import prompts as module
from flashdraft.train.data.prompts import (
    NearDuplicates,
    Prompt,
    digest_of,
    drop_near_duplicates,
    drop_overlapping,
    read_prompts,
)

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_form_of_row(tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    user = {"role": "user", "content": "hi"}
    rows = [
        {"prompt": "hi", "source": "web"},
        {"turns": ["hi", "and then?"]},
        {"messages": [system, user, {"role": "assistant", "content": "hello"}, user]},
        {"prompt": [user]},
        {"instruction": "add", "input": "1 and 2"},
        {"instruction": "hi", "input": ""},
    ]
    prompts = read_prompts(write_rows(tmp_path / "mine.jsonl", rows))
    assert [p.text for p in prompts] == ["hi", "hi", "be brief\nhi", "hi", "add\n\n1 and 2", "hi"]
    assert [m["role"] for m in prompts[2].messages] == ["system", "user"]
    assert [p.source for p in prompts] == ["web"] + ["mine"] * 5


def test_every_kind_of_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"number {i}"} for i in range(3)]
    plain = write_rows(tmp_path / "a.jsonl", rows)
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(plain.read_bytes())
    (tmp_path / "c.json").write_text(json.dumps(rows))
    (tmp_path / "notes.md").write_text("not prompts")
    for name in ("a.jsonl", "b.jsonl.gz", "c.json"):
        assert [p.text for p in read_prompts(tmp_path / name)] == [
            "number 0",
            "number 1",
            "number 2",
        ]
    assert len(read_prompts(tmp_path)) == 9


def test_zstandard(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    data = json.dumps({"prompt": "größer"}, ensure_ascii=False).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(data))
    assert read_prompts(tmp_path / "a.jsonl.zst")[0].text == "größer"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(TrainingError, match="pip install zstandard"):
        read_prompts(tmp_path / "a.jsonl.zst")


def test_limit(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": str(i)} for i in range(100)])
    assert [p.text for p in read_prompts(path, limit=3)] == ["0", "1", "2"]
    drawn = [p.text for p in read_prompts(path, limit=10, seed=1)]
    assert len(set(drawn)) == 10 and drawn != [str(i) for i in range(10)]
    assert drawn == [p.text for p in read_prompts(path, limit=10, seed=1)]
    assert len(read_prompts(path, limit=1000)) == 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompts"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not valid JSON"),
        (b'{"prompt": "a"}\n\n{"text": "b"}\n', r"line 3 has the keys \['text'\]"),
        (b'["a"]\n', "line 1 is no object"),
        (b'{"prompt": "  "}\n', "non-empty"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}\n', "non-empty"),
        (b'{"messages": [{"role": "system", "content": "a"}]}\n', "non-empty"),
        (b"\xff\xfe\n", "not valid UTF-8"),
    ],
)
def test_bad_files_name_the_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TrainingError, match=message) as caught:
        read_prompts(path)
    assert "bad.jsonl" in str(caught.value)


def test_corrupt_files_of_other_libraries_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(TrainingError, match=r"a\.json is nested too deeply"):
        read_prompts(tmp_path / "a.json")
    for name, package in (("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")):
        pytest.importorskip(package)
        (tmp_path / name).write_bytes(b"nonsense" * 20)
        with pytest.raises(TrainingError, match=rf"{name} cannot be read"):
            read_prompts(tmp_path / name)


def test_any_error_of_a_reader_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ReaderError(Exception):
        pass

    class Reader:
        def read_table(self, path: Path) -> None:
            raise ReaderError("bad magic bytes")

        def open(self, path: Path, mode: str, encoding: str) -> None:
            raise ReaderError("bad frame")

    monkeypatch.setattr(module, "_optional", lambda *_: Reader())
    for name, reason in (("a.parquet", "bad magic bytes"), ("a.jsonl.zst", "bad frame")):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(TrainingError, match=rf"{name} cannot be read: {reason}"):
            read_prompts(tmp_path / name)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no file or folder"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(TrainingError, match="holds no prompts"):
        read_prompts(tmp_path)
    (tmp_path / "a.csv").write_text("prompt\n")
    with pytest.raises(TrainingError, match="unknown ending"):
        read_prompts(tmp_path / "a.csv")
    (tmp_path / "a.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(TrainingError, match="cannot be read"):
        read_prompts(tmp_path / "a.jsonl.gz")


def test_overlaps_are_dropped() -> None:
    words = LONG.split()
    same_run = "Well, " + ", ".join(word.upper() for word in words[1:14]) + "!"
    short_run = " ".join(words[:12]) + " other " + " ".join(words[12:])
    prompts = [Prompt.of(same_run), Prompt.of(short_run), Prompt.of("Tell me!"), Prompt.of("x")]
    kept = drop_overlapping(prompts, [LONG, "tell me"])
    assert [p.text for p in kept] == [short_run, "x"]


def test_near_duplicates_are_dropped() -> None:
    essay = " ".join(f"word{i}" for i in range(120))
    prompts = [
        Prompt.of(essay),
        Prompt.of(essay + "."),
        Prompt.of(essay + " more"),
        Prompt.of(" ".join(reversed(essay.split()))),
        Prompt.of("Hi there"),
        Prompt.of("hi there!"),
        Prompt.of("hi you"),
        Prompt.of("?!"),
        Prompt.of("!!"),
        Prompt.of("\ud83d"),  # half of a surrogate pair
    ]
    kept = drop_near_duplicates(prompts)
    assert [prompts.index(p) for p in kept] == [0, 3, 4, 6, 7, 8, 9]


def test_prompts_that_share_a_frame_are_no_duplicates() -> None:
    known = NearDuplicates()
    frame = "Solve the following problem step by step and give the answer: "
    texts = [
        frame + f"how many {i} times {i + 7} apples has Ann{i} in {i} bags?" for i in range(50)
    ]
    assert all(known.add(text) for text in texts)


def test_digest_tells_lists_apart() -> None:
    one, two = Prompt.of("a"), Prompt.of("b")
    assert digest_of([one, two]) != digest_of([two, one])
    assert digest_of([one]) == digest_of([Prompt.of("a")])


def test_a_frame_that_many_forbidden_texts_share_is_not_their_content() -> None:
    frame = "please reason step by step and put your final answer within the box"
    forbidden = [f"how many apples has number {i} of the {i + 3} girls? {frame}" for i in range(20)]
    own = Prompt.of(f"what is the length of the other girls? {frame}")
    taken = Prompt.of(f"how many apples has number 7 of the 10 girls? {frame}")
    assert drop_overlapping([own, taken], forbidden) == [own]
    assert drop_overlapping([own, taken], [forbidden[0]]) == []  # of one text all is content
