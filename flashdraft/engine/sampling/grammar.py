"""A request's grammar at work: which tokens may come next, for the answer and along a draft.

Matching itself is behind a Protocol. What is here keeps a matcher in step with the answer, tells
where a stop token may come, and cuts and extends drafts by the grammar. No torch: a mask is a row
of bits, token 0's is the lowest of the first byte.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flashdraft.core import GrammarSpec
from flashdraft.engine.drafts import FORCED_SOURCE, Draft
from flashdraft.errors import FlashdraftError, RequestError

Mask = NDArray[np.uint8]
TOO_COMPLEX = "The grammar is too complex"  # how every message about that begins

log = logging.getLogger(__name__)


class GrammarError(FlashdraftError):
    """A grammar that cannot be followed any further."""


class DeadEndError(GrammarError):
    """A place in a grammar from which none of the model's tokens leads on."""


class GrammarTooComplexError(RequestError):
    """A grammar that takes more work than a request may cause."""


class Matcher(Protocol):
    """A place in a grammar. Whatever goes wrong raises; a matcher that raised is dropped."""

    def advance(self, token: int) -> bool:
        """Go one token further; False, and nothing is changed, if the token may not come."""
        ...

    def rollback(self, count: int) -> None:
        """Go back by so many tokens."""
        ...

    def allowed(self) -> bytes:
        """A mask of the tokens that may come next; those that only end an answer are not in it."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens of the text that must come next, as the tokenizer cuts it; often none.

        Another cut of the same text may be allowed too.
        """
        ...

    def may_end(self) -> bool:
        """Whether what came so far is a whole sentence of the grammar."""
        ...

    def is_complete(self) -> bool:
        """Whether it is one and nothing more can come."""
        ...


class Grammar(Protocol):
    """A compiled grammar, which any number of requests may share."""

    def start(self) -> Matcher:
        """A matcher at the grammar's beginning."""
        ...


class GrammarCompiler(Protocol):
    """Compiles what a request asks for; raises RequestError with the reason if it cannot."""

    def __call__(self, spec: GrammarSpec) -> Grammar: ...


class Constraint:
    """One request's grammar, its matcher, and the request's own rules on when to stop.

    Every state is named by the tokens that lead to it, so it does not matter in which order drafts
    and rows ask, nor whether drafts are trees. The matcher goes along with the last ones asked
    about; masks are kept for all drafts of a step.
    """

    def __init__(
        self, grammar: Grammar, stop_ids: Collection[int], min_tokens: int, vocab_size: int
    ) -> None:
        self.stop_ids = frozenset(stop_ids)
        self.failures: dict[int, str] = {}  # why rows that were asked for last were not reached
        self._grammar = grammar
        self._first_failure: _Failure | None = None  # since which nothing is drafted
        self._min_tokens = min_tokens
        bits = np.zeros(-(-vocab_size // 8) * 8, dtype=np.uint8)
        bits[[token for token in self.stop_ids if token < vocab_size]] = 1
        self._stop_mask: Mask = np.packbits(bits, bitorder="little")
        self._matcher = grammar.start()
        self._taken: list[int] = []  # what the matcher has taken in
        self._place = 0  # the state asked about is the one after so many of them
        self._num_settled = 0  # of them the answer has so many
        self._masks: dict[tuple[int, ...], Mask] = {}  # by what was taken in behind the settled

    # -- for the target's rows -----------------------------------------------------------------

    def masks(
        self, history: Sequence[int], drafts: Sequence[int], parents: Sequence[int] | None = None
    ) -> dict[int, Mask]:
        """The mask of every row of drafts that the grammar leads to: 0 is behind `history`.

        Row i + 1 is behind drafts[i], and that behind row parents[i], or behind the one before it.
        The states behind a draft token that may not come, or that ends the answer, are not reached;
        nor are those at which the matcher fails: then `failures` says why. Those on other ways are
        reached all the same.
        """
        self.failures = {}
        rows: dict[int, Mask] = {}
        ways: dict[int, tuple[int, ...]] = {}
        with self._guard(0, history):
            self._seek(history)
            ways[0], rows[0] = (), self.allowed()
        for row, parent in _in_branches(range(len(drafts)) if parents is None else parents):
            token, way = drafts[row - 1], ways.get(parent)
            if way is None or token in self.stop_ids:
                continue
            with self._guard(row, history):
                if self._num_settled != len(history):  # it began anew
                    self._seek(history)
                self.go_back(way)
                if self.follow(token) and not self.is_over():
                    rows[row], ways[row] = self.allowed(), (*way, token)
        return rows

    def ends(self, history: Sequence[int]) -> bool:
        """Whether nothing can come after these tokens, not even a stop token."""
        is_over = False
        if not self.stop_ids:
            with self._guard():
                self._seek(history)
                is_over = self.is_over()
        return is_over

    def is_over(self) -> bool:
        """Whether the answer ends here without a stop token, because there is none."""
        return not self.stop_ids and self._here().is_complete()

    # -- for drafts ----------------------------------------------------------------------------

    def fit(self, history: Sequence[int], draft: Draft | None, room: int) -> Draft | None:
        """A draft cut where the grammar forbids it, and extended by what the grammar forces."""
        tokens: list[int] = []
        confidence: list[float] = []
        with self.guard():
            self.seek(history)
            ended = False
            pairs = [] if draft is None else zip(draft.tokens, draft.confidence, strict=True)
            for token, chance in pairs:
                if ended or not self.take(token):
                    break
                tokens.append(token)
                confidence.append(chance)
                ended = token in self.stop_ids
            while not ended and len(tokens) < room and (forced := self.forced()):
                for token in forced[: room - len(tokens)]:
                    if ended := not self.take(token):
                        break
                    tokens.append(token)
                    confidence.append(1.0)
                    ended = token in self.stop_ids
        source = draft.source if draft is not None else FORCED_SOURCE
        return Draft(tokens, confidence, source) if tokens else None

    def forced(self) -> list[int]:
        """Draft tokens that the grammar leaves little else to, here; often none."""
        matcher = self._here()
        if matcher.is_complete():
            return list(self.stop_ids) if len(self.stop_ids) == 1 else []
        return list(matcher.forced())

    def take(self, token: int) -> bool:
        """Whether a draft token may come; the place is then after it."""
        if token not in self.stop_ids:
            return self.follow(token)
        matcher = self._here()
        return self._may_stop(matcher, is_last=matcher.is_complete())

    # -- places --------------------------------------------------------------------------------

    def seek(self, history: Sequence[int]) -> None:
        """Go to the state after these tokens of the answer, to draft what follows them.

        Drafts try more than the answer needs. After a failure, which they may have caused, there
        are none.
        """
        if self._first_failure is not None:
            raise _NoDraftsError
        self._seek(history)

    def _seek(self, history: Sequence[int]) -> None:
        history = list(history)
        start = min(self._num_settled, len(history))
        if self._taken[:start] != history[:start]:
            start = 0
        new, masks = tuple(history[start:]), self._masks
        if start < self._num_settled:
            masks = {}
        self._place = start
        for token in new:
            if not self.follow(token):
                raise FlashdraftError(f"token {token} is in the answer, but not in the grammar")
        self._num_settled, count = self._place, len(new)
        self._masks = {way[count:]: mask for way, mask in masks.items() if way[:count] == new}

    def go_back(self, drafts: Sequence[int]) -> None:
        """Go to the state behind these draft tokens, which were all followed before."""
        self._place = self._num_settled
        for token in drafts:
            if not self.follow(token):
                raise FlashdraftError(f"token {token} came before, but not again")

    def follow(self, token: int) -> bool:
        """Go one token further; False if it may not come. Stop tokens cannot be followed."""
        if self._place < len(self._taken) and self._taken[self._place] == token:
            self._place += 1
            return True
        if not self._here().advance(token):
            return False
        self._taken.append(token)
        self._place += 1
        return True

    def allowed(self) -> Mask:
        """The mask of the tokens that may come next, stop tokens where the answer may end.

        With fewer than min_tokens it may end only if nothing else is possible.
        """
        way = tuple(self._taken[self._num_settled : self._place])
        mask = self._masks.get(way)
        if mask is None:
            matcher = self._here()
            bits = np.frombuffer(matcher.allowed(), dtype=np.uint8)[: len(self._stop_mask)]
            mask = np.zeros_like(self._stop_mask)
            mask[: len(bits)] = bits
            mask &= ~self._stop_mask
            if self._may_stop(matcher, is_last=not mask.any()):
                mask |= self._stop_mask
            if not mask.any():
                raise DeadEndError("no token can come next")
            self._masks[way] = mask
        return mask

    def _may_stop(self, matcher: Matcher, is_last: bool) -> bool:
        return matcher.may_end() and (is_last or self._place >= self._min_tokens)

    def _here(self) -> Matcher:
        """The matcher, brought to the place asked about."""
        surplus = len(self._taken) - self._place
        if surplus:
            self._matcher.rollback(surplus)
            del self._taken[self._place :]
        return self._matcher

    @contextmanager
    def guard(self) -> Iterator[None]:
        """For drafts: begin anew after any failure, and swallow it."""
        try:
            with self._guard():
                yield
        except _NoDraftsError:
            pass

    @contextmanager
    def _guard(self, row: int = 0, wanted: Sequence[int] | None = None) -> Iterator[None]:
        """Begin anew after any failure: a matcher that failed is no use.

        Where a row after the answer's tokens is `wanted`, that is the end there, and `failures`
        says why.
        """
        try:
            yield
        except _NoDraftsError:
            raise
        except BaseException as error:
            failed = _Failure(error, self._place)
            self._place = 0
            self._taken, self._num_settled, self._masks = [], 0, {}
            self._matcher = self._grammar.start()
            # Ctrl-C may have come between two of its steps; a panic in native code is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            if self._first_failure is None:
                self._first_failure = failed
                log.warning(
                    "a grammar failed at output token %d: %s: %s",
                    failed.place,
                    type(error).__name__,
                    " ".join(str(error).split()),
                )
            if wanted is not None:
                # on the way to where it has been before: what went wrong there is the reason
                is_replay = failed.place < len(wanted)
                self.failures[row] = (self._first_failure if is_replay else failed).told


def _in_branches(parents: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows and their parents, branch by branch: so a matcher goes every way but once."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(row)
    waiting = [(row, 0) for row in reversed(children.get(0, []))]
    while waiting:
        row, parent = waiting.pop()
        yield row, parent
        waiting += [(child, row) for child in reversed(children.get(row, []))]


class _NoDraftsError(Exception):
    """Nothing is drafted under this grammar any more."""


class _Failure(NamedTuple):
    """What went wrong, and at which token of the answer."""

    error: BaseException
    place: int

    @property
    def told(self) -> str:
        """What whoever sent the grammar is told; a library's own words are for the log."""
        where = f"(at output token {self.place})"
        # what a matcher tells by a GrammarError is the grammar's fault, not the engine's
        if isinstance(self.error, DeadEndError):
            return f"{TOO_COMPLEX} {where}: none of the model's tokens leads on. Loosen it there."
        if isinstance(self.error, GrammarError):
            return f"{TOO_COMPLEX} {where}: to go on takes too much work. Repeat less, or split it."
        return f"The grammar failed {where}; the log says how. Send it again, or make it simpler."
