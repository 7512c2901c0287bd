"""All routes of a server, in the order in which they are matched and documented."""

from __future__ import annotations

from fastapi import FastAPI

from flashdraft.server.answering.serving import Serving
from flashdraft.server.anthropic import messages
from flashdraft.server.openai import chat, completions, responses
from flashdraft.server.service import models, page, state, tokens


def add_routes(app: FastAPI, serving: Serving) -> None:
    """Bind every route to a server."""
    for module in (state, models, tokens):
        app.include_router(module.router(serving))
    app.include_router(page.router())
    for module in (chat, completions, responses, messages):
        app.include_router(module.router(serving))
