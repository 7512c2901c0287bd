"""Compiles what an answer must match (JSON by schema, regex, choice, Lark) with llguidance.

llguidance is optional: without it `grammar_compiler` is None and requests with a grammar are
refused. It matches in linear time and without backtracking; size, depth and the work of a step are
limited here, so that no grammar can hold up the engine.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.chat.grammar.matcher import LlguidanceGrammar
from flashdraft.chat.schema.json_rule import FREE, SCHEMA_MARK, JsonGrammar
from flashdraft.chat.schema.reading import is_deeper_than, multiples
from flashdraft.chat.schema.rules import lark_text
from flashdraft.core import GrammarSpec
from flashdraft.engine.sampling.grammar import (
    TOO_COMPLEX,
    Grammar,
    GrammarError,
    GrammarTooComplexError,
)
from flashdraft.errors import RequestError, quoted
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.text.exact_json import read

MAX_TEXT = 512 * 1024  # characters of a grammar
MAX_DEPTH = 64  # of a schema
MAX_CHOICES = 4096
MAX_MULTIPLE = 10_000  # the least common one of a schema's multipleOf: so many states it has
MAX_KEPT = 32  # compiled grammars: requests often come with the same one

# They bound the work that a grammar may cause: at worst some 500 ms at first, and 50 ms per mask.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_BEYOND_LIMITS = re.compile(
    r"too (?:big|large|many|complex)|exhausted|max is|fuel|[Uu]nable to determine"
)
_RAISE_A_LIMIT = re.compile(r"increase|[Uu]nable to determine")
_NOTHING_MATCHES = "NoExtensionBias"  # llguidance's word for a first token that cannot be


def grammar_compiler(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> LlguidanceCompiler | None:
    """A compiler for a model's grammars, or None where llguidance is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        return None
    return LlguidanceCompiler(tokenizer, vocab_size, eos_token_ids)


class LlguidanceCompiler:
    """Compiles grammars over one tokenizer; the last ones are kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_token_ids)
        self._made: Any = None  # llguidance's own tokenizer
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._lock = threading.Lock()  # of _kept: a server compiles in a thread

    def __call__(self, spec: GrammarSpec) -> Grammar:
        """Compile a grammar. Raises RequestError, with the reason, if it cannot be."""
        with self._lock:
            grammar = self._kept.pop(spec, None)
        if grammar is None:
            grammar = self._compile(spec)
        with self._lock:
            self._kept[spec] = grammar
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _compile(self, spec: GrammarSpec) -> Grammar:
        import llguidance

        if len(spec.text) > MAX_TEXT:
            raise RequestError(
                f"The {spec.kind} grammar has {len(spec.text)} characters; at most {MAX_TEXT} are "
                "taken. Make it shorter."
            )
        try:
            tokenizer = self._llguidance_tokenizer()
            limits = llguidance.LLParserLimits(**_LIMITS)
            make = functools.partial(
                llguidance.LLMatcher, tokenizer, _source(spec), log_level=0, limits=limits
            )
            grammar = LlguidanceGrammar(make, tokenizer.eos_tokens)
            first = grammar.start()
            mask = first.allowed()
            if not any(mask) and not first.may_end():
                raise GrammarError(_NOTHING_MATCHES)
            _try_first_token(grammar, mask)
        except (RequestError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in native code is no Exception
            raise _refusal(spec.kind, str(error)) from None
        return grammar

    def prepare(self) -> None:
        """Do now what the first grammar would have to wait for: some seconds, for a large model."""
        self._llguidance_tokenizer()

    def _llguidance_tokenizer(self) -> Any:
        import llguidance

        if self._made is None:
            self._made = llguidance.LLTokenizer(
                _with_hidden_names(self._tokenizer.to_json()),
                n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=self._eos_ids or None,
            )
        return self._made


def _refusal(kind: str, reason: str) -> RequestError:
    """Why a grammar is not taken, in words for whoever wrote it."""
    if _BEYOND_LIMITS.search(reason):
        # the library advises to raise a limit, or repeats the pattern, which helps no client
        detail = "it takes too much work to match" if _RAISE_A_LIMIT.search(reason) else reason
        return GrammarTooComplexError(f"{TOO_COMPLEX}: {detail}. Repeat less, or split the {kind}.")
    if _NOTHING_MATCHES in reason:
        reason = "it matches no text"
        if kind in ("json_schema", "lark"):
            reason += ": parts exclude each other, or it refers to itself and never ends"
    return RequestError(f"The {kind} grammar cannot be used: {reason}.")


def _try_first_token(grammar: Grammar, mask: bytes) -> None:
    """Take one token: some grammars go beyond the limits only then, and it is better known now."""
    token = next(
        (8 * n + (byte & -byte).bit_length() - 1 for n, byte in enumerate(mask) if byte), 0
    )
    matcher = grammar.start()
    if matcher.advance(token):
        matcher.allowed()


def _with_hidden_names(tokenizer_json: str) -> str:
    """A tokenizer whose special tokens have names that no text spells.

    llguidance cuts a text that must come as the tokenizer would, and that would make a special
    token of one that looks like it. In a Lark grammar a special token goes by its id: <[48]>.
    """
    data = json.loads(tokenizer_json)
    secret = f"\ufdd0{secrets.token_hex(8)}-"
    names = {t["content"]: f"{secret}{t['id']}" for t in data["added_tokens"] if t["special"]}
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = data["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): index for name, index in model["vocab"].items()}
    else:  # pairs of a token and its score
        model["vocab"] = [[names.get(name, name), value] for name, value in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    data["post_processor"] = None  # it would add special tokens by their old names
    return json.dumps(data)


def _source(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own format."""
    import llguidance

    build = llguidance.LLMatcher
    if spec.kind == "regex":
        return build.grammar_from_regex(spec.text)
    if spec.kind == "lark":
        return build.grammar_from_lark(spec.text)
    if spec.kind == "choice":
        return build.grammar_from_lark("start: " + lark_choice(_choices(spec)))
    if spec.kind == "json_object":
        return _json_source({"type": "object"})
    schema = _load(spec)
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise RequestError(f"The JSON schema is {schema!r:.200}; it must be an object.")
    if is_deeper_than(schema, MAX_DEPTH):
        raise RequestError(
            f"The JSON schema is nested more than {MAX_DEPTH} levels deep; make it flatter, "
            "with $defs and $ref if need be."
        )
    check_multiples(schema)
    return _json_source(schema)


def _json_source(schema: Mapping[str, Any]) -> str:
    import llguidance

    grammar = JsonGrammar(FREE)
    body = grammar.body(schema)
    if grammar.lines:
        text = "\n".join([f"start: {body}", *grammar.lines])
        return llguidance.LLMatcher.grammar_from_lark(text)
    # a schema by itself: what llguidance says of it does not speak of a Lark grammar
    return llguidance.LLMatcher.grammar_from_json_schema(body.removeprefix(SCHEMA_MARK))


def check_multiples(schema: Any) -> None:
    """Refuse a schema whose numbers would take too many states, or overflow in llguidance."""
    found = multiples(schema)
    whole = math.lcm(*(one.coefficient for one in found))
    if whole > MAX_MULTIPLE:
        raise GrammarTooComplexError(
            f"{TOO_COMPLEX}: the least common multiple of the schema's multipleOf is "
            f"{quoted(whole)}; at most {MAX_MULTIPLE}."
        )
    decimals = [one.decimals for one in found]
    if len(found) > 1:
        # where two hold for one number, llguidance has their product in 32 bits
        scale = 10 ** (max(decimals) - min(decimals))
        if whole * scale * max(one.coefficient for one in found) >= 2**32:
            raise GrammarTooComplexError(
                f"{TOO_COMPLEX}: the schema's multipleOf have up to {max(decimals)} digits after "
                "the point and are too far from each other; leave the smallest or largest out."
            )


def _choices(spec: GrammarSpec) -> list[str]:
    choices = _load(spec)
    if not isinstance(choices, list) or not all(isinstance(one, str) and one for one in choices):
        raise RequestError(f"choice is {spec.text!r:.200}; it must be a list of non-empty strings.")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise RequestError(f"choice has {len(choices)} entries; it must have 1 to {MAX_CHOICES}.")
    return choices


def lark_choice(texts: Sequence[str]) -> str:
    """One of several texts, as the body of a Lark rule."""
    return " | ".join(map(lark_text, texts))


def _load(spec: GrammarSpec) -> Any:
    try:
        return read(spec.text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The text of the {spec.kind} grammar is no JSON: {error}.") from None
