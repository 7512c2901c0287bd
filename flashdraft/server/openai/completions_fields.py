"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flashdraft.server.http.fields import Many, SamplingFields


class CompletionRequest(SamplingFields):
    """/v1/completions: raw prompts, without the chat template."""

    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: int | None = None
