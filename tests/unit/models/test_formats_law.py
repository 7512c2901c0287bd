"""Every format of few bits: a whole model of it, and drafted tokens that equal plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashdraft.core import Request, SamplingParams
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.quantized import Quantized
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from tests import few_bits, zoo

ROOMY = CacheOptions(cache_gb=0.02)


BACKENDS = ["torch", "float32"]
KINDS = [*few_bits.GGUF_KINDS, *few_bits.PACKERS]
Answers = dict[str, list[int]]


def plain_and_drafted(folder: Path, kind: str, backend: str) -> tuple[Answers, Answers]:
    """What a model of the format answers, plainly and drafted by what is looked up."""
    checkpoint = open_checkpoint(few_bits.write_model(folder, kind))
    name = "model.layers.1.mlp.up_proj.weight"
    matrix = checkpoint.source.read_matrix(name, torch.device("cpu"))
    assert isinstance(matrix, Quantized) == (kind != "GPTQ, desc_act")
    assert checkpoint.source.read(name).std() * matrix.shape[1] ** 0.5 > 0.3  # it has a say

    kernels = zoo.kernels(backend)
    target = build_target(checkpoint.config, checkpoint.source, kernels)
    requests = zoo.mixed_requests(count=6, max_tokens=40)
    if backend == "torch":  # which takes its time
        settings = SamplingParams(max_tokens=40, ignore_eos=True)
        requests = [Request("r", [5, 6, 7, 8] * 3, settings, seed=1)]
    answers = []
    for verify, ngram in ((0, False), (5, True)):
        config = EngineConfig(verify=verify, ngram=ngram, cache=ROOMY)
        done = zoo.run(Engine(target, None, config), requests)
        answers.append({key: one.token_ids for key, one in done.items()})
        if verify:
            assert sum(one.stats.drafted for one in done.values()) > 0
    return answers[0], answers[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafted_tokens_are_plain_ones(tmp_path: Path, kind: str, backend: str) -> None:
    plain, drafted = plain_and_drafted(tmp_path, kind, backend)
    assert drafted == plain
    assert all(plain.values())
