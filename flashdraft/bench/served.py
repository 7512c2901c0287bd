"""Which server answers at an endpoint, and which of its models is meant."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flashdraft.bench.counters import OTHER, OURS, SGLANG, VLLM, Page, look
from flashdraft.bench.stream import Endpoint
from flashdraft.errors import RequestError

KINDS = (OURS, VLLM, SGLANG)


@dataclass(frozen=True)
class Served:
    """A server that was looked at: what it is, and which of its models is meant."""

    endpoint: Endpoint
    kind: str
    model: str
    has_metrics: bool


def find_served(endpoint: Endpoint, model: str | None) -> Served:
    """Look at a server; `model` None takes the first one it has."""
    status, text = endpoint.get("/v1/models")
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


def _kind_of(page: Page) -> str:
    for kind, prefix in ((OURS, "flashdraft_"), (VLLM, "vllm:"), (SGLANG, "sglang:")):
        if any(name.startswith(prefix) for name in page):
            return kind
    return OTHER
