"""pydantic-ai, on both APIs; its default way to an object is a function that must be called."""

from __future__ import annotations

import asyncio
from typing import Any

import asked
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIChatModel(
    asked.MODEL, provider=OpenAIProvider(base_url=f"{asked.URL}/v1", api_key=asked.KEY)
)
ANTHROPIC = AnthropicModel(
    asked.MODEL, provider=AnthropicProvider(base_url=asked.URL, api_key=asked.KEY)
)


class Person(BaseModel):
    name: str
    age: int


def agent(model: Model, **options: Any) -> Agent[None, Any]:
    limit = asked.MAX_FORM_TOKENS if "output_type" in options else asked.MAX_TOKENS
    return Agent(model, model_settings={"max_tokens": limit}, retries=0, **options)


def text(model: Model = OPENAI) -> str:
    return agent(model).run_sync(asked.QUESTION).output


def stream(model: Model = OPENAI) -> list[str]:
    async def pieces() -> list[str]:
        async with agent(model).run_stream(asked.QUESTION) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    return asyncio.run(pieces())


def tools(model: Model = OPENAI) -> dict[str, Any]:
    """The agent's own loop: the model calls, hears of the result and answers."""
    calls = []
    made = agent(model)

    @made.tool_plain
    def get_weather(city: str, days: int) -> str:
        """The weather in a city."""
        calls.append({"city": city, "days": days})
        return asked.WEATHER

    answer = made.run_sync(asked.WEATHER_QUESTION).output
    return asked.called("get_weather", calls[0], answer)


def schema(model: Model = OPENAI) -> dict[str, Any]:
    person = agent(model, output_type=NativeOutput(Person)).run_sync(asked.PERSON_QUESTION)
    return person.output.model_dump()


def schema_by_function(model: Model = OPENAI) -> dict[str, Any]:
    return agent(model, output_type=Person).run_sync(asked.PERSON_QUESTION).output.model_dump()


asked.report(
    text=text,
    stream=stream,
    tools=tools,
    schema=schema,
    schema_by_function=schema_by_function,
    text_by_anthropic=lambda: text(ANTHROPIC),
    stream_by_anthropic=lambda: stream(ANTHROPIC),
    tools_by_anthropic=lambda: tools(ANTHROPIC),
    schema_by_anthropic=lambda: schema_by_function(ANTHROPIC),
)
