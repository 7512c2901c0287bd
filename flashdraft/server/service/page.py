"""The web page and its files."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, HTTPException
from fastapi.responses import HTMLResponse, Response

from flashdraft.server.http.errors import SERVICE_RESPONSES, CheckedRoute
from flashdraft.server.http.security import FILE_HEADERS, PAGE_HEADERS

PAGE_FOLDER = Path(__file__).parents[1] / "page"
_PAGE_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def router() -> APIRouter:
    """The routes; they are the same for every server."""
    routes = APIRouter(route_class=CheckedRoute, responses=SERVICE_RESPONSES)
    found = (file for file in PAGE_FOLDER.rglob("*") if file.suffix in _PAGE_TYPES)
    files = {file.relative_to(PAGE_FOLDER).as_posix(): file for file in found}

    @routes.head("/", include_in_schema=False)  # how Ollama's clients see whether anybody is there
    @routes.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        index = PAGE_FOLDER / "index.html"
        if not index.is_file():
            raise HTTPException(404, "This installation has no web page.")
        return HTMLResponse(index.read_text(encoding="utf-8"), headers=PAGE_HEADERS)

    @routes.get("/page/{name:path}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:  # names of files that are there: no path leads elsewhere
            raise HTTPException(404, f"The page has no file {name!r}.")
        file = files[name]
        return Response(
            file.read_bytes(),
            media_type=_PAGE_TYPES[file.suffix],
            headers=FILE_HEADERS,
        )

    return routes
