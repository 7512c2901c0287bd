"""Calls without marks: Llama 3's own, and those of models that were told of marks and forgot."""

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
    ToolCallEnd,
)
from tests.unit.chat.answer_corpus import HERMES_ANSWERS, called
from tests.unit.chat.chat_factory import (
    CHATML_MARKS,
    TOOLS,
    byte_tokenizer,
    pieces_of,
    qwen3_tokenizer,
    tool,
)
from tests.unit.chat.llama3_factory import llama3_tokenizer
from tests.unit.chat.test_answer_format import (
    atoms,
    canonical,
    check_calls,
    cuts,
    glue,
    parse,
    read,
)

LLAMA3 = llama3_tokenizer()
TOLD = byte_tokenizer(CHATML_MARKS, [], "{{ messages }}")
TOLD_THINKER = byte_tokenizer(CHATML_MARKS, [], "{{ messages }}<think></think>")
FAMILIES = {"llama3": LLAMA3, "told": TOLD, "thinker": TOLD_THINKER}
NOW = '{"name": "now", "parameters": {}}'
CITY = '{"name": "get_weather", "arguments": {"city": "Łódź", "days": 3}}'
CALLED_CITY = {"city": "Łódź", "days": 3}


def content(text: str) -> tuple[str, list[Delta]]:
    return text, [Content(text)]


BARE: list[tuple[str, list[Delta]]] = [
    (NOW, called(0, "now")),
    (f" \n\t{CITY}\n", called(0, "get_weather", **CALLED_CITY)),
    ('{"parameters": {"days": "3"}, "name": "get_weather"}', called(0, "get_weather", days="3")),
    ('{"type": "function", "function": "get_weather", "parameters": {"days": "3"}}',
     called(0, "get_weather", days=3)),
    ('{"type":"function","name":"now","parameters":null}', called(0, "now")),
    ('{"function": "now", "parameters": "{\\"a\\": 1}"}', called(0, "now", a=1)),
    ('{"name": "now"}', called(0, "now")),
    ('{\n  "name": "n\\u006fw",\n  "parameters": {\n    "a": [1, {"b": null}]\n  }\n}\n',
     called(0, "now", a=[1, {"b": None}])),
    # several
    (f"{NOW}; {CITY}", [*called(0, "now"), *called(1, "get_weather", **CALLED_CITY)]),
    (f"{NOW}, {NOW}\n{NOW}{NOW}", [one for n in range(4) for one in called(n, "now")]),
    (f"[{CITY}, {NOW}]", [*called(0, "get_weather", **CALLED_CITY), *called(1, "now")]),
    (f" [\n  {NOW},\n  {NOW}\n]\n", [*called(0, "now"), *called(1, "now")]),
    (f"[{NOW}]\n[{NOW}]", [*called(0, "now"), *called(1, "now")]),
    ('[{"name": "now", "arguments": {}, "id": "a1"}]', called(0, "now")),
    # what follows and is no call
    (f"{NOW}\n\nI look at {NOW}.", [*called(0, "now"), Content(f"I look at {NOW}.")]),
    (f'{NOW}\n{{"city": 1}}{NOW}', [*called(0, "now"), Content(f'{{"city": 1}}{NOW}')]),
    (f'{NOW}; {{"name": "other", "parameters": {{}}}}',
     [*called(0, "now"), Content('{"name": "other", "parameters": {}}')]),
    (f"{NOW} [link](x)", [*called(0, "now"), Content("[link](x)")]),
    (f"[{NOW}, 5]", [*called(0, "now"), Content("5]")]),
    # cut off or badly closed: the arguments are closed
    ('{"name": "now", "parameters": {"a": {"b": "x', called(0, "now", a={"b": "x"})),
    ('[{"name": "now", "parameters": {"a": [1,', called(0, "now", a=[1])),
    ('{"name": "now", "parameters": {"a": 1]}', called(0, "now", a=1)),
    ('{"name": "now", "parameters": {"a": 1}, "type": "object", "name": {"x": "y"}, "q": 1} z',
     [*called(0, "now", a=1), Content("z")]),
    ('{"name": "now", "parameters": {a: True, b: x y}}', called(0, "now", a=True, b="x y")),
    # content, as it was written
    ("", []),
    content("Hello {world} " + NOW),
    content(f"Well:\n{NOW}"),
    content("```json\n" + NOW + "\n```"),
    content("  {"),
    content('{"'),
    content("{}"),
    content("[]"),
    content("[1, 2]"),
    content(f"[[{NOW}]]"),
    content('\n\n {"title": "x", "name": "now"}\n'),
    content('{"names": ["now"]}'),
    content('{"nam": 1}'),
    content('{name: "now", "parameters": {}}'),
    content("{'name': 'now', 'parameters': {}}"),
    content('{"name": "other", "parameters": {}}'),
    content('{"name": "now" '),
    content('{"name": "no'),
    content('{"name": "nowhere", "parameters": {}}'),
    content('{"name": " now", "parameters": {}}'),
    content('{"name": ["now"], "parameters": {}}'),
    content('{"name": {"name": "now"}, "parameters": {}}'),
    content('{"name": 5, "parameters": {}}'),
    content('{"name": "now", "parameters": [1]}'),
    content('{"name": "now", "parameters": "no"}'),
    content('{"name": "now", "parameters": 7}'),
    content('{"name": "now", "description": "The time.", "parameters": {"type": "object"}}'),
    content('{"type": "FeatureCollection", "features": []}'),
    content('{"type": "function"}'),
    content('{"type": "function", "function": {"name": "now", "arguments": {}}}'),
    content('{"parameters": {"a": {"name": "now"}}}'),
    content('{"parameters": {"a": 1}, "title": "x", "name": "now"}'),
    content('{"parameters": {"a": "x'),
    content('{"": {}}'),
    content('{ , "name": "now"}'),
]  # fmt: skip
LLAMA3_ANSWERS: list[tuple[str, list[Delta]]] = [
    (f"<|python_tag|>{NOW}<|eom_id|>", called(0, "now")),
    (f"\n <|python_tag|> {NOW}; {NOW}<|eot_id|>", [*called(0, "now"), *called(1, "now")]),
    (f"<|python_tag|>{NOW}<|python_tag|>{NOW}", [*called(0, "now"), *called(1, "now")]),
    (f"I look.<|python_tag|>{NOW}", [Content("I look."), *called(0, "now")]),
    ('{"name": "now", "parameters": {"a": "x<|python_tag|>y',
     [*called(0, "now", a="x"), Content("<|python_tag|>y")]),
    content('<|python_tag|>brave_search.call(query="x")'),
    content("<|python_tag|>print([{}])"),
    content("<|python_tag|>"),
    content('{"name"<|python_tag|>'),
    content('<|python_tag|>{"name": "other", "parameters": {}}'),
    content("Say <tool_call>" + CITY + "</tool_call>"),
]  # fmt: skip
TOLD_ANSWERS: list[tuple[str, list[Delta]]] = [
    (f"{CITY}\n</tool_call>", called(0, "get_weather", **CALLED_CITY)),
    (f"{NOW}</tool_call>\n{NOW}</tool_call>\nx",
     [*called(0, "now"), *called(1, "now"), Content("x")]),
    (f"<tool_call>{NOW}\n{NOW}", [*called(0, "now"), *called(1, "now")]),
    (f"{NOW}<tool_call>{NOW}</tool_call>", [*called(0, "now"), *called(1, "now")]),
    ('{"name": "now", "arguments": {"a": "<tool_call>"}}', called(0, "now", a="<tool_call>")),
    ('{"name": "now"</tool_call>', called(0, "now")),
    ('{"<tool_call>' + NOW, [Content('{"'), *called(0, "now")]),
    ('{"name": "<tool_call>' + NOW, [Content('{"name": "'), *called(0, "now")]),
    content('{"x": 1}</tool_call>' + NOW),
]  # fmt: skip
THINKER_ANSWERS: list[tuple[str, list[Delta]]] = [
    (f"<think>\nhm {NOW}\n</think>\n\n{NOW}", [Reasoning(f"hm {NOW}"), *called(0, "now")]),
    ('<think>hm</think>\n\n{"x": 1}\n', [Reasoning("hm"), Content('{"x": 1}\n')]),
    ('<think>hm</think>\n {"name": "x"}', [Reasoning("hm"), Content(' {"name": "x"}')]),
    ("<think>hm</think>\n\n<think>", [Reasoning("hm"), Content("<think>")]),
]  # fmt: skip
ANSWERS = [
    (family, answer, deltas)
    for family, corpora in {
        "llama3": (BARE, LLAMA3_ANSWERS),
        "told": (BARE, TOLD_ANSWERS),
        "thinker": (THINKER_ANSWERS, HERMES_ANSWERS),
    }.items()
    for corpus in corpora
    for answer, deltas in corpus
]


@pytest.mark.parametrize(("family", "answer", "deltas"), ANSWERS)
def test_answers_however_they_are_cut(family: str, answer: str, deltas: list[Delta]) -> None:
    tokenizer = FAMILIES[family]
    pieces = pieces_of(tokenizer, answer)
    whole = parse(tokenizer, [pieces], TOOLS)
    check_calls(whole)
    assert canonical(whole) == canonical(deltas)
    for pushes in cuts(pieces, random.Random(answer)):
        assert parse(tokenizer, pushes, TOOLS) == whole, pushes


FRAGMENTS = [
    "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>", "</think>", NOW, CITY,
    '{"name": "get_weather", ', '{"type": "function", ', '"function": "now", ', '"parameters": {',
    '"arguments": ', '"', "{", "}", "[", "]", ",", ";", ":", "\\", "\\u00e9", "\n", " ", "12",
    "null", "now", "é", '"name"', "<tool",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_no_answer_is_too_strange(family: str) -> None:
    """Random rubble: nothing raises, calls are well-formed, and cuts do not matter."""
    tokenizer, generator = FAMILIES[family], random.Random(family)
    num_calls = 0
    for _ in range(200):
        parts = generator.choices(FRAGMENTS, k=generator.randrange(1, 20))
        if generator.random() < 0.5:
            parts.insert(0, generator.choice(['{"name": "now", "parameters": {', "[" + NOW]))
        pieces = pieces_of(tokenizer, "".join(parts))
        whole = parse(tokenizer, [pieces], TOOLS)
        check_calls(whole)
        num_calls += sum(isinstance(delta, ToolCallBegin) for delta in whole)
        assert parse(tokenizer, [[part] for part in atoms(pieces)], TOOLS) == whole, parts
        middle = generator.randrange(len(atoms(pieces)) + 1)
        halves = [glue(atoms(pieces)[:middle]), glue(atoms(pieces)[middle:])]
        assert parse(tokenizer, halves, TOOLS) == whole, parts
    assert num_calls > 60


@pytest.mark.parametrize("family", ["llama3", "told"])
@pytest.mark.parametrize(
    ("held", "released"),
    [
        ("{", "}"),
        ("{", "'"),
        ("[", "1"),
        ('{"', "t" * 2),
        ('{"name": "', "x"),
        ('{"name": "get_', "x"),
        ('{"name": "now', "h"),
        ('{"type": "f', "e"),
        ('{"type": "function", "', 'x"'),
        ('{"name": "now", ', '"description"'),
    ],
)
def test_an_answer_in_json_is_held_no_longer_than_need_be(
    family: str, held: str, released: str
) -> None:
    parser = AnswerFormat.of(FAMILIES[family]).parser((), TOOLS)
    assert parser.push([held]) == []
    assert parser.push([released]) == [Content(held + released)]
    assert parser.push([" {"]) == [Content(" {")]


@pytest.mark.parametrize("family", ["llama3", "told"])
def test_arguments_stream(family: str) -> None:
    parser = AnswerFormat.of(FAMILIES[family]).parser((), TOOLS)
    assert parser.push(['{"name": "get_weather", "parameters": ']) == []
    assert parser.push(["{"]) == [ToolCallBegin(0, "get_weather"), ToolCallArguments(0, "{")]
    assert parser.push(['"city": "New']) == [ToolCallArguments(0, '"city": "New')]
    assert parser.push([' York"}']) == [ToolCallArguments(0, ' York"}')]
    assert parser.push(["}"]) == [ToolCallEnd(0)]
    assert parser.push(["\nDone"]) == [Content("Done")]


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("text", [NOW, f"[{NOW}]", f" <|python_tag|>{NOW}; {NOW}", "x" + NOW])
def test_without_tools_a_call_is_content(tools: Any, text: str) -> None:
    assert read(LLAMA3, text, tools=tools) == [Content(text.replace(" <|", "<|"))]
    assert read(TOLD, text, tools=tools) == [Content(text)]


def test_models_with_marks_of_their_own_call_with_marks_alone() -> None:
    for text in (NOW, f"[{NOW}]", f"<think>x</think>{NOW}"):
        deltas = read(qwen3_tokenizer(), text)
        assert not any(isinstance(delta, ToolCallBegin) for delta in deltas), text


@pytest.mark.parametrize(
    "name", ["__proto__", "constructor", "toString", "__class__", "<|python_tag|>", "<tool_call>",
             'a"b\\', "é🙂", "name", "function", "{"],
)  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_names_may_be_strange(family: str, name: str) -> None:
    tokenizer, tools = FAMILIES[family], [tool(name), tool(f"{name}2")]
    for written in (name, f"{name}3"):
        text = json.dumps({"name": written, "parameters": {"a": name}}, ensure_ascii=False)
        whole = parse(tokenizer, [[text]], tools)  # text, whatever it looks like
        if written == name:
            assert whole == called(0, name, a=name)
        else:
            assert not any(isinstance(delta, ToolCallBegin) for delta in whole)
        assert parse(tokenizer, [[character] for character in text], tools) == whole


def test_the_tag_as_text_is_text() -> None:
    """What a user writes comes as text; the token alone is a mark."""
    text = "<|python_tag|>" + NOW
    assert parse(LLAMA3, [[text]], TOOLS) == [Content(text)]
    call = (
        '{"name": "now", "parameters": {"a": "<|python_tag|>", "<|python_tag|>": "</tool_call>"}}'
    )
    (_, arguments, _) = parse(LLAMA3, [[call]], TOOLS)
    assert isinstance(arguments, ToolCallArguments)
    assert json.loads(arguments.text) == json.loads(call)["parameters"]


@pytest.mark.parametrize("family", ["llama3", "told"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now", "parameters": {"a": "' + "x\\n" * 3_000 + '"}}',
        '{"parameters": {"a": "' + "xy " * 3_000,
        '{"name": "now", "parameters": {"a": ' + "[{" * 5_000,
        '{"name": "now", "parameters": ' + "[" * 10_000,
        '{"parameters": ' + '{"a": ' * 5_000,
        "{" + " " * 10_000 + '"title"',
        "[" * 10_000,
        '{"name": "' + "n" * 10_000,
        '{"name": "now", "' + "k" * 10_000,
        '{"type": ' + "1" * 10_000,
        (NOW + "; ") * 1_000,
        '{"x": "' + NOW * 1_000,
    ],
    ids=lambda text: text[:20],
)
def test_long_answers_are_read_as_short_ones(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]
    whole = parse(tokenizer, [[text]], TOOLS)
    check_calls(whole)
    if isinstance(whole[0], Content):
        assert whole == [Content(text)]
    pushes: list[list[str | int]] = [[text[n : n + 7]] for n in range(0, len(text), 7)]
    assert parse(tokenizer, pushes, TOOLS) == whole


@pytest.mark.parametrize(
    "text",
    ['{"name": "now", "parameters": {"a": "' + "xy " * 350_000, '{"x": [' + "1, " * 350_000,
     '{"name": "' + "now" * 350_000, '{"arguments": {"a": ' + "1" * 200_000],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_megabyte_takes_linear_time(text: str) -> None:
    begun = time.monotonic()
    whole = parse(TOLD, [[text]], TOOLS)
    assert isinstance(whole[0], ToolCallBegin) or whole == [Content(text)]
    assert time.monotonic() - begun < 60  # at worst some seconds; hours if it were quadratic
