"""What fits in memory: the weights, then pages per pool and the context that they allow."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

import torch

from flashdraft.engine.cache.storage import (
    CacheLayer,
    KVCache,
    bytes_per_token,
    cache_layers,
    check_keys,
    plan_pages,
    shares_keys,
    stored_dtype,
    window_pages,
)
from flashdraft.engine.config import MAX_BUFFERED, EngineConfig
from flashdraft.errors import CapacityError, RequestError
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.quantized import Scheme, filled_bytes, quantized_bytes
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.layers import Target
from flashdraft.models.weights import TensorSource

log = logging.getLogger(__name__)

GB = 10**9
DEFAULT_CPU_GB = 1.0
GPU_SHARE = 0.85  # of the memory left once the weights are there
LOOKAHEAD = 64  # tokens a step may write beyond the committed ones
SPARE_WINDOWS = 2  # a windowed pool's room, in running sequences: as much again for cached prefixes


def check_cache(kernels: Kernels, config: EngineConfig, target: ModelConfig | None = None) -> None:
    """Refuse a cache that the kernels cannot read, or the target, once known, cannot have."""
    stored_dtype(kernels, config.kv_dtype)
    check_keys(kernels, config.kv_keys, target)


def check_weights_fit(
    source: TensorSource, drafter: Drafter | None, kernels: Kernels, label: str
) -> None:
    """Refuse a model whose weights alone outgrow the device's free memory, before reading them."""
    if kernels.device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(kernels.device)
    shapes = [] if drafter is None else [one.shape for one in drafter.parameters()]
    drafter_bytes = sum(_float_bytes(shape, kernels, kernels.quantize_drafter) for shape in shapes)
    needed = target_bytes(source, kernels) + drafter_bytes
    if needed <= free:
        return
    is_float = all(source.quantized_bytes(name) is None for name in source.names())
    name = str(kernels.quantize or kernels.dtype).removeprefix("torch.")
    name = name if is_float else "the format of its file"
    num_values = sum(math.prod(source.shape(one)) for one in source.names())
    room = free * num_values / max(1, needed - drafter_bytes) / GB
    helps = is_float and kernels.quantize is None and kernels.dtype is torch.bfloat16
    cure = "make the weights smaller with quantize='int4', " if helps else ""
    raise CapacityError(
        f"{label} takes {needed / GB:.1f} GB of weights in {name}"
        f" ({drafter_bytes / GB:.1f} GB of it the drafter's); the GPU has "
        f"{free / GB:.1f} GB free of {total / GB:.1f}. That is room for about "
        f"{room:.0f} billion parameters without any context: end "
        f"other programs on the GPU, {cure}choose a smaller model, or use device='cpu'."
    )


def target_bytes(source: TensorSource, kernels: Kernels) -> int:
    """What a target's weights take once they are packed."""
    names = set(source.names())
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    schemes = {table: kernels.quantize_head if head not in names else None}
    schemes |= {head: kernels.quantize_head}
    total = 0
    for name in names:
        stored = source.quantized_bytes(name)
        if stored is not None and not kernels.holds(math.prod(source.shape(name))):
            stored = math.prod(source.shape(name)) * kernels.dtype.itemsize
        if stored is None:
            scheme = None if name.endswith(".router.proj.weight") else kernels.quantize
            stored = _float_bytes(source.shape(name), kernels, schemes.get(name, scheme))
        if kernels.device.type == "cuda":
            stored = filled_bytes(source.shape(name), stored)
        total += stored
    return total


def _float_bytes(shape: Sequence[int], kernels: Kernels, scheme: Scheme | None) -> int:
    if scheme is not None and len(shape) > 1 and kernels.holds(math.prod(shape)):
        with contextlib.suppress(RequestError):  # rows of no group's length stay as they are
            return quantized_bytes(shape, scheme)
    return math.prod(shape) * kernels.dtype.itemsize


def build_cache(
    target: Target, drafter: PackedDrafter | None, config: EngineConfig
) -> tuple[KVCache, int]:
    """The cache within its budget, and the longest sequence it can hold."""
    kernels, drafts = target.kernels, None if drafter is None else drafter.config
    layers = cache_layers(target.config, drafts, config.kv_keys)
    dtype = stored_dtype(kernels, config.kv_dtype)
    check_keys(kernels, config.kv_keys, target.config)
    budget = _budget(kernels.device, config)
    max_position = target.config.max_position
    longest = min(max_position, config.max_context or max_position)
    slack = _slack(drafter, config)
    pages = plan_pools(layers, dtype, budget, config, longest, slack)
    fits = min([max_position, *_length_limits(pages, config.page_size, slack)])
    if fits < 2:
        per_page = sum(bytes_per_token(layers, dtype).values()) * config.page_size
        raise CapacityError(
            f"cache_gb is {budget / GB:.6f}; a single page of {config.page_size} tokens takes "
            f"{per_page / GB:.6f}. Raise cache_gb."
        )
    wanted = config.max_context
    if wanted is not None and wanted > fits:
        if wanted > max_position:
            cure = f"the model knows {max_position} positions"
        else:
            cure = f"the cache of {budget / GB:.3f} GB holds no more; raise cache_gb"
            cure += _smaller_cache(target, dtype, config.kv_keys)
        raise CapacityError(f"max_context is {wanted}; at most {fits} is possible: {cure}.")
    costs = bytes_per_token(layers, dtype)
    size = sum(pages[window] * config.page_size * costs[window] for window in pages)
    name = str(dtype).removeprefix("torch.")
    name += ", keys rebuilt" if config.kv_keys == "rebuilt" else ""
    log.info("cache: %.3f GB of %s, sequences up to %d tokens", size / GB, name, wanted or fits)
    return KVCache(layers, pages, config.page_size, kernels, dtype), wanted or fits


def _smaller_cache(target: Target, dtype: torch.dtype, kv_keys: str) -> str:
    """What a GPU could still do for a longer context, in words to append."""
    kernels, cures = target.kernels, ""
    if kernels.device.type != "cuda":
        return cures
    if dtype == kernels.dtype and kernels.why_no_fp8_cache is None:
        cures += ", or store keys and values in 8 bits with kv_dtype='fp8'"
    if kv_keys == "stored" and shares_keys(target.config):
        cures += ", or store no keys that can be made of values with kv_keys='rebuilt'"
    return cures


def plan_pools(
    layers: Sequence[CacheLayer],
    dtype: torch.dtype,
    budget: int,
    config: EngineConfig,
    longest: int,
    slack: int,
) -> dict[int | None, int]:
    """Pages of every pool: windows to spare for cached prefixes, unless sequences need the room.

    A context that was asked for comes before windows for many sequences, and all sequences at that
    length come before spare windows.
    """
    num_windows = SPARE_WINDOWS * config.max_batch
    while True:
        most = _most_pages(layers, config, longest, slack, num_windows)
        pages = plan_pages(layers, dtype, config.page_size, budget, most)
        fits_one = all(n >= longest for n in _length_limits(pages, config.page_size, slack))
        fits_all = None not in pages or pages[None] >= most[None]
        is_settled = fits_one and (fits_all or num_windows <= config.max_batch)
        if config.max_context is None or is_settled or num_windows == 1:
            return pages
        num_windows //= 2


def _slack(drafter: PackedDrafter | None, config: EngineConfig) -> int:
    """Tokens a sequence holds in a windowed pool beside its window."""
    step_tokens = max(config.max_step_tokens, config.max_batch)  # as the scheduler has it
    slack = min(config.prefill_chunk, step_tokens) + LOOKAHEAD
    if drafter is not None:
        slack += MAX_BUFFERED + max(0, drafter.config.block_size - LOOKAHEAD)
    return slack


def _most_pages(
    layers: Sequence[CacheLayer], config: EngineConfig, longest: int, slack: int, num_windows: int
) -> dict[int | None, int]:
    """What each pool can use: every sequence at full length, or `num_windows` windows."""
    every_token = config.max_batch * -(-(longest + slack) // config.page_size)
    most: dict[int | None, int] = {}
    for window in {layer.window for layer in layers}:
        most[window] = every_token
        if window is not None:
            per_sequence = window_pages(window, slack, config.page_size)
            most[window] = min(every_token, num_windows * per_sequence)
    return most


def _length_limits(pages: dict[int | None, int], page_size: int, slack: int) -> list[int]:
    """What limits a sequence that can always run to its end, if need be alone."""
    return [
        count * page_size
        for window, count in pages.items()
        if window is None or count < window_pages(window, slack, page_size)
    ]


def _budget(device: torch.device, config: EngineConfig) -> int:
    if config.cache_gb is not None:
        return int(config.cache_gb * GB)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    return int(DEFAULT_CPU_GB * GB)
