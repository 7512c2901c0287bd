"""Our models against transformers' in float32: prefill, cached verify, and after a rollback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers

from flashdraft.core import Generation, Request, SamplingParams
from flashdraft.engine.cache.layers import cache_layers
from flashdraft.engine.cache.pages import PageBook
from flashdraft.engine.cache.storage import KVCache, Span
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.sequence import Sequence
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.layers import ForwardBatch
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from tests import zoo

TOLERANCE = 1e-4
TAPS = (0, 2)
BACKENDS = ("torch", "float32")
DRAFTS = ("plain", "ngram", "drafter")

LLAMA = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GEMMA = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 256,
}
GEMMA3 = {
    **{key: GEMMA[key] for key in ("sliding_window", "layer_types", "head_dim")},
    **LLAMA,
    "num_hidden_layers": 6,
}
GEMMA4_SMALL = {
    **{key: value for key, value in GEMMA.items() if key != "num_global_key_value_heads"},
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 211,
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
}
MOE = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1000000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}


def _config(name: str):
    return {
        "llama": lambda: transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True),
        "llama_bias_scaled": lambda: transformers.LlamaConfig(
            **LLAMA, attention_bias=True, rope_parameters=LLAMA3
        ),
        "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=32),
        "qwen3_sliding": lambda: transformers.Qwen3Config(
            **LLAMA, head_dim=32, use_sliding_window=True, sliding_window=8, max_window_layers=2
        ),
        "qwen2": lambda: transformers.Qwen2Config(**LLAMA),
        "qwen2_sliding": lambda: transformers.Qwen2Config(
            **LLAMA, use_sliding_window=True, sliding_window=8, max_window_layers=2
        ),
        "mistral": lambda: transformers.MistralConfig(**LLAMA, head_dim=32, sliding_window=None),
        "mistral_sliding": lambda: transformers.MistralConfig(**LLAMA, sliding_window=8),
        "qwen3_yarn": lambda: transformers.Qwen3Config(**LLAMA, head_dim=32, rope_parameters=YARN),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **LLAMA, **QWEN3_MOE, head_dim=32, norm_topk_prob=True
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA3),
        "gemma3_linear": lambda: transformers.Gemma3TextConfig(
            **GEMMA3, query_pre_attn_scalar=24, rope_parameters=GEMMA3_ROPE
        ),
        "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA),
        "gemma4_12b": lambda: transformers.Gemma4UnifiedTextConfig(
            **{key: value for key, value in GEMMA.items() if key != "hidden_size_per_layer_input"}
        ),
        "gemma4_small": lambda: transformers.Gemma4TextConfig(**GEMMA4_SMALL),
        "gemma4_moe": lambda: transformers.Gemma4TextConfig(**GEMMA, **MOE),
    }[name]()


NAMES = [
    "llama",
    "llama_bias_scaled",
    "qwen3",
    "qwen3_sliding",
    "qwen2",
    "qwen2_sliding",
    "mistral",
    "mistral_sliding",
    "qwen3_yarn",
    "qwen3_moe",
    "gemma3",
    "gemma3_linear",
    "gemma4",
    "gemma4_12b",
    "gemma4_small",
    "gemma4_moe",
]


def make_pair(name: str, folder: Path):
    """A random transformers model, saved by transformers, to be read back by us from the files."""
    torch.manual_seed(11)
    config = _config(name)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("inv_freq") or not tensor.is_floating_point():
                continue
            if tensor.dim() == 1:  # norms, scalars and biases, away from their initial values
                tensor.copy_(1.0 + 0.2 * torch.randn_like(tensor))
            elif "embed_tokens" not in key:
                tensor.mul_(3.0)
    model.eval()
    model.save_pretrained(folder)
    if name == "qwen3_sliding":  # as the Hub has it: the kinds follow from the other keys
        saved = json.loads((folder / "config.json").read_text())
        del saved["layer_types"]
        (folder / "config.json").write_text(json.dumps(saved))
    return model, folder


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tmp_path_factory):
    return make_pair(request.param, tmp_path_factory.mktemp(request.param))


class Probe:
    """A target with a small cache, run by hand."""

    def __init__(self, folder: Path, backend: str) -> None:
        checkpoint = open_checkpoint(folder)
        kernels = zoo.kernels(backend)
        self.target = build_target(checkpoint.config, checkpoint.source, kernels, TAPS)
        layers = cache_layers(self.target.config, None)
        self.cache = KVCache(layers, {layer.window: 40 for layer in layers}, 4, kernels)
        self.book = PageBook(self.cache.book_pools, 4)
        request = Request("probe", [1], SamplingParams(), 0)
        self.sequence = Sequence(request, frozenset(), 200)
        self.book.open(self.sequence, [1])

    def forward(self, start: int, tokens: list[int]):
        """Logits and taps of tokens at start .. and on; what lies beyond is overwritten."""
        self.book.truncate(self.sequence, start)
        assert self.book.reserve(self.sequence, start + len(tokens))
        rows = self.cache.rows(self.book, [Span(self.sequence, start, len(tokens))])
        caches = self.cache.layers(rows.views, 0, len(self.target.config.cached_layers))
        batch = ForwardBatch(rows.positions, rows.end_position, caches)
        output = self.target.forward(torch.tensor(tokens), batch)
        self.book.recycle(self.sequence, start)
        return self.target.logits(output.hidden), output.taps


class Differences(NamedTuple):
    """The largest of our numbers from transformers'."""

    prefill: float
    verify: float  # of the row before wrong drafts
    rollback: float  # of rows that took their places
    taps: float


def differences(model, folder: Path, backend: str) -> Differences:
    """Of a prompt in chunks, then of blocks with wrong drafts, rolled back to the right ones."""
    tokens = torch.randint(1, 211, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        reference = model(torch.tensor([tokens]), output_hidden_states=True)
    expected = reference.logits[0]
    taps = torch.cat([reference.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
    probe = Probe(folder, backend)
    found = {"prefill": 0.0, "verify": 0.0, "rollback": 0.0, "taps": 0.0}

    def compare(what: str, rows: torch.Tensor, others: torch.Tensor) -> None:
        assert rows.isfinite().all() and rows.shape == others.shape
        found[what] = max(found[what], float((rows - others).abs().max()))

    for start, end in ((0, 9), (9, 10), (10, 27)):
        logits, chunk_taps = probe.forward(start, tokens[start:end])
        compare("prefill", logits, expected[start:end])
        compare("taps", chunk_taps, taps[start:end])
    for start, keep in ((27, 3), (30, 5), (35, 5)):
        wrong = [(token + 7) % 211 for token in tokens[start + 1 : start + 6]]
        logits, _ = probe.forward(start, [tokens[start], *wrong])
        compare("verify", logits[0], expected[start])
        logits, chunk_taps = probe.forward(start, tokens[start : start + 5])
        compare("rollback", logits[:keep], expected[start : start + keep])
        compare("taps", chunk_taps[:keep], taps[start : start + keep])
    return Differences(**found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_taps_match_transformers(pair, backend):
    found = differences(*pair, backend)
    assert max(found.prefill, found.verify, found.rollback) <= TOLERANCE
    assert found.taps <= 10 * TOLERANCE


def expected_answer(model) -> tuple[list[int], list[int]]:
    """A prompt of which half is the other half, and transformers' greedy answer, past windows."""
    prompt = torch.randint(1, 211, (14,), generator=torch.Generator().manual_seed(4)).tolist() * 2
    with torch.no_grad():
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
        )
    return prompt, answer[0, len(prompt) :].tolist()


def our_answer(folder: Path, prompt: list[int], drafts: str) -> Generation:
    """Ours, with a random drafter's offers or with what is looked up."""
    target = Probe(folder, "float32").target
    drafter = None
    if drafts == "drafter":
        drafter = zoo.tiny_drafter(target.kernels, vocab_size=211, hidden_size=64)
    config = EngineConfig(
        verify=0 if drafts == "plain" else 7, ngram=drafts == "ngram", cache=CacheOptions(0.01)
    )
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    return zoo.run(Engine(target, drafter, config), [Request("a", prompt, params, 0)])["a"]


@pytest.mark.parametrize("drafts", DRAFTS)
def test_greedy_answers_are_those_of_transformers(pair, drafts):
    model, folder = pair
    prompt, expected = expected_answer(model)
    done = our_answer(folder, prompt, drafts)
    assert done.token_ids == expected
    if drafts != "ngram":  # nothing may have come up before
        assert (done.stats.drafted > 0) is (drafts == "drafter")


def test_the_hub_form_of_a_gemma4_config_reads_like_the_saved_one(tmp_path):
    transformers.Gemma4TextConfig(**GEMMA, **MOE).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in saved
    hub = {key: value for key, value in saved.items() if key != "per_layer_config"}
    hub |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    expected = ModelConfig.from_hf(saved)
    assert ModelConfig.from_hf(hub) == expected
    multimodal = {"model_type": "gemma4", "text_config": hub, "eos_token_id": [1, 106]}
    assert ModelConfig.from_hf(multimodal).layers == expected.layers
    assert ModelConfig.from_hf(multimodal).eos_token_ids == (1, 106)
