"""What fits in memory: the weights, then pages per pool and the context that they allow."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

import torch

from flashdraft.engine.cache.layers import bytes_per_token, cache_layers, shares_keys
from flashdraft.engine.cache.planning import (
    DEFAULT_CPU_GB,
    GB,
    GPU_SHARE,
    length_limits,
    plan_pools,
    window_slack,
)
from flashdraft.engine.cache.storage import KVCache, check_keys, stored_dtype
from flashdraft.engine.config import EngineConfig
from flashdraft.errors import CapacityError, RequestError
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.kinds import Scheme, filled_bytes, quantized_bytes
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.layers import Target
from flashdraft.models.weights import TensorSource, stays_float

log = logging.getLogger(__name__)


def check_cache(kernels: Kernels, config: EngineConfig, target: ModelConfig | None = None) -> None:
    """Refuse a cache that the kernels cannot read, or the target, once known, cannot have."""
    stored_dtype(kernels, config.cache.kv_dtype)
    check_keys(kernels, config.cache.kv_keys, target)


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
    schemes |= {head: kernels.quantize_head, "model.embed_tokens_per_layer.weight": None}
    total = 0
    for name in names:
        stored = source.quantized_bytes(name)
        is_float = stays_float(name)
        if stored is not None and (is_float or not kernels.holds(math.prod(source.shape(name)))):
            stored = math.prod(source.shape(name)) * kernels.dtype.itemsize
        if stored is None:
            scheme = None if is_float else kernels.quantize
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
    layers = cache_layers(target.config, drafts, config.cache.kv_keys)
    dtype = stored_dtype(kernels, config.cache.kv_dtype)
    check_keys(kernels, config.cache.kv_keys, target.config)
    budget = _budget(kernels.device, config)
    max_position = target.config.max_position
    longest = min(max_position, config.max_context or max_position)
    slack = window_slack(drafts, config, target.vision is not None)
    pages = plan_pools(layers, dtype, budget, config, longest, slack)
    fits = min([max_position, *length_limits(pages, config.page_size, slack)])
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
            cure += _smaller_cache(target, dtype, config.cache.kv_keys)
        raise CapacityError(f"max_context is {wanted}; at most {fits} is possible: {cure}.")
    costs = bytes_per_token(layers, dtype)
    size = sum(pages[window] * config.page_size * costs[window] for window in pages)
    name = str(dtype).removeprefix("torch.")
    name += ", keys rebuilt" if config.cache.kv_keys == "rebuilt" else ""
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


def _budget(device: torch.device, config: EngineConfig) -> int:
    if config.cache.cache_gb is not None:
        return int(config.cache.cache_gb * GB)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    return int(DEFAULT_CPU_GB * GB)
