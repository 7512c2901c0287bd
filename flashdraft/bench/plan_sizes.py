"""What a pair weighs: parameters, bytes of its weights in a format, and bytes of keys and values.

Counted from configs alone. How many pages of the cache fit a budget follows the engine's own rule
(engine/memory.py), with the engine's own constants; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from flashdraft.bench.plan_pairs import Pair
from flashdraft.engine.cache import CacheLayer, bytes_per_token, window_pages
from flashdraft.engine.config import EngineConfig
from flashdraft.engine.draft import MAX_BUFFERED
from flashdraft.engine.memory import LOOKAHEAD, plan_pools
from flashdraft.models.config import LayerConfig, ModelConfig
from flashdraft.models.drafter import Drafter
from flashdraft.models.drafter_config import DrafterConfig


@dataclass(frozen=True)
class Format:
    """How a target's weights are stored on the device; `bits` per value, its scales included."""

    name: str
    bits: float
    head_bits: float
    is_loadable: bool  # by this version
    table_bits: float = 0.0  # of an embedding table beside a tied head

    @property
    def small_bits(self) -> float:
        """Of what is not worth quantising."""
        return max(16.0, self.bits, self.table_bits)


BF16 = Format("bf16", 16, 16, is_loadable=True)
# 4.5 bits: four and one 16-bit scale for every 32 values
GPU_FORMATS = (
    BF16,
    Format("fp8 or int8, bf16 head", 8, 16, is_loadable=False),
    Format("fp8 or int8, fp8 head", 8, 8, is_loadable=False),
    Format("int4, bf16 head", 4.5, 16, is_loadable=False),
    Format("int4, fp8 head", 4.5, 8, is_loadable=False),
)
# the CPU's kernels pack the head apart from the embedding table
CPU_FORMATS = (
    Format("int8", 8, 8, is_loadable=True, table_bits=32),
    Format("float32", 32, 32, is_loadable=True, table_bits=32),
)


@dataclass(frozen=True)
class TargetSize:
    """A target's parameters by what a step does with them."""

    layers: int  # matrices that every step reads: attention and dense MLP
    small: int  # router, norms and biases: read too, and never quantised
    experts: int  # of one expert in all layers; a step reads those that its rows chose
    num_experts: int
    head: int
    table: int  # an embedding table of its own; 0 = it is the head

    @property
    def total(self) -> int:
        return self.layers + self.small + self.experts * self.num_experts + self.head + self.table


@dataclass(frozen=True)
class DrafterSize:
    """A drafter's parameters; where it has no head of its own it reads the target's."""

    total: int
    fold: int  # of these, what makes context out of taps
    copies: int  # key and value matrices that are kept twice: for the block and for the context
    own_head: int


@cache
def count_target(config: ModelConfig) -> TargetSize:
    """A target's parameters, to the last one."""
    hidden, experts, count = config.hidden_size, config.experts, len(config.layers)
    matrices = sum(_attention(config, layer) for layer in config.layers)
    small = hidden + sum(_attention_vectors(config, layer) for layer in config.layers)
    # a Gemma 4 layer has four norms and a scalar; beside its experts three more and a router
    small += count * (4 * hidden + 1 if config.family == "gemma4" else 2 * hidden)
    each = num_experts = 0
    if experts is not None:
        num_experts = experts.num_experts
        small += count * (4 * hidden + (hidden + 1) * num_experts)
        each = count * 3 * hidden * experts.intermediate_size
    head = config.vocab_size * hidden
    return TargetSize(
        layers=matrices + count * 3 * hidden * config.intermediate_size,
        small=small,
        experts=each,
        num_experts=num_experts,
        head=head,
        table=0 if config.tie_embeddings else head,
    )


def _attention(config: ModelConfig, layer: LayerConfig) -> int:
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    return config.hidden_size * (2 * query + key * (1 if layer.share_kv else 2))


def _attention_vectors(config: ModelConfig, layer: LayerConfig) -> int:
    heads = layer.num_heads + layer.num_kv_heads * (1 if layer.share_kv else 2)
    biases = heads * layer.head_dim + config.hidden_size if config.attention_bias else 0
    return biases + (2 * layer.head_dim if config.qk_norm else 0)


@cache
def count_drafter(config: DrafterConfig) -> DrafterSize:
    """A drafter's parameters, as its module has them."""
    with torch.device("meta"):
        module = Drafter(config)
    key = config.num_kv_heads * config.head_dim
    return DrafterSize(
        total=sum(one.numel() for one in module.parameters()),
        fold=module.fc.weight.numel(),
        copies=config.num_layers * 2 * key * config.hidden_size,
        own_head=(config.draft_vocab_size or 0) * config.hidden_size,
    )


def weight_bytes(size: TargetSize, form: Format) -> float:
    """What the target's weights take on the device."""
    body = (size.layers + size.experts * size.num_experts) * form.bits
    body += size.small * form.small_bits
    table = size.table * max(form.head_bits, form.table_bits)
    if not size.table:
        table = size.head * form.table_bits
    return (body + size.head * form.head_bits + table) / 8


def drafter_bytes(size: DrafterSize | None, form: Format) -> float:
    """What the drafter takes: in bfloat16 on a GPU, whatever the target's format is."""
    if size is None:
        return 0.0
    bits = form.bits if form.table_bits else 16
    return (size.total + size.copies) * bits / 8


def cache_layers(pair: Pair) -> list[CacheLayer]:
    """The target's layers, then the drafter's."""
    layers = [CacheLayer(one.num_kv_heads, one.head_dim, one.window) for one in pair.target.layers]
    if pair.drafter is not None:
        config = pair.drafter
        layers += [CacheLayer(config.num_kv_heads, config.head_dim, w) for w in config.windows]
    return layers


def cache_bytes(layers: Sequence[CacheLayer], dtype: torch.dtype, context: int) -> int:
    """Keys and values of one sequence; a layer with a window stops growing there."""
    costs = bytes_per_token(layers, dtype)
    return sum(cost * min(context, window or context) for window, cost in costs.items())


@dataclass(frozen=True)
class CachePlan:
    """The cache an engine would build, and what a load needs of it; pages by window."""

    pages: Mapping[int | None, int]
    needed: Mapping[int | None, int]
    needed_bytes: int
    reserved_bytes: int

    @property
    def fits(self) -> bool:
        return all(self.needed[window] <= count for window, count in self.pages.items())


def plan_cache(
    pair: Pair, dtype: torch.dtype, budget: int, config: EngineConfig, context: int
) -> CachePlan:
    """The pages of an engine with `config.max_batch` sequences of up to `context` tokens."""
    layers = cache_layers(pair)
    costs, size = bytes_per_token(layers, dtype), config.page_size
    slack = min(config.prefill_chunk, max(config.max_step_tokens, config.max_batch)) + LOOKAHEAD
    lag = 0
    if pair.drafter is not None:
        lag = MAX_BUFFERED + max(0, pair.drafter.block_size - LOOKAHEAD)
    asked = replace(config, max_context=context)
    pages = plan_pools(layers, dtype, budget, asked, context, slack + lag)
    needed = _needed(costs, config, context, lag)
    return CachePlan(
        pages,
        needed,
        sum(count * size * costs[window] for window, count in needed.items()),
        sum(count * size * costs[window] for window, count in pages.items()),
    )


def _needed(
    costs: Mapping[int | None, int], config: EngineConfig, context: int, lag: int
) -> dict[int | None, int]:
    """Pages while every sequence decodes at its full length, beside one step's worth of prompts."""
    batch, size = config.max_batch, config.page_size
    whole = batch * -(-context // size)
    prompts = -(-min(batch * config.prefill_chunk, config.max_step_tokens) // size)
    needed = {}
    for window in costs:
        needed[window] = whole
        if window is not None:
            decoding = batch * window_pages(window, LOOKAHEAD + lag, size)
            needed[window] = min(whole, decoding + prompts)
    return needed
