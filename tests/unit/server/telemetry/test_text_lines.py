"""The log for people: what a request was and cost, on one line that clients cannot forge."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashdraft.core import FinishReason, Generation, GenerationStats
from flashdraft.server.telemetry.logs import RequestRecord
from flashdraft.server.telemetry.text_lines import in_words, write_in_words

STATS = GenerationStats(
    prompt_tokens=24, steps=10, drafted=40, accepted=22, decode_tokens=32, decode_s=0.5
)


def record(**fields: Any) -> RequestRecord:
    made = RequestRecord("POST", "/v1/chat/completions", route="/v1/chat/completions")
    made.status, made.is_complete = 200, True
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_request_has_its_figures() -> None:
    generation = Generation("x", [1] * 33, FinishReason.STOP, STATS)
    line = in_words(record(generations=[generation]).line())
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  POST /v1/chat/completions  200  \d+\.\d\d s  24 \+ 33 tokens  "
        r"64\.0 tok/s  accepted length 3\.20",
        line,
    )


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"status": 400, "error": "bad_request"}, "  400  0.00 s  bad_request"),
        ({"status": None, "is_complete": False}, "  client left  "),
        ({"is_complete": False, "error": "CancelledError"}, "  client left  "),
        ({"is_complete": False, "error": "ClientDisconnectedError"}, "  client left  "),
        ({"is_broken": True, "error": "engine_lost"}, "  200, broken  0.00 s  engine_lost"),
        ({"status": None, "is_complete": False, "error": "OSError: x"}, "  no answer, broken  "),
        ({"route": None, "path": "/nothing", "status": 404}, "POST /nothing  404  "),
    ],
)
def test_what_came_of_a_request(fields: dict[str, Any], shown: str) -> None:
    assert shown in in_words(record(**fields).line())


HOSTILE = "/a\n12:00:00  POST /v1/models  200\x1b[2J\x1b]0;mine\x07\r\x9b31m\u202e\u2028x"


def test_a_client_cannot_write_lines_or_move_the_cursor() -> None:
    lines = [
        record(route=None, path=HOSTILE, status=404).line(),
        record(error=HOSTILE).line(),
        record(body=HOSTILE).line(),
        {"time": record().line()["time"], "event": "log", "level": "error", "message": HOSTILE},
        {
            **{"time": record().line()["time"], "event": "log", "level": "error"},
            **{"message": "failed", "exception": f"Traceback\n  ValueError: {HOSTILE}"},
        },
    ]
    for content in lines:
        first, *others = in_words(content).split("\n")
        assert first.isprintable() and all(line.isprintable() for line in others)
        assert all(line.startswith("    ") for line in others)  # no line that looks like a first


def test_messages_say_whose_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    content = {"event": "log", "level": "warning", "logger": "x", "message": "it is late"}
    write_in_words({**content, "time": record().line()["time"], "process": "engine"})
    assert re.fullmatch(r"\d\d:\d\d:\d\d  engine warning  it is late\n", capsys.readouterr().out)


def test_files_of_the_page_bury_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for route, status in (("/page/{name:path}", 200), ("/page/{name:path}", 404), ("/", 200)):
        write_in_words(record(method="GET", route=route, status=status).line())
    assert [line.split("  ")[1:3] for line in capsys.readouterr().out.splitlines()] == [
        ["GET /page/{name:path}", "404"],
        ["GET /", "200"],
    ]
