"""A load to offer to a server: how many requests, when each comes, how long it is. No torch.

Open loop: requests come by chance, `rate` a second, whatever is answered. Closed loop: each of so
many clients asks again when it has its answer. Everything drawn follows from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashdraft.errors import RequestError

DEFAULT_DURATION_S = 60.0
REQUEST_LIMIT_S = 300.0  # for one request, whatever the server sends
MAX_RATE = 10_000.0  # requests a second
MAX_CLIENTS = 4096
MAX_TOKENS = 10_000_000
BURSTINESS = (0.05, 1000.0)  # from and to


class LengthRange(NamedTuple):
    """Lengths in tokens, from `low` to `high`, both included, all equally likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """From 256-1536, or one length."""
        low, dash, high = text.partition("-")
        if not (low.isdecimal() and (high.isdecimal() if dash else True)) or len(text) > 40:
            raise RequestError(f"{text[:40]!r} is no range of lengths like 256-1536.")
        found = cls(int(low), int(high) if dash else int(low))
        if not 1 <= found.low <= found.high <= MAX_TOKENS:
            raise RequestError(
                f"{text!r} is no range of lengths from 1 to {MAX_TOKENS}, the shorter one first."
            )
        return found

    def draw(self, dice: random.Random) -> int:
        """One of them."""
        return dice.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class OfferedLoad:
    """Either a rate or a number of clients, until a time or a count is reached."""

    rate: float | None = None  # requests a second
    clients: int | None = None
    duration_s: float | None = None  # for which requests are sent
    num_requests: int | None = None
    burstiness: float = 1.0  # 1 = Poisson; below: in bursts; above: more evenly
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.clients is None):
            raise RequestError("A load has either a rate or a number of clients.")
        if self.duration_s is None and self.num_requests is None:
            raise RequestError("A load needs an end: a duration or a number of requests.")
        if self.clients is not None and not 1 <= self.clients <= MAX_CLIENTS:
            raise RequestError(f"clients is {self.clients}; it must be from 1 to {MAX_CLIENTS}.")
        least, most = BURSTINESS
        if not least <= self.burstiness <= most:
            raise RequestError(
                f"burstiness is {self.burstiness:g}; it must be from {least:g} to {most:g}."
            )

    @property
    def label(self) -> str:
        """The load in words."""
        if self.clients is not None:
            return f"{self.clients} client{'' if self.clients == 1 else 's'}"
        return f"{self.rate:g} requests/s"

    def may_send(self, place: int, seconds: float) -> bool:
        """Whether the request with this number, from 0, may be sent so long after the start."""
        if self.num_requests is not None and place >= self.num_requests:
            return False
        return self.duration_s is None or seconds < self.duration_s

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start at which the requests of an open loop come, in order."""
        assert self.rate is not None
        dice, now, place = random.Random(f"arrivals {self.seed}"), 0.0, 0
        while self.may_send(place, now):
            yield now
            now += dice.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))
            place += 1
