"""Which server answers at an endpoint, and which of its models is meant."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdraft.bench.run.counters import OTHER, OURS, SGLANG, VLLM, Page, look
from flashdraft.bench.run.stream import Endpoint
from flashdraft.errors import EngineLostError, RequestError

LOADING_S = 600.0  # that a server may take to load its model
LOADING_STATUS = 503
POLL_S = 2.0  # between two looks whether it has
KINDS = (OURS, VLLM, SGLANG)
SALTED = (VLLM, SGLANG)  # servers that keep requests with different salts apart


@dataclass(frozen=True)
class Served:
    """A server that was looked at: what it is, and which of its models is meant."""

    endpoint: Endpoint
    kind: str
    model: str
    has_metrics: bool

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        seed: int,
        greedy: bool,
        thinking: bool,
        salt: str,
        verify: int | None,
    ) -> dict[str, Any]:
        """The body of a streamed request for an answer, in this server's words."""
        is_known = self.kind in KINDS
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if greedy:
            body["temperature"] = 0.0
        if is_known or thinking:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        if is_known:
            body["stream_options"]["continuous_usage_stats"] = True
            if greedy:  # which a checkpoint's recommendations may have
                body["repetition_penalty"] = 1.0
        if self.kind in SALTED:
            body["cache_salt"] = salt
        if self.kind == OURS and verify is not None:
            body["flashdraft"] = {"verify": verify}
        return body


def find_served(
    endpoint: Endpoint, model: str | None, on_wait: Callable[[str], None] = lambda text: None
) -> Served:
    """Look at a server, once it has loaded; `model` None takes the first one it has."""
    status, text = _list_models(endpoint, on_wait)
    if status in (401, 403):
        raise RequestError(f"{endpoint.url} wants a key (HTTP {status}); give it with --api-key.")
    try:
        listed = {str(one["id"]): str(one.get("owned_by")) for one in json.loads(text)["data"]}
    except (ValueError, LookupError, TypeError, AttributeError):
        listed = {}
    if status != 200 or not listed:
        raise RequestError(
            f"{endpoint.url} is no OpenAI endpoint: GET /v1/models gave HTTP {status}, no models."
        )
    if model is not None and model not in listed:
        raise RequestError(
            f"{endpoint.url} does not serve {model!r}; it has {', '.join(sorted(listed))}."
        )
    name = model if model is not None else next(iter(listed))
    page = look(endpoint)
    kind = listed[name] if listed[name] in KINDS else _kind_of(page or {})
    return Served(endpoint, kind, name, page is not None)


def _list_models(endpoint: Endpoint, on_wait: Callable[[str], None]) -> tuple[int, str]:
    """What the server says of its models; one that still loads is waited for, within bounds."""
    begin = time.monotonic()
    while (answer := endpoint.get("/v1/models"))[0] == LOADING_STATUS:
        waited_s = time.monotonic() - begin
        if waited_s >= LOADING_S:
            raise EngineLostError(
                f"{endpoint.url} is still loading after {LOADING_S:g} s (HTTP {LOADING_STATUS}); "
                "try again when it is ready, or see its log."
            )
        on_wait(
            f"{endpoint.url} is still loading (HTTP {LOADING_STATUS}): waiting, at most "
            f"{LOADING_S:g} s; {waited_s:.0f} s so far"
        )
        time.sleep(POLL_S)
    return answer


def _kind_of(page: Page) -> str:
    for kind, prefix in ((OURS, "flashdraft_"), (VLLM, "vllm:"), (SGLANG, "sglang:")):
        if any(name.startswith(prefix) for name in page):
            return kind
    return OTHER
