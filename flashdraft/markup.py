"""An answer as HTML for notebooks: what was drafted is coloured, and everything is escaped.

A model's text never becomes markup: no tag, no entity, no formula that a notebook would typeset.
Backgrounds let through what is behind them, so that the same colours do in light and in dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

_DRAFTED = "background:rgba(0,160,160,.25);border-radius:2px"
_TARGET = "background:rgba(220,150,0,.25);border-radius:2px"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere"
_SMALL = "opacity:.7;font-size:85%;margin-top:.4em"
# control characters, and those that turn the direction of what follows, show as what they are
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_TURNING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE |= dict.fromkeys(_TURNING, 0xFFFD)


def answer_html(pieces: Iterable[tuple[str, bool | None]], facts: str) -> str:
    """An answer's text in pieces (text, drafted; None: not known), and a line of facts below."""
    known = {True: _DRAFTED, False: _TARGET}
    body, has_colours = [], False
    for text, drafted in pieces:
        safe = escaped(text)
        if drafted is not None:
            has_colours = True
            safe = f'<span style="{known[drafted]}">{safe}</span>'
        body.append(safe)
    legend = ""
    if has_colours:
        legend = (
            f' · <span style="{_DRAFTED}">drafted</span>'
            f' <span style="{_TARGET}">the model\'s own</span>'
        )
    # notebooks typeset what stands between dollars, but not in these classes
    return (
        '<div class="tex2jax_ignore mathjax_ignore">'
        f'<div style="{_TEXT}">{"".join(body)}</div>'
        f'<div style="{_SMALL}">{escaped(facts)}{legend}</div></div>'
    )


def escaped(text: str) -> str:
    """A text that is nothing but text in HTML."""
    return html.escape(text.translate(_VISIBLE))
