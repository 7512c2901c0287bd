"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from flashdraft.server.http.field_errors import check_kind, complaint
from flashdraft.server.http.fields import Advisory, Body, Extended, FunctionName, Many, one_of
from flashdraft.server.http.picture_fields import PictureText

# Of each type of block what it needs, and what it may have besides.
_BLOCKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ("citations",)),
    "thinking": (("thinking",), ("signature",)),
    "redacted_thinking": ((), ("data",)),
    "tool_use": (("id", "name", "input"), ("caller",)),
    "tool_result": (("tool_use_id",), ("content", "is_error")),
    "tool_reference": (("tool_name",), ()),
    "image": (("source",), ()),
    "document": (("source",), ("title", "context", "citations")),
}
# Where each may stand.
_IN_SYSTEM = ("text",)
_IN_RESULT = ("text", "image", "document", "tool_reference")
_IN_MESSAGE = {
    "system": ("text",),
    "user": ("text", "image", "document", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_FILES = ("container_upload", "search_result")
_PDF = "application/pdf"


class PictureSource(Body):
    """Where a picture or a PDF is: in the body, or behind an address."""

    type: Annotated[str, one_of("base64", "url")]
    media_type: (
        Literal["image/jpeg", "image/png", "image/gif", "image/webp", "application/pdf"] | None
    ) = None
    data: PictureText | None = None  # base64
    url: PictureText | None = None
    file_id: Any = None

    @field_validator("type")
    @classmethod
    def _is_supported(cls, kind: str) -> str:
        if kind == "file":
            raise ValueError(
                "the server stores no files; send the file itself, with the type 'base64'"
            )
        if kind not in ("base64", "url"):
            raise ValueError("it must be 'base64' or 'url'")
        return kind

    @model_validator(mode="after")
    def _is_whole(self) -> PictureSource:
        needed = ("media_type", "data") if self.type == "base64" else ("url",)
        check_kind(self, self.type, needed)
        return self


class ContentBlock(Body):
    """A block of a message; the fields that count depend on its type."""

    type: Annotated[str, one_of(*_BLOCKS)]
    text: str | None = None  # text
    thinking: str | None = None  # thinking
    id: str | None = None  # tool_use
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # tool_result
    content: str | Many[ContentBlock] | None = None
    is_error: bool | None = None
    signature: Advisory
    data: Advisory  # redacted_thinking
    source: PictureSource | None = None  # image, document
    title: str | None = None  # document
    context: str | None = None
    cache_control: Advisory
    citations: Advisory
    caller: Advisory
    tool_name: str | None = None  # tool_reference

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, block: Any) -> Any:
        """Before its fields, which mean something else in a block that is not known."""
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in _FILES:
            raise complaint(
                "type",
                f"is {kind!r}, which is not supported: the server stores no files; send text, "
                "images and documents.",
            )
        if isinstance(kind, str) and kind not in _BLOCKS:
            raise complaint("type", f"is {kind!r}, which is not supported.")
        return block

    @model_validator(mode="after")
    def _is_whole(self) -> ContentBlock:
        needed, also = _BLOCKS[self.type]
        check_kind(self, self.type, needed, (*also, "cache_control"))
        if self.source is not None and self.source.media_type is not None:
            is_pdf = self.source.media_type == _PDF
            if is_pdf != (self.type == "document"):
                raise complaint(
                    "source.media_type",
                    f"is {self.source.media_type!r}, which has no meaning for type {self.type!r}; "
                    f"an image has a picture's, a document {_PDF!r}.",
                )
        if self.type == "tool_result":
            check_place(self.content, "content", _IN_RESULT, "a tool_result")
        return self


def check_place(
    blocks: str | list[ContentBlock] | None, field: str, kinds: tuple[str, ...], where: str
) -> None:
    """Complain of a block that has no meaning where it stands."""
    for number, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if block.type not in kinds:
            text = f"is {block.type!r}; {where} has blocks of type {', '.join(kinds)} only."
            raise complaint(f"{field}[{number}].type", text)


class AnthropicMessage(Body):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[ContentBlock]

    @model_validator(mode="after")
    def _has_its_blocks(self) -> AnthropicMessage:
        where = f"a message of the role {self.role}"
        check_place(self.content, "content", _IN_MESSAGE[self.role], where)
        return self


class AnthropicTool(Body):
    """A tool of the client's; hosted tools have another type and are refused."""

    type: Annotated[str | None, one_of("custom")] = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: Advisory
    strict: bool | None = None
    defer_loading: Advisory
    eager_input_streaming: Advisory
    input_examples: Advisory
    allowed_callers: Advisory

    @field_validator("type")
    @classmethod
    def _is_custom(cls, kind: str | None) -> str | None:
        if kind not in (None, "custom"):
            raise ValueError(
                f"the tool type {kind!r} runs on Anthropic's servers and is not supported here; "
                "only tools with an input_schema are"
            )
        return kind


class AnthropicToolChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Thinking on or off; the budget and the display are the template's and the model's affair."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Advisory
    display: Advisory


class OutputFormat(Body):
    """The schema that the answer's text follows."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: Advisory


class OutputConfig(Body):
    """The answer's form."""

    format: OutputFormat | None = None
    effort: Advisory


class CountTokensRequest(Body):
    """/v1/messages/count_tokens: what makes up the prompt."""

    model: str | None = None
    messages: Many[AnthropicMessage]
    system: str | Many[ContentBlock] | None = None
    tools: Many[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Advisory
    context_management: Advisory
    betas: Advisory
    speed: Advisory

    @model_validator(mode="after")
    def _has_system_text(self) -> CountTokensRequest:
        check_place(self.system, "system", _IN_SYSTEM, "system")
        return self


class MessagesRequest(CountTokensRequest, Extended):
    """/v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Many[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Advisory
    service_tier: Advisory
    inference_geo: Advisory
    diagnostics: Advisory
    user_profile_id: Advisory
    workspace_id: Advisory
