"""A Generation to look at: in a terminal and in a notebook; its parts, and its JSON."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

from flashdraft import LLM, Generation, GrammarSpec, SamplingParams, ToolCall
from flashdraft.core import ChatParts, FinishReason, GenerationStats
from flashdraft.errors import RequestError
from flashdraft.markup import answer_html
from tests.tiny import make_tiny_checkpoint

EVIL = (
    '<script>alert(1)</script><img src=x onerror="x()">&lt;b&gt; \'"` $x^2$ <!-- </div></span> '
    "\x1b[31m\x00\u202eabc\u2066"
)


def generation(text: str, **parts: Any) -> Generation:
    settings: dict[str, Any] = {"finish_reason": FinishReason.STOP, "stats": GenerationStats()}
    return Generation(text, list(range(len(text))), **{**settings, **parts})


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_comment(self, data: str) -> None:
        self.tags.append("comment")

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "qwen3")
    return LLM(folder, device="cpu", dtype="float32", cache_gb=0.01, draft="ngram", verify=4)


# -- in a terminal ---------------------------------------------------------------------------------


def test_a_repr_is_short_and_says_what_matters() -> None:
    stats = GenerationStats(steps=4, decode_tokens=10, decode_s=0.5)
    shown = repr(generation("a\nb" * 100, stats=stats))
    assert shown.startswith(r"Generation('a\nba\nb") and shown.count("…") == 1
    assert shown.endswith("…', stop, 300 tokens, 2.50 a step, 20 tok/s)") and len(shown) < 160
    assert repr(generation("x")) == "Generation('x', stop, 1 token)"
    failed = generation("", finish_reason=FinishReason.ERROR, error="Out of memory.")
    assert repr(failed) == "Generation('', error: Out of memory., 0 tokens)"
    calling = generation("x", parts=ChatParts("", "", (ToolCall("look", "{}"),)))
    assert repr(calling) == "Generation('x', stop, 1 token, calls look)"
    several = generation("x", others=[generation("y"), generation("z")])
    assert repr(several) == "Generation('x', stop, 1 token, and 2 others)"


# -- in a notebook ---------------------------------------------------------------------------------


def test_a_models_text_never_becomes_markup() -> None:
    evil = generation(EVIL, error=EVIL, others=[generation(EVIL)])
    evil.drafted, evil.text_ends = [True, False], [9, len(EVIL)]
    evil.parts = ChatParts(EVIL, EVIL, (ToolCall(EVIL, EVIL),))
    page = Page(evil._repr_html_())
    assert set(page.tags) == {"div", "span"}
    assert "<script>alert(1)</script>" in page.text and "&lt;b&gt;" in page.text
    for character in "\x1b\x00\u202e\u2066":
        assert character not in page.text
    assert "tex2jax_ignore" in evil._repr_html_(), "dollars are no formulas"


def test_drafted_tokens_are_coloured_and_the_text_is_whole(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (found,) = llm.generate("the dog the dog the dog the dog", params)
    assert any(found.drafted) and not all(found.drafted)
    assert "".join(text for text, _ in found.pieces) == found.text
    assert {drafted for _, drafted in found.pieces} == {True, False}
    shown = found._repr_html_()
    assert shown.count("<span") == len(found.pieces) + 2, "each piece, and the legend"
    assert f"{found.stats.mean_accepted_length:.2f} a step" in Page(shown).text


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}, {"stop": "e"}])
def test_pieces_join_to_the_text(llm: LLM, params: dict[str, Any]) -> None:
    for found in llm.generate(
        ["the dog the dog", "é日本 é日本 é日本"], SamplingParams(max_tokens=30, **params)
    ):
        assert "".join(text for text, _ in found.pieces) == found.text
        assert all(text for text, _ in found.pieces)


def test_an_answer_of_which_nothing_is_known_has_no_colours() -> None:
    assert generation("").pieces == [] and generation("abc").pieces == [("abc", None)]
    assert "span" not in Page(generation("abc")._repr_html_()).tags
    assert Page(answer_html([("a\n\tb", None)], "x")).text == "a\n\tbx"


# -- parts and JSON --------------------------------------------------------------------------------


def test_an_answer_without_parts_is_all_content() -> None:
    plain = generation("abc")
    assert (plain.content, plain.reasoning, plain.calls) == ("abc", "", ())
    whole = generation("xyz", parts=ChatParts("z", "x", (ToolCall("f", '{"a": 1}'),)))
    assert (whole.content, whole.reasoning, whole.text) == ("z", "x", "xyz")
    assert whole.calls[0].arguments == {"a": 1}
    with pytest.raises(RequestError, match="arguments of f cannot be read.*text has them"):
        _ = ToolCall("f", "{").arguments


def test_parsed_answers() -> None:
    assert generation('{"a": [1, 2.5, null]}').parsed() == {"a": [1, 2.5, None]}
    thinking = generation("hm[1]", parts=ChatParts("[1]", "hm", ()))
    assert thinking.parsed() == [1]
    cut = generation('{"a', finish_reason=FinishReason.LENGTH)
    with pytest.raises(RequestError, match="it was cut, raise max_tokens"):
        cut.parsed()
    with pytest.raises(RequestError, match=r"is no JSON.*ask with GrammarSpec.json"):
        generation("[" * 100_000).parsed()
    with pytest.raises(RequestError, match="takes a class with model_validate_json"):
        generation("1").parsed(dict)


def test_pydantic_classes_make_grammars_and_read_answers(llm: LLM) -> None:
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")
    person = pydantic.create_model(
        "Person", name=(str, ...), age=(int, pydantic.Field(ge=0, lt=99))
    )
    params = SamplingParams(max_tokens=400, temperature=1.0, seed=2)
    (found,) = llm.generate("the fox", params, GrammarSpec.json(person))
    read = found.parsed(person)
    assert isinstance(read, person) and json.loads(found.text).keys() == {"name", "age"}


def test_grammars_are_made_by_name() -> None:
    assert GrammarSpec.json() == GrammarSpec("json_object")
    schema = {"type": "object", "properties": {"é": {"const": 1}}}
    assert GrammarSpec.json(schema) == GrammarSpec("json_schema", json.dumps(schema))
    assert GrammarSpec.json('{"type": "null"}') == GrammarSpec("json_schema", '{"type": "null"}')
    assert GrammarSpec.json(True).text == "true"
    like_pydantic = SimpleNamespace(model_json_schema=lambda: {"type": "integer"})
    assert GrammarSpec.json(like_pydantic).text == '{"type": "integer"}'
    assert GrammarSpec.regex("a+") == GrammarSpec("regex", "a+")
    assert GrammarSpec.choice(("a", 'b"')) == GrammarSpec("choice", json.dumps(["a", 'b"']))
    assert GrammarSpec.lark('start: "a"').kind == "lark"


LOOP: dict[str, Any] = {}
LOOP["items"] = LOOP


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrammarSpec.json(5), "schema is 5; it must be a mapping"),
        (lambda: GrammarSpec.json(dict), "schema is <class 'dict'>; it must be"),
        (lambda: GrammarSpec.json({"const": float("nan")}), "cannot be written as JSON"),
        (lambda: GrammarSpec.json({"const": object()}), "cannot be written as JSON"),
        (lambda: GrammarSpec.json(LOOP), "cannot be written as JSON"),
        (lambda: GrammarSpec.json(""), "must not be empty"),
        (lambda: GrammarSpec.choice("ab"), "choices is 'ab'; it must be a list"),
        (lambda: GrammarSpec.choice(["a", ""]), "non-empty strings"),
        (lambda: GrammarSpec.choice(["a", 1]), "non-empty strings"),
        (lambda: GrammarSpec.regex(""), "must not be empty"),
        (lambda: GrammarSpec.regex(5), "must be a string"),
        (lambda: GrammarSpec.lark(None), "must be a string"),
    ],
)
def test_bad_forms_are_refused_where_they_are_made(make: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make()


def test_objects_end_after_what_they_declare_as_in_the_server(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    params = SamplingParams(max_tokens=60, temperature=2.0, seed=1, n=4)
    (found,) = llm.generate("x", params, GrammarSpec.json(schema))
    assert all(one.parsed().keys() == {"a"} for one in (found, *found.others))


def test_a_grammar_of_another_kind_is_refused_with_its_remedy(llm: LLM) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=r"None or a GrammarSpec, as GrammarSpec.json"):
            list(call("x", grammar={"type": "object"}))
    with pytest.raises(RequestError, match="None or a GrammarSpec"):
        llm.chat([{"role": "user", "content": "x"}], grammar={"type": "object"})
