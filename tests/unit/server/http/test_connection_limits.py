"""Connections over real sockets: silent ones, slow ones, too many, and what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from tests.unit.server.live_server import (
    CHAT,
    HEALTH,
    LONG,
    is_closed,
    live,
    post,
    read_answer,
    run,
)


def test_silent_sockets_lock_nobody_out_and_are_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, head_timeout_s=3.0) as one:
            silent = [
                await one.connect(b"" if number % 2 else b"GET /health HTTP/1.1\r\nHost: lo")
                for number in range(600)
            ]
            assert (await one.ask(HEALTH))[0] == 200
            status, _, answer = await one.ask(post("/v1/chat/completions", CHAT))
            assert status == 200 and answer["usage"]["completion_tokens"] == 3
            assert all(await asyncio.gather(*(is_closed(reader) for reader, _ in silent)))
            for _, writer in silent:
                writer.close()

    run(scenario)


def test_a_head_in_small_pieces_has_the_same_time_as_a_silent_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, head_timeout_s=0.6) as one:
            reader, writer = await one.connect(b"GET /health HTTP/1.1\r\n")
            closing = asyncio.create_task(is_closed(reader))
            for number in range(40):
                with contextlib.suppress(ConnectionError):
                    writer.write(f"x-{number}: 1\r\n".encode())
                    await writer.drain()
                await asyncio.sleep(0.05)
                if closing.done():
                    break
            assert closing.done() and closing.result()

    run(scenario)


def test_a_kept_connection_that_begins_a_second_request_has_a_limit_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, head_timeout_s=0.4) as one:
            reader, writer = await one.connect(HEALTH)
            assert (await read_answer(reader))[0] == 200
            writer.write(HEALTH)
            assert (await read_answer(reader))[0] == 200
            writer.write(b"GET /hea")
            began = asyncio.get_running_loop().time()
            assert await is_closed(reader)
            assert asyncio.get_running_loop().time() - began < 3

    run(scenario)


def test_an_answer_may_take_longer_than_a_head(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, step_s=0.05, head_timeout_s=0.3) as one:
            status, _, answer = await one.ask(
                post("/v1/chat/completions", {**CHAT, "max_tokens": 20})
            )
            assert status == 200 and answer["usage"]["completion_tokens"] == 20

    run(scenario)


def test_a_body_that_does_not_come_is_answered_in_the_apis_shape(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, body_timeout_s=0.3) as one:
            for path, shape in (("/v1/completions", "error"), ("/v1/messages", "type")):
                status, headers, answer = await one.ask(post(path, {"a": 1}, length=500))
                assert status == 408 and shape in answer and answer["error"]["message"]
                assert headers["connection"] == "close"

    run(scenario)


def test_a_refused_body_that_trickles_on_keeps_no_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, api_key="secret", head_timeout_s=0.5) as one:
            reader, writer = await one.connect(post("/v1/completions", {}, length=100_000))
            assert (await read_answer(reader))[0] == 401
            closing = asyncio.create_task(is_closed(reader))
            for _ in range(40):
                with contextlib.suppress(ConnectionError):
                    writer.write(b" ")
                    await writer.drain()
                await asyncio.sleep(0.05)
                if closing.done():
                    break
            assert closing.done()

    run(scenario)


def test_one_request_too_many_is_told_when_to_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, step_s=0.02, max_connections=2) as one:
            running = [
                await one.connect(post("/v1/chat/completions", {**CHAT, "max_tokens": 500}))
                for _ in range(2)
            ]
            while one.engine.num_open < 2:
                await asyncio.sleep(0.01)
            for path, kind in (
                ("/v1/chat/completions", "server_error"),
                ("/v1/messages", "overloaded_error"),
            ):
                status, headers, answer = await one.ask(post(path, CHAT))
                assert status == 503 and answer["error"]["type"] == kind
                assert int(headers["retry-after"]) > 0
            assert (await one.ask(HEALTH))[0] == 200
            for _, writer in running:
                writer.close()
            while one.engine.num_open:
                await asyncio.sleep(0.01)
            assert (await one.ask(post("/v1/chat/completions", CHAT)))[0] == 200

    run(scenario)


def test_where_too_many_are_open_the_oldest_that_waits_goes_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path, step_s=0.01, max_sockets=4) as one:
            busy, busy_writer = await one.connect(
                post("/v1/chat/completions", {**CHAT, "max_tokens": 60})
            )
            half, _ = await one.connect(post("/v1/completions", {"a": 1}, length=500))
            waiting = [await one.connect() for _ in range(2)]
            assert (await one.ask(HEALTH))[0] == 200
            assert await is_closed(half)
            reader, writer = waiting[1]
            writer.write(HEALTH)
            assert (await read_answer(reader))[0] == 200
            assert (await read_answer(busy))[0] == 200
            for _, open_writer in (*waiting, (None, busy_writer)):
                open_writer.close()

    run(scenario)


def test_what_is_no_http_is_answered_with_json_and_a_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path) as one:
            status, _, answer = await one.ask(b"\x16\x03\x01 hello\r\n\r\n")
            assert status == 400 and answer["error"]["type"] == "invalid_request_error"
            broken = (
                post("/v1/completions", {})
                .split(b"\r\n\r\n")[0]
                .replace(b"Content-Length: 2", b"Transfer-Encoding: chunked")
            )
            status, _, answer = await one.ask(broken + b"\r\n\r\nzz\r\n")
            assert status == 400 and "HTTP" in answer["error"]["message"]
            assert (await one.ask(HEALTH))[0] == 200
            assert {line["event"] for line in one.lines} <= {"request", "log"}
            assert not [line for line in one.lines if "exception" in line]

    run(scenario)


def head(size: int) -> bytes:
    """A request for /health whose head, with the blank line, has so many bytes."""
    start = HEALTH.removesuffix(b"\r\n") + b"X-Filling: "
    return start + b"f" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize(("size", "status"), [(65_535, 200), (65_536, 200), (65_537, 431)])
@pytest.mark.parametrize("pieces", ["at once", "dribbled", "kept", "early"])
def test_a_head_has_exactly_its_limit(tmp_path: Path, size: int, status: int, pieces: str) -> None:
    async def scenario() -> None:
        async with live(tmp_path) as one:
            sent = head(size)
            assert len(sent) == size
            reader, writer = await one.connect(HEALTH if pieces == "kept" else b"")
            if pieces == "kept":
                assert (await read_answer(reader))[0] == 200
            if pieces == "early":
                writer.write(post("/tokenize", {"prompt": "the"}) + HEALTH + sent)
                assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 200]
            elif pieces == "dribbled":
                for start in range(0, size, 1031):
                    writer.write(sent[start : start + 1031])
                    await writer.drain()
                    await asyncio.sleep(0.001)
            else:
                writer.write(sent)
            found, headers, answer = await read_answer(reader)
            assert found == status
            if status == 431:
                assert "65536 bytes" in answer["error"]["message"]
                assert headers["connection"] == "close" and await is_closed(reader)
            writer.close()
            assert (await one.ask(HEALTH))[0] == 200

    run(scenario)


def test_a_head_that_goes_on_and_on_is_refused_and_the_answer_is_heard(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path) as one:
            status, _, answer = await one.ask(head(3_000_000))
            assert status == 431 and answer["error"]["type"] == "invalid_request_error"
            while one.connections:
                await asyncio.sleep(0.02)
            assert (await one.ask(HEALTH))[0] == 200

    run(scenario)


def test_a_body_is_no_part_of_the_head(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path) as one:
            asked = post("/tokenize", {"prompt": "the " * 50_000})
            assert (await one.ask(asked))[0] == 200
            reader, writer = await one.connect(asked + head(65_536))
            assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 200]
            writer.close()

    run(scenario)


def test_a_request_to_upgrade_is_answered_plainly_and_quietly(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with live(tmp_path) as one:
            asked = HEALTH.replace(
                b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
            )
            assert (await one.ask(asked))[0] == 200
            assert one.lines == []

    run(scenario)


@pytest.mark.parametrize(
    "asked",
    [
        post("/tokenize", {"prompt": "a " * LONG}),
        post("/tokenize", {"prompt": "a " * LONG}, Connection="close"),
        post(
            "/v1/completions",
            {"model": "fake", "prompt": "the", "max_tokens": LONG, "stream": True},
        ),
    ],
    ids=["kept", "closed", "streamed"],
)
def test_an_answer_that_nobody_reads_does_not_keep_its_connection(
    tmp_path: Path, asked: bytes
) -> None:
    async def scenario() -> None:
        async with live(tmp_path, write_timeout_s=0.3) as one:
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, one.address)
            await loop.sock_sendall(deaf, asked)
            while not one.lines:
                await asyncio.sleep(0.02)
            while one.connections:
                await asyncio.sleep(0.02)
            assert not [line for line in one.lines if line["event"] == "log"]
            deaf.close()

    run(scenario)
