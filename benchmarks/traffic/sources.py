"""Where requests come from: clients in a closed loop, Poisson arrivals, conversations, a long one.

A source says what is due, and is told of first tokens and of ends. Times are seconds of one clock;
it knows no engine.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from benchmarks.traffic.workload import Span, Workload, poisson_times, random_tokens
from flashdraft.core import Generation, Request, SamplingParams

NUM_CLIENTS, NUM_TURNS, SYSTEM_TOKENS = 8, 6, 2000  # of the conversations
TURN_PROMPTS, TURN_ANSWERS = Span(32, 256), Span(64, 256)


class Arrival(NamedTuple):
    """A request, and when it was due: what waits for the engine's step waits as a user does."""

    request: Request
    at: float


class Source(Protocol):
    """Sends requests."""

    def due(self, now: float) -> list[Arrival]:
        """What has arrived by now and was not taken yet."""
        ...

    def next_at(self) -> float | None:
        """When the next one arrives; None if that depends on answers, or nothing comes any more."""
        ...

    def saw_first(self, request_id: str, now: float) -> None:
        """A request got its first tokens."""
        ...

    def saw_end(self, request_id: str, generation: Generation, now: float) -> None:
        """A request was answered."""
        ...


class ClosedLoop:
    """So many clients, each of whom asks again at once."""

    def __init__(self, workload: Workload, clients: int, begin: float) -> None:
        self._workload = workload
        self._waiting = deque([begin] * clients)
        self._num_made = 0

    def due(self, now: float) -> list[Arrival]:
        found = []
        while self._waiting and self._waiting[0] <= now:
            found.append(Arrival(self._workload.request(self._num_made), self._waiting.popleft()))
            self._num_made += 1
        return found

    def next_at(self) -> float | None:
        return self._waiting[0] if self._waiting else None

    def saw_first(self, request_id: str, now: float) -> None:
        """Nothing follows from it."""

    def saw_end(self, request_id: str, generation: Generation, now: float) -> None:
        self._waiting.append(now)


class OpenLoop:
    """Requests that come when they come, whatever is answered."""

    def __init__(self, workload: Workload, rate: float, begin: float) -> None:
        self._workload, self._begin = workload, begin
        self._times = poisson_times(rate, workload.seed)
        self._next = begin + next(self._times)
        self._num_made = 0

    def due(self, now: float) -> list[Arrival]:
        found = []
        while self._next <= now:
            found.append(Arrival(self._workload.request(self._num_made), self._next))
            self._num_made += 1
            self._next = self._begin + next(self._times)
        return found

    def next_at(self) -> float | None:
        return self._next

    def saw_first(self, request_id: str, now: float) -> None:
        """Nothing follows from it."""

    def saw_end(self, request_id: str, generation: Generation, now: float) -> None:
        """Nothing follows from it."""


class WithLongPrompt:
    """A closed loop, and one long prompt beside it once `after` requests have been answered."""

    def __init__(self, clients: ClosedLoop, long: Request, after: int) -> None:
        self._clients, self.long, self._after = clients, long, after
        self._num_ended = 0
        self._at: float | None = None

    def due(self, now: float) -> list[Arrival]:
        found = self._clients.due(now)
        if self._at is not None:
            found.append(Arrival(self.long, self._at))
            self._at = None
        return found

    def next_at(self) -> float | None:
        return self._clients.next_at() if self._at is None else self._at

    def saw_first(self, request_id: str, now: float) -> None:
        """Nothing follows from it."""

    def saw_end(self, request_id: str, generation: Generation, now: float) -> None:
        if request_id == self.long.id:
            return
        self._clients.saw_end(request_id, generation, now)
        self._num_ended += 1
        if self._num_ended == self._after:
            self._at = now


@dataclass
class Turn:
    """One turn of a conversation: how much of its prompt could be found, and how it went."""

    client: int
    number: int
    prompt_tokens: int
    known_tokens: int  # of its beginning that had been computed when it was sent
    cached_tokens: int = 0  # found in the prefix cache
    first_step_drafted: bool | None = None  # None where it cannot be told

    def could_hit(self, page_size: int) -> int:
        """Tokens in whole pages that had been computed; the last one of a prompt is always new."""
        return min(self.known_tokens, self.prompt_tokens - 1) // page_size * page_size


class Conversations:
    """Clients with one system prompt, whose every turn goes on from the last one's answer.

    The first client begins; the others follow with its first token, when the system prompt has been
    computed.
    """

    def __init__(
        self,
        vocab_size: int,
        seed: int,
        begin: float,
        *,
        clients: int = NUM_CLIENTS,
        turns: int = NUM_TURNS,
        system_tokens: int = SYSTEM_TOKENS,
        params: SamplingParams | None = None,
    ) -> None:
        self._vocab_size, self._num_turns = vocab_size, turns
        self._dice = [random.Random(f"conversation {seed}/{n}") for n in range(clients)]
        self._params = params or SamplingParams(temperature=1.0, top_p=0.95, top_k=64)
        system = random_tokens(random.Random(f"system {seed}"), vocab_size, system_tokens)
        self._system_tokens = system_tokens
        self._history = [list(system) for _ in range(clients)]
        self.turns: dict[str, Turn] = {}
        self._waiting: deque[tuple[int, int, int, float]] = deque([(0, 0, 0, begin)])
        self._has_begun = False

    @property
    def num_requests(self) -> int:
        return len(self._history) * self._num_turns

    def due(self, now: float) -> list[Arrival]:
        found = []
        while self._waiting and self._waiting[0][3] <= now:
            found.append(self._make(*self._waiting.popleft()))
        return found

    def _make(self, client: int, number: int, known: int, at: float) -> Arrival:
        dice, history = self._dice[client], self._history[client]
        history += random_tokens(dice, self._vocab_size, TURN_PROMPTS.draw(dice))
        params = SamplingParams(
            max_tokens=TURN_ANSWERS.draw(dice),
            ignore_eos=True,
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            top_k=self._params.top_k,
        )
        name = f"client {client}, turn {number + 1}"
        self.turns[name] = Turn(client, number, len(history), known)
        return Arrival(Request(name, list(history), params, seed=100 * client + number), at)

    def next_at(self) -> float | None:
        return self._waiting[0][3] if self._waiting else None

    def saw_first(self, request_id: str, now: float) -> None:
        if not self._has_begun:
            self._has_begun = True
            others = range(1, len(self._history))
            self._waiting += [(client, 0, self._system_tokens, now) for client in others]

    def saw_end(self, request_id: str, generation: Generation, now: float) -> None:
        turn = self.turns[request_id]
        turn.cached_tokens = generation.stats.cached_tokens
        turn.first_step_drafted = first_step_drafted(generation)
        history = self._history[turn.client]
        history += generation.token_ids
        if turn.number + 1 < self._num_turns:
            known = len(history) - 1  # the last token was not computed
            self._waiting.append((turn.client, turn.number + 1, known, now))


def first_step_drafted(generation: Generation) -> bool | None:
    """Whether an answer's first decode step verified drafts; None where that cannot be told.

    Token 0 is the prefill's. A step whose first draft token was refused shows in nothing but the
    counts of all steps.
    """
    stats = generation.stats
    if stats.steps == 0:
        return None
    num_drafted = stats.slots_verified[0] if stats.slots_verified else 0
    if num_drafted in (0, stats.steps):
        return num_drafted > 0
    return True if generation.drafted[1:2] == [True] else None
