"""anthropic for Python."""

from __future__ import annotations

from typing import Any

import asked
from anthropic import Anthropic
from pydantic import BaseModel

client = Anthropic(base_url=asked.URL, api_key=asked.KEY, max_retries=0)
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "input_schema": asked.WEATHER_SCHEMA,
    }
]


class Person(BaseModel):
    name: str
    age: int


def text() -> str:
    message = client.messages.create(
        model=asked.MODEL, max_tokens=asked.MAX_TOKENS, messages=asked.USER
    )
    return message.content[0].text


def stream() -> list[str]:
    with client.messages.stream(
        model=asked.MODEL, max_tokens=asked.MAX_TOKENS, messages=asked.USER
    ) as events:
        return list(events.text_stream)


def tools() -> dict[str, Any]:
    common: Any = {
        "model": asked.MODEL,
        "max_tokens": asked.MAX_FORM_TOKENS,
        "tools": TOOLS,
    }
    first = client.messages.create(
        messages=asked.WEATHER_USER, tool_choice={"type": "any"}, **common
    )
    uses = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": asked.WEATHER} for use in uses
    ]
    history = [
        *asked.WEATHER_USER,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(messages=history, tool_choice={"type": "none"}, **common)
    return asked.called(uses[0].name, uses[0].input, second.content[0].text)


def schema() -> dict[str, Any]:
    answer = client.messages.parse(
        model=asked.MODEL,
        max_tokens=asked.MAX_FORM_TOKENS,
        messages=asked.PERSON_USER,
        output_format=Person,
    )
    return answer.parsed_output.model_dump()


asked.report(text=text, stream=stream, tools=tools, schema=schema)
