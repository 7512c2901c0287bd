"""Tiny random targets of every family, drafters for them, scripted proposers, toy grammars."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdraft.core import Generation, Request, SamplingParams
from flashdraft.engine.cache.layers import bytes_per_token, cache_layers
from flashdraft.engine.drafts import Draft
from flashdraft.engine.engine import Engine
from flashdraft.engine.policy.costs import DraftCost
from flashdraft.engine.sampling.process import RequestSampler
from flashdraft.engine.scheduler import Work
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.kernels.cpu.backend import CpuKernels
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.layers import Target
from flashdraft.models.registry import build_target

VOCAB = 67

Rule = Callable[[Sequence[int]], tuple[set[int], bool]]

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_GEMMA = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 20,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": 20},
    "qwen3_moe": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "tie_word_embeddings": False,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    },
    "gemma3": {
        **{key: value for key, value in _GEMMA.items() if "global" not in key},
        "model_type": "gemma3_text",
        "attention_k_eq_v": None,
        "hidden_size_per_layer_input": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    },
    "gemma4": _GEMMA,
    "gemma4_small": {  # as E2B and E4B
        **_GEMMA,
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4_moe": {
        **_GEMMA,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
}


_SELECTOR = {"selector_rank": 6, "selector_top_k": 12}
_CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 8}
ADDED: dict[str, dict[str, Any]] = {  # to dflash_config: every kind of head
    "markov": {"markov_rank": 6, "enable_confidence_head": False},
    "gated": {"markov_rank": 6, "markov_head_type": "gated"},
    "anchored": {
        "markov_rank": 6,
        "sample_from_anchor": True,
        "confidence_head_with_markov": False,
    },
    "selector": {**_SELECTOR, **_CONVOLUTIONS},
}


class Tensors:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_matrix(self, name: str, device: torch.device | None = None) -> Tensor:
        return self.read(name).to(device)

    def quantized_bytes(self, name: str) -> None:
        return None


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, with values of a trained model's order of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    hidden, tensors = config.hidden_size, {}

    def matrix(name: str, *shape: int) -> None:
        tensors[name] = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    def norm(name: str, size: int = hidden) -> None:
        offset = 1.0 - config.norm_offset
        tensors[name] = offset + 0.2 * torch.randn(size, generator=generator)

    matrix("model.embed_tokens.weight", config.vocab_size, hidden)
    if not config.tie_embeddings:
        matrix("lm_head.weight", config.vocab_size, hidden)
        tensors["lm_head.weight"] *= 4.0
    norm("model.norm.weight")
    if config.per_layer is not None:
        total = len(config.layers) * config.per_layer.width
        matrix("model.embed_tokens_per_layer.weight", config.vocab_size, total)
        matrix("model.per_layer_model_projection.weight", total, hidden)
        norm("model.per_layer_projection_norm.weight", config.per_layer.width)
    for i, layer in enumerate(config.layers):
        prefix = f"model.layers.{i}"
        heads = {"q": layer.num_heads, "k": layer.num_kv_heads, "v": layer.num_kv_heads}
        for part, count in heads.items():
            if part == "q" or (layer.kv_source is None and (part == "k" or not layer.share_kv)):
                name = f"{prefix}.self_attn.{part}_proj.weight"
                matrix(name, count * layer.head_dim, hidden)
        matrix(f"{prefix}.self_attn.o_proj.weight", hidden, layer.num_heads * layer.head_dim)
        if config.qk_norm:
            norm(f"{prefix}.self_attn.q_norm.weight", layer.head_dim)
            if layer.kv_source is None:
                norm(f"{prefix}.self_attn.k_norm.weight", layer.head_dim)
        if config.qkv_bias:
            for part, count in heads.items():
                norm(f"{prefix}.self_attn.{part}_proj.bias", count * layer.head_dim)
        if inner := layer.intermediate_size:
            matrix(f"{prefix}.mlp.gate_proj.weight", inner, hidden)
            matrix(f"{prefix}.mlp.up_proj.weight", inner, hidden)
            matrix(f"{prefix}.mlp.down_proj.weight", hidden, inner)
        norm(f"{prefix}.input_layernorm.weight")
        norm(f"{prefix}.post_attention_layernorm.weight")
        if config.family == "gemma":
            norm(f"{prefix}.pre_feedforward_layernorm.weight")
            norm(f"{prefix}.post_feedforward_layernorm.weight")
            if config.layer_scalars:
                norm(f"{prefix}.layer_scalar", 1)
        if config.per_layer is not None:
            matrix(f"{prefix}.per_layer_input_gate.weight", config.per_layer.width, hidden)
            matrix(f"{prefix}.per_layer_projection.weight", hidden, config.per_layer.width)
            norm(f"{prefix}.post_per_layer_input_norm.weight")
        if config.experts is not None:
            count, inner = config.experts.num_experts, config.experts.intermediate_size
            if config.family == "gemma":
                for suffix in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1"):
                    norm(f"{prefix}.{suffix}.weight")
                norm(f"{prefix}.post_feedforward_layernorm_2.weight")
                norm(f"{prefix}.router.scale")
                norm(f"{prefix}.router.per_expert_scale", count)
            matrix(f"{prefix}.router.proj.weight", count, hidden)
            matrix(f"{prefix}.experts.gate_up_proj", count, 2 * inner, hidden)
            matrix(f"{prefix}.experts.down_proj", count, hidden, inner)
    return tensors


def kernels(name: str) -> Kernels:
    """A CPU backend: "torch", "float32" or "int8"."""
    if name == "torch":
        return TorchKernels(torch.device("cpu"), torch.float32)
    found = CpuKernels(quantize=name == "int8")
    found._threads = 2  # also where every process of the tests has one thread by itself
    return found


def tiny_target(family: str, backend: Kernels, taps: Sequence[int] = (), seed: int = 0) -> Target:
    config = ModelConfig.from_hf(CONFIGS[family])
    return build_target(config, Tensors(random_tensors(config, seed)), backend, taps)


def tiny_drafter(
    backend: Kernels,
    block_size: int = 8,
    seed: int = 1,
    any_width: bool = False,
    vocab_size: int = VOCAB,
    hidden_size: int = 32,
    added: dict[str, Any] | None = None,
) -> PackedDrafter:
    """A random drafter for `tiny_target(..., taps=(0, 2))`: one sliding, one full layer.

    `added` are keys of dflash_config, such as one of ADDED has: a head speaks as loudly as slots.
    """
    config = DrafterConfig.from_hf(
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
            "use_sliding_window": True,
            "num_target_layers": 4,
            "block_size": block_size,
            "dflash_config": {
                "mask_token_id": 3,
                "target_layer_ids": [0, 2],
                "any_width": any_width,
                **(added or {}),
            },
        }
    )
    torch.manual_seed(seed)
    drafter = Drafter(config)
    for name, parameter in drafter.named_parameters():
        if "head" in name or "selector" in name or "_conv" in name:
            torch.nn.init.normal_(parameter, std=0.7)
    return PackedDrafter(drafter, backend)


def cache_for(target: Target, drafter: PackedDrafter | None, num_pages: int) -> float:
    """A cache_gb that holds about so many pages: enough for one long sequence, not for eight."""
    layers = cache_layers(target.config, None if drafter is None else drafter.config)
    per_token = bytes_per_token(layers, target.kernels.dtype)
    return sum(per_token.values()) * 16 * num_pages / 1e9


class ScriptedProposer:
    """Proposes a known continuation, corrupted at a given rate: 0 = always right, 1 = never."""

    def __init__(self, answers: dict[str, list[int]], wrong: float, max_drafts: int) -> None:
        self.answers = answers
        self.max_drafts = max_drafts
        self._wrong = wrong
        self._random = random.Random(7)

    def buffer(self, sequence: RunningSequence, taps: Tensor | None) -> None: ...

    def forget(self, sequence: RunningSequence) -> None: ...

    def fold(self, sequences: Sequence[RunningSequence]) -> None:
        for sequence in sequences:
            sequence.num_folded = sequence.num_cached

    def fold_overdue(self, sequences: Sequence[RunningSequence]) -> None:
        self.fold([s for s in sequences if s.num_cached - s.num_folded > 10])

    def propose(
        self,
        works: Sequence[Work],
        samplers: Sequence[RequestSampler],
        limits: Sequence[int],
    ) -> list[Draft]:
        drafts = []
        for work, limit in zip(works, limits, strict=True):
            done = work.sequence.num_output
            room = min(work.room, self.max_drafts, limit)
            right = self.answers[work.sequence.request.id][done : done + room]
            right += [0] * (room - len(right))
            tokens = [
                (token + 1) % VOCAB if self._random.random() < self._wrong else token
                for token in right
            ]
            drafts.append(Draft(tokens, [self._random.random() for _ in tokens], "script"))
        return drafts

    def measure(self, batch_sizes: Sequence[int]) -> DraftCost:
        return DraftCost(dict.fromkeys(batch_sizes, 1e-6))


class TokenGrammar:
    """A grammar by its rule: from the tokens so far to those that may follow, and may it end here.

    It counts what it is asked, and breaks at states of a given length.
    """

    def __init__(self, rule: Rule, vocab_size: int = VOCAB, breaks_at: int | None = None) -> None:
        self.rule = rule
        self.vocab_size = vocab_size
        self.breaks_at = breaks_at
        self.num_masks = 0

    def start(self) -> TokenMatcher:
        return TokenMatcher(self)

    def matches(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens are a whole sentence."""
        is_path = all(token in self.rule(tokens[:i])[0] for i, token in enumerate(tokens))
        return is_path and self.rule(tokens)[1]


class TokenMatcher:
    """A place in a TokenGrammar."""

    def __init__(self, grammar: TokenGrammar) -> None:
        self._grammar = grammar
        self._tokens: list[int] = []

    def advance(self, token: int) -> bool:
        if token not in self._look()[0]:
            return False
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self._tokens)
        del self._tokens[-count:]

    def allowed(self) -> bytes:
        self._grammar.num_masks += 1
        bits = sum(1 << token for token in self._look()[0])
        return bits.to_bytes(-(-self._grammar.vocab_size // 8), "little")

    def forced(self) -> list[int]:
        path: list[int] = []
        while len(path) < 40:
            allowed, may_end = self._grammar.rule([*self._tokens, *path])
            if len(allowed) != 1 or may_end:
                break
            path += allowed
        return path

    def may_end(self) -> bool:
        return self._look()[1]

    def is_complete(self) -> bool:
        return not self._look()[0] and self.may_end()

    def _look(self) -> tuple[set[int], bool]:
        if self._grammar.breaks_at == len(self._tokens):
            raise ValueError("the matcher is broken")
        return self._grammar.rule(self._tokens)


def phrases(tokens: Sequence[int]) -> tuple[set[int], bool]:
    """Sentences of one to four phrases of six tokens, two or three of which are forced."""
    count, place = divmod(len(tokens), 6)
    if place == 0:
        return set(range(6, 66, 3)) if count < 4 else set(), count > 0
    if place in (1, 2):
        return {4 + (tokens[-1] * 2 + place) % 60}, False
    if place == 3 and tokens[-1] % 4 == 0:
        return {5}, False
    return set(range(10 + place, 40)), False


def run(engine: Engine, requests: Sequence[Request], check: bool = True) -> dict[str, Generation]:
    """Submit everything and step to the end, checking the engine's integrity after every step."""
    for request in requests:
        engine.submit(request)
    done: dict[str, Generation] = {}
    for _ in range(10_000):
        if not engine.has_work:
            return done
        for event in engine.step():
            if event.generation is not None:
                done[event.request_id] = event.generation
        if check:
            engine.check_integrity()
    raise AssertionError("the engine did not finish")


def mixed_requests(count: int = 6, seed: int = 3, max_tokens: int = 40) -> list[Request]:
    """Prompts of many lengths, some alike; greedy and sampled with every kind of setting."""
    source = random.Random(seed)
    shared = [source.randrange(4, VOCAB) for _ in range(40)]
    settings = [
        SamplingParams(max_tokens=max_tokens),
        SamplingParams(max_tokens=max_tokens, temperature=1.0),
        SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.9, top_k=20),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(max_tokens=max_tokens, temperature=1.2, min_p=0.05, presence_penalty=0.5),
        SamplingParams(max_tokens=max_tokens, temperature=0.9, frequency_penalty=0.3, min_tokens=9),
    ]
    requests = []
    for i in range(count):
        length = source.choice([1, 2, 15, 16, 17, 33, 50])
        prompt = [source.randrange(4, VOCAB) for _ in range(length)]
        if i % 2:
            prompt = shared[: source.choice([16, 32, 40])] + prompt[:5]
        requests.append(Request(f"r{i}", prompt, settings[i % len(settings)], seed=100 + i))
    return requests
