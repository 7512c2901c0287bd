"""openai for Python, on the chat API."""

from __future__ import annotations

from typing import Any

import asked
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{asked.URL}/v1", api_key=asked.KEY, max_retries=0)
TOOLS: Any = [{"type": "function", "function": asked.FUNCTION}]


class Person(BaseModel):
    name: str
    age: int


def text() -> str | None:
    answer = client.chat.completions.create(
        model=asked.MODEL, messages=asked.USER, max_tokens=asked.MAX_TOKENS
    )
    return answer.choices[0].message.content


def stream() -> list[str]:
    chunks = client.chat.completions.create(
        model=asked.MODEL, messages=asked.USER, max_tokens=asked.MAX_TOKENS, stream=True
    )
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


def tools() -> dict[str, Any]:
    common: Any = {"model": asked.MODEL, "tools": TOOLS, "max_tokens": asked.MAX_FORM_TOKENS}
    first = client.chat.completions.create(
        messages=asked.WEATHER_USER, tool_choice="required", **common
    )
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": asked.WEATHER}
        for call in message.tool_calls
    ]
    history = [*asked.WEATHER_USER, message, *results]
    second = client.chat.completions.create(messages=history, tool_choice="none", **common)
    function = message.tool_calls[0].function
    return asked.called(function.name, function.arguments, second.choices[0].message.content)


def named() -> list[str]:
    """The calls of an answer that must call one function: one."""
    answer = client.chat.completions.create(
        model=asked.MODEL,
        messages=asked.WEATHER_USER,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=asked.MAX_FORM_TOKENS,
    )
    return [call.function.name for call in answer.choices[0].message.tool_calls]


def schema() -> dict[str, Any]:
    answer = client.chat.completions.parse(
        model=asked.MODEL,
        messages=asked.PERSON_USER,
        response_format=Person,
        max_tokens=asked.MAX_FORM_TOKENS,
    )
    return answer.choices[0].message.parsed.model_dump()


asked.report(text=text, stream=stream, tools=tools, named=named, schema=schema)
