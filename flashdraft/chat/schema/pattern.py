"""A JSON schema's `pattern` as a regular expression for the whole string, without anchors."""

from __future__ import annotations

import re

from flashdraft.errors import RequestError

_MAX_PATTERN = 1024  # characters
_ANYTHING = "(?s:.*)"


def full_pattern(pattern: object, where: str) -> tuple[str, bool]:
    """The expression in a grammar's syntax (between slashes), and whether it takes no text at all.

    A pattern may match anywhere in a string: the parts around it are free where it is not
    anchored. Look-around, references back, and anchors within are refused.
    """
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN:
        raise RequestError(f"{where}: pattern must be text of at most {_MAX_PATTERN} characters.")
    try:
        takes_nothing = re.search(pattern, "") is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise RequestError(f"{where}: pattern {pattern!r:.60} is not valid: {error}.") from None
    body = pattern.removeprefix("^")
    is_open_before = body == pattern
    is_open_after = not _ends_with_anchor(body)
    body = body if is_open_after else body[:-1]
    has_alternatives = _check(body, pattern, where)
    if has_alternatives and not (is_open_before and is_open_after):
        raise RequestError(
            f"{where}: pattern {pattern!r:.60} has anchors beside alternatives; put the "
            "alternatives into a group."
        )
    around = (_ANYTHING if is_open_before else "", _ANYTHING if is_open_after else "")
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", body).replace("\n", "\\n")
    return f"{around[0]}(?:{escaped}){around[1]}", takes_nothing


def _ends_with_anchor(text: str) -> bool:
    backslashes = len(text[:-1]) - len(text[:-1].rstrip("\\"))
    return text.endswith("$") and backslashes % 2 == 0


def _check(body: str, pattern: str, where: str) -> bool:
    """Refuse what a grammar cannot match; whether there are alternatives at the outermost level."""
    depth, in_class, has_alternatives, place = 0, False, False, 0
    while place < len(body):
        character, rest = body[place], body[place + 1 : place + 3]
        if character == "\\":
            if not in_class and (rest[:1] in ("b", "B", "A", "Z") or rest[:1].isdigit()):
                raise _refusal("\\" + rest[:1], pattern, where)
            place += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            place += 1 if rest[:1] in ("]", "^") else 0
        elif character in "^$":
            raise _refusal(character, pattern, where)
        elif character == "(" and rest[:1] == "?" and rest != "?:":
            raise _refusal("(" + rest, pattern, where)
        else:
            depth += (character == "(") - (character == ")")
            has_alternatives |= character == "|" and depth == 0
        place += 1
    return has_alternatives


def _refusal(what: str, pattern: str, where: str) -> RequestError:
    return RequestError(
        f"{where}: pattern {pattern!r:.60} uses {what!r}, which a grammar cannot match; write it "
        "without look-around, references back and anchors within."
    )
