"""langchain-anthropic."""

from __future__ import annotations

from typing import Any

import asked
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel

model = ChatAnthropic(
    model=asked.MODEL,
    base_url=asked.URL,
    api_key=asked.KEY,
    max_tokens=asked.MAX_TOKENS,
    max_retries=0,
)
long = model.model_copy(update={"max_tokens": asked.MAX_FORM_TOKENS})


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    return asked.WEATHER


def text() -> str:
    return model.invoke(asked.QUESTION).text


def stream() -> list[str]:
    return [chunk.text for chunk in model.stream(asked.QUESTION)]


def tools() -> dict[str, Any]:
    question = HumanMessage(asked.WEATHER_QUESTION)
    first = long.bind_tools([get_weather], tool_choice="any").invoke([question])
    results = [get_weather.invoke(call) for call in first.tool_calls]
    second = long.bind_tools([get_weather]).invoke([question, first, *results])
    call = first.tool_calls[0]
    return asked.called(call["name"], call["args"], second.text)


def schema(method: str = "json_schema") -> dict[str, Any]:
    return (
        long.with_structured_output(Person, method=method)
        .invoke(asked.PERSON_QUESTION)
        .model_dump()
    )


asked.report(
    text=text,
    stream=stream,
    tools=tools,
    schema=schema,
    schema_by_function=lambda: schema("function_calling"),
)
