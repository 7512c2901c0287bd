"""The application: the routes, the layers around them, and the document that describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fastapi import FastAPI

from flashdraft.core import VERSION
from flashdraft.server.answering.serving import Serving
from flashdraft.server.http.body_memory import BodyMemory
from flashdraft.server.http.exceptions import add_error_answers
from flashdraft.server.http.layers import add_layers
from flashdraft.server.routes import add_routes
from flashdraft.server.telemetry.logs import Sink, write_line
from flashdraft.server.telemetry.metrics import Metrics


def create_app(serving: Serving, sink: Sink = write_line) -> FastAPI:
    """The server's application; `sink` takes a line of the log for every request.

    Its `state.body_memory` is told when the server ends.
    """
    app = FastAPI(
        title="flashdraft",
        version=VERSION,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    add_routes(app, serving)
    add_error_answers(app)
    document = app.openapi
    app.openapi = lambda: _name_models(document(), serving.model_names)  # type: ignore[method-assign]
    memory = app.state.body_memory = BodyMemory(serving.settings.max_body_memory_bytes)
    metrics = cast(Metrics, serving.metrics)
    add_layers(app, serving.settings, memory, metrics, sink, lambda: serving.takes_pictures)
    return app


def _name_models(document: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The OpenAPI document with the names that `model` may have; null is as good as none."""
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"]["enum"] = [*names, None]
    return document
