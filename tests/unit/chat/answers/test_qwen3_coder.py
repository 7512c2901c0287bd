"""Calls in Qwen3-Coder's tags, well-formed and not, cut in every possible way."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from flashdraft.chat.answer_format import AnswerFormat
from flashdraft.chat.answers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from flashdraft.chat.templates import render_chat
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.answer_corpus import called
from tests.unit.chat.chat_factory import CHATML_MARKS, HERMES_MARKS, byte_tokenizer, pieces_of, tool
from tests.unit.chat.test_answer_format import atoms, canonical, check_calls, cuts, glue, parse

TEMPLATE = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls %}
<tool_call>
<function={{ c.function.name }}>
{%- for key, value in c.function.arguments | items %}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}"""
PLAIN = byte_tokenizer(CHATML_MARKS, HERMES_MARKS, TEMPLATE)  # as Qwen has it
SPECIAL = byte_tokenizer(CHATML_MARKS + HERMES_MARKS, [], TEMPLATE)
TEXT = byte_tokenizer(CHATML_MARKS, [], TEMPLATE + "{# <think></think> #}")
FAMILIES = {"plain": PLAIN, "special": SPECIAL, "text": TEXT}
TOOLS = [
    tool(
        "put",
        {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "maybe": {"type": ["string", "null"]},
            "size": {"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]},
            "many": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"$ref": "#/$defs/place"},
            "free": {},
        },
        **{"$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}}},
    ),
    tool("now"),
]


def call(name: str, *parameters: tuple[str, str]) -> str:
    """As templates write it."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def put(**parameters: str) -> str:
    return call("put", *parameters.items())


CUT = "<tool_call>\n<function=put>\n<parameter=text>\n"
ANSWERS: list[tuple[str, list[Delta]]] = [
    ("Hello <b>, <function, </parameter>", [Content("Hello <b>, <function, </parameter>")]),
    (call("now"), called(0, "now")),
    ("<tool_call>\n<function=now></function></tool_call>", called(0, "now")),
    (put(text="Łódź 🙂"), called(0, "put", text="Łódź 🙂")),
    (put(text=""), called(0, "put", text="")),
    ("<tool_call><function=put><parameter=text></parameter></function></tool_call>",
     called(0, "put", text="")),
    ("<tool_call><function=put><parameter=text>a b</parameter><parameter=count>2</parameter>"
     "</function></tool_call>", called(0, "put", text="a b", count=2)),
    # one newline on each side is the format's, more are the value's
    (put(text="\n a\n\n"), called(0, "put", text="\n a\n\n")),
    (f"<think>\nHm.\n</think>\n\nI look.\n{call('now')}\n{put(text='x')}\n",
     [Reasoning("Hm."), Content("I look.\n"), *called(0, "now"), *called(1, "put", text="x")]),
    # types by the schema
    (put(count="2", ratio="-1.5e3", flag="True"),
     called(0, "put", count=2, ratio=-1500.0, flag=True)),
    (put(count="3.0", ratio=".5", flag="false"), called(0, "put", count=3, ratio=0.5, flag=False)),
    (put(count="None", flag="maybe"), called(0, "put", count=None, flag="maybe")),
    (put(text="3", free="3"), called(0, "put", text="3", free="3")),
    (put(text='{"a": 1}', free='["b"]'), called(0, "put", text='{"a": 1}', free='["b"]')),
    (put(text="null", maybe="null"), called(0, "put", text="null", maybe=None)),
    (put(maybe="nullify"), called(0, "put", maybe="nullify")),
    (put(maybe="nul"), called(0, "put", maybe="nul")),
    (put(maybe=""), called(0, "put", maybe="")),
    (put(size="auto"), called(0, "put", size="auto")),
    (put(size="12"), called(0, "put", size=12)),
    (put(size="12 px"), called(0, "put", size="12 px")),
    (put(size="1.5"), called(0, "put", size="1.5")),
    (put(many="some"), called(0, "put", many="some")),
    (put(many='["a", "</parameter>"]'), called(0, "put", many=["a", "</parameter>"])),
    (put(many="[draft] a"), called(0, "put", many="[draft] a")),
    (put(tags='["a", "b\\n<c>"]', place='{"x": "1"}'),
     called(0, "put", tags=["a", "b\n<c>"], place={"x": 1})),
    (put(tags='\n[\n  "a",\n  1\n]\n'), called(0, "put", tags=["a", "1"])),
    (put(tags="a, b", place="here"), called(0, "put", tags="a, b", place="here")),
    (put(tags='["a"', place='{"x": True'), called(0, "put", tags=["a"], place={"x": True})),
    (call("other", ("a", "1"), ("b", "[]")), called(0, "other", a="1", b="[]")),
    # what looks like a tag inside of a value
    (put(text="a < b </p> <parameter> <parameter=x> </"),
     called(0, "put", text="a < b </p> <parameter> <parameter=x> </")),
    (put(text="<p>\n  </parameter>\n</p>", count="1"),
     called(0, "put", text="<p>\n  </parameter>\n</p>", count=1)),
    (put(text="</parameter></parameter>x"), called(0, "put", text="</parameter></parameter>x")),
    (put(text="a\n</function>\nb"), called(0, "put", text="a\n</function>\nb")),
    (put(text="a\n</function>"), called(0, "put", text="a\n</function>")),
    (put(text='"\\n{}'), called(0, "put", text='"\\n{}')),
    (put(tags='["</parameter><parameter=text>"]'),
     called(0, "put", tags=["</parameter><parameter=text>"])),
    # the mark is missing
    ("I look.\n\n<function=put>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>\nSo",
     [Content("I look.\n\n"), *called(0, "put", text="x"), Content("So")]),
    ("<function=now>\n</function>", called(0, "now")),
    ("<tool_call><function=now></function>\n<function=now></function></tool_call>",
     [*called(0, "now"), *called(1, "now")]),
    ("Use <function=now> and <function=other></function>.",
     [Content("Use <function=now> and <function=other></function>.")]),
    # end tags are missing
    ("<tool_call>\n<function=put>\n<parameter=text>\na\n<parameter=count>\n2\n</function>\n"
     "</tool_call>x", [*called(0, "put", text="a", count=2), Content("x")]),
    (CUT + "a\n</parameter>\n</tool_call>x", [*called(0, "put", text="a"), Content("x")]),
    (CUT + "a\n</parameter>\n<tool_call>\n<function=now></function></tool_call>",
     [*called(0, "put", text="a"), *called(1, "now")]),
    (CUT + "a\n</tool_call>", called(0, "put", text="a")),
    (CUT + "a\n</function>", called(0, "put", text="a")),
    ("<tool_call>\n<function=now>\n</tool_call>", called(0, "now")),
    ("<tool_call>\n<function=put\n<parameter=text\na\n</parameter></function>",
     called(0, "put", text="a")),
    # cut off
    (CUT + "a\n</param", called(0, "put", text="a")),
    (CUT + "a\n</parameter>\n", called(0, "put", text="a")),
    (CUT + "a\n</parameter>\n<parameter=cou", called(0, "put", text="a")),
    ("<tool_call>\n<function=put>\n<parameter=tags>\n[\"a", called(0, "put", tags=["a"])),
    # twice
    (call("put", ("text", "a"), ("text", "b"), ("count", "1")),
     called(0, "put", text="a", count=1)),
    # hopeless: given back as it was written
    ("<tool_call>", [Content("<tool_call>")]),
    ("<tool_call>\n<function=now>", [Content("<tool_call>\n<function=now>")]),
    ("<tool_call>\n<function=>\n</function>\n</tool_call>",
     [Content("<tool_call>\n<function=>\n</function>\n</tool_call>")]),
    ("<tool_call>\n<function=a b></function></tool_call>",
     [Content("<tool_call>\n<function=a b></function></tool_call>")]),
    ('<tool_call>\n{"name": "now"}\n</tool_call>',
     [Content('<tool_call>\n{"name": "now"}\n</tool_call>')]),
    ("<tool_call>\n<function=" + "x" * 300 + ">\n",
     [Content("<tool_call>\n<function=" + "x" * 300 + ">\n")]),
]  # fmt: skip
TEXT_ANSWERS: list[tuple[str, list[Delta]]] = [  # where marks are text
    (put(text="a <tool_call> </tool_call> b\n</tool_call>\nc"),
     called(0, "put", text="a <tool_call> </tool_call> b\n</tool_call>\nc")),
    ("<think>a <function=now></function></think>b",
     [Reasoning("a <function=now></function>"), Content("b")]),
]  # fmt: skip
SPECIAL_ANSWERS: list[tuple[str, list[Delta]]] = [
    (CUT + "a\n</tool_call>x", [*called(0, "put", text="a"), Content("x")]),
]
CASES = [
    (family, answer, deltas)
    for family in FAMILIES
    for answer, deltas in ANSWERS + (SPECIAL_ANSWERS if family == "special" else TEXT_ANSWERS)
]


@pytest.mark.parametrize(("family", "answer", "deltas"), CASES)
def test_answers_however_they_are_cut(family: str, answer: str, deltas: list[Delta]) -> None:
    tokenizer = FAMILIES[family]
    pieces = pieces_of(tokenizer, answer)
    whole = parse(tokenizer, [pieces], TOOLS)
    check_calls(whole)
    assert canonical(whole) == canonical(deltas)
    every = list(cuts(pieces, random.Random(answer)))
    for pushes in every if family == "plain" else every[-5:]:
        assert parse(tokenizer, pushes, TOOLS) == whole, pushes


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "put>", "now>",
    "</function>", "<parameter=", "text>", "tags>", "many>", "maybe>", "size>", "</parameter>",
    "\n", "\n", " ", "<", "</", "<param", "nu", "null", "12", "True", "[", '"', "\\", "]", "{", "}",
    "x", "é🙂", ">", "=",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_no_answer_is_too_strange(family: str) -> None:
    """Random rubble: nothing raises, calls are well-formed, and cuts do not matter."""
    tokenizer, generator = FAMILIES[family], random.Random(family)
    num_calls = 0
    for _ in range(200):
        parts = generator.choices(FRAGMENTS, k=generator.randrange(1, 30))
        if generator.random() < 0.7:
            name = generator.choice(["text", "tags", "many", "maybe", "size", "count"])
            head = f"<function=put>\n<parameter={name}>\n"
            parts.insert(generator.randrange(len(parts)), head)
        tools = TOOLS if generator.random() < 0.9 else None
        pieces = pieces_of(tokenizer, "".join(parts))
        whole = parse(tokenizer, [pieces], tools)
        check_calls(whole)
        for delta in whole:
            if isinstance(delta, ToolCallArguments):
                pairs = json.loads(delta.text, object_pairs_hook=list)
                assert len({key for key, _ in pairs}) == len(pairs)
        num_calls += sum(isinstance(delta, ToolCallBegin) for delta in whole)
        parts_of = atoms(pieces)
        middle = generator.randrange(len(parts_of) + 1)
        halves = [glue(parts_of[:middle]), glue(parts_of[middle:])]
        for pushes in ([[part] for part in parts_of], halves):
            assert parse(tokenizer, pushes, tools) == whole, parts
    assert num_calls > 50


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<parameter=te", "{"),
        ("<parameter=text>", '{"text": "'),
        ("<parameter=text>\nNew <", '{"text": "New '),
        ("<parameter=text>\nNew <b\n", '{"text": "New <b'),
        ("<parameter=text>\nNew\n</paramet", '{"text": "New'),
        ("<parameter=text>\nNew\n</parameter>\n", '{"text": "New'),
        ("<parameter=text>\nNew\n</parameter>\n</function>", '{"text": "New"}'),
        ("<parameter=count>\n12", "{"),
        ('<parameter=tags>\n["ab', '{"tags": ["ab'),
        ("<parameter=maybe>\nnul", "{"),
        ("<parameter=maybe>\nnulx", '{"maybe": "nulx'),
        ("<parameter=many>\n[", "{"),
        ("<parameter=many>\nx", '{"many": "x'),
    ],
)
def test_arguments_stream(text: str, shown: str) -> None:
    parser = AnswerFormat.of(PLAIN).parser((), TOOLS)
    deltas = parser.push(["<tool_call>\n<function=put>\n" + text])
    assert "".join(d.text for d in deltas if isinstance(d, ToolCallArguments)) == shown


@pytest.mark.parametrize("tokenizer", FAMILIES.values(), ids=FAMILIES)
def test_without_tools_a_call_is_content(tokenizer: Tokenizer) -> None:
    for text in (put(text="x"), "<function=now></function>"):
        assert parse(tokenizer, [pieces_of(tokenizer, text)], None) == [Content(text)]


def test_what_a_template_writes_is_read_back() -> None:
    """Past calls reach the template as objects, whether they came as such or as text."""
    arguments = {
        "text": '\n"Łódź" <parameter> {x}\n\t</function>\n',
        "count": 2,
        "flag": False,
        "maybe": None,
        "tags": ["a", "\n</parameter>\n"],
        "place": {"x": 1.5},
    }
    for given in (arguments, json.dumps(arguments)):
        function: dict[str, Any] = {"name": "put", "arguments": given}
        said = {"role": "assistant", "content": "Well.", "tool_calls": [{"function": function}]}
        whole = render_chat(PLAIN, [{"role": "user", "content": "Hi"}, said])
        answer = whole.split("assistant\n")[1].removesuffix("<|im_end|>\n")
        (content, *rest) = parse(PLAIN, [pieces_of(PLAIN, answer)], TOOLS)
        assert content == Content("Well.")
        assert canonical(rest) == canonical(called(0, "put", **arguments))


@pytest.mark.parametrize(
    "value",
    [
        "x" * 1_000_000,
        "\n" * 50_000,
        "<" * 50_000,
        "</parameter>" * 4_000,
        "</parameter> \n" * 4_000,
        "</parameter>" + " " * 50_000 + "x",
        "<parameter=" * 4_000,
        "</tool_call>\n" * 4_000 + "x",
        "[" * 50_000,
        "1" * 100_000,
    ],
    ids=lambda value: repr(value[:14]),
)
@pytest.mark.parametrize("key", ["text", "many", "tags", "size"])
def test_long_values_take_linear_time(key: str, value: str) -> None:
    begin = time.monotonic()
    deltas = parse(PLAIN, [[CUT.replace("text", key) + value]], TOOLS)
    check_calls(deltas)
    parser = AnswerFormat.of(PLAIN).parser((), TOOLS)
    parser.push([CUT.replace("text", key)])
    for place in range(0, len(value), 16):
        parser.push([value[place : place + 16]])
    parser.finish()
    assert time.monotonic() - begin < 5  # a second at most; the square would take minutes


def test_deep_nesting_is_closed() -> None:
    check_calls(parse(PLAIN, [[put(place='{"a": ' * 10_000)]], TOOLS))
    check_calls(parse(PLAIN, [[put(many="[" * 10_000)]], TOOLS))
