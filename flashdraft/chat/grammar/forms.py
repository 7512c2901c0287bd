"""The grammar of an answer whose text has a form: a schema, a pattern or a list of texts.

A form is itself a grammar. Here thoughts are put before it, or calls beside it; which thoughts and
calls, and how they are marked, is for others to say.
"""

from __future__ import annotations

import functools
import json
import re

from flashdraft.chat.grammar.compiler import lark_choice
from flashdraft.chat.schema.json_rule import FIXED, JsonGrammar
from flashdraft.core import GrammarSpec
from flashdraft.text import exact_json


def form_grammar(form: GrammarSpec, thoughts: str, calls: GrammarSpec | None) -> GrammarSpec:
    """A form after thoughts, or calls instead of both.

    `thoughts` is the beginning of a Lark rule, "" for none; in it ANY_THOUGHT stands for free text.
    """
    if not thoughts and calls is None:
        return form
    body, rules = _lark(form)
    lines = [f"formed: {thoughts} answer_form", f"answer_form: {body}", *rules]
    if thoughts:
        lines.append("ANY_THOUGHT: /(?s:.+)/")
    if calls is None:
        return GrammarSpec("lark", "\n".join(["start: formed", *lines]))
    head, _, rest = calls.text.partition("\n")
    called = head.replace("start:", "called:", 1)
    return GrammarSpec("lark", "\n".join(["start: called | formed", called, rest, *lines]))


@functools.lru_cache(maxsize=4)  # a request may have many prompts
def _lark(form: GrammarSpec) -> tuple[str, tuple[str, ...]]:
    """A form as the body of a Lark rule, in llguidance's dialect, and the rules it refers to."""
    if form.kind == "regex":
        # a slash that is escaped already stays as it is
        pattern = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", form.text, flags=re.DOTALL)
        pattern = pattern.replace("\n", "\\n")
        return f"/(?:{pattern})/", ()
    if form.kind == "choice":
        return lark_choice(json.loads(form.text)), ()
    schema = exact_json.read(form.text) if form.kind == "json_schema" else {"type": "object"}
    grammar = JsonGrammar(FIXED, "form")
    body = grammar.body(schema if isinstance(schema, dict) else {})
    return body, tuple(grammar.lines)
