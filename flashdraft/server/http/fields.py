"""Fields that several request bodies share. What is not declared in a body is refused.

A field of type `Advisory` is one that real clients send and that cannot change an answer here: it
is taken and has no effect. docs/server.md lists them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from flashdraft.server.http.field_errors import complaint

Entry = TypeVar("Entry")

# one complaint is enough: of a million wrong entries a million would be made
Many = Annotated[list[Entry], Field(fail_fast=True)]

# dropped at once: it may be large, and a body is kept as long as its answer takes
Advisory = Annotated[
    Any,
    BeforeValidator(lambda _: None),
    Field(default=None, description="Accepted, without effect."),
]

Penalty = Annotated[float, Field(ge=-2, le=2)]  # as OpenAI and vLLM have it

# Why a field of the public APIs is refused, and what to do instead.
REMEDIES = {
    "audio": "audio is not supported; leave it out.",
    "best_of": "ask for n answers instead.",
    "container": "hosted tools are not supported; leave it out.",
    "conversation": "the server keeps no state; send the whole conversation as input.",
    "function_call": "use tool_choice.",
    "functions": "use tools.",
    "mcp_servers": "hosted tools are not supported; leave it out.",
    "previous_response_id": "the server keeps no state; send the whole conversation as input.",
    "prompt": "stored prompts are not supported; send the text as input.",
    "suffix": "insertion is not supported; leave it out.",
    "web_search_options": "hosted tools are not supported; leave it out.",
}


def one_of(*values: str) -> Any:
    """A text that the OpenAPI document lists; a validator says what is wrong with another one."""
    return Field(json_schema_extra={"enum": list(values)})


def known_part(kinds: Sequence[str]) -> AfterValidator:
    """The check of a content part's type: a kind of text, or a picture as this API has it."""

    def check(kind: str) -> str:
        if kind not in kinds:
            raise ValueError(
                f"a part of type {kind!r} is not supported: sound is not heard here; there are "
                f"{', '.join(kinds)}"
            )
        return kind

    return AfterValidator(check)


class Body(BaseModel):
    """A request body or a part of one: strict types, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class FlashdraftOptions(Body):
    """The extension field of requests."""

    tokens: bool = False  # each stream chunk says which tokens were drafted
    trees: bool = False  # and, of a step with branches, what was verified, and the way through it
    verify: Annotated[int, Field(ge=0, le=15)] | None = None  # a fixed verify length; 0 = plain

    @model_validator(mode="after")
    def _shows_tokens(self) -> FlashdraftOptions:
        if self.trees and not self.tokens:
            raise complaint("trees", "needs tokens; set both.")
        return self


class Extended(Body):
    """A body with the extension field."""

    flashdraft: FlashdraftOptions | None = None

    @property
    def drafting(self) -> FlashdraftOptions:
        """The extension's settings, its defaults where it is not given."""
        return self.flashdraft or FlashdraftOptions()


class StreamOptions(Body):
    """What a stream says besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far in every chunk (vLLM's field)
    include_obfuscation: Advisory

    @model_validator(mode="after")
    def _tells_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise complaint("continuous_usage_stats", "needs include_usage; set both.")
        return self


class JsonSchemaFormat(Body):
    """The `json_schema` member of a chat response_format."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Advisory  # a schema is always enforced


class ResponseFormat(Body):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's object of constraints; exactly one may be set."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Many[str] | None = None
    json_object: bool | None = None


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments follow the schema; in a forced call they always do


class FunctionTool(Body):
    """A tool in the chat API's shape."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Advisory


class SamplingFields(Extended):
    """How tokens are chosen and when an answer ends: chat completions and completions."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Advisory
    metadata: Advisory
    store: Advisory
    service_tier: Advisory
    safety_identifier: Advisory
    prompt_cache_key: Advisory
    prompt_cache_options: Advisory
    prompt_cache_retention: Advisory
