"""Forms as grammars, alone, after thoughts, and beside calls."""

from __future__ import annotations

from typing import Any

import pytest

from flashdraft.chat.grammar.forms import form_grammar
from flashdraft.chat.schema import json_rule
from flashdraft.core import GrammarSpec


@pytest.mark.parametrize(
    ("pattern", "body"),
    [("a/b", r"a\/b"), (r"a\/b", r"a\/b"), (r"\\/", r"\\\/"), ("x\ny", r"x\ny")],
)
def test_slashes_end_no_pattern(pattern: str, body: str) -> None:
    spec = form_grammar(GrammarSpec("regex", pattern), "ANY_THOUGHT?", None)
    assert f"answer_form: /(?:{body})/" in spec.text.splitlines()


def test_a_form_alone_stays_as_it_is() -> None:
    form = GrammarSpec("regex", "a/b")
    assert form_grammar(form, "", None) is form


def test_calls_stand_beside_the_form() -> None:
    calls = GrammarSpec("lark", 'start: call\ncall: "c"')
    spec = form_grammar(GrammarSpec("choice", '["a"]'), "", calls)
    assert spec.text.splitlines()[:3] == ["start: called | formed", "called: call", 'call: "c"']


def test_a_schema_is_closed_once_for_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    close = json_rule.close_objects
    monkeypatch.setattr(json_rule, "close_objects", lambda one: closed.append(one) or close(one))
    form = GrammarSpec("json_schema", '{"properties": {"of many prompts": {}}}')
    for _ in range(20):
        spec = form_grammar(form, "ANY_THOUGHT?", None)
        assert '"additionalProperties": false' in spec.text
    assert len(closed) == 1
