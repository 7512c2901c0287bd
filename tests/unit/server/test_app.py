"""The whole application over an engine's process that is faked: its own routes, layers and logs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from flashdraft.core import VERSION
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.server.answering.serving import Serving
from flashdraft.server.app import create_app
from flashdraft.server.process.client import EngineClient, EngineState
from flashdraft.server.settings import ServerSettings
from tests.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, make_tiny_tokenizer
from tests.unit.server.asgi_client import Answer, call_async
from tests.unit.server.live_server import FAKE

OWN = {"host": "127.0.0.1:8000"}


@dataclass
class Server:
    app: FastAPI
    engine: EngineClient
    lines: list[dict[str, Any]] = field(default_factory=list)

    async def get(self, path: str, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await call_async(self.app, "GET", path, {**OWN, **named})

    async def post(self, path: str, body: Any, method: str = "POST") -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**OWN, "content-type": "application/json"}
        return await call_async(self.app, method, path, headers, [data])


@contextlib.asynccontextmanager
async def server(
    tmp_path: Path,
    behaviour: str = "normal",
    start: bool = True,
    step_s: float = 0.005,
    **settings: Any,
) -> AsyncIterator[Server]:
    tokenizer = Tokenizer(
        make_tiny_tokenizer(),
        special_tokens={"eos_token": SPECIAL_TOKENS[2]},
        chat_template=CHAT_TEMPLATE,
    )
    arguments = {"behaviour": behaviour, "lives": str(tmp_path / "lives"), "step_s": step_s}
    chosen = ServerSettings(**settings)
    engine = EngineClient(arguments, chosen, command=FAKE)
    lines: list[dict[str, Any]] = []
    app = create_app(Serving(engine, tokenizer, chosen, engine.metrics), lines.append)
    if start:
        await engine.start()
    try:
        yield Server(app, engine, lines)
    finally:
        await engine.stop()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(limited())


def test_health_says_how_the_engine_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, "dies", start=False) as one:
            answer = await one.get("/health")
            assert answer.status == 503 and answer.json()["status"] == "starting"
            assert answer.headers["retry-after"]
            early = await one.get("/v1/models")
            assert early.status == 503 and early.json()["error"]["type"] == "server_error"
            await one.engine.start()
            answer = await one.get("/health")
            assert (answer.status, answer.json()["status"]) == (200, "ready")
            lost = await one.post(
                "/v1/completions", {"model": "fake", "prompt": "the", "max_tokens": 40}
            )
            assert lost.status == 503 and lost.headers["retry-after"]
            assert (await one.get("/health")).json()["status"] == "restarting"
            while one.engine.state is not EngineState.READY:
                await asyncio.sleep(0.01)
            await one.engine.drain(0)
            answer = await one.get("/health")
            assert (answer.status, answer.json()["status"]) == (503, "draining")
            answer = await one.post("/v1/completions", {"model": "fake", "prompt": "the"})
            assert answer.status == 503

    run(scenario)


def test_what_the_server_says_of_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, served_model_names=("mine", "org/other")) as one:
            assert (await one.get("/version")).json() == {"version": VERSION}
            models = (await one.get("/v1/models")).json()
            assert models["object"] == "list"
            assert [model["id"] for model in models["data"]] == ["mine", "org/other"]
            assert models["data"][0]["max_model_len"] == 64
            defaults = models["data"][0]["sampling_defaults"]
            assert defaults == {"temperature": 1.0, "max_tokens": 1024}
            assert models["data"][0]["capabilities"][:2] == ["completion", "tools"]
            assert (await one.get("/v1/models/org/other")).json()["id"] == "org/other"
            unknown = await one.get("/v1/models/nobody")
            assert unknown.status == 404 and "'mine'" in unknown.json()["error"]["message"]
            theirs = (await one.get("/v1/models", anthropic_version="2023-06-01")).json()
            assert theirs["data"][0]["type"] == "model" and theirs["first_id"] == "mine"
            assert theirs["data"][0]["created_at"].endswith("Z")
            metrics = await one.get("/metrics")
            assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert b"flashdraft_engine_up 1\n" in metrics.body

    run(scenario)


def test_tokens_and_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as one:
            answer = (await one.post("/tokenize", {"prompt": "the fox"})).json()
            assert answer["count"] == len(answer["tokens"]) > 0
            assert answer["max_model_len"] == 64
            back = await one.post("/detokenize", {"tokens": answer["tokens"]})
            assert back.json() == {"prompt": "the fox"}
            chat = {"messages": [{"role": "user", "content": "the fox"}]}
            longer = (await one.post("/tokenize", chat)).json()
            assert longer["tokens"][0] == 1 and longer["count"] > answer["count"]
            shorter = (await one.post("/tokenize", {**chat, "add_generation_prompt": False})).json()
            assert shorter["count"] < longer["count"]

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "either prompt or messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "surprise": 1}, "surprise"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "content"),
        ("/tokenize", {"prompt": "\ud800"}, "Unicode"),
        ("/detokenize", {"tokens": [-1]}, "from 0 to 299"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/tokenize", b"{", "JSON"),
        ("/tokenize", b"", "JSON"),
        ("/tokenize", b"[" * 100_000, "levels deep"),
        ("/tokenize", b'{"prompt": "\xff"}', "UTF-8"),
    ],
)
def test_wrong_bodies_are_a_400_that_says_why(
    tmp_path: Path, path: str, body: Any, part: str
) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as one:
            answer = await one.post(path, body)
            assert answer.status == 400
            assert part in answer.json()["error"]["message"]

    run(scenario)


def test_what_is_not_there_is_said_in_the_right_shape(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, max_body_bytes=1000) as one:
            for path in ("/nothing", "/v1/nothing", "/health/", "/page/../app.py", "/page/app.py"):
                answer = await one.get(path)
                assert answer.status == 404 and answer.json()["error"]["message"], path
            wrong = await one.get("/tokenize")
            assert wrong.status == 405 and wrong.headers["allow"] == "POST"
            theirs = await one.get("/v1/messages")
            assert theirs.status == 405 and theirs.json()["type"] == "error"
            large = await one.post("/v1/messages", b"x" * 2000)
            assert large.status == 413
            assert large.json()["error"]["type"] == "request_too_large"

    run(scenario)


def test_the_page_and_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("flashdraft.server.service.page.PAGE_FOLDER", tmp_path)
        (tmp_path / "parts").mkdir()
        (tmp_path / "parts" / "a.js").write_text("let a = 1;")
        (tmp_path / "secret.txt").write_text("secret")
        async with server(tmp_path) as one:
            missing = await one.get("/")
            assert missing.status == 404
            (tmp_path / "index.html").write_text("<script src=page/parts/a.js></script>")
            page = await one.get("/")
            assert page.status == 200 and page.headers["content-type"].startswith("text/html")
            assert "script-src 'self';" in page.headers["content-security-policy"]
            assert page.headers["x-content-type-options"] == "nosniff"
            script = await one.get("/page/parts/a.js")
            assert script.body == b"let a = 1;"
            assert script.headers["content-type"].startswith("text/javascript")
            assert "connect-src" not in script.headers["content-security-policy"]
            assert "default-src 'none'" in script.headers["content-security-policy"]
            for path in ("secret.txt", "a.js", "parts", "parts%2f..%2fa.js"):
                assert (await one.get(f"/page/{path}")).status == 404, path

    run(scenario)


@pytest.mark.parametrize("log_prompts", [False, True])
def test_every_request_is_a_line_without_its_prompt(tmp_path: Path, log_prompts: bool) -> None:
    async def scenario() -> None:
        async with server(tmp_path, log_prompts=log_prompts) as one:
            body = {"model": "fake", "prompt": "the lazy dog", "max_tokens": 6, "n": 2}
            answer = await one.post("/v1/completions", body)
            assert answer.status == 200, answer.body
            await one.get("/health")
            await one.get("/nothing/" + "x" * 100)
            line, other = one.lines
            assert line["route"] == "/v1/completions" and line["status"] == 200
            assert line["id"] == answer.headers["x-request-id"]
            assert line["completion_tokens"] == 12 and line["prompt_tokens"] == 3
            assert line["finish_reasons"] == ["length", "length"]
            assert line["duration_s"] > 0 and line["ttft_s"] > 0
            assert ("lazy dog" in json.dumps(line)) == log_prompts
            assert other["route"] is None and other["status"] == 404
            page = (await one.get("/metrics")).body.decode()
            assert 'responses_total{route="/v1/completions",status="200"} 1' in page
            assert 'responses_total{route="other",status="404"} 1' in page
            assert "xxx" not in page

    run(scenario)


def test_the_key_covers_everything_but_health(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, api_key="secret") as one:
            paths = one.app.openapi()["paths"].keys() | {"/", "/page/x.js", "/openapi.json", "/x"}
            assert {"/v1/models", "/metrics", "/tokenize"} <= paths
            for path in paths - {"/health"}:
                for method in ("GET", "POST"):
                    answer = await call_async(one.app, method, path, OWN)
                    assert answer.status == 401, path
            assert (await one.get("/health")).status == 200
            assert (await one.get("/version", x_api_key="secret")).status == 200
            asked = {
                path: await one.get(path) for path in ("/", "/page/styles/frame.css", "/v1/models")
            }
            schemes = [answer.headers["www-authenticate"].split()[0] for answer in asked.values()]
            assert schemes == ["Basic", "Basic", "Bearer"]
            basic = base64.b64encode(b"me:secret").decode()
            for path in ("/", "/page/styles/frame.css", "/page/main.js", "/v1/models"):
                assert (await one.get(path, authorization=f"Basic {basic}")).status == 200, path

    run(scenario)


def test_what_harnesses_must_know_of_the_tokenizer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as one:
            assert (await one.get("/tokenizer_info")).json() == {
                "eos_token": SPECIAL_TOKENS[2],
                "model_max_length": 64,
                "chat_template": CHAT_TEMPLATE,
            }

    run(scenario)


def test_the_openapi_document_names_the_routes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as one:
            document = (await one.get("/openapi.json")).json()
            assert {"/v1/models", "/tokenize", "/health"} <= document["paths"].keys()
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    assert {"200", "4XX", "5XX"} <= operation["responses"].keys(), path
                    assert "422" not in operation["responses"], path
            chat = document["components"]["schemas"]["ChatRequest"]["properties"]
            assert chat["model"]["enum"] == ["fake", None]
            assert chat["presence_penalty"]["anyOf"][0]["maximum"] == 2
            assert (await one.get("/docs")).status == 404

    run(scenario)


def test_a_full_queue_is_a_429_with_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path, step_s=0.03, max_queue=0) as one:
            body = {"model": "fake", "prompt": "the", "max_tokens": 50}
            answers = await asyncio.gather(*(one.post("/v1/completions", body) for _ in range(4)))
            assert sorted(answer.status for answer in answers) == [200, 200, 429, 429]
            refused = next(answer for answer in answers if answer.status == 429)
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"

    run(scenario)
