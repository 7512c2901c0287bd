"""The table and the picture of a load's results."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from flashdraft.bench.traffic.load import OfferedLoad
from flashdraft.bench.traffic.outcome import Goal, LoadRecord, Outcome, TimedPiece, describe_row
from flashdraft.bench.traffic.report import draw_loads, draw_page, make_document, render_loads

SETTINGS: dict[str, Any] = {
    "url": "http://127.0.0.1:8000",
    "model": "<tiny & small>",
    "tasks": ["sample-chat"],
    "prompt_tokens": None,
    "output_tokens": None,
    "max_tokens": 64,
    "sampling": "the server's",
    "warm_up_requests": 2,
}


def document(*clients: int, **more: Any) -> dict[str, Any]:
    rows = []
    for count in clients:
        record = LoadRecord(OfferedLoad(clients=count, duration_s=10.0 * count))
        record.outcomes = [
            Outcome(n * 1.0, n + 0.5, [TimedPiece(n + 0.1, 2.0), TimedPiece(n + 0.5, 3.0)], 5, 10)
            for n in range(8)
        ]
        record.outcomes.append(Outcome(8.0, 8.1, error="HTTP 500: no"))
        record.num_sent, record.window_s = 9, 10.0 * count
        rows.append(describe_row(record, Goal(ttft_s=0.2)))
    return make_document(rows, ["something"], True, {**SETTINGS, **more}, {"server": "vllm"})


def test_the_table_has_a_line_a_load() -> None:
    text = render_loads(document(1, 2))
    assert text.startswith("PARTIAL")
    line = next(one for one in text.splitlines() if one.startswith("1 client "))
    assert "100/100/100" in line and "400/400/400" in line and "0.50/0.50/0.50" in line
    assert "89 %, 0.80/s" in line and line.split()[-2:] == ["8", "1"]
    assert "1 client: 1 × HTTP 500: no" in text and "- something" in text
    assert "prompts of sample-chat" in text and "the server's sampling" in text
    ranged = render_loads(document(1, prompt_tokens="5-9", output_tokens="3", sampling="greedy"))
    assert "prompts of 5-9 tokens, answers of 3 tokens" in ranged and "greedy," in ranged


def test_the_picture_is_whole_and_escaped() -> None:
    for rows in ((), (1,), (1, 2, 4)):
        found = draw_loads(document(*rows))
        root = ElementTree.fromstring(found)
        assert root.tag.endswith("svg") and "&lt;tiny &amp; small&gt;" in found
        assert found.count("<polyline") == 4 * len(rows)
    page = draw_page(document(1))
    assert page.startswith("<!doctype html>") and "<svg" in page and "http-equiv" not in page
    assert "src=" not in page and "href=" not in page  # nothing is loaded from anywhere
