"""Files that llama.cpp quantised: its own values bit for bit, and its own greedy answer.

make_llama_cpp.py made them; llama_cpp.json has what llama.cpp made of them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import gguf
import pytest

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.gguf.values import read_tensor
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from tests import zoo
from tests.unit.models.gguf.factory import write_wide_qwen3
from tests.unit.models.gguf.test_blocks import count_differing

FOLDER = Path(__file__).parent
TOLD = json.loads((FOLDER / "llama_cpp.json").read_text())
VERSION: str = TOLD["llama-cpp-python"]
FORMATS = {kind: {one["format"] for one in told.values()} for kind, told in TOLD["files"].items()}


def file_of(kind: str) -> Path:
    return FOLDER / f"llama_cpp_{kind}.gguf"


def compare_file(kind: str) -> tuple[int, int]:
    """How many values were compared with llama.cpp's and the package's, and how many differ."""
    file, told = GGUFFile(file_of(kind)), TOLD["files"][kind]
    compared = differing = 0
    for one in gguf.GGUFReader(file_of(kind)).tensors:
        if one.name not in told:
            continue
        found = read_tensor(file, one.name)
        wrong = count_differing(found, gguf.quants.dequantize(one.data, one.tensor_type))
        if hashlib.sha256(found.numpy().tobytes()).hexdigest() != told[one.name]["sha256"]:
            wrong = found.numel()
        compared += found.numel()
        differing += wrong
    return compared, differing


@pytest.mark.parametrize("kind", FORMATS)
def test_every_bit_is_llama_cpp_s(kind: str) -> None:
    compared, differing = compare_file(kind)
    assert compared > 60_000 and differing == 0


def test_the_files_have_what_llama_cpp_mixes() -> None:
    together = set.union(*FORMATS.values())
    assert {"Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ4_NL", "Q4_0", "Q5_0"} <= together


def answers(path: Path, prompt: list[int], length: int) -> list[list[int]]:
    """Greedy tokens, plain and with what is looked up."""
    checkpoint = open_checkpoint(path)
    target = build_target(checkpoint.config, checkpoint.source, zoo.kernels("float32"))
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    found = []
    for verify in (0, 7):
        config = EngineConfig(verify=verify, ngram=verify > 0, cache=CacheOptions(0.01))
        done = zoo.run(Engine(target, None, config), [Request("a", prompt, params, 0)])["a"]
        found.append(done.token_ids)
    return found


def test_answers_are_llama_cpp_s(tmp_path: Path) -> None:
    path = write_wide_qwen3(tmp_path / "m.gguf")
    for told in TOLD["answers"]:
        plain, drafted = answers(path, told["prompt"], len(told["tokens"]))
        assert plain == drafted == told["tokens"]
    assert len({tuple(told["tokens"]) for told in TOLD["answers"]}) > 1


@pytest.mark.parametrize("kind", FORMATS)
def test_its_files_answer_lawfully(kind: str) -> None:
    plain, drafted = answers(file_of(kind), TOLD["answers"][0]["prompt"], 24)
    assert plain == drafted and len(plain) == 24
