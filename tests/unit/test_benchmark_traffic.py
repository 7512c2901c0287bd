"""The traffic benchmark: its workload, its figures, what it injects, and a run in miniature."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.h200_inject import PrescribedAcceptance
from benchmarks.h200_models import MODELS, build_pair, seeing, tiny
from benchmarks.traffic.__main__ import main, make_settings, parse_arguments
from benchmarks.traffic.figures import (
    Window,
    describe_load,
    describe_long,
    describe_turns,
    gaps_in,
    milliseconds,
    num_ended,
    stalls,
    steady_window,
    ttfts_in,
    warm_up_end,
)
from benchmarks.traffic.record import End, Piece, Record, StepMark, kind_of_step
from benchmarks.traffic.sources import (
    ClosedLoop,
    Conversations,
    OpenLoop,
    Turn,
    WithLongPrompt,
    first_step_drafted,
)
from benchmarks.traffic.vocabulary import MadeUpVocabulary, byte_letters, schema_compiler
from benchmarks.traffic.workload import (
    KINDS,
    SCHEMA_TEXT,
    Span,
    Workload,
    params_of,
    poisson_times,
)
from flashdraft.core import (
    FinishReason,
    Generation,
    GenerationStats,
    GrammarSpec,
    Request,
    SamplingParams,
    StepStats,
)
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.validate import validate_pictures
from flashdraft.kernels.accept import walk
from flashdraft.kernels.nodes import make_chain
from flashdraft.kernels.torch_backend import TorchKernels

CPU = torch.device("cpu")
WITH_MORE = ("pictures", "pictures-as-text")


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def generation(num_tokens: int = 4, **stats: Any) -> Generation:
    return Generation("", [7] * num_tokens, FinishReason.LENGTH, GenerationStats(**stats))


# -- the workload ------------------------------------------------------------------------------


def test_a_request_follows_from_the_seed_and_its_number() -> None:
    workload = Workload("sampled", 1000, seed=3, prompts=Span(5, 9), answers=Span(2, 4))
    made = [workload.request(n) for n in range(50)]
    assert made == [workload.request(n) for n in range(50)]
    assert {len(one.prompt_ids) for one in made} == set(range(5, 10))
    assert {one.params.max_tokens for one in made} == {2, 3, 4}
    assert all(5 <= token < 1000 for one in made for token in one.prompt_ids)
    assert made != [replace(workload, seed=4).request(n) for n in range(50)]


def test_kinds_are_gemmas_sampling_and_every_eighth_wants_more() -> None:
    assert params_of("greedy", 0, 9).is_greedy
    for kind in KINDS[1:]:
        params = params_of(kind, 3, 9)
        assert (params.temperature, params.top_p, params.top_k) == (1.0, 0.95, 64)
        assert params.ignore_eos and params.max_tokens == 9 and params.logprobs is None
    assert [params_of("logprobs", n, 9).logprobs for n in (0, 1, 8)] == [5, None, 5]
    assert [params_of("penalty", n, 9).repetition_penalty for n in (0, 1, 8)] == [1.1, 1.0, 1.1]
    assert {params_of("presence", n, 9).presence_penalty for n in range(9)} == {0.5}
    grammars = [Workload("schema", 1000, 0).request(n).grammar for n in range(9)]
    assert [n for n, one in enumerate(grammars) if one is not None] == [0, 8]
    with pytest.raises(ValueError, match="no kind 'odd'"):
        params_of("odd", 0, 1)


def test_every_fourth_request_has_a_picture_or_as_many_tokens_of_text() -> None:
    config = seeing(tiny(MODELS["31b"])).target_config()
    assert config.vision is not None
    for_both = (config.vocab_size, 0, Span(5, 9), Span(2, 4), "r", config.vision)
    shown, told = ([Workload(kind, *for_both).request(n) for n in range(9)] for kind in WITH_MORE)
    assert [len(one.prompt_ids) for one in shown] == [len(one.prompt_ids) for one in told]
    assert [n for n, one in enumerate(shown) if one.pictures] == [0, 4, 8]
    assert not any(one.pictures for one in told) and shown[1].prompt_ids == told[1].prompt_ids
    for one in shown[::4]:
        validate_pictures(one, config.vision, True)
    assert len({placed.picture.key for one in shown for placed in one.pictures}) == 3


@pytest.mark.parametrize("text", ["0-4", "9-4", "x", "-3", ""])
def test_a_span_is_refused_where_it_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        Span.parse(text)


def test_arrivals_come_at_their_rate_by_chance() -> None:
    times = list(islice(poisson_times(5.0, seed=1), 4000))
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.05)
    # of an exponential law the deviation is the mean
    mean = sum(gaps) / len(gaps)
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.08)
    assert times == list(islice(poisson_times(5.0, seed=1), 4000))


# -- where requests come from --------------------------------------------------------------------


def test_a_client_asks_again_when_it_is_answered() -> None:
    source = ClosedLoop(Workload("greedy", 100, 0), 2, begin=10.0)
    assert [one.at for one in source.due(10.0)] == [10.0, 10.0]
    assert source.due(11.0) == [] and source.next_at() is None
    source.saw_end("r-0", generation(), 12.0)
    (third,) = source.due(12.5)
    assert third.at == 12.0 and third.request.id == "r-2"


def test_open_arrivals_wait_for_nobody() -> None:
    source = OpenLoop(Workload("greedy", 100, 0), 10.0, begin=5.0)
    found = source.due(7.0)
    assert 8 <= len(found) <= 35 and all(5.0 < one.at <= 7.0 for one in found)
    next_at = source.next_at()
    assert next_at is not None and next_at > 7.0
    assert [one.at for one in source.due(next_at)] == [next_at]


def test_the_long_prompt_comes_once_and_after_the_others() -> None:
    long = Request("long", [5] * 100, SamplingParams(), seed=0)
    source = WithLongPrompt(ClosedLoop(Workload("greedy", 100, 0), 1, 0.0), long, after=2)
    for end in (1.0, 2.0):
        (one,) = source.due(end - 0.5)
        source.saw_end(one.request.id, generation(), end)
    assert {one.request.id for one in source.due(2.0)} == {"r-2", "long"}
    source.saw_end("long", generation(), 3.0)
    assert source.due(9.0) == []


def test_conversations_know_what_could_be_found() -> None:
    source = Conversations(100, 0, 0.0, clients=2, turns=2, system_tokens=40)
    (first,) = source.due(0.0)
    assert source.turns[first.request.id].could_hit(16) == 0
    assert source.due(1.0) == []  # the second client waits for the system prompt
    source.saw_first(first.request.id, 1.0)
    (other,) = source.due(1.0)
    assert first.request.prompt_ids[:40] == other.request.prompt_ids[:40]
    assert source.turns[other.request.id].could_hit(16) == 32
    source.saw_end(first.request.id, generation(10, cached_tokens=0), 2.0)
    (second,) = source.due(2.0)
    turn, so_far = source.turns[second.request.id], len(first.request.prompt_ids) + 10
    assert list(second.request.prompt_ids[:so_far]) == [*first.request.prompt_ids, *[7] * 10]
    assert turn.known_tokens == so_far - 1 and turn.could_hit(16) == (so_far - 1) // 16 * 16
    source.saw_end(second.request.id, generation(10, cached_tokens=48), 3.0)
    assert source.due(9.0) == [] and source.num_requests == 4
    found = describe_turns(source.turns, 16)
    assert found["turns"] == 3 and found["turns_with_a_hit"] == 1
    assert found["hit_tokens"] == 48 and found["could_hit_tokens"] == 32 + turn.could_hit(16)
    assert found["missed"][0] == {"client": 1, "turn": 1, "tokens": 32}


def test_a_prompts_last_token_is_never_found() -> None:
    assert Turn(0, 0, prompt_tokens=32, known_tokens=500).could_hit(16) == 16


def test_whether_the_first_step_was_drafted() -> None:
    def told(steps: int, verified: list[int], drafted: list[bool]) -> bool | None:
        one = generation(steps=steps, slots_verified=verified)
        return first_step_drafted(replace(one, drafted=drafted))

    assert told(0, [], [False]) is None
    assert told(3, [3, 2], [False, False]) is True  # every step was, its first draft refused
    assert told(3, [], [False, False]) is False
    assert told(3, [2], [False, True]) is True
    assert told(3, [2], [False, False]) is None


# -- figures -------------------------------------------------------------------------------------


def small_record() -> Record:
    """Two requests: one to warm up, one that counts; steps of a second."""
    record = Record(0.0, {"a": 0.0, "b": 2.0, "c": 6.5})
    record.pieces = [Piece(t, "a", 2) for t in (1.0, 2.0, 3.0)]
    record.pieces += [Piece(4.0, "b", 1), Piece(5.0, "b", 3), Piece(7.0, "b", 4)]
    record.steps = [
        StepMark(t, t + 1.0, kind, prompts, lengths, accepted)
        for t, kind, prompts, lengths, accepted in [
            (0.0, "prompt", 64, (), 0),
            (1.0, "drafted", 0, (3,), 1),
            (2.0, "drafted", 0, (3,), 1),
            (3.0, "mixed", 32, (2,), 0),
            (4.0, "drafted", 0, (4,), 2),
            (6.0, "plain", 0, (0,), 0),
        ]
    ]
    record.ends = [End(3.0, "a", generation()), End(7.0, "b", generation())]
    return record


def test_the_window_begins_when_the_warm_up_is_answered() -> None:
    record = small_record()
    assert steady_window(record, 1, 60.0) == Window(3.0, 7.0)
    assert steady_window(record, 0, 60.0) == Window(0.0, 7.0)
    assert steady_window(record, 2, 60.0) is None  # nothing came after it
    assert steady_window(record, 3, 60.0) is None
    assert steady_window(record, 3, 4.0) == Window(4.0, 7.0)  # it is not waited for any longer


def test_figures_are_of_the_window() -> None:
    found = describe_load(small_record(), Window(3.0, 7.0))
    assert found["tokens"] == 8 and found["tokens_per_s"] == 2.0 and found["requests"] == 1
    assert found["gap"]["count"] == 2 and found["gap"]["max_ms"] == 2000.0
    assert found["gap"]["p50_ms"] == 1500.0
    assert found["ttft"]["count"] == 0  # b came before the window
    assert found["waiting_at_end"] == 1
    steps = found["steps"]
    mixed = {"count": 1, "mean_ms": 1000.0, "device_ms": 0.0, "share": 0.25}
    assert steps["kinds"]["mixed"] == mixed
    assert "prompt" not in steps["kinds"] and steps["outside_share"] == 0.25
    assert steps["mean_verify_length"] == 2.0 and steps["mean_accepted_length"] == 1.667
    assert steps["prompt_tokens_a_step"] == 32.0
    warm_up = found["warm_up"]
    assert warm_up["longest_gap_ms"] == 1000.0 and warm_up["longest_ttft_ms"] == 1000.0


def test_first_tokens_count_from_when_they_were_due() -> None:
    assert ttfts_in(small_record(), Window(1.5, 7.0)) == [2.0]
    assert stalls(small_record(), 0.5)["longest_gap_ms"] is None
    assert gaps_in(small_record().pieces, Window(0.0, 7.0), frozenset("a")) == [1.0, 2.0]
    assert milliseconds([]) == {"p50_ms": None, "p95_ms": None, "p99_ms": None} | {
        "max_ms": None,
        "count": 0,
    }


def test_a_long_prompt_is_told_by_what_the_others_saw() -> None:
    record = small_record()
    record.arrivals["long"] = 3.5
    record.pieces = sorted([*record.pieces, Piece(6.0, "long", 1)])
    found = describe_long(record, "long")
    assert found["ttft_s"] == 2.5 and found["others_gap"]["max_ms"] == 1000.0
    assert found["others_gap_before"]["count"] == 2
    assert "never arrived" in describe_long(small_record(), "long")["status"]


def test_steps_are_told_apart_by_what_they_did() -> None:
    def kind(prompt: int, decoding: int, *lengths: int) -> str:
        stats = StepStats(num_decoding=decoding, num_prefill_tokens=prompt, verify_lengths=lengths)
        return kind_of_step(stats)

    assert kind(5, 0) == "prompt" and kind(5, 1, 3) == "mixed" and kind(0, 0) == "nothing"
    assert kind(0, 2, 0, 0) == "plain" and kind(0, 2, 0, 3) == "drafted"


# -- what is injected ----------------------------------------------------------------------------


def test_what_is_accepted_on_the_device_is_committed() -> None:
    accept = PrescribedAcceptance(0.8, 4, CPU, seed=0)
    starts, verified = torch.tensor([0, 6, 7]), (5, 0, 4)
    is_node = torch.arange(5) < torch.tensor(verified).unsqueeze(1)
    tokens, sure = torch.arange(100, 115).view(3, 5), torch.ones(3, 5)
    nodes = make_chain(tokens, sure, sure.double())
    drawn = torch.cat([torch.arange(200, 212), torch.full((6,), -1)])  # six rows are nobody's
    most = 0
    for _ in range(64):
        samples = drawn.clone()
        found = walk(accept(samples, starts, nodes, is_node), nodes, is_node, 5)
        assert torch.equal(found.path, torch.arange(6) * (found.path > 0))
        for slot, count in enumerate(found.num_accepted.tolist()):
            assert 0 <= count <= verified[slot]
            begin = int(starts[slot])
            cut, end = begin + count, begin + 1 + verified[slot]
            assert torch.equal(samples[begin:cut], tokens[slot, :count])
            assert torch.equal(samples[cut:end], drawn[cut:end])
            most = max(most, count)
        assert torch.equal(samples[12:], drawn[12:])
    assert most == 5


@pytest.fixture(scope="module")
def pair() -> Any:
    return build_pair(tiny(MODELS["31b"]), TorchKernels(CPU, torch.float32), seed=0)


@pytest.mark.parametrize("run_ahead", [False, True])  # the host commits, or the device
def test_committed_text_is_what_the_cache_holds(pair: Any, run_ahead: bool) -> None:
    """Were the target's own samples committed, the caches would hold another text."""
    config = EngineConfig(
        cache=CacheOptions(cache_gb=0.02), ngram=False, verify=6, run_ahead=run_ahead
    )
    accept = PrescribedAcceptance(0.9, 16, CPU, seed=1)
    compiler = schema_compiler(pair.target.config.vocab_size)
    engine = Engine(pair.target, pair.drafter, config, accept=accept, grammar_compiler=compiler)
    prompt = random.Random(0).choices(range(5, 500), k=40)
    first = Request("first", prompt, SamplingParams(max_tokens=72, ignore_eos=True), seed=0)
    answer = run_alone(engine, first)
    assert answer.stats.mean_accepted_length > 3.0
    # plain decoding after the same text, from cached pages and from none
    again = Request(
        "again", [*prompt, *answer.token_ids], SamplingParams(max_tokens=8), seed=0, verify=0
    )
    cached = run_alone(engine, again)
    assert cached.stats.cached_tokens >= 64
    engine.forget_prefixes()
    assert run_alone(engine, again).token_ids == cached.token_ids


def run_alone(engine: Engine, request: Request) -> Generation:
    engine.submit(request)
    while True:
        for event in engine.step():
            if event.generation is not None:
                assert event.generation.error is None
                return event.generation


def test_grammars_go_along_with_what_is_accepted(pair: Any) -> None:
    pytest.importorskip("llguidance")
    vocab_size = pair.target.config.vocab_size
    config = EngineConfig(cache=CacheOptions(cache_gb=0.02), ngram=False, verify=6)
    accept = PrescribedAcceptance(0.9, 16, CPU, seed=1)
    compiler = schema_compiler(vocab_size)
    engine = Engine(pair.target, pair.drafter, config, accept=accept, grammar_compiler=compiler)
    params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=1.0)
    grammar = GrammarSpec("json_schema", SCHEMA_TEXT)
    answer = run_alone(engine, Request("g", [5, 6, 7], params, seed=0, grammar=grammar))
    vocabulary = json.loads(MadeUpVocabulary(vocab_size).to_json())["model"]["vocab"]
    spelled = {index: name for name, index in vocabulary.items()}
    text = "".join(spelled[token] for token in answer.token_ids).replace(chr(0x120), " ")
    assert text.startswith("{") and '"kind"' in text
    assert answer.stats.accepted > 0


def test_the_made_up_vocabulary_has_every_byte_once() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256 and letters[ord("a")] == "a"
    vocabulary = json.loads(MadeUpVocabulary(512).to_json())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(512))
    with pytest.raises(ValueError, match="too few"):
        MadeUpVocabulary(100)


# -- the whole -----------------------------------------------------------------------------------


def test_who_ends_with_the_warm_up_is_not_counted() -> None:
    record = Record(0.0)
    record.ends = [End(at, name, generation()) for at, name in ((1.0, "a"), (1.0, "b"), (2.0, "c"))]
    assert warm_up_end(record, 1, 60.0) == 1.0
    assert num_ended(record, 1.0) == 1  # as `requests` of the window from there on


SHORT = ["--prompt-tokens", "8-24", "--answer-tokens", "6-12", "--seconds", "20", "--requests", "5"]


def test_a_run_in_miniature_fills_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "traffic.json"
    kinds = ["--kinds", ",".join(KINDS)]
    command = ["--model", "tiny", "--clients", "2", *kinds, *SHORT, "--output", str(path)]
    assert main(command) == 0
    found = json.loads(path.read_text())
    assert found["format"] == "flashdraft-traffic/1" and found["seed"] == 0
    rows = {(row["engine"], row["kind"]): row for row in found["rows"]}
    assert {engine for engine, _ in rows} == {"drafted α 0.909", "plain"}
    assert len(rows) + len(found["skipped"]) == 2 * len(KINDS)
    for row in rows.values():
        assert row["requests"] >= 5 and row["tokens_per_s"] > 0
        assert row["gap"]["count"] and row["ttft"]["count"] and row["warm_up"]["longest_step_ms"]
    assert rows["plain", "sampled"]["steps"]["mean_verify_length"] == 0.0
    for prepared in found["prepared"]:  # here the host runs as it is asked: few pieces, in no time
        assert prepared["seconds"] >= sum(prepared["slowest"].values()) - 0.05
        assert len(prepared["slowest"]) <= prepared["pieces"]
    assert [one["engine"] for one in found["prepared"]] == ["drafted α 0.909", "plain"]
    for name in ("torch", "python", "date", "hardware"):
        assert found["environment"][name]
    table = capsys.readouterr().out
    assert "c=2 greedy" in table and "gap p50/p95/p99 ms" in table
    assert str(tmp_path) not in path.read_text()


def test_rates_routing_and_other_acceptances_in_miniature(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    command = ["--model", "tiny-26b", "--rate", "40", "--kinds", "sampled", "--draft", *SHORT]
    command += ["--acceptance", "0.6,0.3", "--routing", "degenerate,uniform"]
    assert main([*command, "--output", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["acceptance"], row["routing"]) for row in rows] == [
        (0.6, "degenerate"),
        (0.3, "degenerate"),
        (0.6, "uniform"),
        (0.3, "uniform"),
    ]
    assert all(row["rate"] == 40.0 and row["clients"] is None for row in rows)


def test_conversations_and_a_long_prompt_in_miniature(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    command = ["--model", "tiny", "--draft", "--conversations", "--turns", "2", "--long", "300"]
    command += ["--system-tokens", "100", *SHORT, "--output", str(path)]
    assert main(command) == 0
    long, talks = json.loads(path.read_text())["rows"]
    assert long["long"]["ttft_s"] > 0 and long["long"]["others_gap"]["count"] > 0
    told = talks["conversations"]
    assert told["turns"] == 16 and 0 < told["hit_share"] <= 1.0


def test_what_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Engine:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("benchmarks.traffic.engines.Engine", fail)
    path = tmp_path / "traffic.json"
    assert main(["--model", "tiny", "--clients", "1", *SHORT, "--output", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [row["error"] for row in rows] == ["RuntimeError: out of luck"] * 2
    assert "FAILED: RuntimeError: out of luck" in capsys.readouterr().out


def test_without_llguidance_the_schema_is_skipped_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.traffic.engines.schema_compiler", lambda _: None)
    assert main(["--model", "tiny", "--clients", "1", "--kinds", "schema", "--plain", *SHORT]) == 0
    assert "skipped: c=1 schema, plain: llguidance is not installed" in capsys.readouterr().out


def test_defaults_are_the_facts_workload() -> None:
    settings = make_settings(parse_arguments(["--model", "26b"]))
    assert settings.clients == [1, 8, 32] and settings.max_batch == 32
    assert settings.acceptances == [0.893, None] and settings.routings == ["degenerate"]
    assert [str(one) for one in settings.spans(8)] == ["256-1536", "64-448"]
    assert [str(one) for one in settings.spans(1)] == ["128", "384"]
    assert settings.max_context == 2048
    with pytest.raises(SystemExit):
        parse_arguments(["--model", "31b", "--kinds", "greedy,odd"])
