"""The real `openai` and `anthropic` clients against a live server with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from flashdraft.errors import EngineLostError, QueueFullError
from tests.e2e.live_server import KEY, LiveServer
from tests.unit.server.scripted import (
    CALL,
    MODEL,
    OTHER_CALL,
    THOUGHT,
    WEATHER,
)

USER: Any = [{"role": "user", "content": "hi"}]
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
FLAT_TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
ANTHROPIC_TOOLS: Any = [{"name": "get_weather", "input_schema": WEATHER}]
EVERYTHING = THOUGHT + "Well, é 😀." + CALL + OTHER_CALL
CALLS = [{"city": "Paris", "days": 2}, {"city": "Rome"}]


class Weather(BaseModel):
    """A form for an answer."""

    city: str
    days: int


class Live(LiveServer):
    """A live server, and clients for it."""

    def __init__(self) -> None:
        super().__init__()
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=self.url, api_key=KEY, max_retries=0)

    def stop(self) -> None:
        self.openai.close()
        self.anthropic.close()
        super().stop()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    server = Live()
    try:
        yield server
    finally:
        server.stop()


# -- openai: chat ----------------------------------------------------------------------------------


def test_chat_answers_with_thoughts_and_calls(live: Live) -> None:
    live.play(EVERYTHING)
    answer = live.openai.chat.completions.create(
        model=MODEL,
        messages=USER,
        tools=CHAT_TOOLS,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    message = answer.choices[0].message
    assert message.content == "Well, é 😀."
    assert message.reasoning_content == "let me see"
    found = [call.function for call in message.tool_calls or () if call.type == "function"]
    assert [json.loads(function.arguments) for function in found] == CALLS
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.model_extra is not None and answer.model_extra["flashdraft"]["steps"] == 2


def test_the_clients_own_stream_helper_puts_it_together(live: Live) -> None:
    live.play(EVERYTHING)
    with live.openai.chat.completions.stream(
        model=MODEL, messages=USER, tools=CHAT_TOOLS, stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "tool_calls.function.arguments.done"} <= kinds
    message = final.choices[0].message
    assert message.content == "Well, é 😀."
    calls = [json.loads(call.function.arguments) for call in message.tool_calls or ()]
    assert calls == CALLS
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None and final.usage.completion_tokens > 10


def test_a_conversation_goes_on_with_what_the_client_was_given(live: Live) -> None:
    engine = live.play(EVERYTHING, "Sunny.")
    first = live.openai.chat.completions.create(model=MODEL, messages=USER, tools=CHAT_TOOLS)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        for call in message.tool_calls or ()
    ]
    history: Any = [*USER, message, *results]
    second = live.openai.chat.completions.create(model=MODEL, messages=history, tools=CHAT_TOOLS)
    assert second.choices[0].message.content == "Sunny."
    prompt = engine.tokenizer.decode(engine.requests[1].prompt_ids, skip_special=False)
    assert "(let me see)" in prompt and prompt.count("get_weather=sun") == 2


def test_parse_gives_an_object(live: Live) -> None:
    engine = live.play('{"city": "Oslo", "days": 3}')
    answer = live.openai.chat.completions.parse(model=MODEL, messages=USER, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Oslo", days=3)
    grammar = engine.requests[0].grammar
    assert grammar is not None and grammar.kind == "json_schema" and "days" in grammar.text


def test_logprobs_and_n(live: Live) -> None:
    live.play("aé")
    answer = live.openai.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=2, n=2, seed=5
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [request.seed for request in live.engine.requests] == [5, 6]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(token.bytes or ()) for token in logprobs.content).decode() == "aé"
    assert len(logprobs.content[0].top_logprobs) == 2


def test_leaving_a_stream_cancels_the_request(live: Live) -> None:
    engine = live.play("a very long answer " * 200)

    async def pause(step: int) -> None:
        await asyncio.sleep(0.02)

    engine.pause = pause
    try:
        stream = live.openai.chat.completions.create(model=MODEL, messages=USER, stream=True)
        next(iter(stream))
        stream.close()
        until = time.monotonic() + 10
        while not engine.cancelled and time.monotonic() < until:
            time.sleep(0.02)
        assert engine.cancelled == [engine.requests[0].id]
    finally:
        engine.pause = None


# -- openai: the other routes ----------------------------------------------------------------------


def test_completions(live: Live) -> None:
    live.play(" jumps")
    answer = live.openai.completions.create(
        model=MODEL, prompt=["the fox", "the dog"], echo=True, logprobs=1, max_tokens=20
    )
    assert [choice.text for choice in answer.choices] == ["the fox jumps", "the dog jumps"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "the fox jumps<|im_end|>"
    chunks = list(live.openai.completions.create(model=MODEL, prompt="a", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " jumps"


def test_responses(live: Live) -> None:
    live.play(EVERYTHING)
    answer = live.openai.responses.create(model=MODEL, input="hi", tools=FLAT_TOOLS)
    assert answer.output_text == "Well, é 😀."
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == CALLS
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 2
    history: Any = [*USER, *(item.to_dict() for item in answer.output)]
    history += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls
    ]
    live.play("Sunny.")
    again = live.openai.responses.create(model=MODEL, input=history, tools=FLAT_TOOLS)
    assert again.output_text == "Sunny."


def test_responses_stream_and_parse(live: Live) -> None:
    live.play(EVERYTHING)
    with live.openai.responses.stream(model=MODEL, input="hi", tools=FLAT_TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.output_text.delta"} <= kinds
    assert "response.function_call_arguments.done" in kinds
    assert final.output_text == "Well, é 😀."
    live.play('{"city": "Oslo", "days": 3}')
    parsed = live.openai.responses.parse(model=MODEL, input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Oslo", days=3)


# -- anthropic -------------------------------------------------------------------------------------


def test_messages(live: Live) -> None:
    live.play(EVERYTHING)
    answer = live.anthropic.messages.create(
        model=MODEL,
        max_tokens=500,
        messages=USER,
        tools=ANTHROPIC_TOOLS,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert [use.input for use in uses] == CALLS
    assert answer.stop_reason == "tool_use"
    assert answer.usage.cache_read_input_tokens == 2
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "sun"} for use in uses]
    history: Any = [
        *USER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    engine = live.play("Sunny.")
    again = live.anthropic.messages.create(
        model=MODEL, max_tokens=50, messages=history, tools=ANTHROPIC_TOOLS
    )
    assert again.content[0].type == "text" and again.content[0].text == "Sunny."
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_ids, skip_special=False)
    assert prompt.count("get_weather=sun") == 2
    count = live.anthropic.messages.count_tokens(
        model=MODEL, messages=history, tools=ANTHROPIC_TOOLS
    )
    assert count.input_tokens == len(engine.requests[0].prompt_ids)


def test_messages_stream(live: Live) -> None:
    live.play(EVERYTHING)
    with live.anthropic.messages.stream(
        model=MODEL, max_tokens=500, messages=USER, tools=ANTHROPIC_TOOLS
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "text", "input_json", "message_stop"} <= kinds
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [b.input for b in final.content if b.type == "tool_use"] == CALLS
    assert final.stop_reason == "tool_use" and final.usage.output_tokens > 10


def test_messages_stop_sequence(live: Live) -> None:
    live.play("one two three")
    answer = live.anthropic.messages.create(
        model=MODEL, max_tokens=50, messages=USER, stop_sequences=["two"]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")


# -- errors ----------------------------------------------------------------------------------------

Ask = Callable[[Live, str], Any]


def _chat(live: Live, model: str) -> Any:
    return live.openai.chat.completions.create(model=model, messages=USER)


def _chat_stream(live: Live, model: str) -> Any:
    return list(live.openai.chat.completions.create(model=model, messages=USER, stream=True))


def _messages(live: Live, model: str) -> Any:
    return live.anthropic.messages.create(model=model, max_tokens=9, messages=USER)


ASKS: Sequence[tuple[Ask, Any]] = (
    (_chat, openai),
    (_chat_stream, openai),
    (_messages, anthropic),
)


@pytest.mark.parametrize(("ask", "sdk"), ASKS)
def test_errors_are_the_clients_own_classes(live: Live, ask: Ask, sdk: Any) -> None:
    with pytest.raises(sdk.NotFoundError, match="not served"):
        ask(live, "other")
    live.play(QueueFullError("The queue is full.", 3))
    with pytest.raises(sdk.RateLimitError, match="queue is full") as refused:
        ask(live, MODEL)
    assert refused.value.response.headers["retry-after"] == "3"
    live.play(EngineLostError("The engine is restarting."))
    with pytest.raises(sdk.APIStatusError, match="restarting") as lost:
        ask(live, MODEL)
    assert lost.value.status_code == 503
    live.play("some text here and more!!The device is gone.")
    with pytest.raises(sdk.APIError, match="device is gone"):
        ask(live, MODEL)


def test_bad_requests(live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="between 0") as bad:
        live.openai.chat.completions.create(model=MODEL, messages=USER, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    image: Any = [{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}]
    with pytest.raises(anthropic.BadRequestError, match="the model takes none"):
        live.anthropic.messages.create(
            model=MODEL, max_tokens=9, messages=[{"role": "user", "content": image}]
        )


def test_wrong_key(live: Live) -> None:
    with (
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(model=MODEL, messages=USER)


def test_async_client(live: Live) -> None:
    live.play("Hello")

    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=KEY) as client:
            asked = [client.chat.completions.create(model=MODEL, messages=USER) for _ in range(8)]
            return [one.choices[0].message.content for one in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == ["Hello"] * 8
