"""Matchers of llguidance at work: what requests with one grammar share, and what they do not.

Knows nothing of how grammars are written; compiler.py makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flashdraft.engine.sampling.grammar import GrammarError

MAX_RENEWALS = 4  # lexers that a request may use up: each is some 100 ms of work
MAX_UNMASKED = 16  # tokens in a row: only a mask gives llguidance's lexer new fuel
MAX_REASON = 400  # characters of a compiler's message that are passed on

T = TypeVar("T")


class LlguidanceGrammar:
    """A compiled grammar: a matcher that nobody advances, copied for every request.

    The copies share the lexer's states, which saves work, and with them the limit on states. What
    one copy uses up the others lack, and a lexer beyond its limit may even answer wrongly. So a
    matcher one of whose copies failed is retired, and its other copies go over to a new one.
    """

    def __init__(self, make: Callable[[], Any], eos_token_ids: Sequence[int]) -> None:
        self._make = make
        self._eos_ids = eos_token_ids
        self._root: Any = None

    def start(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self, self._eos_ids)

    def root(self) -> Any:
        """The matcher to copy; a new one where the last was retired."""
        if self._root is None:
            root = self._make()
            _check(root)
            root.compute_bitmask()  # here: the copies have this work done
            _check(root)
            self._root = root
        return self._root

    def is_current(self, root: Any) -> bool:
        """Whether a matcher may still be used, and so may its copies."""
        return self._root is root

    def retire(self, root: Any) -> None:
        """Use this matcher no more."""
        if self._root is root:
            self._root = None


class LlguidanceMatcher:
    """A place in a grammar. It fails where even a new lexer, which others did not use, fails."""

    def __init__(self, grammar: LlguidanceGrammar, eos_token_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._eos_ids = frozenset(eos_token_ids)
        self._taken: list[int] = []
        self._renewals_left = MAX_RENEWALS
        self._join()

    def advance(self, token: int) -> bool:
        if token in self._eos_ids or self._do(lambda matcher: matcher.is_stopped()):
            return False
        if self._do(lambda matcher: matcher.try_consume_tokens([token])) != 1:
            return False
        self._taken.append(token)
        self._num_unmasked += 1
        if self._num_unmasked >= MAX_UNMASKED:
            self.allowed()
        return True

    def rollback(self, count: int) -> None:
        del self._taken[-count:]
        if self._grammar.is_current(self._root):  # else it is replayed without them
            self._matcher.rollback(count)
            _check(self._matcher)

    def allowed(self) -> bytes:
        mask = bytearray(self._do(lambda matcher: matcher.compute_bitmask()))
        self._num_unmasked = 0
        for token in self._eos_ids:
            mask[token // 8] &= ~(1 << token % 8) & 0xFF
        return bytes(mask)

    def forced(self) -> list[int]:
        return self._do(lambda matcher: matcher.compute_ff_tokens())

    def may_end(self) -> bool:
        return self._do(lambda matcher: matcher.is_accepting())

    def is_complete(self) -> bool:
        return self._do(lambda matcher: matcher.is_stopped()) and self.may_end()

    def _do(self, work: Callable[[Any], T]) -> T:
        """Do something with the matcher, and if that fails once more with a new one."""
        try:
            return self._try(work)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException:  # a panic in native code is no Exception
            self._grammar.retire(self._root)
            if not self._renewals_left:
                raise
        self._renewals_left -= 1
        try:
            return self._try(work)
        except BaseException:
            self._grammar.retire(self._root)
            raise

    def _try(self, work: Callable[[Any], T]) -> T:
        if not self._grammar.is_current(self._root):
            self._join()
        result = work(self._matcher)
        _check(self._matcher)
        return result

    def _join(self) -> None:
        """Take a copy of the grammar's matcher and bring it to this place."""
        self._root = self._grammar.root()
        self._matcher = self._root.deep_copy()
        for begin in range(0, len(self._taken), MAX_UNMASKED):
            some = self._taken[begin : begin + MAX_UNMASKED]
            num_taken = self._matcher.try_consume_tokens(some)
            _check(self._matcher)
            if num_taken != len(some):
                raise GrammarError(f"token {begin + num_taken} cannot be taken again")
            self._matcher.compute_bitmask()
            _check(self._matcher)
        self._num_unmasked = 0


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise GrammarError(" ".join(matcher.get_error().split())[:MAX_REASON])
