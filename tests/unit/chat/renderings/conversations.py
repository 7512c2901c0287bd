"""Conversations of every kind that clients send, for the comparison of renderings."""

from __future__ import annotations

from typing import Any, NamedTuple

Messages = list[dict[str, Any]]


class Conversation(NamedTuple):
    """Messages, and what is rendered with them."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    switches: dict[str, Any] = {}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def result(content: Any, number: int = 1, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content, **fields}


def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def call(arguments: Any, number: int = 1, name: str = "get_weather") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def calling(content: Any, *calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return assistant(content, tool_calls=list(calls), **fields)


TEXT, OBJECT = '{"city": "Łódź"}', {"city": "Łódź"}
ODD_TEXT = (
    '{"price":1.50, "big" : 1e400,"zero":-0,"id":12345678901234567890,"plain": 2.5,'
    '"list": [1E5, {"deep": 0.10}], "yes": true, "no": null}'
)
NESTED = {
    "days": [1, 2],
    "where": {"city": 'O\'Hare "x"', "at": [52.5, 13.25]},
    "ok": True,
    "no": None,
    "empty": {},
}
ASKED = user("How warm is it?")
HI = user("Hi")
LONG = [one for n in range(6) for one in (user(f"Question {n}"), assistant(f"Answer {n}."))]

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <now> & here, in °C",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "City", "enum": ["Łódź", "Paris"]},
                "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 7},
                "where": {
                    "type": "object",
                    "properties": {
                        "at": {"type": "array", "items": {"type": "number", "minimum": -180.5}},
                        "name": {"type": ["string", "null"], "default": None},
                    },
                    "required": ["at"],
                },
            },
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}


def _without_content(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "content"}


_ROUND = [ASKED, calling(None, call(TEXT)), result("21 °C"), assistant("It is 21 °C.")]

CONVERSATIONS: dict[str, Conversation] = {
    "plain": Conversation([HI]),
    "without a prompt": Conversation([HI], add_generation_prompt=False),
    "system": Conversation([system("Be brief."), HI]),
    "empty system": Conversation([system(""), HI]),
    "turns": Conversation([HI, assistant("Hello. "), user("🙂 <b> & é\n")]),
    "long": Conversation([system("Be brief."), *LONG, HI]),
    "ends with the assistant": Conversation([HI, assistant("Hello.")], add_generation_prompt=False),
    "two users": Conversation([HI, user("Are you there?")]),
    "empty": Conversation([user("")]),
    "spaces": Conversation([user("  a\r\n\tb \n\n"), assistant("\n c"), HI]),
    "template in text": Conversation([user("{{ 7 * 7 }}{% if %} None 'x' \"y\"")]),
    "developer": Conversation([{"role": "developer", "content": "Be brief."}, HI]),
    "names": Conversation([{**HI, "name": "ann"}, assistant("Hello.", name="bot"), HI]),
    "thinking off": Conversation([HI], switches={"enable_thinking": False}),
    "part": Conversation([user(parts("one"))]),
    "parts": Conversation([user(parts("one", " two"))]),
    "no parts": Conversation([user([]), assistant("Hello."), HI]),
    "parts of the system": Conversation([system(parts("Be brief.", "Be kind.")), HI]),
    "parts of the assistant": Conversation([HI, assistant(parts("one", "two")), HI]),
    "parts of the developer": Conversation([{"role": "developer", "content": parts("a", "b")}, HI]),
    "parts by other names": Conversation([user(parts("one", kind="input_text")), HI]),
    "tools": Conversation([HI], tools=[WEATHER, CLOCK]),
    "call": Conversation(_ROUND, tools=[WEATHER]),
    "call with an object": Conversation([ASKED, calling(None, call(OBJECT)), result("21 °C")]),
    "call and empty text": Conversation([ASKED, calling("", call(TEXT)), result("21 °C")]),
    "call and text": Conversation([ASKED, calling("Look.", call(OBJECT)), result("21 °C")]),
    "call without content": Conversation(
        [ASKED, _without_content(calling(None, call(TEXT))), result("21 °C")]
    ),
    "calls at once": Conversation(
        [
            ASKED,
            calling(None, call(TEXT), call("{}", 2, "clock")),
            result("21 °C"),
            result("12:00", 2, name="clock"),
            assistant("Warm."),
            user("Thanks."),
        ]
    ),
    "call after call": Conversation(
        [*_ROUND[:3], calling(None, call(OBJECT, 2)), result("22 °C", 2)]
    ),
    "numbers": Conversation([ASKED, calling(None, call(ODD_TEXT)), result("21.50")]),
    "escapes": Conversation([ASKED, calling(None, call('{"t":"\\u00e9\\n\\""}')), result("é")]),
    "nested": Conversation([ASKED, calling(None, call(NESTED)), result('{"t": 21.5}')]),
    "no arguments": Conversation([ASKED, calling(None, call("", name="clock")), result("12:00")]),
    "named result": Conversation([*_ROUND[:2], result("21 °C", name="get_weather")]),
    "parts of a result": Conversation([*_ROUND[:2], result(parts("21 °C", "dry"))]),
    "thoughts": Conversation([HI, assistant("Hello.", reasoning_content="Greet."), HI]),
    "thoughts by another name": Conversation([HI, assistant("Hello.", reasoning="Greet."), HI]),
    "thoughts in the text": Conversation([HI, assistant("<think>\nhm\n</think>\n\nHello."), HI]),
    "thoughts alone": Conversation([HI, assistant(None, reasoning_content="Greet."), HI]),
    "thoughts and a call": Conversation(
        [ASKED, calling(None, call(TEXT), reasoning_content="Ask."), result("21 °C")]
    ),
    "nobody speaks": Conversation([user(None), HI]),
    "media": Conversation([user([*parts("Look"), {"type": "image", "url": "x"}])]),
    "broken arguments": Conversation([ASKED, calling(None, call('{"city": ')), result("?")]),
}
