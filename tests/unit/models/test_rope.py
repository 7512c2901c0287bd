"""Rotary tables: equal to transformers', and independent of how far they have grown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flashdraft.models.config.rope import RopeConfig, read_plain_rope
from flashdraft.models.config.values import ConfigObject
from flashdraft.models.rope import BLOCK_POSITIONS, Rope, rotate

CPU = torch.device("cpu")
POSITIONS = torch.tensor([[0, 1, 2, 77, 1023, 1024, 5000]])
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("theta", "kind", "scaling"),
    [
        (10000.0, "default", {}),
        (1e6, "default", {}),
        (500000.0, "llama3", LLAMA3),
        (10000.0, "linear", {"factor": 4.0}),
    ],
)
def test_tables_equal_transformers_llama(
    theta: float, kind: str, scaling: dict[str, float]
) -> None:
    parameters = {"rope_type": kind, "rope_theta": theta, **scaling}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters=parameters, vocab_size=8
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS)
    pairs = tuple(sorted((key, float(value)) for key, value in scaling.items()))
    table = Rope(RopeConfig(theta, 64, 64, pairs), CPU).table(5001)
    assert torch.equal(table.cos[POSITIONS[0]], cos[0, :, :32])
    assert torch.equal(table.sin[POSITIONS[0]], sin[0, :, :32])


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"attention_factor": 1.5},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"beta_fast": 16, "beta_slow": 2.0, "truncate": False},
        {"factor": 0.5},
        {"original_max_position_embeddings": 8},  # every pair turns seldom
    ],
)
def test_tables_of_yarn_equal_transformers(scaling: dict[str, Any]) -> None:
    base = {"factor": 4.0, "original_max_position_embeddings": 2048, "rope_theta": 1e6}
    parameters = {"rope_type": "yarn", **base, **scaling}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        rope_parameters=parameters,
        vocab_size=8,
        max_position_embeddings=8192,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS)
    raw = {"rope_parameters": parameters, "max_position_embeddings": 8192}
    table = Rope(read_plain_rope(ConfigObject(raw), 64, "X"), CPU).table(5001)
    assert torch.equal(table.cos[POSITIONS[0]], cos[0, :, :32])
    assert torch.equal(table.sin[POSITIONS[0]], sin[0, :, :32])


def test_yarn_without_the_trained_length_takes_the_whole() -> None:
    raw = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096}
    found = dict(read_plain_rope(ConfigObject(raw), 64, "X").scaling)
    assert found["original_max_position_embeddings"] == 4096
    assert found["attention_factor"] == pytest.approx(1.1386, abs=1e-4)


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_tables_equal_transformers_gemma4(kind: str) -> None:
    config = Gemma4TextConfig(
        head_dim=32,
        global_head_dim=64,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
        },
    )
    cos, sin = Gemma4TextRotaryEmbedding(config)(torch.zeros(1), POSITIONS, kind)
    ours = {
        "sliding_attention": RopeConfig(10000.0, 32, 32),
        "full_attention": RopeConfig(1e6, 64, 16),
    }[kind]
    table = Rope(ours, CPU).table(5001)
    half = ours.head_dim // 2
    assert torch.equal(table.cos[POSITIONS[0]], cos[0, :, :half])
    assert torch.equal(table.sin[POSITIONS[0]], sin[0, :, :half])
    assert (kind == "full_attention") == bool((table.sin[:, -1] == 0).all())


def test_a_positions_values_do_not_depend_on_growth() -> None:
    config = RopeConfig(10000.0, 30, 30)  # a width that fills no vector register
    grown, at_once = Rope(config, CPU), Rope(config, CPU).table(5000)
    first = grown.table(1)
    assert first.cos.shape == (BLOCK_POSITIONS, 15)
    for length in (1024, 1025, 3000, 2, 5000):
        table = grown.table(length)
        assert table.cos.shape[0] >= length
    assert torch.equal(table.cos, at_once.cos) and torch.equal(table.sin, at_once.sin)
    assert torch.equal(first.cos, at_once.cos[:BLOCK_POSITIONS])
    assert table.cos.dtype == torch.float32


def test_scores_of_rotated_heads_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    table = Rope(RopeConfig(10000.0, 16, 16), CPU).table(64)
    query, key = torch.randn(1, 2, 16), torch.randn(1, 2, 16)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        q = rotate(query, table.cos[[query_position]], table.sin[[query_position]])
        k = rotate(key, table.cos[[key_position]], table.sin[[key_position]])
        return (q * k).sum(-1)

    torch.testing.assert_close(score(9, 4), score(45, 40))
    assert (score(9, 4) - score(9, 5)).abs().max() > 1e-2
