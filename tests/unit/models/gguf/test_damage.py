"""GGUF files that are damaged or made in bad faith: typed errors, also once a model is built."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.errors import CheckpointError, FlashdraftError, UnsupportedModelError
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from tests import zoo
from tests.unit.models.gguf.factory import EXPERTS, GEMMA4, LLAMA, random_values, write_gguf
from tests.unit.models.gguf.test_file import ROPE_FREQS, write_gemma4, write_llama

NAN, INFINITY, LARGEST = float("nan"), float("inf"), 2**32 - 1


def test_every_truncation_is_a_checkpoint_error(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "whole.gguf",
        "llama",
        LLAMA,
        {"token_embd.weight": random_values(4, 64)},
        general={"tokenizer.ggml.tokens": ["a", "b"]},
    )
    whole = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, len(whole) - 1024, 7), len(whole) - 64, len(whole) - 32]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFFile(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: its download was cut short"),
        (b"GG", "truncated or damaged: .* the file has 2"),
        (b"GGUF\x03\0\0\0" + b"\x01" * 9, "truncated or damaged: .* 8 bytes at 16, .* has 17"),
        (b"<!doctype html><html>", "is not a GGUF file"),
    ],
)
def test_a_file_that_ends_in_its_header_is_to_be_fetched_again(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{message}.*Fetch it again, or name another file"):
        GGUFFile(path)


def gguf_bytes(*parts: bytes | tuple[str, int]) -> bytes:
    """A header of version 3: numbers are (code, value)."""
    packed = (one if isinstance(one, bytes) else struct.pack(f"<{one[0]}", one[1]) for one in parts)
    return b"GGUF" + struct.pack("<I", 3) + b"".join(packed)


NO_TENSORS, ONE_KEY, KEY = ("Q", 0), ("Q", 1), struct.pack("<Q", 1) + b"k"
STRING, ARRAY, UINT8 = ("I", 8), ("I", 9), ("I", 0)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf_bytes(("Q", 2**63), ("Q", 0)), f"claims {2**63} tensors and 0 metadata keys"),
        (gguf_bytes(("Q", 0), ("Q", 2**63)), f"claims 0 tensors and {2**63} metadata keys"),
        (gguf_bytes(NO_TENSORS, ONE_KEY, ("Q", 2**60)), f"count at byte 24 is {2**60}"),
        (gguf_bytes(NO_TENSORS, ONE_KEY, KEY, STRING, ("Q", 2**60)), f"is {2**60}, at most"),
        (gguf_bytes(NO_TENSORS, ONE_KEY, KEY, ARRAY, STRING, ("Q", 2**40)), f"is {2**40}, at"),
        (gguf_bytes(NO_TENSORS, ONE_KEY, KEY, ARRAY, UINT8, ("Q", 2**62)), f"is {2**62}, at"),
        (gguf_bytes(NO_TENSORS, ONE_KEY, KEY, ARRAY, ARRAY, ("Q", 1)), "metadata type 9"),
        (gguf_bytes(NO_TENSORS, ONE_KEY, KEY, ("I", 13)), "metadata type 13"),
        (gguf_bytes(NO_TENSORS, ("Q", 2), *[KEY, UINT8, b"\1"] * 2), "key 'k' twice"),
        # as many empty strings as a file of zeros has: each takes time
        (
            gguf_bytes(
                NO_TENSORS, ("Q", 3), *[KEY, ARRAY, STRING, ("Q", 2**22), bytes(2**25)] * 2
            ).replace(KEY, struct.pack("<Q", 1) + b"j", 1),
            f"is {2**22}, at most 0",
        ),
    ],
)
def test_counts_beyond_all_files_are_refused_before_anything_is_read(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m\.gguf .*{message}"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("shape", "offset", "message"),
    [
        ((2**40, 2**40), 0, "is truncated: tensor 'x'"),
        ((2**63, 2), 0, "is truncated: tensor 'x'"),
        ((0, 4), 0, r"tensor 'x' of shape \[4, 0\] does not divide"),
        ((), 0, r"tensor 'x' of shape \[\] does not divide"),
        ((4,), 3, "tensor 'x' begins at 3, which is no multiple of 32"),
        ((4,), 2**63, "is truncated: tensor 'x'"),
    ],
)
def test_places_of_a_tensor(
    tmp_path: Path, shape: tuple[int, ...], offset: int, message: str
) -> None:
    name = struct.pack("<Q", 1) + b"x"
    sizes = [("Q", size) for size in shape]
    row = [name, ("I", len(shape)), *sizes, ("I", 0), ("Q", offset)]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(("Q", 1), ("Q", 0), *row, bytes(256)))
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*{message}"):
        GGUFFile(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.key_length", 1, "head_dim is 1; .* even"),
        ("attention.key_length", 15, "head_dim is 15; .* even"),
        ("attention.key_length", 0, "key_length is 0; .* whole number .* 1"),
        ("attention.head_count", 64, "head_dim is 1; .* even"),
        ("attention.head_count", 4.5, "head_count is 4.5; .* whole number"),
        ("attention.head_count_kv", 3, "num_attention_heads is 4.* multiple of .* 3"),
        ("attention.head_count_kv", 0, "head_count_kv is 0; .* whole number"),
        ("attention.head_count_kv", True, "head_count_kv is True; .* whole number"),
        ("attention.layer_norm_rms_epsilon", NAN, "epsilon is nan; .* finite"),
        ("attention.layer_norm_rms_epsilon", "small", "epsilon is 'small'; .* finite"),
        ("block_count", LARGEST, "block_count is 4294967295, .* 20 tensors"),
        ("block_count", 0, "block_count is 0; .* whole number"),
        ("block_count", "two", "block_count is 'two'; .* whole number"),
        ("context_length", 0, "context_length is 0; .* whole number"),
        ("context_length", 128.0, "context_length is 128.0; .* whole number"),
        ("feed_forward_length", ["a", "b"], r"length is \['a', 'b'\]; .* whole number"),
        ("rope.freq_base", 0.0, "freq_base is 0.0; .* at least 1"),
        ("rope.freq_base", NAN, "freq_base is nan; .* finite"),
        ("rope.freq_base", INFINITY, "freq_base is inf; .* finite"),
    ],
)
def test_hostile_metadata_is_refused_at_opening(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    path = tmp_path / "m.gguf"
    write_llama(path, metadata={**LLAMA, key: value})
    with pytest.raises(CheckpointError, match=rf"is not valid: .*{message}.* again"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.eos_token_id", "x", "eos_token_id is 'x'; .* whole number"),
        ("tokenizer.ggml.eot_token_id", 1.5, "eot_token_id is 1.5; .* whole number"),
        ("tokenizer.ggml.bos_token_id", "x", "bos_token_id is 'x'; .* whole number"),
        ("general.sampling.temp", "hot", "temp is 'hot'; .* finite"),
        ("general.sampling.temp", NAN, "temp is nan; .* finite"),
        ("general.sampling.top_p", [0.5, 0.9], r"top_p is \[.*\]; .* finite"),
        ("general.sampling.top_k", True, "top_k is True; .* finite"),
        ("split.count", "many", "split.count is 'many'; .* whole number"),
    ],
)
def test_hostile_general_metadata_is_refused_at_opening(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    path = tmp_path / "m.gguf"
    write_llama(path, general={key: value})
    with pytest.raises(CheckpointError, match=rf"m\.gguf is not valid: .*{message}.* again"):
        open_checkpoint(path)


def test_a_long_wrong_value_is_cut_in_the_message(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", metadata={**LLAMA, "block_count": "x" * 100_000})
    with pytest.raises(CheckpointError, match="block_count") as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert len(str(caught.value)) < 1000


def load_and_step(path: Path) -> bool:
    """Whether a request came to an end; a FlashdraftError on the way says False, others escape."""
    try:
        checkpoint = open_checkpoint(path)
        target = build_target(checkpoint.config, checkpoint.source, zoo.kernels("torch"))
        engine = Engine(target, config=EngineConfig(cache=CacheOptions(cache_gb=0.001), verify=0))
        engine.submit(Request("a", [3, 4, 5], SamplingParams(max_tokens=2), seed=0))
    except FlashdraftError:
        return False
    updates = engine.step()
    while engine.has_work:
        updates += engine.step()
    return updates[-1].generation is not None


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    write_llama(tmp_path / "whole.gguf", general={"tokenizer.ggml.tokens": ["a", "b"]})
    assert load_and_step(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    generator = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for place in generator.integers(0, 2000, 4):  # the header
            data[place] = generator.integers(0, 256)
        damaged.write_bytes(data)
        num_refused += not load_and_step(damaged)
    assert num_refused > 100


HOSTILE = (0, 1, 3, LARGEST, 0.0, 1e-30, 3e38, NAN, INFINITY, True, "x", [1, 2], ["a"], [False])


SCALED = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
FAMILIES = {  # all metadata of a file, and the keys that are damaged in it
    "llama": (LLAMA, tuple(LLAMA)),
    "llama scaled": (LLAMA | SCALED, tuple(SCALED)),
    "gemma4": (GEMMA4, tuple(key for key in GEMMA4 if GEMMA4[key] != LLAMA.get(key))),
    "gemma4 experts": (GEMMA4 | EXPERTS, tuple(EXPERTS)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_metadata_value_escapes_as_another_error(tmp_path: Path, family: str) -> None:
    path = tmp_path / "m.gguf"
    whole, keys = FAMILIES[family]
    num_refused = 0
    for key in keys:
        for value in HOSTILE:
            metadata: dict[str, Any] = {**whole, key: value}
            if family.startswith("llama"):
                write_llama(path, metadata=metadata)
            else:
                write_gemma4(path, "experts" in family, metadata=metadata)
            num_refused += not load_and_step(path)
    assert num_refused > len(keys) * len(HOSTILE) // 2


def test_damaged_rope_divisors_never_escape_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for factors in (np.full(8, NAN, np.float32), random_values(2, 4), random_values(3)):
        write_llama(path, extra_tensors={ROPE_FREQS: factors})
        with pytest.raises((CheckpointError, UnsupportedModelError)):
            open_checkpoint(path)
