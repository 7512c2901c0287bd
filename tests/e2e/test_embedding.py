"""The Python API inside of other programs: a web application, and a notebook's running loop."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from nbclient import NotebookClient

from flashdraft import LLM, AsyncLLM, SamplingParams
from flashdraft.errors import EngineLostError
from tests.tiny import make_tiny_checkpoint

TOUR = Path(__file__).parents[2] / "docs" / "tour.ipynb"
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cache_gb": 0.01, "draft": "ngram"}
SHORT = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def blocking(folder: Path) -> LLM:
    return LLM(folder, **OPTIONS)


# -- a web application -----------------------------------------------------------------------------


def make_app(folder: Path) -> FastAPI:
    """As docs/python.md has it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncLLM(folder, **OPTIONS) as app.state.llm:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/tell")
    async def tell(about: str, endless: bool = False) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            async for event in app.state.llm.stream(about, ENDLESS if endless else SHORT):
                yield event.text

        return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")

    @app.get("/whole")
    async def whole(about: str) -> dict[str, str]:
        (found,) = await app.state.llm.generate(about, SHORT)
        return {"text": found.text}

    return app


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[FastAPI, int]]:
    app = make_app(folder)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    yield app, server.servers[0].sockets[0].getsockname()[1]
    llm = app.state.llm
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(EngineLostError):  # the end of the application was the model's
        asyncio.run(llm.generate("x"))


def get(port: int, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    return connection.getresponse()


def until_idle(llm: AsyncLLM) -> None:
    until = time.monotonic() + 30
    while llm.engine.has_work and time.monotonic() < until:
        time.sleep(0.02)
    assert not llm.engine.has_work
    llm.engine.check_integrity()


def test_many_clients_of_a_web_application_get_the_texts_of_one_by_one(
    served: tuple[FastAPI, int], blocking: LLM
) -> None:
    app, port = served
    prompts = [f"the {word}" for word in ("fox", "dog", "tree", "token", "target", "draft")]
    found: dict[str, tuple[str, str]] = {}

    def ask(prompt: str) -> None:
        streamed = get(port, f"/tell?about={quote(prompt)}").read().decode()
        found[prompt] = streamed, json.load(get(port, f"/whole?about={quote(prompt)}"))["text"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for prompt in prompts:
        expected = blocking.generate(prompt, SHORT)[0].text
        assert found[prompt] == (expected, expected)
    until_idle(app.state.llm)


def test_a_client_that_goes_away_cancels_its_request(
    served: tuple[FastAPI, int], blocking: LLM
) -> None:
    app, port = served
    leaving = [get(port, "/tell?about=fox&endless=true") for _ in range(3)]
    for response in leaving:
        assert response.read(4)
    assert app.state.llm.engine.load.running == 3
    for response in leaving:
        response.close()
    text = get(port, "/tell?about=dog").read().decode()
    assert text == blocking.generate("dog", SHORT)[0].text
    until_idle(app.state.llm)


# -- notebooks -------------------------------------------------------------------------------------


def run_notebook(notebook: Any, path: Path) -> Any:
    """Run it in a kernel, whose event loop runs already when a cell begins."""
    client = NotebookClient(notebook, timeout=280, kernel_name="python3")
    return client.execute(cwd=str(path))


def outputs(cell: Any, kind: str) -> str:
    """What a cell showed of one kind: "stdout", "stderr", or a MIME type."""
    found = ""
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == kind:
            found += output.text
        elif "data" in output:
            found += output.data.get(kind, "")
    return found


def test_a_notebook_shows_answers_in_colours_and_awaits_others(
    folder: Path, blocking: LLM, tmp_path: Path
) -> None:
    options = {**OPTIONS, "verify": 4}
    sources = [
        "from flashdraft import LLM, AsyncLLM, SamplingParams\n"
        "params = SamplingParams(max_tokens=24, ignore_eos=True)\n"
        f"llm = LLM({str(folder)!r}, **{options!r})\n"
        "llm",
        "llm.generate('the dog the dog the dog the dog', params)[0]",
        "found = llm.generate(['a fox', 'a dog'], params)",
        f"other = AsyncLLM({str(folder)!r}, **{options!r})\n"
        "(one,) = await other.generate('a fox', params)\n"
        "print(one.text == found[0].text)",
        "text = ''\n"
        "async for event in other.stream('a dog', params):\n"
        "    text += event.text\n"
        "print(text == found[1].text)",
        "async for event in other.stream('a dog', SamplingParams(max_tokens=None)):\n"
        "    break\n"
        "other.close(); llm.close()\n"
        "repr(llm)[-8:]",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in sources])
    cells = run_notebook(notebook, tmp_path).cells
    assert "max_context=1024" in outputs(cells[0], "text/plain")
    page, plain = outputs(cells[1], "text/html"), outputs(cells[1], "text/plain")
    assert page.startswith('<div class="tex2jax_ignore') and page.count("<span style=") > 3
    assert plain.startswith("Generation(") and "a step" in plain
    assert "2/2" in outputs(cells[2], "stderr") + outputs(cells[2], "text/plain"), "the bar"
    assert outputs(cells[3], "stdout") == outputs(cells[4], "stdout") == "True\n"
    assert "closed)" in outputs(cells[5], "text/plain")


@pytest.mark.weights
@pytest.mark.alone  # it loads the default pair twice, as a user does
def test_the_tour_runs(tmp_path: Path) -> None:
    tour = nbformat.read(TOUR, as_version=4)
    assert all(not cell.get("outputs") for cell in tour.cells), "it is kept without results"
    nbformat.validate(tour)
    cells = run_notebook(tour, tmp_path).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(code) >= 8 and all(cell.outputs for cell in code)
    assert any("<span style=" in outputs(cell, "text/html") for cell in code)
