"""Figures of a load, from outcomes made by hand."""

from __future__ import annotations

import pytest

from flashdraft.bench.run.stream import AnswerError, StreamedAnswer
from flashdraft.bench.traffic.load import OfferedLoad
from flashdraft.bench.traffic.outcome import (
    NUM_BINS,
    Goal,
    LoadRecord,
    Outcome,
    TimedPiece,
    answered,
    describe_row,
    tell_problems,
)


def outcome(due_s: float, *times: float, tokens: int = 2) -> Outcome:
    pieces = [TimedPiece(at, float(tokens)) for at in times]
    return Outcome(due_s, times[-1], pieces, tokens * len(times), 10, 0)


def record() -> LoadRecord:
    found = LoadRecord(OfferedLoad(clients=2, duration_s=10.0))
    found.outcomes = [
        outcome(0.0, 1.0, 2.0, 3.0),
        outcome(1.0, 3.0, 4.0, 9.0),
        outcome(3.0, 3.5, 11.0),  # its end is after the window's
        Outcome(4.0, 5.0, error="HTTP 500: no"),
        Outcome(5.0, 10.0, is_finished=False),
    ]
    found.num_sent, found.window_s, found.wall_s, found.cpu_s = 5, 10.0, 11.0, 0.5
    found.lags = [0.001] * 99 + [0.002]
    return found


def test_a_row_counts_what_the_window_holds() -> None:
    row = describe_row(record(), Goal())
    assert (row["num_sent"], row["num_answered"], row["num_failed"]) == (5, 3, 1)
    assert row["num_unfinished"] == 1 and row["errors"] == {"HTTP 500: no": 1}
    assert row["requests_per_s"] == pytest.approx(0.2)
    assert row["tokens_per_s"] == pytest.approx(14 / 10)  # 16 came, 2 of them too late
    assert row["ttft_p50_s"] == 1.0 and row["latency_p99_s"] == pytest.approx(8.0, abs=0.1)
    assert row["gap_p50_s"] == pytest.approx(1.0) and row["gap_p99_s"] <= 7.5
    assert row["goodput_share"] is None and row["goodput_per_s"] is None
    assert len(row["timeline"]) == NUM_BINS
    assert sum(one["tokens_per_s"] or 0 for one in row["timeline"]) * 0.5 == pytest.approx(14)
    assert row["curves"]["ttft_s"][-1] == 2.0 and len(row["requests"]) == 3


def test_goodput_is_of_all_that_ended() -> None:
    row = describe_row(record(), Goal(ttft_s=1.5, gap_s=1.0))
    assert row["goodput_share"] == pytest.approx(1 / 4)  # one is late, one halts, one failed
    assert row["goodput_per_s"] == pytest.approx(0.1)
    assert describe_row(record(), Goal(ttft_s=1.5))["goodput_share"] == pytest.approx(0.5)


def test_problems_are_told() -> None:
    told = tell_problems(describe_row(record(), Goal()), None)
    assert len(told) == 1 and "1 of 5 requests failed; most often: HTTP 500: no." in told[0]
    late = record()
    late.lags = [0.05] * 10
    late.outcomes[0] = Outcome(0.0, 3.0, [TimedPiece(1.0, 2.0)], 2, 10, 10)
    told = tell_problems(describe_row(late, Goal()), "Interrupted.")
    assert told[0] == "2 clients: Interrupted."
    assert "this client was itself the bottleneck (late by 50 ms" in told[2]
    assert "33 % of the prompts' tokens in its prefix cache" in told[3]


def test_a_load_without_an_answer_has_a_row_too() -> None:
    row = describe_row(LoadRecord(OfferedLoad(rate=1.0, duration_s=1.0)), Goal(ttft_s=1.0))
    assert row["num_answered"] == 0 and row["timeline"] == [] and row["ttft_p50_s"] is None
    assert row["goodput_share"] is None and tell_problems(row, None) == []


def streamed(*chunks: tuple[float, int, int | None], tokens: int) -> StreamedAnswer:
    answer = StreamedAnswer(begun_at=100.0)
    answer.chunks = list(chunks)
    answer.usage = {"prompt_tokens": 4, "completion_tokens": tokens}
    return answer


def test_tokens_of_pieces_are_counted_or_shared() -> None:
    counted = answered(streamed((101.0, 5, 1), (102.0, 5, 7), tokens=7), 0.5, 2.0, 100.0)
    assert [piece.num_tokens for piece in counted.pieces] == [1.0, 6.0]
    assert counted.ttft_s == 0.5 and counted.latency_s == 1.5 and counted.gaps == [1.0]
    shared = answered(streamed((101.0, 5, None), (102.0, 15, None), tokens=8), 0.5, 2.0, 100.0)
    assert [piece.num_tokens for piece in shared.pieces] == [2.0, 6.0]
    with pytest.raises(AnswerError, match="any text"):
        answered(streamed(tokens=3), 0.0, 1.0, 100.0)
