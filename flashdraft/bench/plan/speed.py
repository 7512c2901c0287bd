"""How fast a step is expected to be: bytes over bandwidth, arithmetic, and kernels to start.

    step = sum over the step's parts of √(reading² + arithmetic²)  +  kernels × time per kernel
    reading = bytes ÷ (bandwidth × its share),  arithmetic = operations ÷ (rate × its share)

A part's reading and arithmetic overlap, though not wholly, hence the root. The shares belong to a
card (gpus.py) and are the same for every model and load; what is read in few bits has a share of
its own. Nothing is run here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashdraft.bench.plan.gpus import GB, TERA, Card, Efficiency
from flashdraft.bench.plan.pairs import Pair, expected_length
from flashdraft.bench.plan.sizes import (
    BF16,
    FLOAT,
    FP8,
    StoredFormat,
    count_drafter,
    count_target,
    drafter_bytes,
)
from flashdraft.engine.cache.layers import CacheLayer
from flashdraft.models.config.layers import ExpertsConfig

# The share of the bandwidth at which weights of at most so many bits are read for several rows,
# fitted to the H200 results in int4 and fp8; other formats and cards are taken to be like these.
FEW_BITS_SHARES = {6.0: 0.6, 10.0: 0.78}
# Launches per captured step, as profiled on the H200. Over few bits there are fewer in a layer, for
# one row fewer still; each takes longer: norms and choices are part of them. How much is fitted.
KERNELS_PER_LAYER, KERNELS_PER_EXPERT_LAYER, KERNELS_PER_DRAFT = 10.4, 14.8, 90
FEW_BITS_KERNELS = {"layer": (5.4, 7.2), "expert layer": (7.9, 11.4)}  # for one row, for more
FEW_BITS_KERNEL = 1.3  # times another's time
SEVERAL_REQUESTS_KERNELS = 2  # more in a layer over few bits: attention is not one launch then
VERIFY_LENGTHS = (1, 2, 3, 4, 5, 7, 10, 15)  # a request's mean, where steps may verify drafts


@dataclass(frozen=True)
class Part:
    """One kind of work of a step: bytes it reads, operations it makes of them."""

    name: str
    num_bytes: float
    operations: float
    bits: float = FLOAT  # of a weight

    def share(self, use: Efficiency, rows: int) -> float:
        """Of the bandwidth, at which its bytes are read for a step of so many rows."""
        if rows == 1 or not use.unpacks:
            return use.bandwidth
        shares = [share for most, share in FEW_BITS_SHARES.items() if self.bits <= most]
        return min([use.bandwidth, *shares[:1]])


@dataclass(frozen=True)
class Prediction:
    """A step at one verify length, for a whole batch."""

    verify: int
    requests: int
    context: int
    accepted_length: float  # tokens per request and step; 1 without drafts
    parts: tuple[Part, ...]
    distinct_experts: float | None  # that a layer reads
    reading_s: float
    arithmetic_s: float  # what it adds to reading
    kernels_s: float
    num_kernels: float
    floor_s: float  # the same bytes at the data sheet's bandwidth and nothing else

    @property
    def step_s(self) -> float:
        return self.reading_s + self.arithmetic_s + self.kernels_s

    @property
    def rows(self) -> int:
        return self.requests * (self.verify + 1)

    @property
    def num_bytes(self) -> float:
        return sum(part.num_bytes for part in self.parts)

    @property
    def operations(self) -> float:
        return sum(part.operations for part in self.parts)

    @property
    def tokens_per_s(self) -> float:
        return self.requests * self.accepted_length / self.step_s


def distinct_experts(experts: ExpertsConfig, num_rows: int) -> float:
    """Experts that rows which choose independently and evenly reach: E(1 - (1 - k/E)^n).

    Real routing is skewed and neighbours agree, so this is the most that is to be expected.
    """
    return experts.num_experts * (1 - (1 - experts.num_chosen / experts.num_experts) ** num_rows)


def predict(
    pair: Pair,
    card: Card,
    *,
    requests: int,
    context: int,
    verify: int,
    form: StoredFormat = BF16,
    experts_read: float | None = None,
    accepted_length: float | None = None,
) -> Prediction:
    """One decode step of `requests` sequences at this context and verify length.

    `experts_read` and `accepted_length` stand in for the even routing and the pair's known
    acceptance where they are known better. The card must have a bandwidth; a drafted step needs a
    drafter and an accepted length.
    """
    assert card.bandwidth_tb_s is not None
    if accepted_length is None:
        accepted_length = 1.0
        if verify:
            assert pair.accepted is not None
            accepted_length = expected_length(pair.accepted.chance, verify)
    rows, moe = requests * (verify + 1), pair.target.experts
    if moe is not None and experts_read is None:
        experts_read = distinct_experts(moe, rows)
    parts = _target_parts(pair, form, requests, context, rows, experts_read)
    if verify:
        parts += _drafter_parts(pair, form, requests, context, rows)
    use = card.efficiency
    kernels = _count_kernels(pair, form, requests, rows) + (KERNELS_PER_DRAFT if verify else 0)
    kernel_us = use.kernel_us * (FEW_BITS_KERNEL if _is_in_few_bits(form) else 1.0)
    rate = math.inf if card.tflops is None else card.tflops * use.arithmetic * TERA
    bandwidth = card.bandwidth_tb_s * TERA
    reading = [part.num_bytes / (bandwidth * part.share(use, rows)) for part in parts]
    both = [
        math.hypot(read, part.operations / rate) for read, part in zip(reading, parts, strict=True)
    ]
    return Prediction(
        verify=verify,
        requests=requests,
        context=context,
        accepted_length=accepted_length,
        parts=tuple(parts),
        distinct_experts=experts_read,
        reading_s=sum(reading),
        arithmetic_s=sum(both) - sum(reading),
        kernels_s=kernels * kernel_us / 1e6,
        num_kernels=kernels,
        floor_s=sum(part.num_bytes for part in parts) / bandwidth,
    )


def predict_best(
    pair: Pair, card: Card, *, requests: int, context: int, form: StoredFormat = BF16
) -> Prediction:
    """The verify length with the most tokens per second, of those that the engine tries.

    Zero is among them; without a drafter or a known accepted length it is the only one.
    """
    longest = 0
    if pair.drafter is not None and pair.accepted is not None:
        longest = pair.drafter.num_slots
    steps = [
        predict(pair, card, requests=requests, context=context, verify=width, form=form)
        for width in (0, *VERIFY_LENGTHS)
        if width <= longest
    ]
    return max(steps, key=lambda step: step.tokens_per_s)


def _is_in_few_bits(form: StoredFormat) -> bool:
    """Whether a layer has the fewer launches of a GPU's kernels over few bits."""
    return form.bits <= max(FEW_BITS_SHARES) and not form.is_cpu


def _count_kernels(pair: Pair, form: StoredFormat, requests: int, rows: int) -> float:
    """Of the target's layers."""
    has_experts = pair.target.experts is not None
    per_layer = KERNELS_PER_EXPERT_LAYER if has_experts else KERNELS_PER_LAYER
    if _is_in_few_bits(form):
        one, more = FEW_BITS_KERNELS["expert layer" if has_experts else "layer"]
        is_composed = has_experts and (form.expert_bits or form.bits) == FP8  # at any rows
        per_layer = one if rows == 1 and not is_composed else more
        per_layer += SEVERAL_REQUESTS_KERNELS if requests > 1 else 0
    return per_layer * len(pair.target.layers)


def _target_parts(
    pair: Pair, form: StoredFormat, requests: int, context: int, rows: int, experts: float | None
) -> list[Part]:
    size, config = count_target(pair.target), pair.target
    matrices = size.layers + size.light
    parts = [
        Part("layers", size.layer_bytes(form), 2.0 * matrices * rows, form.bits),
        Part("head", size.head_bytes(form), 2.0 * size.head * rows, form.head_bits),
    ]
    if config.experts is not None and experts is not None:
        read = size.experts * experts
        chosen = 2.0 * size.experts * config.experts.num_chosen * rows
        bits = form.expert_bits or form.bits
        parts.append(Part("experts", read * bits / 8, chosen, bits))
    read = keys = 0.0
    for layer in config.layers:
        seen = min(context, layer.window or context)
        num_tensors = CacheLayer.of(layer, form.kv_keys).num_tensors
        read += num_tensors * layer.num_kv_heads * layer.head_dim * seen
        keys += layer.num_heads * layer.head_dim * seen
    item = form.cache_dtype.itemsize
    parts.append(Part("cache", item * read * requests, 4.0 * keys * rows))
    return parts


def _drafter_parts(
    pair: Pair, form: StoredFormat, requests: int, context: int, rows: int
) -> list[Part]:
    """One pass over every request's whole block, and the context made of the verified rows.

    On a CPU the block holds as many slots as will be verified.
    """
    config = pair.drafter
    assert config is not None
    size, target = count_drafter(config), count_target(pair.target)
    item = drafter_bytes(size, form) / (size.total + size.copies)
    bits = form.drafter_bits if size.coded > 0 else FLOAT
    block = rows if form.is_cpu else requests * config.block_size
    body = size.total - size.own_head - size.fold - size.tables
    fold = size.fold + size.copies
    head, head_bytes, head_bits = size.own_head, size.own_head * item, bits
    if not head:
        head, head_bytes = target.head, target.head_bytes(form)
        head_bits = form.head_bits
    seen = sum(min(context, window or context) for window in config.windows)
    key, query = config.num_kv_heads * config.head_dim, config.num_heads * config.head_dim
    return [
        Part("drafter's layers", body * item, 2.0 * body * block, bits),
        Part("drafter's context", fold * item, 2.0 * fold * rows, bits),
        Part("head for the drafts", head_bytes, 2.0 * head * block, head_bits),
        Part(
            "drafter's cache",
            form.cache_dtype.itemsize * 2.0 * key * seen * requests,
            4.0 * query * seen * block,
        ),
    ]


def explain(step: Prediction, card: Card) -> list[str]:
    """The formula with this step's numbers in it, a line for each of its terms."""
    use = card.efficiency
    assert card.bandwidth_tb_s is not None
    # a CPU's figures are thousandths, and its operations are of integers
    scale, tera, work = (1e3, "G", "OP") if card.is_cpu else (1.0, "T", "FLOP")
    bandwidth = f"{scale * card.bandwidth_tb_s:.4g} {tera}B/s"
    rate = "the card's rate is not known"
    if card.tflops is not None:
        done = f"{scale * step.operations / TERA:.2f} {tera}{work}"
        rate = f"{done} at {use.arithmetic:g} × {scale * card.tflops:.4g} {tera}{work}/s"
    sizes: dict[float, float] = {}
    for part in step.parts:
        share = part.share(use, step.rows)
        sizes[share] = sizes.get(share, 0.0) + part.num_bytes
    terms = [f"{size / GB:.2f} GB ÷ ({share:g} × {bandwidth})" for share, size in sizes.items()]
    each = f"{step.accepted_length:.2f} tokens" if step.verify else "1 token"
    times = f"{step.requests} × " if step.requests > 1 else ""
    kernel_us = 1e6 * step.kernels_s / step.num_kernels
    return [
        f"reading: {' + '.join(terms)} = {1e3 * step.reading_s:.2f} ms",
        f"arithmetic that reading does not hide: + {1e3 * step.arithmetic_s:.2f} ms ({rate})",
        f"kernels: {step.num_kernels:.0f} × {kernel_us:.3g} µs = {1e3 * step.kernels_s:.2f} ms",
        f"{times}{each} ÷ {1e3 * step.step_s:.2f} ms = {step.tokens_per_s:,.0f} tokens/s",
    ]
