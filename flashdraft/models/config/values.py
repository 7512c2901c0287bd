"""Values of a JSON config by name: each within its limits, and none passed over.

A `ConfigObject` notes which keys were asked for. Whoever reads a config ends with `finish`, which
refuses what nobody asked for and no list knows to be irrelevant: a key that is ignored in silence
may change every answer. What keys mean is for the readers; which ones are irrelevant, for
keys.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from flashdraft.errors import CheckpointError, UnsupportedModelError, quoted

Value = TypeVar("Value")


REMEDY = "Fetch the checkpoint, or convert it, again."


class Range(NamedTuple):
    """What a number must lie between, both ends included."""

    least: float
    most: float

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"finite and at least {self.least:g}"
        return f"from {self.least:,} to {self.most:,}"


# far beyond any model, and small enough that no size made of them overflows
LAYERS = Range(1, 4096)
HEADS = Range(1, 65_536)
WIDTH = Range(1, 16_777_216)
VOCABULARY = Range(1, 16_777_216)
POSITIONS = Range(1, 2**30)
EXPERTS = Range(1, 65_536)
POSITIVE = Range(1e-9, math.inf)


class InvalidConfigError(CheckpointError):
    """A value that no config may have; who knows the file says again where, with the `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The config is not valid: {reason}")
        self.reason = reason


def require(holds: bool, name: str, value: Any, rule: str) -> None:
    """Raise an error that names the value and the rule, unless the rule holds."""
    if not holds:
        raise InvalidConfigError(f"{name} is {quoted(value)}; it must be {rule}. {REMEDY}")


def is_whole(value: Any) -> bool:
    """Whether a JSON value is a whole number; true and false are none, 4096.0 is one."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


class ConfigObject:
    """One JSON object of a config; null is the same as no key."""

    def __init__(self, values: Any, name: str = "") -> None:
        require(isinstance(values, Mapping), name or "it", values, "a JSON object")
        self._values: Mapping[str, Any] = values
        self._prefix = f"{name}." if name else ""
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def says(self, key: str) -> bool:
        """Whether the key is there, if only to say null."""
        return key in self._values

    def raw(self, key: str) -> Any:
        """The value as it is; None where there is none."""
        self._asked.add(key)
        return self._values.get(key)

    def whole(self, key: str, within: Range, default: int | None = None) -> int:
        """A whole number; without a default it must be there."""
        found = self.maybe_whole(key, within)
        return self._or_default(key, found, default)

    def maybe_whole(self, key: str, within: Range) -> int | None:
        value = self.raw(key)
        if value is None:
            return None
        fits = is_whole(value) and within.least <= value <= within.most
        require(fits, self._prefix + key, value, f"a whole number {within}")
        return int(value)

    def real(self, key: str, within: Range, default: float | None = None) -> float:
        """A finite number; without a default it must be there."""
        found = self.maybe_real(key, within)
        return self._or_default(key, found, default)

    def maybe_real(self, key: str, within: Range) -> float | None:
        value = self.raw(key)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and within.least <= value <= within.most and abs(value) < 1e300
        require(fits, self._prefix + key, value, f"a number {within}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        found = self.maybe_flag(key)
        return default if found is None else found

    def maybe_flag(self, key: str) -> bool | None:
        value = self.raw(key)
        is_flag = value is None or isinstance(value, bool)
        require(is_flag, self._prefix + key, value, "true or false")
        return None if value is None else bool(value)

    def word(self, key: str, default: str | None = None) -> str:
        """A string; without a default it must be there."""
        value = self.raw(key)
        is_word = value is None or isinstance(value, str)
        require(is_word, self._prefix + key, value, "a string")
        return self._or_default(key, value, default)

    def words(self, key: str) -> list[str] | None:
        """A list of strings."""
        return self._list(key, lambda one: isinstance(one, str), "a list of strings")

    def wholes(self, key: str, within: Range, default: list[int] | None = None) -> list[int]:
        """A list of whole numbers; without a default it must be there."""

        def fits(one: Any) -> bool:
            return is_whole(one) and within.least <= one <= within.most

        found = self._list(key, fits, f"a list of whole numbers {within}")
        return [int(one) for one in self._or_default(key, found, default)]

    def section(self, key: str) -> ConfigObject | None:
        """An object within this one."""
        value = self.raw(key)
        return None if value is None else ConfigObject(value, self._prefix + key)

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigObject:
        """The same with values for keys that it has not."""
        stated = {key: value for key, value in self._values.items() if value is not None}
        filled = ConfigObject({**defaults, **stated}, self._prefix.removesuffix("."))
        filled._asked |= self._asked
        return filled

    def names(self) -> list[str]:
        """Every key that has a value."""
        return [key for key, value in self._values.items() if value is not None]

    def unasked(self) -> dict[str, Any]:
        """What nobody has asked for so far."""
        return {key: value for key, value in self._values.items() if key not in self._asked}

    def forget(self, other: ConfigObject) -> None:
        """Leave to another object what both say alike."""
        self._asked |= {key for key in self.names() if other._values.get(key) == self._values[key]}

    def finish(self, model: str, is_irrelevant: Callable[[str], bool], file: str) -> None:
        """Refuse what was never asked for and may matter; nothing, false and 0 change nothing."""
        for key, value in self.left_over(is_irrelevant).items():
            raise UnsupportedModelError(
                f"{model} has {quoted(self._prefix + key)} = {quoted(value)} in its {file}; "
                "flashdraft does not know what it changes. Where it changes nothing, take it "
                "out of the file."
            )

    def left_over(self, is_irrelevant: Callable[[str], bool]) -> dict[str, Any]:
        """What was never asked for and may matter."""
        unasked = self.unasked().items()
        return {key: value for key, value in unasked if value and not is_irrelevant(key)}

    def _list(self, key: str, fits: Callable[[Any], bool], rule: str) -> list[Any] | None:
        value = self.raw(key)
        is_list = value is None or (isinstance(value, list) and all(map(fits, value)))
        require(is_list, self._prefix + key, value, rule)
        return None if value is None else list(value)

    def _or_default(self, key: str, found: Value | None, default: Value | None) -> Value:
        found = default if found is None else found
        if found is None:
            raise InvalidConfigError(f"it lacks the key {self._prefix + key!r}. {REMEDY}")
        return found


def token_ids(value: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    """One token id, a list of them or none; each must be in the vocabulary."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for one in ids:
        fits = isinstance(one, int) and not isinstance(one, bool) and 0 <= one < vocab_size
        rule = f"a token id below the vocabulary's size of {vocab_size}, or a list of such"
        require(fits, name, value, rule)
    return tuple(dict.fromkeys(ids))
