"""The engine in this process, on a tiny random checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashdraft.bench.results import DRAFT, PLAIN, Measurement
from flashdraft.bench.run.local import LocalRunner
from flashdraft.bench.run.measure import Run
from flashdraft.bench.tasks import BenchPrompt
from flashdraft.core import Request, SamplingParams
from flashdraft.errors import RequestError
from flashdraft.llm import LLM
from tests.tiny import make_tiny_checkpoint

TEXTS = ("the quick brown fox", "a lazy dog", "the tree", "fox and dog and fox and dog", "token")
PROMPTS = tuple(BenchPrompt(({"role": "user", "content": text},)) for text in TEXTS)
TALK = BenchPrompt(({"role": "user", "content": "the old dog"},), ("and then", "and after that"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return LLM(folder, dtype="float32", draft="ngram", verify=4, max_batch=4)


def make_runner(llm: LLM, temperature: float = 0.0) -> LocalRunner:
    return LocalRunner(llm, SamplingParams(temperature=temperature), thinking=False, seed=7)


def measure(
    llm: LLM,
    mode: str,
    concurrency: int = 2,
    prompts: tuple[BenchPrompt, ...] = PROMPTS,
    temperature: float = 0.0,
) -> Measurement:
    run = Run("task", prompts, concurrency, mode, max_tokens=24)
    return make_runner(llm, temperature).run(run, lambda reply: None)


def texts(measured: Measurement) -> list[list[str]]:
    return [[reply.text for reply in replies] for replies in measured.replies.values()]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_plain_and_drafted_answer_every_prompt_alike(
    llm: LLM, temperature: float, concurrency: int
) -> None:
    prompts = (*PROMPTS, TALK)
    plain = measure(llm, PLAIN, concurrency, prompts, temperature)
    drafted = measure(llm, DRAFT, concurrency, prompts, temperature)
    assert list(plain.replies) == list(drafted.replies) == list(range(6))
    assert texts(plain) == texts(drafted)
    assert [len(one) for one in texts(plain)] == [1, 1, 1, 1, 1, 3]
    assert plain.num_failed == 0 and plain.problems == []


def test_plain_is_verify_length_zero_on_the_same_engine(llm: LLM) -> None:
    plain, drafted = measure(llm, PLAIN), measure(llm, DRAFT)
    assert set(plain.acceptance.histogram) == {1} and plain.acceptance.verified == []
    assert sum(drafted.acceptance.verified) > 0
    assert sum(drafted.acceptance.accepted) > 0
    assert len(drafted.acceptance.verified) <= 4
    expected = llm.chat(PROMPTS[0].messages, SamplingParams(max_tokens=24))
    [reply] = plain.replies[0]
    assert reply.text == reply.content == expected.text
    assert reply.output_tokens == len(expected.token_ids)
    assert reply.prompt_tokens == expected.stats.prompt_tokens


def test_every_second_and_every_token_is_accounted_for(llm: LLM) -> None:
    measured = measure(llm, DRAFT)
    for reply in measured.every:
        assert reply.buckets is not None and reply.histogram is not None
        assert sum(reply.buckets.values()) == pytest.approx(reply.seconds, abs=1e-3)
        assert len(reply.token_gaps) == reply.output_tokens - 1
        assert sum(reply.token_gaps) == pytest.approx(reply.seconds - reply.ttft_s, abs=0.05)
        committed = sum(n * count for n, count in reply.histogram.items())
        assert committed == reply.output_tokens - 1
        assert reply.steps == sum(reply.histogram.values())
    assert measured.wall_s >= max(reply.seconds for reply in measured.every)


def test_as_many_requests_are_in_flight_as_asked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, flying, most = llm.engine, set[str](), 0
    submit, step = engine.submit, engine.step

    def counted_submit(request: Request) -> None:
        nonlocal most
        submit(request)
        flying.add(request.id)
        most = max(most, len(flying))

    def counted_step():
        events = step()
        flying.difference_update(e.request_id for e in events if e.generation is not None)
        return events

    monkeypatch.setattr(engine, "submit", counted_submit)
    monkeypatch.setattr(engine, "step", counted_step)
    for concurrency in (1, 3):
        most = 0
        measure(llm, DRAFT, concurrency, (*PROMPTS, TALK))
        assert most == concurrency


def test_a_second_turn_follows_the_models_own_answer(llm: LLM) -> None:
    [replies] = measure(llm, PLAIN, prompts=(TALK,)).replies.values()
    history = list(TALK.messages)
    for reply, follow_up in zip(replies, (*TALK.follow_ups, ""), strict=True):
        answer = llm.chat(history, SamplingParams(max_tokens=24))
        assert reply.content == answer.text
        history.append({"role": "assistant", "content": answer.text})
        history.append({"role": "user", "content": follow_up})


def test_no_run_finds_another_runs_prompts_in_the_prefix_cache(llm: LLM) -> None:
    long = BenchPrompt(({"role": "user", "content": "fox " * 60},))
    for _ in range(2):
        [[reply]] = measure(llm, PLAIN, prompts=(long,)).replies.values()
        assert reply.cached_tokens == 0


def test_a_prompt_that_does_not_fit_is_named_and_the_others_run(llm: LLM) -> None:
    huge = BenchPrompt(({"role": "user", "content": "fox " * 3000},))
    measured = measure(llm, PLAIN, prompts=(PROMPTS[0], huge, PROMPTS[1]))
    assert list(measured.replies) == [0, 2] and measured.num_failed == 1
    [problem] = measured.problems
    assert problem.startswith("task, concurrency 2, plain: prompt 2 was refused")


def test_a_prompt_that_cannot_be_encoded_is_named_and_the_others_run(llm: LLM) -> None:
    half = BenchPrompt(({"role": "user", "content": "\ud83d"},))
    measured = measure(llm, PLAIN, prompts=(PROMPTS[0], half, PROMPTS[1]))
    assert list(measured.replies) == [0, 2] and measured.num_failed == 1
    assert "prompt 2 was refused" in measured.problems[0]
    assert measure(llm, PLAIN, prompts=(half,)).num_failed == 1


def test_a_model_that_cannot_think_aloud_is_not_asked_to(llm: LLM) -> None:
    with pytest.raises(RequestError, match="Drop --thinking"):
        LocalRunner(llm, SamplingParams(), thinking=True, seed=0)


def test_thinking_is_the_templates_own_switch(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] += "{% if enable_thinking %}the fox thinks about{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    llm = LLM(folder, dtype="float32", draft="ngram")
    counts = []
    for thinking in (False, True):
        runner = LocalRunner(llm, SamplingParams(), thinking, seed=0)
        measured = runner.run(Run("task", PROMPTS[:1], 1, PLAIN, 4), lambda reply: None)
        counts.append(measured.replies[0][0].prompt_tokens)
    assert counts[0] < counts[1]


def test_without_drafts_there_is_one_mode(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    assert make_runner(LLM(folder, dtype="float32", draft=None)).modes == (PLAIN,)
