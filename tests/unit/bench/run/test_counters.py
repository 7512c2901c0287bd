"""Accepted lengths from metrics pages of flashdraft, vLLM and SGLang."""

from __future__ import annotations

import itertools
import time

import pytest

from flashdraft.bench.run import counters
from flashdraft.bench.run.counters import (
    CountersError,
    GaugeWatch,
    acceptance_between,
    look,
    read_page,
)
from flashdraft.bench.run.stream import Endpoint
from tests.unit.bench.run.openai_server import OpenAIServer


def vllm_page(drafts: int, accepted: list[int], suffix: str = "_total", engine: str = "0") -> str:
    labels = f'engine="{engine}",model_name="m"'
    lines = [
        "# HELP vllm:spec_decode_num_drafts Number of drafts.",
        f"vllm:spec_decode_num_drafts{suffix}{{{labels}}} {drafts}.0",
        f"vllm:spec_decode_num_draft_tokens{suffix}{{{labels}}} {drafts * len(accepted)}.0",
        f"vllm:spec_decode_num_accepted_tokens{suffix}{{{labels}}} {sum(accepted)}.0",
    ]
    for position, count in enumerate(accepted):
        name = f"vllm:spec_decode_num_accepted_tokens_per_pos{suffix}"
        lines.append(f'{name}{{{labels},position="{position}"}} {count}.0')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("suffix", ["", "_total"])
def test_vllms_counters_give_a_histogram_and_every_slots_share(suffix: str) -> None:
    before = read_page(vllm_page(100, [60, 30, 10], suffix))
    after = read_page(vllm_page(110, [68, 34, 11], suffix))
    found = acceptance_between("vllm", before, after)
    assert found is not None
    # 10 drafts: 8 had the first token accepted, 4 the second, 1 the third
    assert found.histogram == {1: 2, 2: 4, 3: 3, 4: 1}
    assert list(found.verified) == [10, 10, 10] and list(found.accepted) == [8, 4, 1]
    pooled = sum(n * count for n, count in found.histogram.items()) / 10
    assert pooled == 1 + 13 / 10


def test_what_is_accepted_beyond_an_answers_end_is_not_in_the_pooled_length() -> None:
    pages = read_page(vllm_page(0, [0, 0])), read_page(vllm_page(10, [9, 6]))
    found = acceptance_between("vllm", *pages, answers=[13, 12])
    assert found is not None
    # 25 tokens were counted; of the answers' 25 two are the prefills'
    assert found.pooled == 2.3 and found.counted == 2.5
    assert found.histogram == {1: 1, 2: 3, 3: 6}  # the counters' own


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (None, "not every prompt was answered"),
        ([20, 20], "steps without a draft gave tokens too"),
        ([11, 11], "no answer can have left that many: others asked as well"),
        ([3, 3], "fewer tokens than steps: others asked as well"),
    ],
)
def test_where_answers_and_counters_do_not_meet_the_counters_figure_is_left(
    answers: list[int] | None, why: str
) -> None:
    pages = read_page(vllm_page(0, [0, 0])), read_page(vllm_page(10, [9, 6]))
    found = acceptance_between("vllm", *pages, answers=answers)
    assert found is not None and found.pooled == found.counted == 2.5, why


def test_counters_of_several_engines_are_summed() -> None:
    empty = read_page(vllm_page(0, [0, 0]))
    after = read_page(vllm_page(3, [2, 1]) + vllm_page(5, [4, 0], engine="1"))
    found = acceptance_between("vllm", empty, after)
    assert found is not None and found.histogram == {1: 2, 2: 5, 3: 1}


def test_without_counts_by_position_the_pooled_length_is_left() -> None:
    def page(drafts: int, accepted: int) -> counters.Page:
        names = (("drafts", drafts), ("accepted_tokens", accepted))
        return read_page("".join(f"vllm:spec_decode_num_{n}_total {v}\n" for n, v in names))

    found = acceptance_between("vllm", page(2, 3), page(6, 13))
    assert found is not None and found.pooled == 3.5 and not found.histogram
    found = acceptance_between("vllm", page(2, 3), page(6, 13), answers=[13])
    assert found is not None and (found.pooled, found.counted) == (3.0, 3.5)


def test_a_server_that_drafted_nothing_has_no_accepted_length() -> None:
    page = read_page(vllm_page(10, [3]))
    assert acceptance_between("vllm", page, page) is None
    assert acceptance_between("other", {}, read_page("up 1")) is None


def per_position(position: str, count: str = "1") -> str:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return vllm_page(9, [4]) + f'{name}{{position="{position}"}} {count}\n'


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (vllm_page(2, [1]), "num_drafts went from 5 to 2"),
        (vllm_page(9, [0]), "per_pos at position 0 went from 3 to 0"),
        (vllm_page(9, []), "per_pos at position 0 went from 3 to 0"),
        (vllm_page(9, [3]).replace(" 9.0", " NaN"), "num_drafts went from 5 to nan"),
        (vllm_page(9, [3]).replace(" 9.0", " +Inf"), "num_drafts went from 5 to inf"),
        (per_position("1", "NaN"), "per_pos at position 1 went from 0 to nan"),
        (per_position("999999999"), "position '999999999'; the highest that is read is 64"),
        (per_position("7" * 5000), "the highest that is read is 64"),
        (vllm_page(9, [3, 4]), "do not add up"),
    ],
)
def test_counters_that_make_no_sense_are_refused_in_words(after: str, said: str) -> None:
    with pytest.raises(CountersError) as caught:
        acceptance_between("vllm", read_page(vllm_page(5, [3])), read_page(after))
    assert said in str(caught.value) and len(str(caught.value)) < 200


def test_a_position_that_is_no_number_is_passed_over() -> None:
    after = read_page(vllm_page(9, [4]) + per_position("²").splitlines()[-1])
    found = acceptance_between("vllm", read_page(vllm_page(5, [3])), after)
    assert found is not None and list(found.accepted) == [1]


def test_our_own_slots_are_as_deep_as_the_drafts() -> None:
    text = (
        'flashdraft_draft_depths_total{depth="0"} 5\n'
        'flashdraft_draft_depths_total{depth="1"} 4\n'
        'flashdraft_draft_depths_total{depth="3"} 6\n'
        'flashdraft_accepted_tokens_by_position_total{position="1"} 7\n'
        'flashdraft_accepted_tokens_by_position_total{position="2"} 3\n'
    )
    found = acceptance_between("flashdraft", {}, read_page(text))
    assert found is not None
    assert list(found.verified) == [10, 6, 6] and list(found.accepted) == [7, 3, 0]
    assert acceptance_between("flashdraft", read_page(text), read_page(text)) is not None


def test_odd_lines_of_a_page_are_passed_over() -> None:
    page = read_page('# TYPE a counter\n\na{x="y",z="q\\"}"} 2\nb NaNsense\n{"json": 1}\nc +Inf\n')
    assert page["a"] == [({"x": "y", "z": 'q\\"}'}, 2.0)]
    assert set(page) == {"a", "c"}


def test_a_gauge_is_watched_while_a_row_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "SAMPLE_S", 0.01)
    values = itertools.chain([0.0, 2.0, "NaN", "+Inf", 4.0], itertools.repeat(3.0))
    with OpenAIServer("sglang") as server:
        server.metrics = lambda: f'sglang:spec_accept_length{{model_name="m"}} {next(values)}\n'
        watch = GaugeWatch(Endpoint.parse(server.url))
        while len(server.paths) < 5:
            time.sleep(0.01)
        mean = watch.mean()
    assert mean == pytest.approx(3.0)  # while it shows 0 it has nothing to say


def test_a_server_without_metrics_has_none() -> None:
    with OpenAIServer() as server:
        assert look(Endpoint.parse(server.url)) is None
        server.metrics = lambda: "not a metric\n\n"
        assert look(Endpoint.parse(server.url)) is None
    assert look(Endpoint.parse(server.url)) is None  # it is gone
