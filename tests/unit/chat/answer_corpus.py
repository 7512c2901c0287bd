"""Answers as models write them, well-formed and not, and what they are."""

from __future__ import annotations

import json
from typing import Any

from flashdraft.chat.answers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


def called(index: int, name: str, **arguments: Any) -> list[Delta]:
    text = json.dumps(arguments, ensure_ascii=False)
    return [ToolCallBegin(index, name), ToolCallArguments(index, text), ToolCallEnd(index)]


# (answer, what it is)
GEMMA4_ANSWERS: list[tuple[str, list[Delta]]] = [
    ("", []),
    ("Hello,\nworld\n", [Content("Hello,\nworld\n")]),
    ("  \n x", [Content("  \n x")]),
    ("a<b <|tool_cal <chan", [Content("a<b <|tool_cal <chan")]),
    (
        "<|channel>thought\nFirst.\n\nThen.\n<channel|>\nHi",
        [Reasoning("First.\n\nThen."), Content("Hi")],
    ),
    ("<|channel>thought\n<channel|>Hi", [Content("Hi")]),
    ("<|channel>thought<channel|>Hi", [Content("Hi")]),
    ("<|channel>though it be\n<channel|>", [Reasoning("though it be")]),
    ("<|channel>thought\ncut of", [Reasoning("cut of")]),
    ("<|channel>thou", [Reasoning("thou")]),
    ("thought\nno mark\n<channel|>Hi", [Reasoning("no mark"), Content("Hi")]),
    ("thoughtful", [Content("thoughtful")]),
    ("though", [Content("though")]),
    ("A<channel|>B", [Content("AB")]),
    (
        "<|channel>thought\nA<channel|>x<|channel>thought\nB<channel|>y",
        [Reasoning("A"), Content("x"), Reasoning("\nB"), Content("y")],
    ),
    ("<|channel>thought\nA<|channel>thought\nB<channel|>y", [Reasoning("A\nB"), Content("y")]),
    (
        '<|tool_call>call:get_weather{city:<|"|>Łódź "{x}," 🙂\n\\<|"|>,days:3,metric:true}'
        "<tool_call|>",
        called(0, "get_weather", city='Łódź "{x}," 🙂\n\\', days=3, metric=True),
    ),
    (
        "I look.\n<|tool_call>call:now{}<tool_call|>\n"
        '<|tool_call>call:get_weather{tags:[<|"|>a<|"|>,<|"|><|"|>],where:{x:-1.5e3,name:<|"|>n'
        '<|"|>}}<tool_call|>',
        [
            Content("I look.\n"),
            *called(0, "now"),
            *called(1, "get_weather", tags=["a", ""], where={"x": -1500.0, "name": "n"}),
        ],
    ),
    (
        "<|channel>thought\nneed it\n<|tool_call>call:now{}<tool_call|>Done",
        [Reasoning("need it"), *called(0, "now"), Content("Done")],
    ),
    # types by schema
    (
        "<|tool_call>call:get_weather{city:75001,zip:null,metric:<|\"|>true<|\"|>,days:<|\"|>3"
        '<|"|>,ratio:.5,free:0.50,tags:[1,x y]}<tool_call|>',
        called(
            0, "get_weather",
            city="75001", zip=None, metric=True, days=3, ratio=0.5, free=0.50, tags=["1", "x y"],
        ),
    ),
    (
        '<|tool_call>call:get_weather{days:3.0,where:<|"|>{"x": 1}<|"|>,ratio:<|"|>many<|"|>}'
        "<tool_call|>",
        called(0, "get_weather", days=3, where={"x": 1}, ratio="many"),
    ),
    # unknown tool, odd values
    (
        '<|tool_call>call:other.tool-2{a:None,b:True,c:NaN,d:007,e:12:30,f:<|"|>"<|"|>}<tool_call|>',
        called(0, "other.tool-2", a=None, b=True, c="NaN", d="007", e="12:30", f='"'),
    ),
    ('<|tool_call>call:f{"a": "b\\n\\u00e9\\ud83d\\ude42\\ud83d", \'c\': 1}<tool_call|>',
     called(0, "f", a="b\né🙂\ufffd", **{"'c'": 1})),
]  # fmt: skip
GEMMA4_MALFORMED: list[tuple[str, list[Delta]]] = [
    # cut off or badly closed: the arguments are closed
    ('<|tool_call>call:f{a:<|"|>x', called(0, "f", a="x")),
    ('<|tool_call>call:f{a:<|"|>x<tool_call|>y', [*called(0, "f", a="x"), Content("y")]),
    ("<|tool_call>call:f{a:{b:[1,2", called(0, "f", a={"b": [1, 2]})),
    ("<|tool_call>call:f{a:1,b:", called(0, "f", a=1)),
    ('<|tool_call>call:f{a:1,<|"|>b', called(0, "f", a=1)),
    ("<|tool_call>call:f{a:1,b", called(0, "f", a=1)),
    ("<|tool_call>call:f{a:,b,c:1}<tool_call|>", called(0, "f", a=None, b=None, c=1)),
    ("<|tool_call>call:f{a:[1}<tool_call|>", called(0, "f", a=[1])),
    ("<|tool_call>call:f{a:1]}<tool_call|>", called(0, "f", a=1)),
    ("<|tool_call>call:f{{a:1}}<tool_call|>x", [*called(0, "f", a=1), Content("x")]),
    ("<|tool_call>call:f{a:1}\n and so on", [*called(0, "f", a=1), Content("and so on")]),
    ('<|tool_call>call:f{a:<|"|>x<|"|>b:<|"|>y<|"|>}<tool_call|>', called(0, "f", a="x", b="y")),
    ('<|tool_call>call:f{a:<|"|>x<|"|><|"|>b<|"|>:1}<tool_call|>', called(0, "f", a="x", b=1)),
    ('<|tool_call>call:f{<|"|>a<|"|><|"|>x<|"|>}<tool_call|>', called(0, "f", a="x")),
    ("<|tool_call>call:f{a:1,a:2}<tool_call|>", called(0, "f", a=2)),
    ("<|tool_call>call:f{,,a:1,,}<tool_call|>", called(0, "f", a=1)),
    ("<|tool_call>call:f{:1}<tool_call|>", called(0, "f", **{"": 1})),
    ("<|tool_call>call:f{a:x<|\"|>y<|\"|>}<tool_call|>", called(0, "f", a='x"y"')),
    ("<|tool_call>call:f{a:\ufffd\ufffd}<tool_call|>", called(0, "f", a="\ufffd\ufffd")),
    # marks where they do not belong
    ("<|tool_call>call:f{a:1<|tool_call>call:g{}<tool_call|>",
     [*called(0, "f", a=1), *called(1, "g")]),
    ("<|tool_call>call:f{a:1<|channel>thought\nh<channel|>x",
     [*called(0, "f", a=1), Reasoning("h"), Content("x")]),
    ("<|tool_call>call:f{a:1<channel|>}<tool_call|>", called(0, "f", a=1)),
    ('<tool_call|>x<|"|>y<tool_call|><turn|>z', [Content("xyz")]),
    # heads
    ("<|tool_call>call:now<tool_call|>", called(0, "now")),
    ("<|tool_call> now {a:1}<tool_call|>", called(0, "now", a=1)),
    ('<|tool_call>call:<|"|>now<|"|>{a:1}<tool_call|>', called(0, "now", a=1)),
    # hopeless: given back as it was written
    ("<|tool_call>call:no", [Content("<|tool_call>call:no")]),
    ("<|tool_call>", [Content("<|tool_call>")]),
    ("<|tool_call><tool_call|>\nx", [Content("<|tool_call><tool_call|>\nx")]),
    ('<|tool_call>call:{a:<|"|>x<|"|>}<tool_call|>y',
     [Content('<|tool_call>call:{a:<|"|>x<|"|>}<tool_call|>y')]),
    ("a<|tool_call>call:f(x=1)<tool_call|>b", [Content("a<|tool_call>call:f(x=1)<tool_call|>b")]),
    ("<|tool_call>" + "x" * 300 + "{}<tool_call|>",
     [Content("<|tool_call>" + "x" * 300 + "{}<tool_call|>")]),
    ("<|tool_call>!{<|tool_call>call:now{}<tool_call|>",
     [Content("<|tool_call>!{"), *called(0, "now")]),
]  # fmt: skip
CITY = '{"name": "get_weather", "arguments": {"city": "Łódź"}}'
HERMES_ANSWERS: list[tuple[str, list[Delta]]] = [
    ("Hello <b>", [Content("Hello <b>")]),
    ("<think>\nHm.\n\nYes.\n</think>\n\nHi\n", [Reasoning("Hm.\n\nYes."), Content("Hi\n")]),
    (" \n<think>Hm</think>Hi", [Reasoning("Hm"), Content("Hi")]),
    ("<think>\n\n</think>\n\nHi", [Content("Hi")]),
    ("<think>cut </thi", [Reasoning("cut </thi")]),
    (
        f"<tool_call>\n{CITY}\n</tool_call>\n<tool_call>\n{CITY}\n</tool_call>",
        [*called(0, "get_weather", city="Łódź"), *called(1, "get_weather", city="Łódź")],
    ),
    (
        '<think>I\n</think>\nWell.\n<tool_call>{"arguments": {"a": ["\\"}", 1e5, {}], "b": "\\d"}, '
        '"id": [{"name": "x"}], "name": "f"}</tool_call> after',
        [
            Reasoning("I"),
            Content("Well.\n"),
            ToolCallBegin(0, "f"),
            ToolCallArguments(0, '{"a": ["\\"}", 1e5, {}], "b": "\\\\d"}'),
            ToolCallEnd(0),
            Content(" after"),
        ],
    ),
    (
        '<tool_call>{"name": "f", "parameters": "{\\"a\\": 1}"}</tool_call>',
        called(0, "f", a=1),
    ),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', called(0, "f")),
    ('<tool_call>{"name": "f"}</tool_call>', called(0, "f")),
    # cut off or badly closed
    ('<tool_call>{"name": "f", "arguments": {"a": "x', called(0, "f", a="x")),
    ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x',
     [*called(0, "f", a=1), Content("x")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}\nand so on',
     [*called(0, "f", a=1), Content("and so on")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}<tool_call>{"name": "g"}}</tool_call>',
     [*called(0, "f", a=1), *called(1, "g")]),
    ('<tool_call>{name: f, arguments: {a: 1, "b": true}}</tool_call>',
     called(0, "f", a=1, b=True)),
    # hopeless: given back as it was written
    ("<tool_call>get_weather(city)</tool_call> x",
     [Content("<tool_call>get_weather(city)</tool_call> x")]),
    ('<tool_call>{"name": "", "arguments": {}}</tool_call>',
     [Content('<tool_call>{"name": "", "arguments": {}}</tool_call>')]),
    ('<tool_call>{"arguments": {"a": 1}}</tool_call>',
     [Content('<tool_call>{"arguments": {"a": 1}}</tool_call>')]),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     [Content('<tool_call>{"name": "f", "arguments": [1]}</tool_call>')]),
    ('<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
     [Content('<tool_call>{"name": "f", "arguments": "no"}</tool_call>')]),
    ('<tool_call>{"name": "f"', [Content('<tool_call>{"name": "f"')]),
    ("<tool_call> </tool_call>", [Content("<tool_call> </tool_call>")]),
]  # fmt: skip
TEXT_MARKS: list[tuple[str, list[Delta]]] = [  # where a mark is text, an answer may speak of it
    ("Write <think> and </think>.", [Content("Write <think> and </think>.")]),
    ("<think>a <tool_call> b</think>c", [Reasoning("a <tool_call> b"), Content("c")]),
    ("</think>\nHi", [Content("\nHi")]),
    ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
     called(0, "f", a="</tool_call>")),
    ("Say <tool_call> x", [Content("Say <tool_call> x")]),
]  # fmt: skip
SPECIAL_MARKS: list[tuple[str, list[Delta]]] = [
    ("A<think>b</think>C", [Content("A"), Reasoning("b"), Content("C")]),
    ('<think>a<tool_call>{"name": "f"}</tool_call>', [Reasoning("a"), *called(0, "f")]),
    ('<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>y',
     [*called(0, "f", a="x"), Content("y")]),
]  # fmt: skip
