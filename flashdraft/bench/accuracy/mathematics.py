"""Whether two final answers of mathematics mean the same: 1/2 and 0.5, $1,000 and 1000 dollars.

Both are brought to one spelling; what can be read as an expression is compared by its value, with
letters at a few fixed places. Sequences are compared item by item. It knows no tasks.
"""

from __future__ import annotations

import cmath
import re
from fractions import Fraction

Number = Fraction | complex
MAX_LENGTH = 500  # characters of a final answer; longer ones are compared as text
_MAX_BITS = 4096  # of an exact power; beyond it, and in roots, floating point does
_TOLERANCE = 1e-9
# Unrelated places for letters: expressions that agree at all of them are taken to be equal.
_PLACES = (Fraction(7, 3), Fraction(-5, 11), Fraction(13, 4))

_SPACING = re.compile(
    r"(?<!\\)\\[,;:!> ]|\\q?quad\b|~|\\displaystyle\b|\\(?:left|right|[bB]igg?[lr]?)\b"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degree\b")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d|[a-z]))\s*(?:\{([^{}]*)\}|(\d|[a-z]))")
_ONE_NAME = re.compile(r"^[a-zA-Z](?:\([a-z]\))?\s*(?:=|\\in\b)\s*(?=[^=]+$)")
_UNIT = re.compile(r"(?<=[\d})])\s+[a-zA-Z]{2,}[a-zA-Z./ ]*(?:\^\s*\{?\d\}?)?$")
_TEXT_UNIT = re.compile(rf"(?<=[\d}})])\s*{_TEXT.pattern}(?:\^\s*\{{?\d\}}?)?\s*$")
_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z]+(?:[ '-]+[A-Za-z]+)*")
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|\\([a-zA-Z]+)|(.))")
_OPENING, _CLOSING = "([{", ")]}"


def same_answer(given: str, wanted: str) -> bool:
    """Whether a final answer is the one that is wanted."""
    if max(len(given), len(wanted)) > MAX_LENGTH:
        return given.split() == wanted.split()
    given, wanted = normalise(given), normalise(wanted)
    if given == wanted or not given or not wanted:
        return given == wanted != ""
    given_items, wanted_items = _items(given), _items(wanted)
    if len(given_items) != len(wanted_items):
        return False
    if len(wanted_items) == 1:
        return _same_sequence(given, wanted) or _same_value(given, wanted)
    # a list of solutions has no order
    left = list(given_items)
    for item in wanted_items:
        found = next((one for one in left if same_answer(one, item)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def normalise(text: str) -> str:
    """A final answer in one spelling: no spacing, no units, fractions with braces."""
    text = text.strip().strip("$").strip()
    text = re.sub(r"\\[()\[\]]", "", text).replace("\\$", "").replace("$", "")
    text = re.sub(r"\{,\}|,\\!\s*", ",", text)
    text = re.sub(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi ", text)  # and no unit
    text = text.replace("−", "-").replace("π", "\\pi ").replace("∞", "\\infty ")
    text = _SPACING.sub("", _DEGREES.sub("", text)).replace("\\%", "").replace("%", "")
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = _UNIT.sub("", _TEXT.sub(r" \1", _TEXT_UNIT.sub("", text)).strip())
    text = re.sub(r"(?<=\d) (\d+)/(\d+)$", r"\\frac{\1}{\2}", text)
    text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)
    text = _SHORT_FRACTION.sub(_full_fraction, text)
    text = re.sub(r"\\sqrt\s*(\d|[a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2", text)
    text = _ONE_NAME.sub("", text.strip().rstrip(".").strip())
    if re.fullmatch(r"\(\s*[A-Za-z]\s*\)", text):  # the letter of a choice
        text = text.strip("() ")
    if _WORDS.fullmatch(text):
        return " ".join(text.casefold().split())
    return re.sub(r"\s+", "" if "\\" not in text else " ", text).strip()


def number_of(text: str) -> Number | None:
    """The value of an expression without letters; None where it has none that is known."""
    spelled = normalise(text)
    return _evaluate(spelled, Fraction(0)) if not _letters(spelled) else None


def is_list(text: str) -> bool:
    """Whether a final answer is several numbers, parted by commas."""
    items = _items(normalise(text))
    return len(items) > 1 and all(number_of(item) is not None for item in items)


def _full_fraction(found: re.Match[str]) -> str:
    above, below = found.group(1) or found.group(2) or "", found.group(3) or found.group(4) or ""
    return f"\\frac{{{above}}}{{{below}}}"


def _items(text: str) -> list[str]:
    """The parts of a list; commas inside brackets part nothing. 1 ± 2 is the list of both."""
    if text.startswith("\\{") and text.endswith("\\}"):
        text = text[2:-2]
    depth, items = 0, [""]
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    both = [
        [item.replace("\\pm", sign) for sign in "+-"] if "\\pm" in item else [item]
        for item in items
    ]
    return [one.strip() for pair in both for one in pair]


def _same_sequence(given: str, wanted: str) -> bool:
    """Points, intervals and their unions, matrices: the same brackets and items."""
    unions = [re.split(r"\\cup", text) for text in (given, wanted)]
    if len(unions[0]) > 1:
        pairs = zip(*unions, strict=False)
        return len(unions[0]) == len(unions[1]) and all(same_answer(*pair) for pair in pairs)
    cells = [_matrix(text) or _bracketed(text) for text in (given, wanted)]
    if not cells[0] or not cells[1] or len(cells[0]) != len(cells[1]):
        return False
    if (given[0], given[-1]) != (wanted[0], wanted[-1]):
        return False
    return all(same_answer(one, other) for one, other in zip(cells[0], cells[1], strict=True))


def _matrix(text: str) -> list[str] | None:
    found = re.fullmatch(r"\\begin\{([pbv]?matrix)\}(.*)\\end\{\1\}", text, re.DOTALL)
    if found is None:
        return None
    rows = found.group(2).strip().removesuffix("\\\\").split("\\\\")
    return [str(len(rows)), *(cell for row in rows for cell in row.split("&"))]


def _bracketed(text: str) -> list[str] | None:
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return None
    items = _items(text[1:-1])
    return items if len(items) > 1 else None


# -- values ----------------------------------------------------------------------------------------


def _same_value(given: str, wanted: str) -> bool:
    if given.count("=") == wanted.count("=") == 1:
        left = [side.split("=") for side in (given, wanted)]
        return all(_same_value(one, other) for one, other in zip(*left, strict=True))
    if any(re.fullmatch(r"[A-Za-z\s]+", text) for text in (given, wanted)):
        return False  # a word is no product of its letters
    for place in _PLACES if _letters(wanted) else _PLACES[:1]:
        one, other = _evaluate(given, place), _evaluate(wanted, place)
        if one is None or other is None or not _close(one, other):
            return False
    return True


def _letters(text: str) -> bool:
    return re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)) is not None


def _close(one: Number, other: Number) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    return cmath.isclose(complex(one), complex(other), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _evaluate(text: str, place: Fraction) -> Number | None:
    """The value with every letter at a place of its own near `place`; None where it has none."""
    try:
        reader = _Expression(text, place)
        value = reader.sum()
        return None if reader.peek() else value
    except (ValueError, ArithmeticError, RecursionError, KeyError, IndexError):
        return None


class _Expression:
    """Reads sums of products of powers, as LaTeX or plain text writes them."""

    def __init__(self, text: str, place: Fraction) -> None:
        found = (match for match in _TOKEN.finditer(text.strip()))
        self._tokens = [next(part for part in match.groups() if part) for match in found]
        self._place = place
        self._at = 0

    def peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _accept(self, *tokens: str) -> str:
        return self._next() if self.peek() in tokens and self.peek() else ""

    def sum(self) -> Number:
        """A sum, up to what is no part of it."""
        value = self._product()
        while sign := self._accept("+", "-"):
            term = self._product()
            value = value + term if sign == "+" else value - term
        return value

    def _product(self) -> Number:
        if sign := self._accept("+", "-"):
            value = self._product()
            return value if sign == "+" else -value
        value, is_number = self._power()
        while True:
            if self._accept("*", "cdot", "times"):
                value, is_number = value * self._power()[0], False
            elif self._accept("/", "div"):
                value, is_number = value / self._power()[0], False
            elif self.peek() and self.peek() not in (*_CLOSING, "+", "-", "=", ","):
                is_mixed = is_number and self._is_plain_fraction()
                factor, _ = self._power()
                value, is_number = value + factor if is_mixed else value * factor, False
            else:
                return value

    def _is_plain_fraction(self) -> bool:
        """Whether two numbers make the fraction that follows: after a number it is added to it."""
        shape = "".join("0" if token.isdigit() else token for token in self._tokens[self._at :][:7])
        return shape == "frac{0}{0}"

    def _power(self) -> tuple[Number, bool]:
        """A factor with its exponent, and whether it is a bare whole number."""
        is_number = self.peek().isdigit()
        value = self._factor()
        if self._accept("^"):
            is_number = False
            exponent = -self._factor() if self._accept("-") else self._factor()
            value = _raise(value, exponent)
        return value, is_number

    def _factor(self) -> Number:
        token = self._next()
        if token[0].isdigit() or token[0] == ".":
            return Fraction(token)
        if token in _OPENING:
            value = self.sum()
            if self._next() != _CLOSING[_OPENING.index(token)]:
                raise ValueError("brackets do not match")
            return value
        if token == "frac":
            return self._factor() / self._factor()
        if token == "sqrt":
            degree = self._factor() if self.peek() == "[" else Fraction(2)
            return _raise(self._factor(), 1 / degree)
        if token == "pi":
            return complex(cmath.pi)
        if token == "i":
            return 1j
        if len(token) == 1 and token.isascii() and token.isalpha():
            return self._place + Fraction(ord(token), 97)
        raise ValueError(f"{token} is not read")


def _raise(value: Number, exponent: Number) -> Number:
    """A power; exact where both are fractions and the result is one of a sensible size."""
    if isinstance(value, Fraction) and isinstance(exponent, Fraction):
        size = max(value.numerator.bit_length(), value.denominator.bit_length())
        if exponent.denominator == 1 and size * abs(exponent) <= _MAX_BITS:
            return Fraction(value ** int(exponent))
        if value < 0 and exponent.denominator % 2 == 1:
            sign = -1 if exponent.numerator % 2 else 1
            return complex(sign * float(-value) ** float(exponent))
    return complex(complex(value) ** complex(exponent))
