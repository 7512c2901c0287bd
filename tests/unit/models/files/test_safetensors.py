"""safetensors, single and sharded: what is read, and how broken files are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.errors import CheckpointError
from flashdraft.models.files.safetensors import SafetensorsFiles, open_safetensors

INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(3, 4),
        "b.weight": torch.randn(2, 2, dtype=torch.bfloat16),
        "c": torch.randn(1).half(),
    }


def write_sharded(folder: Path) -> dict[str, Tensor]:
    values = tensors()
    save_file({"a.weight": values["a.weight"]}, folder / "one.safetensors")
    save_file({name: values[name] for name in ("b.weight", "c")}, folder / "two.safetensors")
    places = {"a.weight": "one.safetensors", "b.weight": "two.safetensors", "c": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return values


def assert_reads(source: SafetensorsFiles, values: dict[str, Tensor]) -> None:
    assert set(source.names()) == set(values)
    for name, value in values.items():
        assert source.shape(name) == tuple(value.shape)
        read = source.read(name)
        assert read.dtype == value.dtype and torch.equal(read, value)


def test_single_file(tmp_path: Path) -> None:
    values = tensors()
    save_file(values, tmp_path / "model.safetensors")
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert_reads(open_safetensors(tmp_path), values)


def test_single_file_of_any_name(tmp_path: Path) -> None:
    values = tensors()
    save_file(values, tmp_path / "weights.safetensors")
    assert_reads(open_safetensors(tmp_path), values)


def test_sharded(tmp_path: Path) -> None:
    values = write_sharded(tmp_path)
    assert_reads(open_safetensors(tmp_path), values)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors.*missing"):
        open_safetensors(tmp_path)


def test_tensor_that_is_not_in_its_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["c"] = "one.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'c' in 'one\.safetensors'"):
        open_safetensors(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    values = write_sharded(tmp_path)
    save_file({name: values[name] for name in ("a.weight", "c")}, tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"'c' is in both.*one\.safetensors.*two"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("shard", ["../one.safetensors", "/etc/one.safetensors"])
def test_index_cannot_leave_the_folder(tmp_path: Path, shard: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("shard", [None, 3, ["one.safetensors"], {}, "config.json", "one\0"])
def test_an_index_names_safetensors_files(tmp_path: Path, shard: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="tensor 'a' in .*no safetensors file"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_invalid_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{INDEX} (is not (a )?valid|holds no JSON object)"):
        open_safetensors(tmp_path)


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_safetensors(tmp_path)


def test_truncated_data_names_the_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"only.weight": torch.zeros(64)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"truncated: tensor 'only\.weight'"):
        open_safetensors(tmp_path)


def write_header(file: Path, header: str, num_bytes: int) -> None:
    text = header.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


ENTRY = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("not json", "header of .* is not valid JSON"),
        ("[1]", "not a JSON object"),
        (f'{{"x": {ENTRY}, "x": {ENTRY}}}', "'x' twice"),
        ('{"x": {"dtype": "F32", "shape": [2]}}', "entry of tensor 'x'"),
        ('{"x": {"dtype": "Z9", "shape": [2], "data_offsets": [0, 8]}}', "entry of tensor 'x'"),
        ('{"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', "'x'.*8 bytes"),
        ('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}', "'x'"),
        ('{"x": 3}', "entry of tensor 'x'"),
        ('{"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}', "'1e999' is too"),
        ('{"x": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}}', "'x' is bad"),
        ('{"x": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}', "'x' is bad"),
        ('{"x": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}', "'x' is bad"),
        (f'{{"x": {{"dtype": "F32", "shape": [0, {2**64}], "data_offsets": [0, 0]}}}}', "'x' is"),
        ('{"x": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}', "'x' is bad"),
        ('{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}', "'x' is bad"),
        (f'{{"x": {"[" * 10**5}{"]" * 10**5}}}', "nested deeper"),
        (f'{{"\\u001b[31m": {ENTRY.replace("[2]", "[3]")}}}', r"'\\x1b\[31m'.*8 bytes"),
    ],
)
def test_bad_headers(tmp_path: Path, header: str, message: str) -> None:
    write_header(tmp_path / "model.safetensors", header, 8)
    with pytest.raises(CheckpointError, match=message):
        open_safetensors(tmp_path)


def test_overlapping_tensors_are_refused_when_read(tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", f'{{"x": {ENTRY}, "y": {ENTRY}}}', 8)
    with pytest.raises(CheckpointError, match="'y' cannot be read"):
        open_safetensors(tmp_path).read("y")


def test_pickles_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*safetensors or GGUF"):
        open_safetensors(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        open_safetensors(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8], ids=str
)
def test_codes_without_scales_are_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a.weight": torch.ones(2, 2).to(dtype), "b.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    files = open_safetensors(tmp_path)
    assert torch.equal(files.read("b.weight"), torch.ones(2, 2))
    for read in (files.read, files.read_matrix):
        with pytest.raises(CheckpointError, match=r"'a\.weight_scale'.*quantization_config.*bf16"):
            read("a.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_whole_numbers_are_read_without_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([[1, 2], [3, 100]], dtype=dtype)
    values[0, 0] = torch.iinfo(dtype).min
    save_file({"before": torch.ones(3), "x": values}, tmp_path / "model.safetensors")
    files = open_safetensors(tmp_path)
    assert files.whole_numbers("x") == tuple(values.flatten().tolist())
    assert files.item_bytes("x") == dtype.itemsize
