"""All routes of a server, in the order in which they are matched and documented."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from starlette.routing import Route

from flashdraft.server.answering.serving import Serving
from flashdraft.server.anthropic import messages
from flashdraft.server.ollama import generation
from flashdraft.server.ollama import models as ollama_models
from flashdraft.server.openai import chat, completions, responses
from flashdraft.server.service import models, page, state, tokens


def add_routes(app: FastAPI, serving: Serving) -> None:
    """Bind every route to a server; the app's `state.methods` has their paths and methods."""
    routers: list[APIRouter] = [module.router(serving) for module in (state, models, tokens)]
    routers.append(page.router())
    routers += [module.router(serving) for module in (chat, completions, responses, messages)]
    routers += [module.router(serving) for module in (generation, ollama_models)]
    methods: dict[str, set[str]] = {}
    for routes in ([*app.routes], *(one.routes for one in routers)):
        for route in routes:
            assert isinstance(route, Route), "nothing is mounted, and there are no websockets"
            methods.setdefault(route.path, set()).update(route.methods or ())
    for router in routers:
        app.include_router(router)
    app.state.methods = methods
