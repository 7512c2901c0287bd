"""What the next step on the device is about: draft tokens to verify, and rows of prompts. No torch.

Chosen a step early, from what the last ones showed: which of the drafter's confidences came true,
and what steps took. Up to where reading the weights hides them rows are free; beyond, a step's time
grows with all its rows alike. A token is worth what it takes to get one without prompts, a row of a
prompt a little more than it takes where rows are cheapest, since its request decodes nothing yet.
The step is chosen that brings most for its time, as long as the others need not wait too long and
prompts move on. Decoding plainly is always a candidate, and drafting must promise more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from flashdraft.engine.config import MAX_VERIFY
from flashdraft.engine.drafts import NODE_SOURCES, Draft
from flashdraft.engine.policy.times import StepTimes
from flashdraft.engine.policy.verify import BUCKET_EDGES, MIN_GAIN, Survival

MAX_GAP_S = 0.085  # between two tokens of a request, while little waits
LONGEST_GAP_S = 0.116  # and however much does
FAR_CONTEXT = 8192  # of a prompt's rows: beyond it their times rise as they are learned,
FAR_MARGIN = 0.93  # so that a step takes longer than is known of it
MANY_WAITING = 6144  # tokens that double the limit
PATIENCE_S = 0.25  # in which what waits should be computed
MIN_ROWS = 32  # of prompts, in any case: they move on
ROW_WORTH = 1.15  # of a prompt's row, by what it takes where rows are cheapest
HOPELESS = 1.3  # a step that is guessed to be slower than the best by this is not tried
SETTLED = 8  # steps of one batch before anything is tried out: a batch that shrinks has no time
PROBE_PERIOD = 64  # steps between drafts where drafting does not pay
UNKNOWN = 0.8  # survival of a draft token nobody has seen yet


class StepOptions(NamedTuple):
    """What a step may look like."""

    batch: int  # slots that take part
    num_awake: int  # those of them who decode
    rows: Sequence[int]  # of those who decode: fewest first, which is without drafts
    rows_beside: Sequence[int]  # the same where prompts ride
    sizes: Sequence[int]  # of passes with prompts: all their rows
    widths_of: Callable[[int], Sequence[int]]  # draft tokens that may be filled in, by rows


class StepChoice(NamedTuple):
    """What a step is to be, and what is expected of it."""

    num_rows: int  # of those who decode
    prompt_rows: int  # that may ride
    tokens: float  # committed
    seconds: float
    plain_tokens: float = 0.0  # the same of a step without drafts
    plain_s: float = 0.0
    width: int = 0  # draft tokens that are filled in for each


class StepPolicy:
    """Chooses steps; remembers what they took and brought."""

    def __init__(
        self,
        times: StepTimes,
        survival: Survival,
        fixed: int | None,
        max_rows: int,
        num_nodes: int = 0,
    ) -> None:
        """`fixed`: draft tokens that everybody verifies; `max_rows`: of prompts in a step.

        `num_nodes`: the most of a tree, where drafts are trees.
        """
        self.times, self._survival = times, survival
        self._num_nodes = num_nodes
        self.fixed, self._max_rows = fixed, max_rows
        self._num_drafted = 0  # sequences of the last drafts
        self._curves: list[list[float]] = []  # survival of every slot of theirs
        self._gains: dict[int, list[float]] = {}  # by width, see `_gains_of`
        self._steps_since_draft = 0
        self._batch, self._steps_of_batch = 0, 0

    def chances(self) -> list[list[float]]:
        """How likely the target agrees, for NODE_SOURCES; see `Survival.rate`."""
        edges = [0.0, *BUCKET_EDGES, 1.0]
        middles = [(low + high) / 2 for low, high in zip(edges[:-1], edges[1:], strict=True)]
        return [
            [self._survival.rate(source, middle) for middle in middles] for source in NODE_SOURCES
        ]

    def chance(self, source: str, confidence: float) -> float:
        """That the target agrees with a draft token at its turn."""
        return self._survival.chance(source, confidence)

    def remember_drafts(self, drafts: Sequence[Draft]) -> None:
        """Take in the newest drafts, one for each sequence, verified or not."""
        self._curves = [self._curve(draft) for draft in drafts]
        self._num_drafted, self._gains = len(drafts), {}

    def expected_tokens(self, num_awake: int, num_rows: int, width: int = MAX_VERIFY) -> float:
        """Tokens that a step over so many rows is expected to commit, where so many are drafted."""
        most = self._num_nodes if self._num_nodes and width else width
        num_slots = min(max(num_rows - num_awake, 0), num_awake * most)
        if num_slots == 0:
            return float(num_awake)
        if self._num_drafted == 0:
            depth = min(num_slots // num_awake, width)
            return num_awake * sum(UNKNOWN**i for i in range(depth + 1))
        gains = self._gains_of(most)
        place = min(round(num_slots * self._num_drafted / num_awake), len(gains) - 1)
        return num_awake + num_awake / self._num_drafted * gains[place]

    def choose(
        self, options: StepOptions, prompts: Sequence[int] = (), context: int = 0
    ) -> StepChoice:
        """The next step, where prompts of these lengths wait, the first behind such a context."""
        if options.num_awake == 0:  # a lone prompt runs at full speed
            rows = min(sum(prompts), self._max_rows)
            choice = StepChoice(0, rows, 0.0, self.times.beside(max(rows, 1), context))
        elif prompts:
            choice = self._choose_beside(options, prompts, context)
        else:
            choice = self._choose_alone(options)
        return choice

    def _choose_alone(self, options: StepOptions) -> StepChoice:
        candidates = self._candidates(options, options.rows)
        found = {rows: self._alone(options, rows) for rows in candidates}
        plain = found.get(options.rows[0]) or self._alone(options, options.rows[0])
        best = min(found, key=lambda rows: _pace(found[rows]))
        self._steps_of_batch = self._steps_of_batch + 1 if options.batch == self._batch else 0
        self._batch = options.batch
        near = self._untimed_neighbour(options, list(found), best)
        if near is not None and _pace(found[near]) < HOPELESS * _pace(found[best]):
            return _beside_plain(found[near], plain)
        return _beside_plain(found[self._or_none(candidates[0], best, found)], plain)

    def _choose_beside(
        self, options: StepOptions, prompts: Sequence[int], context: int
    ) -> StepChoice:
        candidates = self._candidates(options, options.rows_beside)
        alone = {rows: self._alone(options, rows) for rows in candidates}
        row_s = ROW_WORTH * self.times.row_price()
        worth = row_s / min(map(_pace, alone.values()))  # of a row, in tokens
        waiting = sum(prompts)
        limit = min(MAX_GAP_S * (1.0 + waiting / MANY_WAITING), LONGEST_GAP_S)
        limit *= FAR_MARGIN if context >= FAR_CONTEXT else 1.0
        found = {
            rows: [
                self._beside(options, one, size, waiting, context)
                for size in options.sizes
                if size >= rows + min(MIN_ROWS, waiting)
            ]
            or [self._beside(options, one, rows + MIN_ROWS, waiting, context)]
            for rows, one in alone.items()
        }
        # where others are slow all have to wait
        fitting = {
            rows: [one for one in several if one.seconds <= max(limit, 1.25 * alone[rows].seconds)]
            or several[:1]
            for rows, several in found.items()
        }
        best: dict[int, StepChoice] = {}
        for rows, several in fitting.items():
            fast = [one for one in several if waiting * one.seconds <= PATIENCE_S * one.prompt_rows]
            fastest = min(several, key=lambda one: one.seconds / one.prompt_rows)
            best[rows] = min(fast or [fastest], key=lambda one: _pace(one, worth))
        chosen = min(best, key=lambda rows: _pace(best[rows], worth))
        choice = best[self._or_none(candidates[0], chosen, best, worth)]
        plain = best.get(options.rows_beside[0])
        if plain is None:  # nobody may choose it: the same of the prompts, and no drafts
            none = self._alone(options, options.rows_beside[0])
            size = none.num_rows + choice.prompt_rows
            plain = self._beside(options, none, size, waiting, context)
        return _beside_plain(choice, plain)

    def _candidates(self, options: StepOptions, sizes: Sequence[int]) -> Sequence[int]:
        """Rows of those who decode."""
        if self.fixed is None:
            return sizes
        wanted, drafted = options.num_awake * (1 + self.fixed), sizes[1:] if self.fixed else sizes
        return [next((rows for rows in drafted if rows >= wanted), sizes[-1])]

    def _alone(self, options: StepOptions, rows: int) -> StepChoice:
        return min(
            (self._drafted(options, rows, one) for one in options.widths_of(rows)), key=_pace
        )

    def _drafted(self, options: StepOptions, rows: int, width: int) -> StepChoice:
        seconds = self.times.alone(options.batch, rows) + self.times.draft(options.batch, width)
        tokens = self.expected_tokens(options.num_awake, rows, width)
        return StepChoice(rows, 0, tokens, seconds, width=width)

    def _beside(
        self, options: StepOptions, alone: StepChoice, size: int, waiting: int, context: int
    ) -> StepChoice:
        rows, drafting = alone.num_rows, self.times.draft(options.batch, alone.width)
        seconds = max(self.times.beside(size, context) + drafting, alone.seconds)
        riding = min(size - rows, waiting, self._max_rows)
        return StepChoice(rows, riding, alone.tokens, seconds, width=alone.width)

    def _or_none(
        self,
        plain: int,
        best: int,
        found: dict[int, StepChoice],
        worth: float = 0.0,
    ) -> int:
        """The best, or no drafts where they promise little, but for some now and then."""
        if plain in found and _pace(found[best], worth) > (1 - MIN_GAIN) * _pace(
            found[plain], worth
        ):
            best = plain
        self._steps_since_draft = 0 if best != plain else self._steps_since_draft + 1
        drafted = [rows for rows in found if rows != plain]
        if self._steps_since_draft >= PROBE_PERIOD and drafted:
            self._steps_since_draft = 0
            return min(drafted)
        return best

    def _untimed_neighbour(
        self, options: StepOptions, rows: Sequence[int], best: int
    ) -> int | None:
        """The next size up or down that was never tried; None until the best one itself was."""
        batch, times = options.batch, self.times
        if not times.knows_alone(batch, best) or self._steps_of_batch < SETTLED:
            return None
        place = rows.index(best)
        near = rows[max(0, place - 1) : place + 2]
        return next((one for one in near if not times.knows_alone(batch, one)), None)

    def _gains_of(self, width: int) -> list[float]:
        """Tokens that the likeliest of the first slots bring together, by how many slots."""
        if width not in self._gains:
            slots = sorted((one for curve in self._curves for one in curve[:width]), reverse=True)
            self._gains[width] = [0.0, *accumulate(slots)]
        return self._gains[width]

    def _curve(self, draft: Draft) -> list[float]:
        """Survival of every slot; a chain goes on as it did where nothing was drafted."""
        count, alive = len(draft.confidence), [1.0]  # by rows, the anchor's first
        parents = range(count) if draft.parents is None else draft.parents
        for parent, source, one in zip(parents, draft.sources, draft.confidence, strict=True):
            alive.append(alive[parent] * self._survival.chance(source, one))
        usual = alive[-1] ** (1.0 / count) if count else UNKNOWN
        while draft.parents is None and len(alive) <= MAX_VERIFY:
            alive.append(alive[-1] * usual)
        return alive[1:]


def _beside_plain(choice: StepChoice, plain: StepChoice) -> StepChoice:
    """The choice, with what a step without drafts promised."""
    return choice._replace(plain_tokens=plain.tokens, plain_s=plain.seconds)


def _pace(choice: StepChoice, worth: float = 0.0) -> float:
    """Seconds a token, where a row of a prompt is worth so much of one."""
    return choice.seconds / (choice.tokens + worth * choice.prompt_rows)
