"""openai for Python, on the responses API."""

from __future__ import annotations

from typing import Any

import asked
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{asked.URL}/v1", api_key=asked.KEY, max_retries=0)
TOOLS: Any = [{"type": "function", **asked.FUNCTION, "strict": True}]


class Person(BaseModel):
    name: str
    age: int


def text() -> str:
    answer = client.responses.create(
        model=asked.MODEL, input=asked.QUESTION, max_output_tokens=asked.MAX_TOKENS
    )
    return answer.output_text


def stream() -> list[str]:
    with client.responses.stream(
        model=asked.MODEL, input=asked.QUESTION, max_output_tokens=asked.MAX_TOKENS
    ) as events:
        return [event.delta for event in events if event.type == "response.output_text.delta"]


def tools() -> dict[str, Any]:
    common: Any = {
        "model": asked.MODEL,
        "tools": TOOLS,
        "max_output_tokens": asked.MAX_FORM_TOKENS,
    }
    first = client.responses.create(
        input=asked.WEATHER_QUESTION, tool_choice="required", parallel_tool_calls=False, **common
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": asked.WEATHER}
    history: Any = [*asked.WEATHER_USER, *first.output, result]
    second = client.responses.create(input=history, tool_choice="none", **common)
    return asked.called(call.name, call.arguments, second.output_text)


def schema() -> dict[str, Any]:
    answer = client.responses.parse(
        model=asked.MODEL,
        input=asked.PERSON_QUESTION,
        text_format=Person,
        max_output_tokens=asked.MAX_FORM_TOKENS,
    )
    return answer.output_parsed.model_dump()


asked.report(text=text, stream=stream, tools=tools, schema=schema)
