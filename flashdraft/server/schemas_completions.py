"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flashdraft.server.schemas_common import SamplingFields

# one complaint is enough: of a million wrong entries a million would be made
_Texts = Annotated[list[str], Field(fail_fast=True)]
_Ids = Annotated[list[int], Field(fail_fast=True)]
_IdLists = Annotated[list[_Ids], Field(fail_fast=True)]


class CompletionRequest(SamplingFields):
    """/v1/completions: raw prompts, without the chat template."""

    prompt: str | _Texts | _Ids | _IdLists
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: int | None = None
