"""What a pair weighs: parameters, bytes of its weights in a format, and bytes of keys and values.

Counted from configs, and from a file's tensors where it stores them in few bits. How many pages of
the cache fit a budget is the engine's own rule (engine/cache/planning.py). What becomes of a weight
on a GPU follows kernels/cuda/backend.py. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from flashdraft.bench.plan.pairs import Pair
from flashdraft.engine.cache.layers import CacheLayer, ValueType, bytes_per_token, cache_layers
from flashdraft.engine.cache.planning import (
    LOOKAHEAD,
    draft_lag,
    plan_pools,
    window_pages,
    window_slack,
)
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.kernels.kinds import FILLED_BITS, filled_depth
from flashdraft.models.config.layers import LayerConfig
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.config.vision import VisionConfig
from flashdraft.models.drafter.config import DrafterConfig, tensor_shapes

# Fewer values than this stay floats on a GPU: kernels/cuda/backend.py has the same number, but is
# not imported where there is no Triton. A test holds the two together.
LEAST_VALUES = 1 << 22
FLOAT, INT8, FP8, INT4 = 16.0, 8.5, 8.0, 4.5  # bits; integers have a 16-bit scale for 32 values


class CacheType(NamedTuple):
    """What keys and values are stored as; it stands for a dtype of torch."""

    name: str
    itemsize: int  # bytes


BFLOAT16, FLOAT32, FLOAT8 = CacheType("bfloat16", 2), CacheType("float32", 4), CacheType("fp8", 1)


@dataclass(frozen=True)
class StoredFormat:
    """How a pair is stored on the device, in bits per value with scales, and the flags for it."""

    name: str
    bits: float  # of the target's matrices, those of experts included
    head_bits: float
    drafter_bits: float
    flags: tuple[str, ...] = ()
    expert_bits: float | None = None  # where a file has them in another format
    table_bits: float | None = None  # of an embedding table beside the head; None = a float's
    is_cpu: bool = False  # whose kernels quantise small weights too, and keep a table in any case
    cache_dtype: CacheType = BFLOAT16
    kv_keys: str = CacheOptions.kv_keys

    @property
    def float_bits(self) -> float:
        """Of what is not worth quantising."""
        return 32.0 if self.is_cpu else FLOAT

    @property
    def is_predicted(self) -> bool:
        """Whether a device's figures say how fast it is: a CPU's are of its 8-bit kernel."""
        return not self.is_cpu or self.bits == 8

    @property
    def is_measured(self) -> bool:
        """Whether steps were timed in it: the shares of bandwidth were fitted to these alone."""
        widths = (self.bits, self.head_bits, self.drafter_bits)
        timed = ((FLOAT, FLOAT, FLOAT), (INT4, INT8, INT8), (FP8, FP8, FP8))
        is_plain_cache = self.cache_dtype == BFLOAT16 and self.kv_keys == "stored"
        return widths in timed and self.expert_bits in (None, self.bits) and is_plain_cache


BF16 = StoredFormat("bf16", FLOAT, FLOAT, FLOAT)
# the most exact first; beside int4 the head and the drafter have a byte, unless the head is said
GPU_FORMATS = (
    BF16,
    StoredFormat("int8", INT8, INT8, INT8, ("--quantize", "int8")),
    StoredFormat("fp8", FP8, FP8, FP8, ("--quantize", "fp8")),
    StoredFormat("int4, int8 head", INT4, INT8, INT8, ("--quantize", "int4")),
    StoredFormat(
        "int4, fp8 head", INT4, FP8, INT8, ("--quantize", "int4", "--quantize-head", "fp8")
    ),
)
# the CPU's kernels pack the head apart from the embedding table
_ON_CPU: dict[str, Any] = {"is_cpu": True, "cache_dtype": FLOAT32}
CPU_FORMATS = (
    StoredFormat("int8", 8, 8, 8, ("--device", "cpu", "--dtype", "int8"), **_ON_CPU),
    StoredFormat("float32", 32, 32, 32, ("--device", "cpu", "--dtype", "float32"), **_ON_CPU),
)


@dataclass(frozen=True)
class TargetSize:
    """A target's parameters by what a step does with them."""

    layers: int  # matrices that every step reads: attention and dense MLP
    light: int  # more of these, too small to be worth quantising on a GPU
    small: int  # router, norms and biases: read too, and never quantised
    experts: int  # of one expert in all layers; a step reads those that its rows chose
    num_experts: int
    head: int
    table: int  # an embedding table of its own; 0 = it is the head
    spare: int  # more, that fill up rows of 4-bit codes on a GPU
    inputs: int = 0  # a table of per-layer inputs, of which a step reads a row a token
    vision: int = 0  # a tower for pictures, which no step reads and nothing quantises

    @property
    def total(self) -> int:
        body = self.layers + self.light + self.small + self.experts * self.num_experts
        return body + self.head + self.table + self.inputs + self.vision

    def layer_bytes(self, form: StoredFormat) -> float:
        """What every step reads of the layers, experts aside."""
        light = form.bits if form.is_cpu else form.float_bits
        return (self.layers * form.bits + self.light * light + self.small * form.float_bits) / 8

    def head_bytes(self, form: StoredFormat) -> float:
        """The same of the head."""
        is_coded = form.is_cpu or self.head >= LEAST_VALUES
        return self.head * (form.head_bits if is_coded else form.float_bits) / 8


_KERNELS = "attention_conv.kernel_projection", "mlp_conv.kernel_projection"  # of convolutions


@dataclass(frozen=True)
class DrafterSize:
    """A drafter's parameters; where it has no head of its own it reads the target's."""

    total: int
    fold: int  # of these, what makes context out of taps
    copies: int  # key and value matrices that are kept twice: for the block and for the context
    own_head: int
    coded: int  # of these and the copies, what a GPU quantises if asked to
    tables: int  # of a head that chooses paths: kept in floats, and a pass reads a few rows


@cache
def count_target(config: ModelConfig) -> TargetSize:
    """A target's parameters, to the last one."""
    hidden, experts, count = config.hidden_size, config.experts, len(config.layers)
    packs = [sum(pack.values()) for pack in _packs(config)]
    heavy = sum(size for size in packs if size >= LEAST_VALUES)
    small = hidden + sum(_attention_vectors(config, layer) for layer in config.layers)
    # a Gemma layer has four norms, and Gemma 4's a scalar
    small += count * ((4 if config.family == "gemma" else 2) * hidden + config.layer_scalars)
    each = num_experts = 0
    if experts is not None:
        num_experts = experts.num_experts
        # Gemma 4 norms what they read and write, and scales the router and what it says
        beside = 4 * hidden + num_experts if config.family == "gemma" else 0
        small += count * (beside + hidden * num_experts)
        each = count * 3 * hidden * experts.intermediate_size
    head = config.vocab_size * hidden
    inputs = 0
    if config.per_layer is not None:
        inputs = config.vocab_size * count * config.per_layer.width
        small += count * hidden + config.per_layer.width
    inner = [layer.intermediate_size for layer in config.layers if layer.intermediate_size]
    if experts is not None:
        inner += [experts.intermediate_size] * num_experts * count
    return TargetSize(
        layers=heavy,
        light=sum(packs) - heavy,
        small=small,
        experts=each,
        num_experts=num_experts,
        head=head,
        table=0 if config.tie_embeddings else head,
        spare=hidden * sum(filled_depth(depth) - depth for depth in inner),
        inputs=inputs,
        vision=0 if config.vision is None else _count_tower(config.vision, hidden),
    )


def _count_tower(tower: VisionConfig, target_width: int) -> int:
    """The parameters of a tower for pictures and of its projection."""
    hidden, heads = tower.hidden_size, tower.num_heads * tower.head_dim
    layer = 4 * hidden * heads + 3 * hidden * tower.intermediate_size
    layer += 4 * hidden + 2 * tower.head_dim
    places = 3 * tower.patch_size**2 + 2 * tower.num_positions
    vectors = 2 if tower.standardize else 0
    return tower.num_layers * layer + hidden * (places + vectors + target_width)


def _packs(config: ModelConfig) -> Iterator[dict[str, int]]:
    """Values of the matrices of all layers, by name; those that are packed as one together."""
    hidden = config.hidden_size
    for index, layer in enumerate(config.layers):
        attention, mlp = (f"model.layers.{index}.{part}" for part in ("self_attn", "mlp"))
        query = hidden * layer.num_heads * layer.head_dim
        key = hidden * layer.num_kv_heads * layer.head_dim
        pack = {f"{attention}.q_proj.weight": query}
        if layer.kv_source is None:
            pack |= {f"{attention}.k_proj.weight": key}
            pack |= {} if layer.share_kv else {f"{attention}.v_proj.weight": key}
        yield pack
        yield {f"{attention}.o_proj.weight": query}
        if wide := hidden * layer.intermediate_size:
            yield {f"{mlp}.gate_proj.weight": wide, f"{mlp}.up_proj.weight": wide}
            yield {f"{mlp}.down_proj.weight": wide}
        if config.per_layer is not None:
            part = hidden * config.per_layer.width
            yield {f"model.layers.{index}.per_layer_input_gate.weight": part}
            yield {f"model.layers.{index}.per_layer_projection.weight": part}
    if config.per_layer is not None:
        total = hidden * config.per_layer.width * len(config.layers)
        yield {"model.per_layer_model_projection.weight": total}


def _attention_vectors(config: ModelConfig, layer: LayerConfig) -> int:
    heads = layer.num_heads + layer.num_kv_heads * (1 if layer.share_kv else 2)
    biases = heads * layer.head_dim if config.qkv_bias else 0
    biases += config.hidden_size if config.output_bias else 0
    num_norms = 0 if not config.qk_norm else 2 if layer.kv_source is None else 1
    return biases + num_norms * layer.head_dim


@cache
def count_drafter(config: DrafterConfig) -> DrafterSize:
    """A drafter's parameters, as its module has them."""
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(config).items()}
    hidden = config.hidden_size
    key, query = (config.head_dim * n for n in (config.num_kv_heads, config.num_heads))
    copies = config.num_layers * 2 * key * hidden
    own_head = (config.draft_vocab_size or 0) * hidden
    wide = config.intermediate_size * hidden
    layer = [(query + 2 * key) * hidden, query * hidden, 2 * wide, wide]
    layer += [sizes[f"layers.0.{name}.weight"] for name in _KERNELS if config.convolution]
    packs = [sizes["fc.weight"], copies, own_head, *layer * config.num_layers]
    heads = "markov_head.", "candidate_selector.", "confidence_head."
    return DrafterSize(
        total=sum(sizes.values()),
        fold=sizes["fc.weight"],
        copies=copies,
        own_head=own_head,
        coded=sum(size for size in packs if size >= LEAST_VALUES),
        tables=sum(size for name, size in sizes.items() if name.startswith(heads)),
    )


def stored_formats(pair: Pair) -> tuple[StoredFormat, ...]:
    """The formats of a target whose file has its weights in few bits; they stay as they are."""
    plain = _stored_format(pair, "as stored", FLOAT, ())
    other = _stored_format(pair, "as stored, rest int8", INT8, ("--quantize", "int8"))
    size = None if pair.drafter is None else count_drafter(pair.drafter)
    target = count_target(pair.target)
    sizes = [weight_bytes(target, form) + drafter_bytes(size, form) for form in (plain, other)]
    return (plain, other) if sizes[1] < sizes[0] else (plain,)


def _stored_format(pair: Pair, name: str, rest: float, flags: tuple[str, ...]) -> StoredFormat:
    """With `rest` bits for the drafter and for what the file has as floats."""
    stored, size = pair.stored, count_target(pair.target)

    def mean_bits(values: Mapping[str, int], floats: float) -> float:
        bits = [8 * stored[one] if one in stored else floats * n for one, n in values.items()]
        return sum(bits) / max(1, sum(values.values()))

    heavy: dict[str, int] = {}
    for pack in _packs(pair.target):
        heavy |= pack if sum(pack.values()) >= LEAST_VALUES else {}
    experts: dict[str, int] = {}
    for index in range(len(pair.target.layers) if size.experts else 0):
        part = size.experts * size.num_experts // (3 * len(pair.target.layers))
        prefix = f"model.layers.{index}.experts"
        experts |= {f"{prefix}.gate_up_proj": 2 * part, f"{prefix}.down_proj": part}
    table = {"model.embed_tokens.weight": size.head}
    return StoredFormat(
        name,
        mean_bits(heavy, rest) if heavy else FLOAT,
        mean_bits({"lm_head.weight": size.head} if size.table else table, rest),
        rest,
        flags,
        expert_bits=mean_bits(experts, rest) if experts else None,
        table_bits=mean_bits(table, FLOAT),
    )


def weight_bytes(size: TargetSize, form: StoredFormat) -> float:
    """What the target's weights take on the device."""
    bits = form.expert_bits or form.bits
    experts = size.experts * size.num_experts * bits
    if not form.is_cpu and bits < FILLED_BITS:
        experts += size.spare * bits
    table_bits = form.float_bits
    if form.table_bits is not None and size.table >= LEAST_VALUES:
        table_bits = form.table_bits
    table = size.head if form.is_cpu else size.table
    rest = experts + table * table_bits + (size.inputs + size.vision) * form.float_bits
    return size.layer_bytes(form) + size.head_bytes(form) + rest / 8


def loading_bytes(size: TargetSize, form: StoredFormat) -> float:
    """What a CPU takes for a moment beside the weights, as it packs the head: copies in floats.

    The head is the largest matrix of most models, and its table one of the copies where it has
    none. On a GPU this is within what the cache gets later.
    """
    num_copies = 3 if size.table else 2
    return 4.0 * num_copies * size.head if form.is_cpu else 0.0


def drafter_bytes(size: DrafterSize | None, form: StoredFormat) -> float:
    """What the drafter takes on the device."""
    if size is None:
        return 0.0
    total = size.total + size.copies
    coded = total - size.tables if form.is_cpu else size.coded
    return (coded * form.drafter_bits + (total - coded) * form.float_bits) / 8


def cache_bytes(layers: Sequence[CacheLayer], dtype: ValueType, context: int) -> int:
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
    pair: Pair, dtype: ValueType, budget: int, config: EngineConfig, context: int
) -> CachePlan:
    """The pages of an engine with `config.max_batch` sequences of up to `context` tokens."""
    layers = cache_layers(pair.target, pair.drafter, config.cache.kv_keys)
    costs, size = bytes_per_token(layers, dtype), config.page_size
    asked = replace(config, max_context=context)
    slack = window_slack(pair.drafter, config, pair.target.vision is not None)
    pages = plan_pools(layers, dtype, budget, asked, context, slack)
    needed = _needed(costs, config, context, draft_lag(pair.drafter))
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
