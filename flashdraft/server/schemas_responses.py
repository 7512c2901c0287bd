"""The body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from flashdraft.server.schemas_chat import ReasoningEffort
from flashdraft.server.schemas_common import Advisory, Body, Extended, StreamOptions, one_of

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class ResponsePart(Body):
    """A part of an item's content."""

    type: Annotated[str, one_of(*_TEXT_PARTS)]
    text: str | None = None
    refusal: str | None = None
    annotations: Advisory
    logprobs: Advisory
    prompt_cache_breakpoint: Advisory
    image_url: Any = None
    file_id: Any = None
    file_url: Any = None
    file_data: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None

    @field_validator("type")
    @classmethod
    def _is_text(cls, kind: str) -> str:
        if kind not in _TEXT_PARTS:
            raise ValueError(
                f"a part of type {kind!r} is not supported: images, audio and files are refused; "
                "send text parts only"
            )
        return kind


class InputMessage(Body):
    """A message; its type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ResponsePart]
    id: Advisory
    status: Advisory
    phase: Advisory


class InputFunctionCall(Body):
    """A call the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Advisory
    status: Advisory
    namespace: Advisory
    caller: Advisory


class InputFunctionOutput(Body):
    """What the function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ResponsePart]
    id: Advisory
    status: Advisory
    caller: Advisory


class InputReasoning(Body):
    """What the model thought earlier."""

    type: Literal["reasoning"]
    content: list[ResponsePart] | None = None
    summary: list[ResponsePart] | None = None
    id: Advisory
    status: Advisory
    encrypted_content: Advisory


InputItem = InputMessage | InputFunctionCall | InputFunctionOutput | InputReasoning


class ResponseTool(Body):
    """A function. Hosted tools, which agents offer by default, are not passed to the model."""

    model_config = {"extra": "allow"}

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Body):
    """tool_choice that names one function."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: str | None = None
    description: str | None = None
    strict: Advisory


class TextOptions(Body):
    """The answer's text."""

    format: TextFormat | None = None
    verbosity: Advisory


class ReasoningOptions(Body):
    """How the model thinks: only whether it does."""

    effort: ReasoningEffort | None = None
    summary: Advisory
    generate_summary: Advisory
    context: Advisory


class ResponsesRequest(Extended):
    """/v1/responses, without state: the whole conversation is the input."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: Advisory
    store: Advisory
    user: Advisory
    service_tier: Advisory
    safety_identifier: Advisory
    prompt_cache_key: Advisory
    prompt_cache_options: Advisory
    prompt_cache_retention: Advisory
    max_tool_calls: Advisory
    client_metadata: Advisory
    context_management: Advisory
