"""How Llama 3.1 and later write a call, as a grammar: `{"name": …, "parameters": {…}}`.

There is one call at most, whatever the request allows: the models' own template refuses a message
with several, so the conversation could not go on. There are no thoughts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flashdraft.chat.answers.llama3 import PYTHON_TAG
from flashdraft.chat.grammar.hermes import arguments_rules
from flashdraft.chat.grammar.tools import NO_BARE_CALL
from flashdraft.chat.schema.rules import lark_text
from flashdraft.models.tokenizer import Tokenizer


class Llama3CallGrammar:
    """A `CallGrammar` of one bare object."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tag = f"<[{tokenizer.token_id(PYTHON_TAG)}]>"

    def text(
        self,
        functions: Mapping[str, Any],
        *,
        is_free: bool,
        parallel: bool,
        is_open: bool,
        thinking: bool,
    ) -> str:
        rules, lines = arguments_rules(functions)
        start = f"{self._tag}? call | /{NO_BARE_CALL}/?" if is_free else "call"
        # piece by piece, as a form in JSON is: of one long piece beside such a form, llguidance
        # would expect the rest as soon as its first character is there
        gap, colon = lark_text(", "), lark_text(": ")
        named = " | ".join(
            f"{_quoted(name)} {gap} {_quoted('parameters')} {colon} {rule}"
            for name, rule in rules.items()
        )
        call = f'call: "{{" {_quoted("name")} {colon} ({named}) "}}"'
        return "\n".join([f"start: {start}", call, *lines])


def _quoted(text: str) -> str:
    """A JSON string as a Lark one."""
    return lark_text(json.dumps(text, ensure_ascii=False))
