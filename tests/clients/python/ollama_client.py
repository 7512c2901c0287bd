"""Ollama's own client for Python."""

from __future__ import annotations

from typing import Any

import asked
import ollama
from pydantic import BaseModel

client = ollama.Client(asked.URL, headers={"Authorization": f"Bearer {asked.KEY}"})
SHORT = {"num_predict": asked.MAX_TOKENS}
LONG = {"num_predict": asked.MAX_FORM_TOKENS}


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str, days: int) -> str:
    """The weather in a city.

    Args:
      city: where
      days: how many days
    """
    return asked.WEATHER


def text() -> str:
    return client.chat(asked.MODEL, asked.USER, options=SHORT).message.content


def stream() -> list[str]:
    parts = client.chat(asked.MODEL, asked.USER, options=SHORT, stream=True)
    return [part.message.content for part in parts]


def tools() -> dict[str, Any]:
    """Ollama's API cannot force a call; a model that makes one must stand behind it."""
    first = client.chat(asked.MODEL, asked.WEATHER_USER, tools=[get_weather], options=LONG)
    call = first.message.tool_calls[0].function
    result = {"role": "tool", "tool_name": call.name, "content": get_weather(**call.arguments)}
    history = [*asked.WEATHER_USER, first.message, result]
    second = client.chat(asked.MODEL, history, tools=[get_weather], options=LONG)
    return asked.called(call.name, dict(call.arguments), second.message.content)


def schema() -> dict[str, Any]:
    answer = client.chat(
        asked.MODEL, asked.PERSON_USER, format=Person.model_json_schema(), options=LONG
    )
    return Person.model_validate_json(answer.message.content).model_dump()


def models() -> dict[str, Any]:
    return {
        "listed": [one.model for one in client.list().models],
        "context": client.ps().models[0].context_length,
        "capabilities": client.show(asked.MODEL).capabilities,
    }


def chat(is_stream: bool = False) -> dict[str, Any]:
    """Thoughts, text and calls of one answer, with the options that Ollama's users set."""
    found = client.chat(
        f"{asked.MODEL}:latest",
        asked.WEATHER_USER,
        tools=[get_weather],
        think=True,
        stream=is_stream,
        options={"num_ctx": 2048, "temperature": 0.2, "stop": ["zzz"]},
        keep_alive="5m",
    )
    parts = list(found) if is_stream else [found]
    calls = [call for one in parts for call in one.message.tool_calls or ()]
    return {
        "content": "".join(one.message.content or "" for one in parts),
        "thinking": "".join(one.message.thinking or "" for one in parts),
        "calls": [dict(call.function.arguments) for call in calls],
        "done": parts[-1].done,
        "counts": [parts[-1].eval_count, parts[-1].total_duration],
    }


def generate() -> dict[str, Any]:
    pieces = client.generate(asked.MODEL, "hi", stream=True, raw=True)
    return {
        "whole": client.generate(asked.MODEL, "hi", system="be brief").response,
        "pieces": [one.response for one in pieces],
        "loaded": client.generate(asked.MODEL).done_reason,
    }


def refusals() -> list[Any]:
    """Status and words of everything that the server does not do."""
    asks = (
        lambda: client.pull("x"),
        lambda: client.push("x"),
        lambda: client.create("x", from_="y"),
        lambda: client.copy("x", "y"),
        lambda: client.delete("x"),
        lambda: client.embed(asked.MODEL, "x"),
        lambda: list(client.generate(asked.MODEL, "x", stream=True, options={"num_ctx": 99999})),
        lambda: client.chat("other", asked.USER),
    )
    return [_refusal(ask) for ask in asks]


def _refusal(ask: Any) -> list[Any]:
    try:
        ask()
    except ollama.ResponseError as error:
        return [error.status_code, error.error]
    return []


asked.report(
    text=text,
    stream=stream,
    tools=tools,
    schema=schema,
    models=models,
    chat=chat,
    chat_stream=lambda: chat(is_stream=True),
    generate=generate,
    refusals=refusals,
)
