"""Grammars compiled with llguidance: what they take, what is refused, and answers that validate."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashdraft.chat.grammar.compiler import (
    MAX_KEPT,
    MAX_TEXT,
    LlguidanceCompiler,
    grammar_compiler,
)
from flashdraft.core import FinishReason, Generation, GrammarSpec, SamplingParams
from flashdraft.errors import RequestError
from flashdraft.llm import LLM
from flashdraft.models.tokenizer import Tokenizer
from tests.tiny import (
    END_OF_TURN,
    VOCAB_SIZE,
    make_byte_fallback_tokenizer,
    make_tiny_checkpoint,
    make_tiny_tokenizer,
)

TINY = Tokenizer(make_tiny_tokenizer())
COMPILE = LlguidanceCompiler(TINY, VOCAB_SIZE, [END_OF_TURN])
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog", None]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
LIST = {
    "type": "array",
    "items": {"anyOf": [{"type": "boolean"}, {"const": "the quick brown fox"}]},
    "minItems": 1,
    "maxItems": 4,
}


def is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "age", "kind"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 130
        and value["kind"] in ("cat", "dog", None)
    )


def is_list(value: Any) -> bool:
    items = (True, False, "the quick brown fox")
    return isinstance(value, list) and 1 <= len(value) <= 4 and all(one in items for one in value)


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def choice(*texts: str) -> GrammarSpec:
    return GrammarSpec("choice", json.dumps(texts))


def takes(spec: GrammarSpec, text: str, compiler: LlguidanceCompiler = COMPILE) -> bool:
    """Whether a text, as the tokenizer cuts it, is a sentence of the grammar."""
    matcher = compiler(spec).start()
    return all(map(matcher.advance, compiler._tokenizer.encode(text))) and matcher.may_end()


# -- what is taken ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec("regex", "[0-9]{3}-(a|é)+"), ["123-aéa", "000-é"], ["12-a", "123-", "123-b"]),
        (GrammarSpec("regex", "(a+)+b"), ["ab", "a" * 50 + "b"], ["b", "a" * 50, "abb"]),
        (choice("yes", "no", 'é日 "q" \\ \n'), ["yes", "no", 'é日 "q" \\ \n'], ["ye", "yesno", ""]),
        (GrammarSpec("json_object"), ["{}", '{"a": [1, {"b": null}]}'], ["[]", '{"a"}', "{", "1"]),
        (
            schema(PERSON),
            ['{"name":"Bo","age":7,"kind":"cat"}', '{ "name": "", "age": 130, "kind": null }'],
            ['{"name":"Bo","age":131,"kind":"cat"}', '{"name":"Bo","age":7}', '{"age":7}'],
        ),
        (schema(LIST), ["[true]", '[false, "the quick brown fox"]'], ["[]", '["the"]', "true"]),
        (schema(True), ["1", "[[]]", '"a"'], ["", "]"]),
        (GrammarSpec("lark", 'start: "f(" /[a-z]+/ ")"'), ["f(abc)"], ["f()", "f(A)", "g(a)"]),
        (
            GrammarSpec("lark", 'start: "call " arguments\narguments: %json {"type": "boolean"}'),
            ["call true"],
            ["call 1", "true"],
        ),
    ],
)
def test_texts_that_match_and_texts_that_do_not(
    spec: GrammarSpec, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not takes(spec, text)] == []
    assert [text for text in bad if takes(spec, text)] == []


@pytest.mark.parametrize("spec", [schema(PERSON), schema(LIST), GrammarSpec("regex", "(ab?)*c")])
def test_masks_are_what_advances_and_going_back_leads_to_the_same_place(spec: GrammarSpec) -> None:
    source, grammar = random.Random(4), COMPILE(spec)
    num_forced = 0
    for _ in range(8):
        matcher = grammar.start()
        masks: list[bytes] = []
        while True:
            masks.append(matcher.allowed())
            allowed = [t for t in range(VOCAB_SIZE) if masks[-1][t // 8] >> t % 8 & 1]
            assert not {0, 1, 2} & set(allowed), "special tokens are no text"
            forced = matcher.forced()[:1]
            assert not forced or allowed == forced, "what is forced is the only choice"
            num_forced += bool(forced)
            for token in source.sample(range(VOCAB_SIZE), 40):
                advanced = matcher.advance(token)
                assert advanced == (token in allowed) or (forced and advanced)
                if advanced:
                    matcher.rollback(1)
            if not allowed or len(masks) == 40:
                assert matcher.is_complete() == (not allowed)
                break
            assert not matcher.is_complete()
            assert matcher.advance(source.choice(allowed))
        while masks:
            assert matcher.allowed() == masks.pop()
            if masks:
                matcher.rollback(1)
    assert num_forced > 8 or spec.kind == "regex"


def test_forced_tokens_are_the_tokenizers_own_and_may_come() -> None:
    matcher = COMPILE(choice("the quick brown fox", "the quick brown dog")).start()
    forced = matcher.forced()
    assert TINY.encode("the quick brown fox")[: len(forced)] == forced and len(forced) > 3
    assert all(map(matcher.advance, forced))
    assert matcher.forced() == []


@pytest.mark.parametrize(
    "spec",
    [
        choice("<|im_start|>"),
        GrammarSpec("regex", r"<\|im_start\|>"),
        GrammarSpec("lark", 'start: "<|im_start" "|>"'),
    ],
)
def test_text_that_looks_like_a_special_token_is_text(spec: GrammarSpec) -> None:
    matcher = COMPILE(spec).start()
    assert not matcher.advance(1)
    forced = matcher.forced()
    assert TINY.decode(forced) == "<|im_start|>" and 1 not in forced
    assert all(map(matcher.advance, forced)) and matcher.is_complete()
    named = COMPILE(GrammarSpec("lark", 'start: "a" <[1]> "b"')).start()
    a, b = TINY.encode("ab")
    assert named.forced() == [a, 1, b]


@pytest.mark.parametrize("text", ["ab é🙂", "日本"])
def test_a_tokenizer_with_byte_tokens(text: str) -> None:
    tokenizer = Tokenizer(make_byte_fallback_tokenizer())
    compiler = LlguidanceCompiler(tokenizer, tokenizer.vocab_size + 21, [2])
    matcher = compiler(choice(text, "x")).start()
    spelled = [index for letter in text for index in _spell(tokenizer, letter)]
    assert all(map(matcher.advance, spelled)) and matcher.is_complete()
    assert tokenizer.decode(spelled) == text


def _spell(tokenizer: Tokenizer, letter: str) -> list[int]:
    whole = tokenizer.token_id("▁" if letter == " " else letter)
    pieces = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in letter.encode()]
    return [whole] if whole is not None else [one for one in pieces if one is not None]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec("regex", "[0-9"), "unclosed character class"),
        (GrammarSpec("regex", "(?=x)a"), "look-around"),
        (GrammarSpec("regex", r"(.)\1"), "backreferences"),
        (GrammarSpec("lark", "start: nothing"), 'unknown name: "nothing"'),
        (GrammarSpec("lark", "start: start"), "regex|NoExtension|matches no text"),
        (schema({"type": "nope"}), "Invalid type: nope"),
        (schema({"$ref": "#/$defs/x"}), "does not exist"),
        (schema({"$ref": "http://localhost/x.json"}), "retriev"),
        (schema({"not": {"type": "string"}}), "Unimplemented"),
        (schema({"type": "string", "pattern": "(?!x)"}), "look-around"),
        (schema([1]), "must be an object"),
        (schema("a"), "must be an object"),
        (GrammarSpec("json_schema", "{"), "no JSON"),
        (GrammarSpec("json_schema", "[" * 100_000), "no JSON"),
        (GrammarSpec("json_schema", '{"a":' * 65 + "{}" + "}" * 65), "more than 64 levels"),
        (GrammarSpec("regex", "a" * (MAX_TEXT + 1)), "Make it shorter"),
        (GrammarSpec("choice", "[]"), "0 entries"),
        (GrammarSpec("choice", '["a", 1]'), "non-empty strings"),
        (GrammarSpec("choice", '[""]'), "non-empty strings"),
        (GrammarSpec("choice", '"a"'), "non-empty strings"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason(
    spec: GrammarSpec, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        COMPILE(spec)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "((((a{100}){100}){100}){100}){100}"),
        GrammarSpec("regex", "(a?){5000}a{5000}"),
        GrammarSpec("regex", "(" * 200 + "a" + ")*" * 200),
        schema({"type": "array", "minItems": 10**6, "items": {"type": "integer"}}),
        schema({"anyOf": [{"enum": [f"{i}{j}" for j in range(40)]} for i in range(40)]}),
        GrammarSpec("json_schema", '{"type":"object","properties":{"a":' * 31 + "{}" + "}}" * 31),
        GrammarSpec("lark", "start: start start | /a*/ | /[ab]*/"),
    ],
)
def test_no_grammar_holds_the_engine_up(spec: GrammarSpec) -> None:
    begin = time.perf_counter()
    try:
        matcher = COMPILE(spec).start()
        for token in [*matcher.forced()[:3], *TINY.encode("aaaa")]:
            if matcher.advance(token):
                matcher.allowed()
    except Exception as error:
        assert "grammar" in str(error) or type(error).__name__ == "GrammarError"
    assert time.perf_counter() - begin < 5.0  # much less, but the machine may be busy


def test_the_last_grammars_are_kept() -> None:
    compiler = LlguidanceCompiler(TINY, VOCAB_SIZE, [])
    first = compiler(choice("a"))
    assert compiler(choice("a")) is first
    for index in range(MAX_KEPT):
        compiler(choice(f"b{index}"))
    assert compiler(choice("a")) is not first


# -- answers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gemma4"])
def models_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LLM, LLM]:
    """The same tiny random target, plain and drafting."""
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param)
    plain = LLM(folder, draft=None, dtype="float32", device="cpu", cache_gb=0.05)
    return plain, LLM(folder, draft="ngram", verify=7, dtype="float32", device="cpu", cache_gb=0.05)


def answers(llm: LLM, spec: GrammarSpec, count: int) -> list[Generation]:
    prompts = [f"the fox {index}" for index in range(count)]
    params = [
        SamplingParams(
            max_tokens=300,
            temperature=1.2 * (index % 4 > 0),
            top_p=0.9 if index % 4 == 2 else 1.0,
            repetition_penalty=1.2 if index % 4 == 3 else 1.0,
            seed=index,
        )
        for index in range(count)
    ]
    return llm.generate(prompts, params, spec)


@pytest.mark.parametrize(
    ("value", "holds"), [(PERSON, is_person), (LIST, is_list)], ids=["person", "list"]
)
def test_answers_of_random_models_validate_drafted_and_plain(
    models_of: tuple[LLM, LLM], value: Any, holds: Callable[[Any], bool]
) -> None:
    plain, drafted = (answers(llm, schema(value), 16) for llm in models_of)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]
    for one in plain:
        assert one.finish_reason is FinishReason.STOP, one
        assert holds(json.loads(one.text)), one.text
    assert len({one.text for one in plain}) > 5
    assert sum(one.stats.accepted for one in drafted) > 40
    assert all(one.stats.drafted == 0 for one in plain)


def test_other_grammars_and_all_three_ways_to_ask(models_of: tuple[LLM, LLM]) -> None:
    llm = models_of[1]
    llm.prepare_grammars()
    pattern = "(the|fox|é){2,4}!"
    for one in answers(llm, GrammarSpec("regex", pattern), 8):
        assert re.fullmatch(pattern, one.text)
    spec = choice("cat", "dog", "日本")
    messages = [{"role": "user", "content": "which?"}]
    assert llm.chat(messages, grammar=spec).text in ("cat", "dog", "日本")
    events = list(llm.stream(messages, grammar=spec))
    assert "".join(event.text for event in events) in ("cat", "dog", "日本")
    free = llm.generate("fox", SamplingParams(max_tokens=30), GrammarSpec("json_object"))[0]
    assert free.text.startswith("{")


def test_a_bad_grammar_is_refused_and_costs_nobody_anything(models_of: tuple[LLM, LLM]) -> None:
    llm = models_of[0]
    with pytest.raises(RequestError, match="unclosed"):
        llm.generate(["a", "b"], grammar=GrammarSpec("regex", "[a"))
    assert not llm.engine.has_work


def test_without_llguidance_there_is_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llguidance" else find(name)
    )
    assert grammar_compiler(TINY, VOCAB_SIZE, [2]) is None
    folder = make_tiny_checkpoint(tmp_path)
    llm = LLM(folder, draft=None, dtype="float32", device="cpu", cache_gb=0.05)
    with pytest.raises(RequestError, match=r'pip install "flashdraft\[serve\]"'):
        llm.generate("a", grammar=choice("b"))
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].token_ids
    (folder / "tokenizer.json").unlink()
    mute = LLM(folder, draft=None, dtype="float32", device="cpu", cache_gb=0.05)
    with pytest.raises(RequestError, match="no tokenizer"):
        mute.generate([[5, 6]], grammar=choice("b"))


@pytest.mark.weights
def test_the_default_pair_answers_in_json_drafted_and_plain() -> None:
    prompt = [{"role": "user", "content": "Invent a person, as JSON with name, age and kind."}]
    drafted, plain = LLM(max_batch=4, cache_gb=0.2), LLM(draft=None, max_batch=4, cache_gb=0.2)
    ids = drafted.chat_prompt(prompt)
    params = [SamplingParams(max_tokens=80, temperature=0.5 * i, seed=i) for i in range(4)]
    ours = drafted.generate([ids] * 4, params, schema(PERSON))
    theirs = plain.generate([ids] * 4, params, schema(PERSON))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    assert all(is_person(json.loads(one.text)) for one in ours), [one.text for one in ours]
