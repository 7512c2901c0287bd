"""The n-gram proposer on the device, for all slots at once. Pure tensor functions.

It drafts what `ngram.NgramIndex` drafts, without waiting for the device; shapes depend on nothing
but the arguments' own: all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flashdraft.engine.draft.ngram import MAX_MATCH, MIN_MATCH, confidence_of

MARGIN = MAX_MATCH  # columns before a slot's first token: a match ends there
NO_TOKEN = -1
PLACE_BITS = 24  # of a key: a place below, above how much shorter its match is than the longest


class TokenHistory:
    """The tokens of every slot's sequence, prompt and answer. Who is in a slot it does not know."""

    def __init__(self, num_slots: int, max_length: int, device: torch.device) -> None:
        assert max_length < 1 << PLACE_BITS
        shape = (num_slots, MARGIN + max_length + 1)  # the last is for what is not to be kept
        self._tokens = torch.full(shape, NO_TOKEN, dtype=torch.int32, device=device)

    def until(self, longest: int) -> Tensor:
        """The first `longest` tokens of every slot, [num_slots, MARGIN + longest] for `look_up`."""
        return self._tokens[:, : MARGIN + longest]

    def load(self, slot: int, start: int, tokens: Tensor) -> None:
        """Write a slot's tokens from position `start` on; those behind them are of any value."""
        first = MARGIN + start
        self._tokens[slot, first : first + tokens.shape[0]] = tokens

    @property
    def behind_first(self) -> Tensor:
        """What a step appends to: every token but the first, and a column for what is dropped."""
        return self._tokens[:, MARGIN + 1 :]

    def put(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write one token of each of these slots."""
        self._tokens[slots, MARGIN + positions] = tokens.to(torch.int32)

    def move(self, order: Tensor) -> None:
        """Lay the slots out anew: slot i becomes what slot order[i] was."""
        self._tokens[: order.shape[0]] = self._tokens[order]


def look_up(
    history: Tensor, ends: Tensor, width: int, forbidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What followed the longest known suffix of every slot: draft tokens and confidence.

    history [num_slots, MARGIN + longest] int32 is `TokenHistory.until`'s, ends [num_slots] int64
    the number of known tokens, the anchor among them, 0 = nobody; forbidden [vocab_size] bool.
    Returns [num_slots, width] int64 and float32, both 0 where nothing is proposed. The index looks
    at no more than the latest `ngram.MAX_LOOKS` places of a pair, this at all of them.
    """
    ends = ends.unsqueeze(1)
    keys = _rate_places(history, ends).amax(1, keepdim=True).to(torch.int64)
    start = keys % (1 << PLACE_BITS)
    period = (ends - start).clamp_(min=1)  # a repeating run: let it go on repeating
    columns = _count_up(width, history.device) % period + start
    tokens = history[:, MARGIN:].gather(1, columns).to(torch.int64)
    confidence = _confidence(history.device).take(keys >> PLACE_BITS)
    if forbidden is None:
        confidence = confidence.repeat(1, width)
    else:
        confidence = confidence.masked_fill(forbidden.take(tokens).cummax(1).values, 0.0)
    return tokens * (confidence > 0), confidence


def _rate_places(history: Tensor, ends: Tensor) -> Tensor:
    """A key for every place, [num_slots, longest] int32; the largest one is the best place's.

    At a place there is what follows a match: the tokens before it are the sequence's last ones.
    """
    num_slots, longest = history.shape[0], history.shape[1] - MARGIN
    device = history.device
    windows = history.unfold(1, longest, 1)[:, :MAX_MATCH]  # [num_slots, MAX_MATCH, longest]
    suffix = history.gather(1, ends + _count_up(MAX_MATCH, device)).unsqueeze(2)
    places = torch.arange(longest, dtype=torch.int32, device=device)
    costs = _costs(device)
    misses = costs.new_empty(num_slots, MAX_MATCH + 1, longest)
    is_miss = misses.view(torch.bool) if costs.dtype == torch.uint8 else misses
    torch.ne(windows, suffix, out=is_miss[:, :MAX_MATCH])
    torch.ge(places, ends.to(torch.int32), out=is_miss[:, MAX_MATCH])
    return torch.add(places, misses.mul_(costs).amax(1), alpha=-(1 << PLACE_BITS))


# Constants are made once and kept for good: a graph goes on reading them, and what the host sends
# cannot be captured. A step's first run makes them, which is never the captured one.


@cache
def _count_up(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, …"""
    return torch.arange(count, device=device)


@cache
def _costs(device: torch.device) -> Tensor:
    """How many tokens a match is too short for a miss at each of them; last, for no such place."""
    costs = [*range(1, MAX_MATCH + 1), MAX_MATCH]
    # few bytes for a GPU, and for a CPU the width of a token: it compares fast into no other
    dtype = torch.int32 if device.type == "cpu" else torch.uint8
    return torch.tensor(costs, dtype=dtype, device=device).unsqueeze(1)


@cache
def _confidence(device: torch.device) -> Tensor:
    """By the length of the match less MAX_MATCH: from the end, but for the longest."""
    lengths = range(MIN_MATCH, MAX_MATCH)
    values = [confidence_of(MAX_MATCH), *[0.0] * MIN_MATCH, *map(confidence_of, lengths)]
    return torch.tensor(values, dtype=torch.float32, device=device)
