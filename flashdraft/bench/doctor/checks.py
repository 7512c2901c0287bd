"""Doctor's checks that need no cause: the machine, the kernels, the law, the accepted length.

Each returns findings, one line of the report each. What to do about a low accepted length is
causes.py's business.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdraft.bench.doctor.expected import Expected
from flashdraft.bench.doctor.probe import FEW_TOKENS, Accepted, are_cut
from flashdraft.bench.doctor.report import OK, PROBLEM, WARNING, Finding
from flashdraft.core import VERSION, Generation
from flashdraft.engine.config import DEFAULT_CACHE, CacheOptions
from flashdraft.kernels.cpu import backend as cpu_backend
from flashdraft.kernels.cuda.quantized.layout import pack_quantized, round_activations
from flashdraft.kernels.interface import (
    BIDIRECTIONAL,
    CAUSAL,
    BlockMask,
    Heads,
    Kernels,
    KeyRebuild,
    Mixture,
    PagedKeys,
    PageView,
    QKVSpec,
    Residual,
    RopeTable,
    Trees,
)
from flashdraft.kernels.kinds import Activation, Scheme
from flashdraft.kernels.quantized import quantize, round_rows, stack_experts
from flashdraft.kernels.torch_backend import TorchKernels

GB = 10**9
# Logits near 20 have a bf16 spacing of 1/8; rounding along the layers adds up to three of them.
MARGIN = 0.375
_ERROR_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_INT8_LIMIT = 2e-2  # of a linear with weights and inputs in 8 bits
_HEAD_DIM = 32
_FEW_HEAD_DIM = 128  # where a GPU has kernels of its own, for few rows and for many
_MANY_SEQS = 24
_Operation = tuple[str, float, Tensor, Tensor]


# -- environment -----------------------------------------------------------------------------------


def check_environment(kernels: Kernels, cache: CacheOptions = DEFAULT_CACHE) -> list[Finding]:
    """What the pair runs on, and what slows it."""
    area = "environment"
    versions = [f"flashdraft {VERSION}", f"Python {platform.python_version()}"]
    versions += [
        f"{name} {_version(name) or 'not installed'}" for name in ("torch", "transformers")
    ]
    findings = [Finding(area, OK, " · ".join(versions))]
    dtype = str(kernels.dtype).removeprefix("torch.")
    if kernels.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(kernels.device)
        name = torch.cuda.get_device_name(kernels.device)
        memory = f"{free / GB:.0f} of {total / GB:.0f} GB free"
        findings.append(Finding(area, OK, f"{name}, {memory}; activations in {dtype}"))
        if isinstance(kernels, TorchKernels):
            findings.append(
                Finding(
                    area,
                    WARNING,
                    "plain torch runs in place of flashdraft's GPU kernels, several times slower",
                    "install Triton with pip install 'flashdraft[gpu]'; the kernels need an "
                    "NVIDIA GPU of compute capability 8.0 or newer",
                )
            )
        return findings
    cores, threads = _usable_cores(), torch.get_num_threads()
    memory = _describe_memory()
    where = f"{platform.machine()} CPU, {cores} cores, {threads} threads"
    built = f"; kernels built for {kernels.level}" if kernels.level else ""
    findings.append(Finding(area, OK, f"{where}{memory}; activations in {dtype}{built}"))
    if threads > cores or 2 * threads < cores:
        text = f"{threads} threads run on {cores} usable cores"
        remedy = f"set OMP_NUM_THREADS={cores} before starting"
        findings.append(Finding(area, WARNING, text, remedy))
    if torch.cuda.is_available():
        text, remedy = "a CUDA device is there and is not used", "use --device cuda"
        findings.append(Finding(area, WARNING, text, remedy))
    if not cpu_backend.available():
        findings.append(
            Finding(
                area,
                WARNING,
                "the native CPU kernels were not built: plain torch runs, several times slower",
                "install a C compiler (gcc or clang) and reinstall flashdraft",
            )
        )
    elif isinstance(kernels, TorchKernels):
        text = f"plain torch runs for {dtype}, slower than the native kernels"
        remedy = "use --dtype auto (int8) or float32"
        # the native kernels refuse these
        flags = [] if cache.kv_dtype == "auto" else [f"--kv-dtype {cache.kv_dtype}"]
        flags += [] if cache.kv_keys == "stored" else [f"--kv-keys {cache.kv_keys}"]
        remedy += f", and leave {' and '.join(flags)} out" if flags else ""
        findings.append(Finding(area, WARNING, text, remedy))
    return findings


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: what a container or taskset leaves
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _describe_memory() -> str:
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return f", {sizes['MemAvailable'] / GB:.0f} of {sizes['MemTotal'] / GB:.0f} GB free"
    except (OSError, KeyError, ValueError, IndexError):  # not a Linux: say nothing
        return ""


# -- kernels ---------------------------------------------------------------------------------------


def check_kernels(
    kernels: Kernels, schemes: Iterable[Scheme] = (), cache: CacheOptions = DEFAULT_CACHE
) -> list[Finding]:
    """The chosen backend against plain torch on small inputs, and rows that ignore each other.

    `schemes` are those that weights are in, as far as these kernels keep any so.
    """
    reference = TorchKernels(kernels.device, torch.float32)
    where = f"{kernels.name} on {kernels.device}"
    worst, wrong = 0.0, []
    operations = [_operations(kernels, reference, cache.kv_keys)]
    if kernels.keeps_quantized:
        operations += [_quantized_operations(kernels, reference, one) for one in sorted(schemes)]
    for name, limit, ours, theirs in itertools.chain(*operations):
        scale = float(theirs.float().abs().max()) or 1.0
        error = float((ours.float() - theirs.float()).abs().max()) / scale
        worst = max(worst, error)
        if not error <= limit:  # NaN is wrong too
            wrong.append(f"{name} is off by {error:.1e} (limit {limit:.0e})")
    remedy = "reinstall flashdraft, or run with --device cpu --dtype float32, and report this"
    if wrong:
        text = f"{where} disagrees with plain torch: {', '.join(wrong)}"
        return [Finding("kernels", PROBLEM, text, remedy)]
    findings = [Finding("kernels", OK, f"{where} agrees with plain torch within {worst:.0e}")]
    if kernels.device.type == "cpu" and not _rows_are_alone(kernels):
        text = f"{where}: a row's result depends on the other rows, so drafted text may part"
        findings.append(Finding("kernels", PROBLEM, text, remedy))
    return findings


def _operations(kernels: Kernels, reference: Kernels, kv_keys: str) -> Iterator[_Operation]:
    """Name, limit of the error relative to the largest value, result, reference's result."""
    draw = _Draw(kernels)
    limit = _ERROR_LIMITS[kernels.dtype]
    x, weight, vector = draw(5, 96), draw(64, 96), draw(96)
    packed, plain = kernels.pack(weight), reference.pack(weight)
    wide = x.to(reference.dtype)
    linear_limit = max(limit, _INT8_LIMIT) if kernels.weight_dtype == "int8" else limit
    yield "linear", linear_limit, kernels.linear(x, packed), reference.linear(wide, plain)
    gated = reference.gated_linear(wide, plain, Activation.SILU)
    ours = kernels.gated_linear(x, packed, Activation.SILU)
    yield "gated_linear", linear_limit, ours, gated
    norm = reference.rms_norm(wide, vector.float(), 1e-5)
    yield "rms_norm", limit, kernels.rms_norm(x, vector, 1e-5), norm
    gated = reference.gated(wide, Activation.SILU)
    yield "gated", limit, kernels.gated(x, Activation.SILU), gated
    yield "softmax", limit, kernels.softmax(x), reference.softmax(wide)
    router = draw(8, 96) / 10  # logits near 1; no rounding makes the fifth the fourth
    for rows in (x[:1], x):  # by itself a row may go another way
        yield "route", limit, _route(kernels, rows, router), _route(reference, rows, router)
    tree = _binary_tree(len(draw.qkv), kernels.device)
    for mask in (CAUSAL, BIDIRECTIONAL, tree):
        name = "attention" if mask.trees is None else "attention of trees"
        yield name, limit, _attend(kernels, draw.qkv, mask), _attend(reference, draw.qkv, mask)
    if kv_keys == "rebuilt":
        norm = draw(_HEAD_DIM)
        for mask in (CAUSAL, tree):
            theirs = _attend(reference, draw.qkv, mask, norm.float())
            yield "rebuilt keys", limit, _attend(kernels, draw.qkv, mask, norm), theirs
    few = draw(12, (4 + 2 + 2) * _FEW_HEAD_DIM)
    tree = _binary_tree(len(few), kernels.device)
    for rows, mask in ((few[:1], CAUSAL), (few, CAUSAL), (few, tree)):
        name = "attention of few rows" if mask.trees is None else "attention of trees"
        theirs = _attend(reference, rows, mask, head_dim=_FEW_HEAD_DIM)
        ours = _attend(kernels, rows, mask, head_dim=_FEW_HEAD_DIM)
        yield name, limit, ours, theirs
    many = draw(3 * _MANY_SEQS, (4 + 2 + 2) * _FEW_HEAD_DIM)
    ours, theirs = (
        _attend(one, many, CAUSAL, head_dim=_FEW_HEAD_DIM, num_seqs=_MANY_SEQS)
        for one in (kernels, reference)
    )
    yield "attention of many rows", limit, ours, theirs


def _quantized_operations(
    kernels: Kernels, reference: Kernels, scheme: Scheme
) -> Iterator[_Operation]:
    """Products by a weight in few bits, which `pack` would not leave so small a one in."""
    draw, limit = _Draw(kernels), _ERROR_LIMITS[kernels.dtype]
    x, weight = draw(5, 256), quantize(draw(128, 256), scheme)
    packed, plain = pack_quantized(weight), reference.pack(weight)
    for rows in (x[:1], x):  # by itself a row goes another way
        wide = rows.to(reference.dtype)
        theirs = reference.linear(wide, plain)
        yield f"{scheme} linear", limit, kernels.linear(rows, packed), theirs
        theirs = reference.gated_linear(wide, plain, Activation.SILU)
        ours = kernels.gated_linear(rows, packed, Activation.SILU)
        yield f"{scheme} gated_linear", limit, ours, theirs
    if kernels.activations is scheme:
        many, rounded = draw(20, 256), round_activations(packed, scheme)
        for rows in (many[:1], many):
            values = round_rows(rows, scheme).to(reference.dtype)
            ours, theirs = kernels.linear(rows, rounded), reference.linear(values, plain)
            yield f"{scheme} linear of rounded rows", limit, ours, theirs
    norm = draw(256)
    theirs = reference.linear(reference.rms_norm(wide[:1], norm.float(), 1e-5), plain)
    _, ours = kernels.residual_linear(Residual(x[:1]), norm, 1e-5, packed)
    yield f"{scheme} residual_linear", limit, ours, theirs
    both = [_mixture(one, _Draw(kernels), scheme) for one in (kernels, reference)]
    for rows in (x[:1], x):
        mine = kernels.mixture(Residual(rows), both[0])
        others = reference.mixture(Residual(rows.to(reference.dtype)), both[1])
        for ours, theirs in zip(mine[1:], others[1:], strict=True):
            yield f"{scheme} mixture", limit, ours, theirs


def _mixture(kernels: Kernels, draw: _Draw, scheme: Scheme) -> Mixture:
    """An MLP and experts, of which all are chosen: rounding cannot make it others."""
    is_reference = isinstance(kernels, TorchKernels)

    def pack(*shape: int) -> Any:
        parts = [quantize(draw(*shape[-2:]) / 16, scheme) for _ in range(math.prod(shape[:-2]))]
        weight = parts[0] if len(shape) == 2 else stack_experts(parts)
        if not is_reference:
            return pack_quantized(weight)
        return kernels.pack(weight) if len(shape) == 2 else kernels.pack_experts(weight)

    norm = draw(256).to(kernels.dtype)
    router = kernels.pack(draw(3, 256) / 16, quantize=False)
    scale = torch.ones(3, device=kernels.device)
    mlp, experts = (pack(256, 256), pack(256, 128)), (pack(3, 256, 256), pack(3, 256, 128))
    return Mixture(norm, *mlp, norm, router, 3, scale, norm, *experts, Activation.SILU, 1e-5)


class _Draw:
    """Random inputs from a fixed seed, as the kernels want them."""

    def __init__(self, kernels: Kernels) -> None:
        self._generator = torch.Generator().manual_seed(7)
        self._kernels = kernels
        self.qkv = self(20, (4 + 2 + 2) * _HEAD_DIM)

    def __call__(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self._generator)
        return values.to(self._kernels.device, self._kernels.dtype)


def _route(kernels: Kernels, x: Tensor, router: Tensor) -> Tensor:
    """Every expert's weight, 0 for those that were not chosen."""
    packed, count = kernels.pack(router, quantize=False), len(router)
    scale = torch.ones(count, device=kernels.device)
    chosen, weights = kernels.route(x.to(kernels.dtype), packed, 4, scale)
    return torch.zeros(len(x), count, device=kernels.device).scatter(1, chosen, weights)


def _binary_tree(num_rows: int, device: torch.device) -> BlockMask:
    """One sequence's rows, of which each is followed by two, as far as there are so many."""
    ancestors, depths = [1], [0]
    for row in range(1, num_rows):
        parent = (row - 1) // 2
        ancestors.append(ancestors[parent] | 1 << row)
        depths.append(depths[parent] + 1)
    words = torch.tensor(ancestors, device=device)
    return BlockMask(trees=Trees(words, torch.tensor(depths, dtype=torch.int32, device=device)))


def _attend(
    kernels: Kernels,
    qkv: Tensor,
    mask: BlockMask,
    key_norm: Tensor | None = None,
    head_dim: int = _HEAD_DIM,
    num_seqs: int = 1,
) -> Tensor:
    """Rotation, cache and attention of rows in pages of 16; with a norm keys are rebuilt.

    Every sequence has as many of the rows, and two pages.
    """
    device, count = kernels.device, len(qkv) // num_seqs
    angles = torch.arange(64).unsqueeze(1) * 0.5 ** torch.arange(head_dim // 2)
    rope = RopeTable(angles.cos().to(device), angles.sin().to(device))
    places = torch.arange(count, device=device).repeat(num_seqs)
    first_slots = 32 * torch.arange(num_seqs, device=device).repeat_interleave(count)
    shape = (2, 2 * num_seqs, 16, 2, head_dim)
    keys, values = torch.zeros(shape, device=device, dtype=kernels.dtype)
    is_rebuilt = key_norm is not None
    spec = QKVSpec(4, 2, head_dim, 1e-5, k_norm=key_norm, v_norm=is_rebuilt, share_kv=is_rebuilt)
    rebuild = None if key_norm is None else KeyRebuild(key_norm, rope, head_dim // 2)
    rows = qkv[:, : spec.width].to(kernels.dtype).contiguous()
    stored = None if is_rebuilt else keys
    view = PageView(
        query_start=count * torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        context_lens=torch.zeros(num_seqs, dtype=torch.int32, device=device),
        block_table=torch.arange(2 * num_seqs, dtype=torch.int32, device=device).view(-1, 2),
        slots=first_slots + places,
        page_size=16,
        max_query_len=count,
        max_key_len=count,
    )
    return kernels.attend(
        rows,
        Heads(spec, rope, places),
        PagedKeys(
            stored, values, view, scale=head_dim**-0.5, window=None, mask=mask, rebuild=rebuild
        ),
    )


def _rows_are_alone(kernels: Kernels) -> bool:
    draw = _Draw(kernels)
    x, packed = draw(16, 96), kernels.pack(draw(64, 96))
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda rows: kernels.linear(rows, packed),
        kernels.softmax,
        lambda rows: kernels.rms_norm(rows, None, 1e-5),
    ]
    return all(
        torch.equal(function(x)[place], function(x[place : place + 1])[0])
        for function in functions
        for place in (0, 7, 15)
    )


# -- the law ---------------------------------------------------------------------------------------


def check_law(
    label: str,
    plain: Sequence[Generation],
    drafted: Sequence[Generation],
    on_gpu: bool,
    is_drawn: bool = False,
) -> Finding:
    """Drafted tokens against plain ones: identical, or on a GPU parted at a near tie only.

    On a GPU the plain answers carry two logprobs a token, by which a tie is told. Where tokens are
    drawn a tie lies elsewhere, between logits with their noise: there partings are only counted.
    """
    parted: list[float] = []
    tokens = 0
    for one, other in zip(plain, drafted, strict=True):
        length, margin = first_difference(one, other)
        tokens += length
        if margin is not None:
            parted.append(margin)
    counted = f"{label}: {len(plain)} answers, {tokens} tokens"
    if not tokens and are_cut([*plain, *drafted]):
        text = f"{label}: the answers were cut before a token came"
        return Finding("law", WARNING, text, "give more time with --seconds")
    if not tokens:
        return Finding("law", WARNING, f"{label}: the answers have no token to compare")
    if not parted:
        return Finding("law", OK, f"{counted}, drafted and plain are identical")
    if on_gpu and max(parted) <= MARGIN:
        text = f"{counted}; {len(parted)} parted where the two likeliest tokens are within "
        text += f"{max(parted):.3f} of each other: rounding (at most {MARGIN:g})"
        return Finding("law", OK, text, "exact=True in Python makes them identical, at some cost")
    if on_gpu and is_drawn:
        status = OK if 2 * len(parted) <= len(plain) else WARNING
        text = f"{counted}; {len(parted)} parted, as rounding can turn a draw on a GPU"
        return Finding("law", status, text, "exact=True in Python makes them identical")
    text = f"{counted}; {len(parted)} drafted answers are not the plain ones"
    remedy = "run with --draft none meanwhile, and report this with the output of --json"
    return Finding("law", PROBLEM, text, remedy)


def first_difference(plain: Generation, drafted: Generation) -> tuple[int, float | None]:
    """Tokens before the first difference, and the margin of the plain run's two best tokens there.

    The margin is infinite where the plain run recorded none. Answers that were cut are compared as
    far as both go.
    """
    pairs = zip(plain.token_ids, drafted.token_ids, strict=False)
    for place, (one, other) in enumerate(pairs):
        if one != other:
            top = plain.logprobs[place].top if plain.logprobs is not None else ()
            return place, top[0][1] - top[1][1] if len(top) > 1 else float("inf")
    return min(len(plain.token_ids), len(drafted.token_ids)), None


# -- accepted length -------------------------------------------------------------------------------


def check_accepted(accepted: Accepted, expected: Expected, how: str) -> list[Finding]:
    """Accepted length, pooled and per position, against what this pair should have."""
    area = "accepted length"
    if not accepted.num_steps and accepted.is_cut:
        text = f"{how}: not enough time to judge: no drafted step was made before it ran out"
        return [Finding(area, WARNING, text, "raise --seconds")]
    if not accepted.num_steps:
        text = f"{how}: the target ends its answers at once, so there is nothing to draft"
        return [Finding(area, PROBLEM, text, "see the causes below")]
    bounds = f"expected {expected.low:.1f} to {expected.high:.1f} ({expected.rationale})"
    text = f"{how}: {accepted.length:.2f} tokens a step over {accepted.num_tokens}; {bounds}"
    is_low = accepted.length < expected.low
    few = accepted.num_tokens < FEW_TOKENS
    if is_low:
        status = WARNING if few else PROBLEM
        remedy = (
            "too few tokens to be sure: give more time with --seconds"
            if few
            else "see the causes below"
        )
        findings = [Finding(area, status, text, remedy)]
    else:
        above = " (more than expected: repeated text, perhaps)"
        text += above if accepted.length > expected.high else ""
        findings = [Finding(area, OK, text)]
    shares = " ".join(f"{share:.2f}" for share in accepted.by_position)
    text = f"by position: {shares or 'none accepted'}"
    low = [
        slot
        for slot, least in enumerate(expected.by_position, 1)
        if (accepted.by_position[slot - 1 : slot] or (0.0,))[0] < least
    ]
    if low:
        least = " ".join(f"{share:.2f}" for share in expected.by_position)
        text += f"; low at {', '.join(map(str, low))}, expected at least {least}"
    findings.append(Finding(area, WARNING if low else OK, text))
    return findings
