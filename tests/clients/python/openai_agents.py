"""openai-agents, on the chat API and on the responses API (its default)."""

from __future__ import annotations

import asyncio
from typing import Any

import asked
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{asked.URL}/v1", api_key=asked.KEY, max_retries=0)
CHAT = OpenAIChatCompletionsModel(asked.MODEL, openai_client=client)
RESPONSES = OpenAIResponsesModel(asked.MODEL, openai_client=client)
calls: list[dict[str, Any]] = []


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    calls.append({"city": city, "days": days})
    return asked.WEATHER


def agent(model: Any, max_tokens: int, choice: str | None = None, **options: Any) -> Agent:
    settings = ModelSettings(max_tokens=max_tokens, tool_choice=choice)
    return Agent(name="tested", model=model, model_settings=settings, **options)


async def text(model: Any = CHAT) -> str:
    return (await Runner.run(agent(model, asked.MAX_TOKENS), asked.QUESTION)).final_output


async def stream(model: Any = CHAT) -> list[str]:
    run = Runner.run_streamed(agent(model, asked.MAX_TOKENS), asked.QUESTION)
    return [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]


async def tools(model: Any = CHAT, choice: str | None = "required") -> dict[str, Any]:
    """The runner forces the first call alone; after its result the model may answer."""
    calls.clear()
    made = agent(model, asked.MAX_FORM_TOKENS, choice, tools=[get_weather])
    answer = (await Runner.run(made, asked.WEATHER_QUESTION)).final_output
    return asked.called("get_weather", calls[0], answer)


async def loop(model: Any = CHAT) -> dict[str, Any]:
    """The same, where the model decides to call."""
    return await tools(model, None)


async def schema(model: Any = CHAT) -> dict[str, Any]:
    made = agent(model, asked.MAX_FORM_TOKENS, output_type=Person)
    return (await Runner.run(made, asked.PERSON_QUESTION)).final_output.model_dump()


async def main() -> None:
    running = asyncio.get_running_loop()

    def run(aspect: Any, model: Any) -> Any:
        return lambda: asyncio.run_coroutine_threadsafe(aspect(model), running).result()

    functions = (text, stream, tools, loop, schema)
    aspects = {f.__name__: run(f, CHAT) for f in functions}
    aspects |= {f"{f.__name__}_by_responses": run(f, RESPONSES) for f in functions}
    await asyncio.to_thread(asked.report, **aspects)


asyncio.run(main())
