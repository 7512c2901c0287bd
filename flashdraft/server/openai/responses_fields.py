"""The body of /v1/responses."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from flashdraft.server.http.field_errors import check_kind, complaint
from flashdraft.server.http.fields import (
    Advisory,
    Body,
    Extended,
    FunctionName,
    Many,
    known_part,
    one_of,
)
from flashdraft.server.http.picture_fields import Budget, Detail, PictureText
from flashdraft.server.openai.chat_fields import ReasoningEffort

MAX_ECHOED = 16 * 1024  # characters; OpenAI takes 16 pairs of 64 and 512


def _is_short(value: Any) -> Any:
    """Every event of an answer repeats it, and it is kept as long as the answer takes."""
    size = len(value) if isinstance(value, str) else len(json.dumps(value))
    if size > MAX_ECHOED:
        raise ValueError(f"it has {size} characters; at most {MAX_ECHOED}. Shorten it")
    return value


def _is_no_number(value: Any) -> Any:
    """In Python 0 is equal to False."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError("it must be false, or left out")
    return value


Echoed = Annotated[
    Any,
    AfterValidator(_is_short),
    Field(default=None, description="Accepted and repeated in the answer, without effect."),
]

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_PICTURE, _FILE = "input_image", "input_file"
_MEDIA = {_PICTURE: "pictures", _FILE: "files"}
_PARTS = (*_TEXT_PARTS, *_MEDIA)


class ResponsePart(Body):
    """A part of an item's content."""

    type: Annotated[str, one_of(*_PARTS), known_part(_PARTS)]
    text: str | None = None
    refusal: str | None = None
    annotations: Advisory
    logprobs: Advisory
    prompt_cache_breakpoint: Advisory
    image_url: PictureText | None = None  # input_image
    max_soft_tokens: Budget | None = None  # counts before detail
    file_id: Any = None
    file_url: PictureText | None = None  # input_file
    file_data: PictureText | None = None
    filename: Advisory
    detail: Detail | None = None
    input_audio: Any = None

    @model_validator(mode="after")
    def _is_whole(self) -> ResponsePart:
        if self.type in _MEDIA:
            is_picture = self.type == _PICTURE
            noun, place = ("picture", "image_url") if is_picture else ("PDF", "file_data")
            if self.file_id is not None:
                raise complaint(
                    "file_id",
                    f"is not supported: the server stores no files. Send the {noun} as a data: URL "
                    f"in {place}.",
                )
            if not is_picture and self.file_url is not None and self.file_data is None:
                place = "file_url"
            how = ("detail", "max_soft_tokens", "prompt_cache_breakpoint")
            check_kind(self, self.type, (place,), how)
            return self
        needed = "refusal" if self.type == "refusal" else "text"
        also = ("annotations", "logprobs", "prompt_cache_breakpoint")
        check_kind(self, self.type, (needed,), also)
        return self


def _check_text(parts: str | list[ResponsePart] | None, field: str, where: str) -> None:
    """Complain of a picture or a file where only text has a meaning."""
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        if part.type in _MEDIA:
            raise complaint(
                f"{field}[{number}].type",
                f"is {part.type!r}, which has no meaning in {where}; {_MEDIA[part.type]} stand in "
                "messages of the user's and in functions' outputs.",
            )


class InputMessage(Body):
    """A message; its type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[ResponsePart]
    id: Advisory
    status: Advisory
    phase: Advisory

    @model_validator(mode="after")
    def _has_its_parts(self) -> InputMessage:
        if self.role != "user":
            _check_text(self.content, "content", f"a message of the role {self.role}")
        return self


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
    output: str | Many[ResponsePart]
    id: Advisory
    status: Advisory
    caller: Advisory


class InputReasoning(Body):
    """What the model thought earlier."""

    type: Literal["reasoning"]
    content: Many[ResponsePart] | None = None
    summary: Many[ResponsePart] | None = None
    id: Advisory
    status: Advisory
    encrypted_content: Advisory

    @model_validator(mode="after")
    def _has_its_parts(self) -> InputReasoning:
        _check_text(self.content, "content", "thoughts")
        _check_text(self.summary, "summary", "thoughts")
        return self


InputItem = InputMessage | InputFunctionCall | InputFunctionOutput | InputReasoning


_TOOL_ADVISORY = ("cache_control", "defer_loading", "output_schema", "allowed_callers")


class ResponseTool(Body):
    """A function. Hosted tools, which agents offer by default, are not passed to the model."""

    model_config = {"extra": "allow"}

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _is_known(self) -> ResponseTool:
        unknown = [name for name in self.model_extra or () if name not in _TOOL_ADVISORY]
        if self.type == "function" and unknown:
            raise complaint(unknown[0], "is not supported for a function; leave it out.")
        return self


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


class ResponseStreamOptions(Body):
    """What a stream says besides the answer; the last event always has the usage."""

    include_usage: Advisory
    include_obfuscation: Advisory


class ResponsesRequest(Extended):
    """/v1/responses, without state: the whole conversation is the input."""

    model: str | None = None
    input: str | Many[InputItem]
    instructions: str | None = None
    tools: Many[ResponseTool] | None = None
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
    stop: str | Many[str] | None = None
    ignore_eos: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Annotated[Literal[False], BeforeValidator(_is_no_number)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: Many[str] | None = None
    metadata: Echoed
    store: Advisory
    user: Echoed
    service_tier: Advisory
    safety_identifier: Advisory
    prompt_cache_key: Advisory
    prompt_cache_options: Advisory
    prompt_cache_retention: Advisory
    max_tool_calls: Advisory
    client_metadata: Advisory
    context_management: Advisory
