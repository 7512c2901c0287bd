"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flashdraft.server.http.field_errors import check_kind, complaint
from flashdraft.server.http.fields import (
    Advisory,
    Body,
    FunctionTool,
    Many,
    SamplingFields,
    known_part,
    one_of,
)
from flashdraft.server.http.picture_fields import Budget, Detail, PictureText

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_MEDIA = {"image_url": "pictures", "video_url": "films", "file": "files"}
_PARTS = ("text", "refusal", *_MEDIA)


class PictureUrl(Body):
    """A picture, and how many tokens it may take."""

    url: PictureText
    detail: Detail | None = None
    max_soft_tokens: Budget | None = None  # counts before detail


class VideoUrl(Body):
    """A film, as vLLM has it."""

    url: PictureText


class SentFile(Body):
    """A PDF document, and how many tokens each of its pages may take."""

    file_data: PictureText | None = None
    filename: Advisory
    file_id: Any = None
    max_soft_tokens: Budget | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> SentFile:
        if self.file_id is not None:
            raise complaint(
                "file_id",
                "is not supported: the server stores no files. Send the PDF as a data: URL in "
                "file_data.",
            )
        if self.file_data is None:
            raise complaint("file_data", "is missing; it holds a PDF as a data: URL.")
        return self


class ContentPart(Body):
    """A part of a message's content: text, a picture, a film, or a PDF."""

    type: Annotated[str, one_of(*_PARTS), known_part(_PARTS)]
    text: str | None = None
    refusal: str | None = None
    cache_control: Advisory
    annotations: Advisory
    image_url: PictureUrl | None = None
    input_audio: Any = None
    video_url: VideoUrl | None = None
    file: SentFile | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> ContentPart:
        check_kind(self, self.type, (self.type,), ("cache_control", "annotations"))
        return self


Content = str | Many[ContentPart] | None


def _check_text(content: Content, role: str) -> None:
    """Complain of a picture, a film or a file where only text has a meaning."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if part.type in _MEDIA:
            raise complaint(
                f"content[{number}].type",
                f"is {part.type!r}, which has no meaning for the role {role!r}; "
                f"{_MEDIA[part.type]} stand in messages of the user's and in tools' results.",
            )


class TextMessage(Body):
    """What the user, the system or the developer says; the user shows pictures too."""

    role: Literal["system", "developer", "user"]
    content: str | Many[ContentPart]
    name: Advisory
    cache_control: Advisory

    @model_validator(mode="after")
    def _has_its_parts(self) -> TextMessage:
        if self.role != "user":
            _check_text(self.content, self.role)
        return self


class CalledFunction(Body):
    """The function of a past call; arguments are JSON text."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class PastCall(Body):
    """A call the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Advisory


class AssistantMessage(Body):
    """What the model said earlier. SDKs send back every field they were given."""

    role: Literal["assistant"]
    content: Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Many[PastCall] | None = None
    refusal: str | None = None
    name: Advisory
    annotations: Advisory
    audio: Advisory
    function_call: Advisory
    cache_control: Advisory
    reasoning_details: Advisory
    provider_specific_fields: Advisory
    thinking_blocks: Advisory

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        said = (self.content, self.refusal, self.reasoning_content, self.reasoning)
        if all(one is None for one in said) and not self.tool_calls:
            raise complaint("content", "is missing; a message without tool_calls needs it.")
        _check_text(self.content, self.role)
        return self


class ToolMessage(Body):
    """What a tool returned."""

    role: Literal["tool"]
    content: str | Many[ContentPart]
    tool_call_id: str | None = None
    name: str | None = None
    cache_control: Advisory


Message = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ChosenFunction(Body):
    """The function that must be called."""

    name: str


class NamedTool(Body):
    """tool_choice that names one function."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(SamplingFields):
    """/v1/chat/completions."""

    messages: Many[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    modalities: Many[Literal["text"]] | None = None
    verbosity: Advisory
    prediction: Advisory
