"""A new drafter: its shape for every family, its mask token, and its scale."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from flashdraft.errors import RequestError
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.opening import check_fit
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.train.initial import (
    calibrate,
    choose_mask_token,
    drafter_config,
    new_drafter,
    spread_taps,
)
from tests.tiny import CONFIGS, make_tiny_checkpoint, make_tiny_tokenizer

SMOLLM2 = ModelConfig.from_hf(
    CONFIGS["llama"]
    | {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 100000.0,
    }
)


def test_published_taps() -> None:
    assert spread_taps(30) == (1, 8, 14, 20, 27)
    assert spread_taps(60, 6) == (1, 12, 23, 35, 46, 57)
    assert spread_taps(30, 6) == (1, 6, 11, 17, 22, 27)
    assert spread_taps(36) == (1, 9, 17, 25, 33)


@pytest.mark.parametrize("num_layers", range(1, 12))
def test_taps_of_small_targets_are_different_layers(num_layers: int) -> None:
    taps = spread_taps(num_layers)
    assert len(set(taps)) == len(taps) == min(5, num_layers)
    assert min(taps) >= 0 and max(taps) < num_layers


def test_a_llama_targets_drafter_has_its_shape() -> None:
    drafter = new_drafter(SMOLLM2, mask_token_id=3)
    assert sum(p.numel() for p in drafter.parameters()) == pytest.approx(19.4e6, rel=0.005)
    config = drafter.config
    assert config.windows == (None,) * 5 and config.causal == (False,) * 5
    assert (config.block_size, config.rope) == (16, SMOLLM2.layers[0].rope)
    check_fit(config, SMOLLM2)


def test_gemmas_drafters_have_the_published_shapes() -> None:
    for hidden, heads in ((5376, 64), (2816, 32)):
        raw = CONFIGS["gemma4"] | {"hidden_size": hidden}
        config = drafter_config(ModelConfig.from_hf(raw), mask_token_id=4)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (heads, 8, 128)
        assert config.intermediate_size == 2 * hidden
        assert config.windows == (2048,) * 4 + (None,)
        assert config.causal == (True,) * 4 + (False,)
        assert config.logit_softcap == 30.0 and config.embed_scale is None


@pytest.mark.parametrize("family", CONFIGS)
def test_config_survives_the_checkpoint_layout(family: str) -> None:
    target = ModelConfig.from_hf(CONFIGS[family])
    config = drafter_config(target, mask_token_id=0, layers=2, block_size=4)
    assert DrafterConfig.from_hf(config.to_hf()) == config
    check_fit(config, target)


def test_seed_decides_the_weights_and_leaves_torchs_own_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = (new_drafter(SMOLLM2, mask_token_id=3, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_bad_shapes_are_refused() -> None:
    for taps in ([30], [1, 1], [-1]):
        with pytest.raises(RequestError, match="has 30, counted from 0"):
            new_drafter(SMOLLM2, mask_token_id=3, taps=taps)
    with pytest.raises(RequestError, match="is 0; it must be at least 1"):
        new_drafter(SMOLLM2, mask_token_id=3, layers=0)


def test_calibrated_taps_speak_equally_loud() -> None:
    drafter = new_drafter(SMOLLM2, mask_token_id=3, seed=0)
    generator = torch.Generator().manual_seed(1)
    scales = torch.tensor([0.3, 3.0, 8.0, 12.0, 25.7])
    taps = torch.randn(200, 5, 576, generator=generator) * scales.view(1, 5, 1)
    taps[7] *= 1000  # an outlier
    norm = torch.rand(576, generator=generator)
    calibrate(drafter, taps.flatten(1), norm)
    assert torch.equal(drafter.norm.weight, norm)
    parts = torch.einsum("rtc,htc->trh", taps[8:], drafter.fc.weight.view(576, 5, 576))
    assert parts.square().mean((1, 2)).tolist() == pytest.approx([0.2] * 5, rel=0.05)


def tokenizer_with(tokens: list[str], template: str = "") -> Tokenizer:
    backend = make_tiny_tokenizer()
    backend.add_special_tokens(tokens)
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return Tokenizer(backend, special_tokens=named, chat_template=template)


def test_mask_token_is_one_that_no_text_holds(tmp_path: Path) -> None:
    target = dataclasses.replace(ModelConfig.from_hf(CONFIGS["llama"]), vocab_size=304)
    used = "<|im_start|>"
    tokens = ["<tool>", "<spare>", "<|reserved_0|>", "<mask>"]
    assert choose_mask_token(target, tokenizer_with(tokens, used)) == 303
    assert choose_mask_token(target, tokenizer_with(tokens[:3], used)) == 303  # beyond the text's
    smaller = dataclasses.replace(target, vocab_size=303)
    assert choose_mask_token(smaller, tokenizer_with(tokens[:3], used)) == 302
    smaller = dataclasses.replace(target, vocab_size=302)
    assert choose_mask_token(smaller, tokenizer_with(tokens[:2], used + "<tool>")) == 301
    tiny = Tokenizer.from_checkpoint(make_tiny_checkpoint(tmp_path))
    assert choose_mask_token(ModelConfig.from_hf(CONFIGS["llama"]), tiny) == 0


def test_no_spare_token_asks_for_one() -> None:
    target = dataclasses.replace(ModelConfig.from_hf(CONFIGS["llama"]), bos_token_id=None)
    with pytest.raises(RequestError, match="--mask-token"):
        choose_mask_token(target, None)
