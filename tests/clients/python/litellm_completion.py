"""litellm, by way of OpenAI's API and of Anthropic's."""

from __future__ import annotations

from typing import Any

import asked
import litellm
from pydantic import BaseModel

litellm.telemetry = False
OPENAI: dict[str, Any] = {
    "model": f"openai/{asked.MODEL}",
    "api_base": f"{asked.URL}/v1",
    "api_key": asked.KEY,
    "num_retries": 0,
}
ANTHROPIC = OPENAI | {"model": f"anthropic/{asked.MODEL}", "api_base": asked.URL}
TOOLS = [{"type": "function", "function": asked.FUNCTION}]


class Person(BaseModel):
    name: str
    age: int


def text(route: dict[str, Any] = OPENAI) -> str:
    answer = litellm.completion(messages=asked.USER, max_tokens=asked.MAX_TOKENS, **route)
    return answer.choices[0].message.content


def stream(route: dict[str, Any] = OPENAI) -> list[str]:
    chunks = litellm.completion(
        messages=asked.USER, max_tokens=asked.MAX_TOKENS, stream=True, **route
    )
    return [chunk.choices[0].delta.content or "" for chunk in chunks]


def tools(route: dict[str, Any] = OPENAI) -> dict[str, Any]:
    common = {"tools": TOOLS, "max_tokens": asked.MAX_FORM_TOKENS, **route}
    first = litellm.completion(messages=asked.WEATHER_USER, tool_choice="required", **common)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": asked.WEATHER}
        for call in message.tool_calls
    ]
    history = [*asked.WEATHER_USER, message.model_dump(), *results]
    second = litellm.completion(messages=history, tool_choice="none", **common)
    function = message.tool_calls[0].function
    return asked.called(function.name, function.arguments, second.choices[0].message.content)


def schema(route: dict[str, Any] = OPENAI) -> dict[str, Any]:
    answer = litellm.completion(
        messages=asked.PERSON_USER,
        response_format=Person,
        max_tokens=asked.MAX_FORM_TOKENS,
        **route,
    )
    return Person.model_validate_json(answer.choices[0].message.content).model_dump()


asked.report(
    text=text,
    stream=stream,
    tools=tools,
    schema=schema,
    text_by_anthropic=lambda: text(ANTHROPIC),
    stream_by_anthropic=lambda: stream(ANTHROPIC),
    tools_by_anthropic=lambda: tools(ANTHROPIC),
    schema_by_anthropic=lambda: schema(ANTHROPIC),
)
