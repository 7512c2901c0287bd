"""The pure parts of the page's benchmark: the conversation it opens, how times are summed up."""

from __future__ import annotations

from benchmarks import page_latency


def test_the_conversation_has_about_a_hundred_tokens_a_turn() -> None:
    (chat,) = page_latency.conversation(20)["conversations"]
    assert [turn["parent"] for turn in chat["turns"]] == ["", *map(str, range(19))]
    for turn in chat["turns"]:
        answer = turn["answer"]
        runs = answer["content"]["runs"]
        assert sum(length for length, _, _ in runs) == len(answer["content"]["text"])
        assert 80 <= answer["numTokens"] == len(runs) <= page_latency.TOKENS_PER_TURN


def test_times_are_summed_up_by_their_middle_and_their_end() -> None:
    found = page_latency.summary([float(n) for n in range(100, 0, -1)])
    assert found == {"p50_ms": 50.5, "p95_ms": 96.0, "max_ms": 100.0, "count": 100}
    assert page_latency.summary([7.04])["max_ms"] == 7.0
