"""The bodies of /api/chat, /api/generate and /api/show.

Ollama passes over options that it does not know, and so do we; what it knows must have its type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from flashdraft.server.http.field_errors import complaint
from flashdraft.server.http.fields import Advisory, Body, FunctionDefinition, Many, Penalty
from flashdraft.server.http.picture_fields import PictureText


def _whole(value: Any) -> Any:
    """Clients of dynamic languages write 40 as 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
_WITHOUT_EFFECT = "Its type is checked; without effect."
IdleNumber = Annotated[float | None, Field(default=None, description=_WITHOUT_EFFECT)]
IdleWhole = Annotated[Whole | None, Field(default=None, description=_WITHOUT_EFFECT)]
IdleSwitch = Annotated[bool | None, Field(default=None, description=_WITHOUT_EFFECT)]


class OllamaOptions(Body):
    """How tokens are chosen and when an answer ends; what tunes an engine has no effect."""

    model_config = ConfigDict(extra="ignore")

    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Whole | None = None
    stop: str | Many[str] | None = None
    num_predict: Annotated[Whole, Field(ge=-2)] | None = None
    num_ctx: Annotated[Whole, Field(ge=1)] | None = None
    repeat_last_n: IdleWhole
    num_keep: IdleWhole
    num_batch: IdleWhole
    num_gpu: IdleWhole
    main_gpu: IdleWhole
    num_thread: IdleWhole
    typical_p: IdleNumber
    tfs_z: IdleNumber
    mirostat: IdleWhole
    mirostat_tau: IdleNumber
    mirostat_eta: IdleNumber
    penalize_newline: IdleSwitch
    numa: IdleSwitch
    low_vram: IdleSwitch
    f16_kv: IdleSwitch
    logits_all: IdleSwitch
    vocab_only: IdleSwitch
    use_mmap: IdleSwitch
    use_mlock: IdleSwitch
    embedding_only: IdleSwitch


class OllamaFunction(Body):
    """The function of a past call; arguments are an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Advisory
    description: Advisory


class OllamaCall(Body):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaMessage(Body):
    """One turn; pictures are base64, of the user's or a tool's."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Many[PictureText] | None = None
    tool_calls: Many[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None  # a tool's, as some clients have it

    @model_validator(mode="after")
    def _has_its_fields(self) -> OllamaMessage:
        if self.images and self.role not in ("user", "tool"):
            raise complaint("images", f"has no meaning for the role {self.role!r}.")
        if self.tool_calls and self.role != "assistant":
            raise complaint("tool_calls", f"has no meaning for the role {self.role!r}.")
        return self


class OllamaTool(Body):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class OllamaRequest(Body):
    """What /api/chat and /api/generate share."""

    model: str | None = None
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["", "low", "medium", "high", "max"] | None = None
    stream: bool | None = None  # None is true
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    keep_alive: Advisory

    @model_validator(mode="after")
    def _drops_nothing(self) -> OllamaRequest:
        for name in ("truncate", "shift"):
            if getattr(self, name):
                raise complaint(
                    name,
                    "is true, and nothing of a conversation is ever dropped here; leave it out. A "
                    "prompt beyond the context is refused.",
                )
        return self


class OllamaChatRequest(OllamaRequest):
    """/api/chat."""

    messages: Many[OllamaMessage] | None = None
    tools: Many[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """/api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    suffix: str | None = None
    images: Many[PictureText] | None = None
    context: Many[int] | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> OllamaGenerateRequest:
        reasons = {
            "template": "the model's own chat template is used; leave it out, or set raw.",
            "suffix": "insertion is not known here; leave it out.",
            "context": "send the whole conversation to /api/chat.",
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                raise complaint(name, f"is not supported: {reason}")
        if self.raw and self.system:
            raise complaint("system", "has no meaning with raw; write it into prompt.")
        if self.raw and self.images:
            raise complaint("images", "has no meaning with raw; leave the one or the other out.")
        return self


class OllamaShowRequest(Body):
    """/api/show; `name` is what `model` was called earlier."""

    model: str | None = None
    name: str | None = None
    verbose: Advisory
    system: Advisory
    template: Advisory
    options: Advisory
