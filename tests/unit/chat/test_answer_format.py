"""Answers of every family, well-formed and not, cut in every possible way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
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
    join_deltas,
)
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.answer_corpus import (
    CITY,
    GEMMA4_ANSWERS,
    GEMMA4_MALFORMED,
    HERMES_ANSWERS,
    SPECIAL_MARKS,
    TEXT_MARKS,
    called,
)
from tests.unit.chat.chat_factory import (
    TOOLS,
    byte_tokenizer,
    gemma4_tokenizer,
    pieces_of,
    qwen3_tokenizer,
    special_hermes_tokenizer,
)

GEMMA4, QWEN3, SPECIAL = gemma4_tokenizer(), qwen3_tokenizer(), special_hermes_tokenizer()
FAMILIES = {"gemma4": GEMMA4, "qwen3": QWEN3, "special": SPECIAL}


def parse(
    tokenizer: Tokenizer,
    pushes: list[list[str | int]],
    tools: list[dict[str, Any]] | None,
    prompt: str = "",
) -> list[Delta]:
    parser = AnswerFormat.of(tokenizer).parser(tokenizer.encode(prompt), tools)
    deltas = [delta for pieces in pushes for delta in parser.push(pieces)]
    return join_deltas([*deltas, *parser.finish()])


def read(tokenizer: Tokenizer, text: str, prompt: str = "", tools: Any = TOOLS) -> list[Delta]:
    return parse(tokenizer, [pieces_of(tokenizer, text)], tools, prompt)


def atoms(pieces: list[str | int]) -> list[str | int]:
    """The stream in its smallest parts."""
    return [
        part for piece in pieces for part in ([piece] if isinstance(piece, int) else list(piece))
    ]


def cuts(pieces: list[str | int], generator: random.Random) -> Iterator[list[list[str | int]]]:
    """Every cut in two, the finest cut, and random ones with pieces cut inside a push too."""
    parts = atoms(pieces)
    for place in range(len(parts) + 1):
        yield [glue(parts[:place]), glue(parts[place:])]
    yield [[part] for part in parts]
    for _ in range(4):
        pushes, place = [], 0
        while place < len(parts):
            size = generator.choice((1, 1, 2, 3, 7, 16))
            chunk = parts[place : place + size]
            pushes.append(chunk if generator.random() < 0.3 else glue(chunk))
            place += size
        yield pushes


def glue(parts: list[str | int]) -> list[str | int]:
    glued: list[str | int] = []
    for part in parts:
        last = glued[-1] if glued else None
        if isinstance(part, str) and isinstance(last, str):
            glued[-1] = last + part
        else:
            glued.append(part)
    return glued


def canonical(deltas: list[Delta]) -> list[Delta]:
    """The same with numbers in one spelling."""
    return [
        ToolCallArguments(delta.index, json.dumps(json.loads(delta.text)))
        if isinstance(delta, ToolCallArguments)
        else delta
        for delta in deltas
    ]


def check_calls(deltas: list[Delta]) -> None:
    """Calls are begun, filled and ended in order, and their arguments are JSON objects."""
    names = [delta for delta in deltas if isinstance(delta, ToolCallBegin)]
    assert [begin.index for begin in names] == list(range(len(names)))
    for begin in names:
        place = deltas.index(begin)
        arguments, end = deltas[place + 1 : place + 3]
        assert isinstance(arguments, ToolCallArguments) and arguments.index == begin.index
        assert isinstance(json.loads(arguments.text), dict)
        assert end == ToolCallEnd(begin.index)


ANSWERS = [
    (family, answer, deltas)
    for family, corpora in {
        "gemma4": (GEMMA4_ANSWERS, GEMMA4_MALFORMED),
        "qwen3": (HERMES_ANSWERS, TEXT_MARKS),
        "special": (HERMES_ANSWERS, SPECIAL_MARKS),
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


FRAGMENTS = {
    "gemma4": ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>",
               "thought\n", "call:", "get_weather", "{", "}", "[", "]", ",", ":", '"', "\\", "\n",
               "days", "city", "12", "-0.5", "true", "nu", "é🙂", "\ufffd", " ", "<", "\\ud83d"],
    "qwen3": ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "get_weather", ',
              '"arguments": {', '"', "{", "}", "[", "]", ",", ":", "\\", "\\u00e9", "\\ud83d",
              "\\ude42", "\n", '"days": ', "12", "3.0", "false", "x", "é", "<tool", "</", " "],
}  # fmt: skip
FRAGMENTS["special"] = FRAGMENTS["qwen3"]


@pytest.mark.parametrize("family", FRAGMENTS)
def test_no_answer_is_too_strange(family: str) -> None:
    """Random rubble: nothing raises, calls are well-formed, and cuts do not matter."""
    tokenizer, generator = FAMILIES[family], random.Random(family)
    num_calls = 0
    for _ in range(300):
        parts = generator.choices(FRAGMENTS[family], k=generator.randrange(1, 30))
        if generator.random() < 0.7:
            head = (
                "<|tool_call>call:f{"
                if family == "gemma4"
                else '<tool_call>{"name": "f", "arguments": {'
            )
            parts.insert(generator.randrange(len(parts)), head)
        tools = TOOLS if generator.random() < 0.9 else None
        pieces = pieces_of(tokenizer, "".join(parts))
        whole = parse(tokenizer, [pieces], tools)
        check_calls(whole)
        num_calls += sum(isinstance(delta, ToolCallBegin) for delta in whole)
        assert parse(tokenizer, [[part] for part in atoms(pieces)], tools) == whole, parts
        middle = generator.randrange(len(atoms(pieces)) + 1)
        halves = [glue(atoms(pieces)[:middle]), glue(atoms(pieces)[middle:])]
        assert parse(tokenizer, halves, tools) == whole, parts
    assert num_calls > 100


def test_what_is_decided_is_passed_on_at_once() -> None:
    """One character at a time: what each of them brings to light."""
    parser = AnswerFormat.of(GEMMA4).parser((), TOOLS)
    answer = '<|channel>thought\nHm\nso\n<channel|>Hi<|tool_call>call:now{a:<|"|>b\n'
    shown = [parser.push([part]) for part in atoms(pieces_of(GEMMA4, answer))]
    thoughts = [Reasoning("H"), Reasoning("m"), None, Reasoning("\ns"), Reasoning("o")]
    call = [ToolCallBegin(0, "now"), ToolCallArguments(0, "{")]
    assert [deltas[0] if deltas else None for deltas in shown[9:14]] == thoughts
    assert [delta for deltas in shown[14:] for delta in deltas] == [
        Content("H"),
        Content("i"),
        *call,
        ToolCallArguments(0, '"a": "'),
        ToolCallArguments(0, "b"),
        ToolCallArguments(0, "\\n"),
    ]


def arguments_so_far(text: str) -> str:
    parser = AnswerFormat.of(GEMMA4).parser((), TOOLS)
    deltas = parser.push(pieces_of(GEMMA4, "<|tool_call>call:get_weather{" + text))
    return "".join(d.text for d in deltas if isinstance(d, ToolCallArguments))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "{"),
        ("city:", "{"),
        ('city:<|"|>', '{"city": "'),
        ('city:<|"|>New "', '{"city": "New \\"'),
        ('city:<|"|>x<|"|>,days:1', '{"city": "x"'),
        ('city:<|"|>x<|"|>,days:12,', '{"city": "x", "days": 12'),
        ('days:<|"|>12', "{"),  # not a string: its form is decided at its end
        ("where:{x:1", '{"where": {'),
        ("tags:[", '{"tags": ['),
    ],
)
def test_arguments_stream(text: str, shown: str) -> None:
    assert arguments_so_far(text) == shown


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "answer", "deltas"),
    [
        (GEMMA4, "<|turn>model\n<|channel>thought\n", "hm<channel|>x", "rc"),
        (GEMMA4, "<|turn>model\n<|channel>thou", "ght\nhm<channel|>x", "rc"),
        (GEMMA4, "<|turn>model\n<|channel>", "thought\n\nhm<channel|>x", "rc"),
        (GEMMA4, "<|turn>model\n<|channel>thought\n<channel|>", "hmx", "c"),
        (GEMMA4, "<|turn>user\n<|channel>thought\n<turn|>\n<|turn>model\n", "hmx", "c"),
        (GEMMA4, "<|turn>model\n", "<|channel>thought\nhm<channel|>x", "rc"),
        (QWEN3, "<|im_start|>assistant\n<think>\n", "hm</think>\n\nx", "rc"),
        (QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "hmx", "c"),
        (QWEN3, "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", "hmx", "c"),
        (SPECIAL, "<|im_start|>assistant\n<think>\n", "hm</think>\n\nx", "rc"),
    ],
)
def test_prompts_may_leave_a_thought_open(
    tokenizer: Tokenizer, prompt: str, answer: str, deltas: str
) -> None:
    wanted: list[Delta] = [Reasoning("hm"), Content("x")] if deltas == "rc" else [Content("hmx")]
    assert read(tokenizer, answer, prompt) == wanted


def test_a_thought_may_be_continued() -> None:
    prompt = "<|turn>model\n<|channel>thought\nI thin"
    assert read(GEMMA4, "k\nso<channel|>x", prompt) == [Reasoning("k\nso"), Content("x")]


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_a_call_is_content(tools: Any) -> None:
    text = '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'
    assert read(GEMMA4, "<|channel>thought\nh<channel|>" + text, tools=tools) == [
        Reasoning("h"),
        Content(text),
    ]
    text = f"<tool_call>\n{CITY}\n</tool_call>"
    assert read(QWEN3, text, tools=tools) == [Content(text)]
    assert read(SPECIAL, text, tools=tools) == [Content(text)]


def test_the_format_is_told_by_tokenizer_and_template() -> None:
    plain = byte_tokenizer(["<|im_end|>"], [])
    text = "<think>x</think><tool_call>{}"
    assert read(plain, text) == [Content(text)]
    template = "{{ '<think>' }}{{ '</think>' }}"
    thinking = byte_tokenizer(["<|im_end|>"], [], template)
    assert read(thinking, text) == [Reasoning("x"), Content("<tool_call>{}")]
    template += "<tool_call></tool_call>"
    calling = byte_tokenizer(["<|im_end|>"], [], template)
    assert read(calling, f"<tool_call>{CITY}</tool_call>") == called(0, "get_weather", city="Łódź")


def test_a_model_that_is_told_of_tools_writes_calls_as_text() -> None:
    plain = byte_tokenizer(["<|im_end|>"], [])
    text = f"Let me see. <tool_call>\n{CITY}\n</tool_call>"
    assert read(plain, text) == [Content("Let me see. "), *called(0, "get_weather", city="Łódź")]
    assert read(plain, text, tools=None) == [Content(text)]
    thinking = byte_tokenizer(["<|im_end|>"], [], "{{ '<think>' }}{{ '</think>' }}")
    assert read(thinking, f"<think>hm</think>{text[12:]}") == [
        Reasoning("hm"),
        *called(0, "get_weather", city="Łódź"),
    ]


def test_special_tokens_without_a_meaning_leave_no_trace() -> None:
    plain = byte_tokenizer(["<|im_end|>"], [])
    assert read(plain, "a<|im_end|>b") == [Content("ab")]
    assert read(QWEN3, "a<|im_end|>b") == [Content("ab")]


def test_long_answers_take_linear_time() -> None:
    """Much in one push, and deep nesting, in a moment."""
    text = "<|tool_call>call:f{a:[" + "1,{b:2}," * 8_000 + "]}<tool_call|>"
    (_, arguments, _) = read(GEMMA4, text)
    assert isinstance(arguments, ToolCallArguments)
    assert len(json.loads(arguments.text)["a"]) == 16_000
    check_calls(read(GEMMA4, "<|tool_call>call:f{a:" + "[{a:" * 10_000 + "<tool_call|>"))
    assert read(QWEN3, "\n" * 200_000) == [Content("\n" * 200_000)]
    assert read(QWEN3, "<think>" + "\n" * 200_000 + "x") == [Reasoning("x")]


def test_numbers_that_json_readers_refuse_are_strings() -> None:
    digits = "9" * 5000
    (_, arguments, _) = read(GEMMA4, f"<|tool_call>call:f{{a:{digits}}}<tool_call|>")
    assert isinstance(arguments, ToolCallArguments)
    assert json.loads(arguments.text) == {"a": digits}
