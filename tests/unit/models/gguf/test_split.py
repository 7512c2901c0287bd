"""GGUF models in several files: the first is named, all are read, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from flashdraft.errors import CheckpointError, FlashdraftError, ModelNotFoundError
from flashdraft.models.files.hub_cache import HubFolder
from flashdraft.models.files.split import first_part, part_names, part_of
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import list_cached, remove_models, resolve_source
from tests.hub import hub_in_use
from tests.unit.models.gguf.factory import LLAMA, Array, write_gguf
from tests.unit.models.gguf.test_file import write_llama

FIRST = "m-00001-of-00003.gguf"


def name(number: int, count: int = 3) -> str:
    return f"m-{number:05d}-of-{count:05d}.gguf"


def write_parts(folder: Path, **changes: Any) -> dict[str, Array]:
    """A tiny Llama as the package splits it; `changes` to what parts say, by key or file."""
    tensors = write_llama(folder / "whole.gguf")
    whole = GGUFFile(folder / "whole.gguf")
    names = list(whole.tensors)
    reader = gguf.GGUFReader(folder / "whole.gguf")
    values = {one.name: one.data.copy() for one in reader.tensors}
    cuts = (0, 5, 11, len(names))
    for number in range(3):
        said = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        said |= changes.get(f"part{number + 1}", {})
        write_gguf(
            folder / name(number + 1),
            "llama",
            LLAMA if number == 0 else {},
            {one: values[one] for one in names[cuts[number] : cuts[number + 1]]}
            | changes.get(f"more{number + 1}", {}),
            general=said,
        )
    return tensors


def test_names() -> None:
    assert part_names(FIRST) == [name(1), name(2), name(3)]
    assert part_names("a/b-00001-of-00002.gguf") == [f"a/b-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert part_names("m.gguf") == ["m.gguf"] and part_of("m.gguf") is None
    assert part_names("m-00004-of-00003.gguf") == ["m-00004-of-00003.gguf"]
    assert part_of(name(2)) == (2, 3)
    assert first_part(name(2)) == FIRST and first_part(FIRST) is first_part("m.gguf") is None


def test_all_parts_are_one_model(tmp_path: Path) -> None:
    write_parts(tmp_path)
    whole, parts = (open_checkpoint(tmp_path / one) for one in ("whole.gguf", FIRST))
    assert parts.config == whole.config
    assert set(parts.source.names()) == set(whole.source.names())
    for one in whole.source.names():
        assert torch.equal(parts.source.read(one), whole.source.read(one)), one


def test_the_first_may_hold_no_tensor(tmp_path: Path) -> None:
    write_llama(tmp_path / "whole.gguf")
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    values = {one.name: one.data.copy() for one in reader.tensors}
    said = {"split.count": 2, "split.tensors.count": len(values)}
    write_gguf(tmp_path / name(1, 2), "llama", LLAMA, {}, general={**said, "split.no": 0})
    write_gguf(tmp_path / name(2, 2), "llama", {}, values, general={**said, "split.no": 1})
    assert len(GGUFFile(tmp_path / name(1, 2)).tensors) == len(values)


@pytest.mark.parametrize("missing", [2, 3])
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    write_parts(tmp_path)
    (tmp_path / name(missing)).unlink()
    with pytest.raises(CheckpointError, match=rf"{name(missing)} is missing. Fetch it into"):
        open_checkpoint(tmp_path / FIRST)


def test_another_part_than_the_first_says_which_to_name(tmp_path: Path) -> None:
    write_parts(tmp_path)
    with pytest.raises(FlashdraftError, match=rf"is a part of .* name its first one, {FIRST}"):
        open_checkpoint(tmp_path / name(2))


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path)
    (tmp_path / FIRST).rename(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="part 1 of 3 .* is not named so"):
        open_checkpoint(tmp_path / "m.gguf")
    (tmp_path / name(2)).rename(tmp_path / FIRST)
    with pytest.raises(CheckpointError, match="part 2 of 3 .* is not named so"):
        open_checkpoint(tmp_path / FIRST)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part2": {"split.no": 2}}, "says that it is part 3 of 3; it must be part 2 of 3"),
        ({"part3": {"split.count": 4}}, "says that it is part 3 of 4; it must be part 3 of 3"),
        ({"part1": {"split.count": 60000}}, "part 1 of 60000 .* is not named so"),
        ({"part1": {"split.tensors.count": 99}}, "hold 20 tensors; they must hold 99"),
        ({"part1": {"split.no": [0, 0]}}, r"split.no is \[0, 0\]; it must be one number"),
        ({"part2": {"split.no": "x"}}, "split.no is 'x'; it must be a whole number"),
    ],
)
def test_parts_that_do_not_belong_together(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_parts(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / FIRST)


def test_a_tensor_in_two_parts_and_a_part_that_ends_early(tmp_path: Path) -> None:
    tensors = write_parts(tmp_path)
    write_parts(tmp_path, more2={"token_embd.weight": tensors["model.embed_tokens.weight"]})
    with pytest.raises(CheckpointError, match="holds the tensor 'token_embd.weight', which an"):
        open_checkpoint(tmp_path / FIRST)
    write_parts(tmp_path)
    part = tmp_path / name(3)
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{name(3)} is truncated"):
        open_checkpoint(tmp_path / FIRST)


def test_all_parts_are_fetched_listed_and_removed_by_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_parts(tmp_path)
    contents = {name(number): (tmp_path / name(number)).read_bytes() for number in (1, 2, 3)}
    with hub_in_use(monkeypatch, tmp_path / "cache") as hub:
        hub.add("org/split", **contents)
        path = resolve_source(f"org/split:{FIRST}").path
        assert path.name == FIRST and len(GGUFFile(path).tensors) == 20
        (row,) = list_cached()
        assert row.name == f"org/split:{FIRST}" and row.is_whole
        assert row.num_bytes == sum(map(len, contents.values()))
        (path.parent / name(2)).unlink()
        assert HubFolder("org/split").find(FIRST) is None
        resolve_source(f"org/split:{FIRST}")
        assert HubFolder("org/split").find(FIRST) is not None
        assert remove_models([f"org/split:{FIRST}"]) == [(f"org/split:{FIRST}", row.num_bytes)]
        with pytest.raises(ModelNotFoundError, match=f"name its first one, '{FIRST}'"):
            resolve_source(f"org/split:{name(3)}")
        del hub.models["org/split"][name(3)]
        with pytest.raises(ModelNotFoundError, match=f"has no file '{name(3)}'"):
            resolve_source(f"org/split:{FIRST}")
