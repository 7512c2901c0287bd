"""The rule by which a row of logits becomes a token, and the words for what it looks at.

One row, in this order:

1. tokens that the row's grammar mask forbids: -inf;
2. + the slot's bias;
3. before position `free_from`, stop tokens: -inf;
4. tokens of the prompt or the output: divided by the repetition penalty where positive, else
   multiplied by it; then - count * frequency; then - presence where the count is not 0;
5. scaled = (x - the largest x) / max(temperature, 1e-8), which orders the tokens: the lower id
   first among equals, here and everywhere;
6. min-p: those with scaled >= log(min_p); of them top-k: the first k; of them top-p: all before
   which less than top_p of their weight lies, a weight being floor(exp(scaled) * 2**40);
7. the token with the largest scaled + noise, the noise keyed by (seed, position, id).

At temperature 0 the token is the largest after step 4. A row has no token, -1, if its raw logits
hold NaN or +inf, or if nothing finite is left after step 4. Log-probabilities are of raw logits.

Every quotient, exp and logarithm that decides is one of arithmetic.py, every sum one of integers:
the token is the same on every backend, whatever the row's neighbours. reference.py is the rule in
plain torch, host.py in numpy, cuda/draw in Triton. Nothing here knows of models or requests' ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashdraft.core import SamplingParams
from flashdraft.kernels.draw.noise import noise_start
from flashdraft.kernels.nodes import MAX_NODES

MAX_TOP = 20  # log-probabilities beside the token's own
LOWEST_TEMPERATURE = 1e-8  # below it float32 logits differ by nothing or by far too much anyway
NO_TOKEN = -1

Send = Callable[[NDArray[np.int64]], Tensor]  # to the device, by whoever has buffers for it

PENALISED, BIASED, STOPS_LATE = 1, 2, 4  # bits of `flags`
USES_FACTS = PENALISED | STOPS_LATE

PROMPT, STOP = 1 << 24, 1 << 25  # bits of `facts`
COUNT = PROMPT - 1  # the bits below: how often the token was put out


class Draw(NamedTuple):
    """What was drawn from every row."""

    tokens: Tensor  # [rows] int64; -1 = none can be chosen, and the rest says nothing
    logit: Tensor  # [rows] float32: the token's own, raw
    # [rows] float32: the logarithm of the sum of exp(raw logit). Of a row without a token it tells
    # whose fault that is: it is finite if a token could have been drawn from the raw row.
    log_total: Tensor
    # The likeliest by raw logits, the slot's num_top of them; -1 and -inf behind, or if there are
    # fewer with a logit above -inf.
    top_ids: Tensor  # [rows, MAX_TOP] int64
    top_logits: Tensor  # [rows, MAX_TOP] float32


class HeadProducts(NamedTuple):
    """What a head says of every token, before it is logits: `Kernels.finish_logits` of these."""

    products: Tensor  # [rows, vocab]
    multiplier: float = 1.0
    softcap: float | None = None
    forbidden: Tensor | None = None  # [vocab] bool


@dataclass(frozen=True)
class DrawnRows:
    """Whose rows they are, and what stands before each of them."""

    owner: Tensor  # [rows] int64: the slot
    positions: Tensor  # [rows] int64: absolute, of the token that is drawn
    # A row's counts are its slot's, and those of the draft tokens on its path: its own and what
    # came before. Bit j + 1 of its ancestors = it follows its slot's draft token j; bit 0, the
    # anchor, is counted already. Both or neither: without, no row follows any.
    followed: Tensor | None = None  # [slots, width] int64, at most MAX_NODES
    ancestors: Tensor | None = None  # [rows] int64
    # Grammars' masks, and which of them is a row's: -1 = everything is allowed. Both or neither.
    masks: Tensor | None = None  # [masks, ceil(vocab / 32)] int32: bit set = allowed
    mask_of: Tensor | None = None  # [rows] int64
    # Whether anybody reads `log_total` of slots that want no log-probabilities: numpy else leaves
    # it NaN, which saves an exp of the whole row.
    totals: bool = True

    def __post_init__(self) -> None:
        assert self.followed is None or self.followed.shape[1] <= MAX_NODES


class SlotRequest(NamedTuple):
    """What a slot is set from."""

    params: SamplingParams
    seed: int
    prompt_ids: Sequence[int]
    stop_ids: Collection[int] = ()
    output_ids: Sequence[int] = ()  # that are committed already
    is_constrained: bool = False  # by a grammar, which has its own word on stop tokens


@dataclass(frozen=True)
class SlotSettings:
    """How each slot's rows are drawn: a column of every tensor. A slot unset is greedy.

    A row of `facts` means something only under PENALISED or STOPS_LATE, one of `bias` only under
    BIASED: others are neither written nor read. All methods queue work on the device and return.
    """

    temperature: Tensor  # [slots] float32; 0 = the likeliest
    top_k: Tensor  # int32; no limit is the vocabulary's size
    top_p: Tensor  # float64
    least: Tensor  # float32: log(min_p), -inf for none
    repetition: Tensor  # float32
    presence: Tensor  # float32
    frequency: Tensor  # float32
    free_from: Tensor  # int64: the position from which stop tokens may be drawn
    noise: Tensor  # int64: noise_start(seed)
    num_top: Tensor  # int32: log-probabilities wanted; -1 = not even the token's own
    num_candidates: Tensor  # int32: the same of a drafter's rows, from which a grammar picks
    flags: Tensor  # int32
    facts: Tensor  # [slots, vocab] int32: count | PROMPT | STOP
    bias: Tensor  # [slots, vocab] float32
    host_flags: list[int]  # `flags`, where the host can look at them

    @classmethod
    def allocate(
        cls, num_slots: int, vocab_size: int, device: torch.device, has_tables: bool = True
    ) -> SlotSettings:
        """Greedy slots. Without tables none may ever have penalties, a bias or min_tokens."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        idle, cells = _column(None, vocab_size), (num_slots if has_tables else 0, vocab_size)
        return cls(
            **{name: full(idle[name], dtype) for name, dtype in _COLUMNS.items()},
            facts=torch.zeros(cells, dtype=torch.int32, device=device),
            bias=torch.zeros(cells, dtype=torch.float32, device=device),
            host_flags=[0] * num_slots,
        )

    @property
    def vocab_size(self) -> int:
        return self.facts.shape[1]

    @cached_property
    def host(self) -> dict[str, NDArray[Any]]:
        """The columns as numpy sees them, where they are the host's."""
        return {name: getattr(self, name).numpy() for name in _COLUMNS}

    @property
    def for_drafts(self) -> SlotSettings:
        """The same for a drafter's rows, of which the likeliest tokens are wanted for a grammar."""
        return replace(self, num_top=self.num_candidates)

    @property
    def any_penalised(self) -> bool:
        """Whether any slot's draw depends on which tokens came before."""
        return any(flags & PENALISED for flags in self.host_flags)

    def set(self, requests: Mapping[int, SlotRequest | None], send: Send | None = None) -> None:
        """Give slots to requests, or to nobody (None); all that they need travels at once."""
        if not requests:
            return
        columns = {slot: _column(one, self.vocab_size) for slot, one in requests.items()}
        facts, bias = _Cells(self.vocab_size), _Cells(self.vocab_size)
        for slot, request in requests.items():
            flags = self.host_flags[slot] = int(columns[slot]["flags"])
            if request is not None and flags & USES_FACTS:
                facts.add(slot, _facts_of(request, flags))
            if request is not None and flags & BIASED:
                bias.add(slot, request.params.logit_bias)
        numbers = [np.array([one[name] for one in columns.values()]) for name in _COLUMNS]
        slots = np.array(list(requests), dtype=np.int64)
        arrays = [slots, *numbers, *facts.arrays(), *bias.arrays()]
        there, *rest = upload(arrays, self.facts.device, send)
        for name, values in zip(_COLUMNS, rest, strict=False):
            column: Tensor = getattr(self, name)
            column.index_copy_(0, there, values.to(column.dtype))
        _write(self.facts, *rest[-6:-3])
        _write(self.bias, *rest[-3:])

    def clear(self, slots: Sequence[int]) -> None:
        """Make slots greedy; their rows of facts and bias stay, and are not read."""
        self.set(dict.fromkeys(slots))

    def count(self, slots: Tensor, tokens: Tensor, num_tokens: Tensor) -> None:
        """Count committed tokens [n, width]: of slots[i] [n] int64 the first num_tokens[i]."""
        count_tokens(self.flags, self.facts, slots, tokens, num_tokens)

    def move(
        self, sources: Sequence[int], targets: Sequence[int], send: Send | None = None
    ) -> None:
        """Give targets[i] what sources[i] had; all are read before any is written."""
        if not sources:
            return
        flags = [self.host_flags[source] for source in sources]
        pairs = list(zip(sources, targets, flags, strict=True))
        with_facts = [pair[:2] for pair in pairs if pair[2] & USES_FACTS]
        with_bias = [pair[:2] for pair in pairs if pair[2] & BIASED]
        moves = [[pair[:2] for pair in pairs], with_facts, with_bias]
        arrays = [np.array(one, dtype=np.int64).reshape(-1, 2).T for one in moves]
        all_moves, of_facts, of_bias = upload(arrays, self.facts.device, send)
        for name in _COLUMNS:
            column: Tensor = getattr(self, name)
            column.index_copy_(0, all_moves[1], column[all_moves[0]])
        for table, (source, target) in ((self.facts, of_facts), (self.bias, of_bias)):
            if len(source):
                table.index_copy_(0, target, table[source])
        for target, flag in zip(targets, flags, strict=True):
            self.host_flags[target] = flag


def count_tokens(
    flags: Tensor, facts: Tensor, slots: Tensor, tokens: Tensor, num_tokens: Tensor
) -> None:
    """`SlotSettings.count`, of its flags and its facts."""
    vocab_size = facts.shape[1]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    wanted = (flags[slots] & PENALISED).ne(0)
    counts = (place < num_tokens.unsqueeze(1)) & wanted.unsqueeze(1)
    counts &= (tokens >= 0) & (tokens < vocab_size)
    where = slots.unsqueeze(1) * vocab_size + tokens * counts
    facts.view(-1).index_add_(0, where.flatten(), counts.flatten().to(torch.int32))


_COLUMNS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float64,
    "least": torch.float32,
    "repetition": torch.float32,
    "presence": torch.float32,
    "frequency": torch.float32,
    "free_from": torch.int64,
    "noise": torch.int64,
    "num_top": torch.int32,
    "num_candidates": torch.int32,
    "flags": torch.int32,
}


def _column(request: SlotRequest | None, vocab_size: int) -> dict[str, float | int]:
    """A slot's numbers, each as a Python float or int by the kind of its tensor."""
    params = SamplingParams() if request is None else request.params
    flags, free_from, start = 0, 0, 0
    if request is not None:
        if has_penalties(params):
            flags |= PENALISED
        if params.logit_bias:
            flags |= BIASED
        if params.min_tokens > 0 and request.stop_ids and not request.is_constrained:
            flags |= STOPS_LATE
        free_from = len(request.prompt_ids) + params.min_tokens
        start = noise_start(request.seed)
    return {
        "temperature": float(params.temperature),
        "top_k": params.top_k if 0 < params.top_k < vocab_size else vocab_size,
        "top_p": float(params.top_p),
        "least": math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        "repetition": float(params.repetition_penalty),
        "presence": float(params.presence_penalty),
        "frequency": float(params.frequency_penalty),
        "free_from": free_from,
        "noise": start,
        "num_top": -1 if params.logprobs is None else params.logprobs,
        "num_candidates": MAX_TOP if request is not None and request.is_constrained else -1,
        "flags": flags,
    }


def has_penalties(params: SamplingParams) -> bool:
    """Whether the draw depends on which tokens came before."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def _facts_of(request: SlotRequest, flags: int) -> dict[int, int]:
    """What the rule must know of tokens, of those that are not like most."""
    found: Counter[int] = Counter()
    if flags & PENALISED:
        found.update(request.output_ids)
        if request.params.repetition_penalty != 1.0:  # it alone looks at the prompt
            found.update(dict.fromkeys(request.prompt_ids, PROMPT))
    if flags & STOPS_LATE:
        found.update(dict.fromkeys(request.stop_ids, STOP))
    return found


class _Cells:
    """Rows of a [slots, vocab] table and what to write into them; the rest of a row becomes 0."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[int] = []
        self._places: list[int] = []
        self._values: list[float] = []

    def add(self, row: int, values: Mapping[int, float]) -> None:
        self._rows.append(row)
        # A token outside the vocabulary (a placeholder) has no logit to change.
        inside = [token for token in values if 0 <= token < self._vocab_size]
        self._places += [row * self._vocab_size + token for token in inside]
        self._values += [values[token] for token in inside]

    def arrays(self) -> list[NDArray[Any]]:
        places = [np.array(one, dtype=np.int64) for one in (self._rows, self._places)]
        return [*places, np.array(self._values, dtype=np.float64)]


def _write(table: Tensor, rows: Tensor, places: Tensor, values: Tensor) -> None:
    if len(rows):
        table.index_fill_(0, rows, 0)
        table.view(-1).index_copy_(0, places, values.to(table.dtype))


def upload(
    arrays: Sequence[NDArray[Any]], device: torch.device, send: Send | None = None
) -> list[Tensor]:
    """Arrays of 64-bit integers or floats, on the device by one copy that nobody waits for."""
    words = np.concatenate([one.reshape(-1).view(np.int64) for one in map(_in_64_bits, arrays)])
    packed = torch.from_numpy(words) if send is None else send(words)
    if send is None and device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    pieces = torch.split(packed, [one.size for one in arrays])
    return [
        (piece.view(torch.float64) if one.dtype.kind == "f" else piece).view(one.shape)
        for piece, one in zip(pieces, arrays, strict=True)
    ]


def _in_64_bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array, np.float64 if array.dtype.kind == "f" else np.int64)
