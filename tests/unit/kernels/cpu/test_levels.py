"""The levels of the native kernels: which there are, and that all of them give the same bits."""

from __future__ import annotations

import hashlib
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.cpu import levels
from flashdraft.kernels.cpu.backend import CpuKernels
from flashdraft.kernels.interface import (
    CAUSAL,
    BlockMask,
    Heads,
    PagedKeys,
    PageView,
    QKVSpec,
    RopeTable,
)
from flashdraft.kernels.kinds import Activation
from tests import zoo

ROOT = Path(__file__).parents[4]

if not levels.runnable():
    pytest.skip("the native kernels are not built", allow_module_level=True)


def numbers(*shape: int) -> Tensor:
    """Like a model's, and the same wherever this runs: torch's own generator may differ."""
    state = torch.arange(torch.Size(shape).numel()) * 2654435761 % 4294967296
    return (((state * 48271 % 2147483647) % 20011) - 10005).float().view(shape) / 4096


def outputs(kernels: CpuKernels) -> Iterator[Tensor]:
    """Every kernel, with whole vectors and with rests."""
    for out, columns in ((1, 1), (37, 19), (130, 77), (96, 576)):
        x, weight, both = numbers(13, columns), numbers(columns), numbers(13, 2 * columns)
        yield kernels.linear(x, kernels.pack(numbers(out, columns)))
        yield kernels.rms_norm(x, weight, 1e-6)
        yield from kernels.add_rms_norm(x, x.flip(0), weight, 1e-5)
        yield from (kernels.gated(both, activation) for activation in Activation)
        yield kernels.softmax(x)
        yield kernels.finish_logits(x, softcap=3.0)
        yield kernels.argmax(x)
    rope, spec = RopeTable(numbers(40, 10), numbers(40, 10)), QKVSpec(6, 2, 20, 1e-6)
    keys, values = numbers(5, 8, 2, 20), numbers(5, 8, 2, 20).flip(0)
    slots = torch.arange(30, 39)
    query = kernels.prepare_qkv(
        numbers(9, spec.width), Heads(spec, rope, slots), keys, values, slots
    )
    starts, context = torch.tensor([0, 9]).int(), torch.tensor([30]).int()
    view = PageView(starts, context, torch.arange(5).int().unsqueeze(0), slots, 8, 9, 39)
    yield from (query, keys, values)
    picture = BlockMask(ahead=torch.tensor([0, 0, 4, 3, 2, 1, 0, 0, 0]).int())
    for window, mask in ((None, CAUSAL), (7, CAUSAL), (7, picture)):
        seen = PagedKeys(keys, values, view, scale=0.2, window=window, mask=mask)
        yield kernels.attention(query, seen)


def digest() -> str:
    """Of all that every kernel gives, in float32 and in int8, at the level in use."""
    found = hashlib.sha256()
    for quantize in (False, True):
        for tensor in outputs(CpuKernels(quantize)):
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def test_every_level_gives_the_same_bits(level: str) -> None:
    mine = digest()
    levels.use(None)
    assert mine == digest()


@pytest.mark.parametrize("backend", ["float32", "int8"])
def test_every_level_keeps_the_law_and_decodes_the_same_tokens(level: str, backend: str) -> None:
    def answers(verify: int, drafts: dict[str, list[int]] | None) -> dict[str, list[int]]:
        target = zoo.tiny_target("qwen3", zoo.kernels(backend))
        proposer = None if drafts is None else zoo.ScriptedProposer(drafts, 0.4, max_drafts=7)
        config = EngineConfig(verify=verify, ngram=False, cache=CacheOptions(0.01))
        engine = Engine(target, config=config, proposer=proposer)
        done = zoo.run(engine, zoo.mixed_requests(4, max_tokens=16))
        return {name: generation.token_ids for name, generation in done.items()}

    plain = answers(0, None)
    assert answers(7, plain) == plain
    levels.use(None)
    assert answers(0, None) == plain


def test_kernels_say_their_level_and_the_fastest_is_the_default(level: str) -> None:
    assert CpuKernels(quantize=True).level == level
    levels.use(None)
    assert CpuKernels(quantize=True).level == levels.chosen() == levels.runnable()[-1]


def test_a_level_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=f"'mmx' does not run here; {levels.runnable()[0]}"):
        levels.use("mmx")


def test_detection_and_setup_name_the_same_levels() -> None:
    built = list(runpy.run_path(str(ROOT / "setup.py"))["LEVELS"])
    assert [name for name in built if name in levels.runnable()] == list(levels.runnable())
    assert levels.runnable()[0] == built[0]  # what every machine of the architecture runs


FRESH = """
from flashdraft.kernels.cpu import levels
from tests.unit.kernels.cpu.test_levels import digest
for level in 3 * levels.runnable():
    levels.use(level)
    print(digest())
"""


def test_fresh_processes_agree() -> None:
    """Processes that start together, and thus fight for the cores, compute what this one does."""
    processes = [
        subprocess.Popen([sys.executable, "-c", FRESH], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    expected = [digest()] * 3 * len(levels.runnable())
    assert [process.communicate(timeout=240)[0].split() for process in processes] == [expected] * 3
