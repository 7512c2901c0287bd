"""What Python's logging says while a server runs: lines of JSON like all others."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from flashdraft.server.telemetry.logs import begin_record, structured_logging, write_line


@pytest.fixture(autouse=True)
def untouched_loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """uvicorn's loggers as they are before any server of another test has set them up."""
    loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "disabled", False)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_messages_and_exceptions_become_lines() -> None:
    lines: list[dict[str, Any]] = []
    with structured_logging(lines.append):
        logging.getLogger("uvicorn.error").warning("Invalid %s", "request")
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("flashdraft.x").exception("it failed")
        logging.getLogger("uvicorn.error").info("not worth a line")
    logging.getLogger("uvicorn.error").warning("afterwards")
    assert [line["message"] for line in lines] == ["Invalid request", "it failed"]
    assert lines[0]["event"] == "log" and lines[0]["level"] == "warning"
    assert lines[0]["logger"] == "uvicorn.error" and lines[0]["time"]
    assert "ValueError" in lines[1]["exception"]
    assert all("\n" not in json.dumps(line) for line in lines)


def test_a_line_within_a_request_has_its_id() -> None:
    lines: list[dict[str, Any]] = []
    with structured_logging(lines.append):
        record = begin_record("GET", "/")
        logging.getLogger("flashdraft.x").error("here")
    assert lines[0]["id"] == record.id


def test_a_client_that_left_is_no_line_of_its_own() -> None:
    lines: list[dict[str, Any]] = []
    with structured_logging(lines.append):
        logging.getLogger("asyncio").warning("socket.send() raised exception.")
        logging.getLogger("asyncio").warning("another thing")
    assert [line["message"] for line in lines] == ["another thing"]


def test_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    with structured_logging(write_line):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.\nmore")
    out, err = capsys.readouterr()
    assert json.loads(out)["message"].startswith("Invalid") and out.count("\n") == 1
    assert err == ""
