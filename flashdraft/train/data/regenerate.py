"""The target's own answers to a list of prompts, written to disk as they come.

What a drafter must learn is what its target writes, so the answers of any data set are thrown away
and written anew. An interrupted run goes on where it stopped; the answers on disk are never lost.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from flashdraft.chat.templates import render_chat
from flashdraft.errors import RequestError, TrainingError
from flashdraft.kernels.kinds import AS_STORED, WeightOptions
from flashdraft.kernels.select import weights_of
from flashdraft.llm import LLM
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.train.data.answer_writer import MAX_UINT16_VOCAB, AnswerWriter
from flashdraft.train.data.answers import Answer, fingerprint, tokenizer_digest
from flashdraft.train.data.decode import BulkDecoder, Continuation, Job
from flashdraft.train.data.prompts import Prompt, digest_of
from flashdraft.train.data.settings import THINKING, AnswerSettings
from flashdraft.train.lock import make_folder, sole_writer

log = logging.getLogger(__name__)

SHARD_SIZE = 20_000  # answers
REPORT_EVERY_S = 10.0
MIN_LOOP = 64  # tokens of repetition that make a loop
MAX_PERIOD = 128
KEPT_REPEATS, KEPT_TOKENS = 3, 32  # of a loop that is cut, whichever is longer
_BATCH = 256  # prompts encoded at once
_SAMPLED_ROWS = 64  # prompts looked at to estimate the disk space


@dataclass
class AnswerReport:
    """What a run did."""

    num_planned: int = 0
    num_found: int = 0  # already on disk
    num_too_long: int = 0  # prompts above max_prompt_tokens, left out
    num_refused: int = 0  # conversations that the chat template does not take
    num_not_text: int = 0  # prompts with half of a surrogate pair, which no encoding has
    num_answers: int = 0
    num_ended: int = 0  # by the target's own stop token
    num_looped: int = 0
    answer_tokens: int = 0  # as generated
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.answer_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def num_left_out(self) -> int:
        return self.num_too_long + self.num_refused + self.num_not_text

    def describe_left_out(self, settings: AnswerSettings) -> str:
        """Why prompts have no answer, in words."""
        return (
            f"{self.num_too_long} longer than --max-prompt-tokens {settings.max_prompt_tokens}, "
            f"{self.num_refused} refused by the chat template, {self.num_not_text} not valid "
            "Unicode"
        )


@dataclass(frozen=True)
class _Plan:
    """One answer to be written."""

    prompt_index: int
    variant: int
    thinking: str
    temperature: float
    seed: int


def load_target(
    model: str | Path,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    weights: WeightOptions = AS_STORED,
) -> LLM:
    """The target alone, with next to no cache: the memory is for the answers' own."""
    return LLM(
        model,
        draft=None,
        device=device,
        dtype=dtype,
        max_batch=1,
        max_context=64,
        vision=False,
        **weights._asdict(),
    )


def regenerate(
    llm: LLM,
    prompts: Sequence[Prompt],
    folder: str | Path,
    settings: AnswerSettings | None = None,
    *,
    num_slots: int | None = None,
) -> AnswerReport:
    """Let the target answer every prompt into `folder`; goes on where an earlier run stopped.

    Load the target by `load_target`. `num_slots` answers are written at once (None = as many as
    memory allows, within reason).
    """
    settings = settings or AnswerSettings()
    tokenizer = _require_template(llm, settings)
    make_folder(folder := Path(folder))
    with sole_writer(folder):
        return _answer_all(llm, tokenizer, prompts, folder, settings, num_slots)


def _answer_all(
    llm: LLM,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: AnswerSettings,
    num_slots: int | None,
) -> AnswerReport:
    target = llm.engine.target
    writer = AnswerWriter(
        folder,
        target.config.vocab_size,
        _identity(llm, prompts, settings),
        SHARD_SIZE,
        tokenizer_digest(tokenizer),
        weights_of(llm.kernels),
    )
    every = list(_plan(len(prompts), settings))
    done = writer.done()
    plans = [plan for plan in every if (plan.prompt_index, plan.variant) not in done]
    report = AnswerReport(num_planned=len(every), num_found=len(every) - len(plans))
    if not plans:
        return report
    _check_disk(prompts, tokenizer, plans, settings, target.config.vocab_size, writer.folder)
    decoder = BulkDecoder(
        target,
        max_prompt=settings.max_prompt_tokens,
        max_tokens=settings.max_tokens,
        stop_ids=target.config.eos_token_ids,
        num_slots=num_slots,
    )
    view = _Progress(report, len(plans), writer)
    jobs = _jobs(tokenizer, prompts, plans, settings, report)
    try:
        for made in decoder.run(jobs):
            plan = plans[made.job.key]
            answer = _answer(made, plan, prompts[plan.prompt_index].source, settings, report)
            if answer is not None:
                writer.append(answer)
            view.show()
    except KeyboardInterrupt:
        view.close()
        writer.flush()
        log.warning(
            "Interrupted; %d of %d answers are saved in %s. Run the same command again to go on.",
            len(writer.done()),
            len(every),
            folder,
        )
        raise
    finally:  # an error too: whatever is complete goes to disk
        view.close()
        if not writer.has_failed:
            writer.flush()
    return report


def find_loop(token_ids: NDArray[np.int32] | Sequence[int]) -> tuple[int, int] | None:
    """(where it begins, its period) if the tokens end in a loop, else None.

    A loop is an n-gram of up to 128 tokens that is repeated over the last 64 tokens or more, and
    stands there twice at least.
    """
    ids = np.asarray(token_ids)
    size = len(ids)
    for period in range(1, min(MAX_PERIOD, size // 2) + 1):
        if ids[-1] != ids[-1 - period]:
            continue
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        begin = int(differs[-1]) + 1 if len(differs) else 0
        if size - begin >= max(MIN_LOOP, 2 * period):
            return begin, period
    return None


def _identity(llm: LLM, prompts: Sequence[Prompt], settings: AnswerSettings) -> dict[str, Any]:
    described = json.loads(json.dumps(dataclasses.asdict(settings)))
    formats = weights_of(llm.kernels)
    if any(formats):  # without them the identity is what it was before there were any
        described |= formats._asdict()
    return {
        "target": Path(llm.model).name,
        "fingerprint": fingerprint(llm.model),
        "prompts": digest_of(prompts),
        **described,
    }


def _require_template(llm: LLM, settings: AnswerSettings) -> Tokenizer:
    tokenizer = llm.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        lacks = "tokenizer" if tokenizer is None else "chat template"
        raise TrainingError(
            f"{llm.model} has no {lacks}, so no prompt can be put to it; use a chat model."
        )
    wants_switch = set(settings.thinking) != {"default"}
    if wants_switch and "enable_thinking" not in tokenizer.chat_template:
        raise TrainingError(
            f"thinking is {', '.join(settings.thinking)}, but the chat template of {llm.model} "
            "knows no enable_thinking; leave it at 'default'."
        )
    return tokenizer


def _plan(num_prompts: int, settings: AnswerSettings) -> Iterator[_Plan]:
    """Every answer to be written: the greedy ones first, since they need no noise."""
    sampled: list[_Plan] = []
    for index in range(num_prompts):
        dice = random.Random(f"{settings.seed} {index}")
        for number in range(settings.answers_per_prompt):
            greedy = number == 0 and dice.random() < settings.greedy_share
            temperature = 0.0 if greedy else dice.choice(settings.temperatures)
            for place, thinking in enumerate(settings.thinking):
                variant = number * len(settings.thinking) + place
                plan = _Plan(index, variant, thinking, temperature, dice.getrandbits(62))
                if greedy:
                    yield plan
                else:
                    sampled.append(plan)
    yield from sampled


def _jobs(
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    plans: Sequence[_Plan],
    settings: AnswerSettings,
    report: AnswerReport,
) -> Iterator[Job]:
    for first in range(0, len(plans), _BATCH):
        keys, texts = [], []
        for key in range(first, min(first + _BATCH, len(plans))):
            plan = plans[key]
            try:
                texts.append(_text(tokenizer, prompts[plan.prompt_index], plan.thinking))
                keys.append(key)
            except UnicodeEncodeError:
                report.num_not_text += 1
            except RequestError:
                report.num_refused += 1
        for key, ids in zip(keys, tokenizer.encode_batch(texts), strict=True):
            if len(ids) <= settings.max_prompt_tokens:
                yield Job(key, ids, plans[key].temperature, plans[key].seed)
            else:
                report.num_too_long += 1


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt, thinking: str = "default") -> list[int]:
    """A prompt in the target's chat format, ready for its answer."""
    return tokenizer.encode(_text(tokenizer, prompt, thinking))


def _text(tokenizer: Tokenizer, prompt: Prompt, thinking: str) -> str:
    prompt.text.encode()  # a lone surrogate must not fail a whole batch
    text = render_chat(tokenizer, prompt.messages, extra=THINKING[thinking])
    text.encode()
    return text


def _answer(
    made: Continuation, plan: _Plan, source: str, settings: AnswerSettings, report: AnswerReport
) -> Answer | None:
    report.num_answers += 1
    report.num_ended += made.ended
    report.answer_tokens += len(made.token_ids)
    ids = made.token_ids
    loop = None if made.ended else find_loop(ids)
    if loop is not None:
        report.num_looped += 1
        begin, period = loop
        if settings.loops == "drop":
            return None
        if settings.loops == "cut":
            ids = ids[: begin + max(KEPT_REPEATS * period, KEPT_TOKENS)]
    return Answer(
        prompt_ids=made.job.prompt_ids,
        answer_ids=ids,
        prompt_index=plan.prompt_index,
        variant=plan.variant,
        source=source,
        temperature=plan.temperature,
        ended=made.ended,
    )


def _check_disk(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    plans: Sequence[_Plan],
    settings: AnswerSettings,
    vocab_size: int,
    folder: Path,
) -> None:
    """Estimate the space the answers take; refuse to start where they cannot fit."""
    some = random.Random(0).sample(range(len(plans)), min(_SAMPLED_ROWS, len(plans)))
    counts = [0]
    for index in some:
        with suppress(RequestError):  # left out later, and counted there
            counts.append(len(tokenizer.encode(prompts[plans[index].prompt_index].text)))
    prompt_tokens = sum(counts) / max(1, len(counts) - 1)
    token_bytes = 2 if vocab_size <= MAX_UINT16_VOCAB else 4
    tokens = min(prompt_tokens, settings.max_prompt_tokens) + settings.max_tokens / 2
    wanted = int(len(plans) * tokens * token_bytes)
    free = shutil.disk_usage(folder).free
    log.info("%d answers will take about %.2f GB on disk", len(plans), wanted / 1e9)
    if wanted > free:
        raise TrainingError(
            f"{len(plans)} answers will take about {wanted / 1e9:.1f} GB and {folder} has "
            f"{free / 1e9:.1f} GB left; free some room, or use fewer prompts or shorter answers."
        )


class _Progress:
    """A bar on terminals, a line in the log now and then elsewhere."""

    def __init__(self, report: AnswerReport, total: int, writer: AnswerWriter) -> None:
        self._report, self._total, self._writer = report, total, writer
        self._begin = self._shown_at = time.perf_counter()
        self._bar = tqdm(total=total, desc="Answering", unit=" answers", disable=None, leave=False)

    def show(self) -> None:
        now = time.perf_counter()
        self._report.seconds = now - self._begin
        if now - self._shown_at < (0.5 if not self._bar.disable else REPORT_EVERY_S):
            return
        self._shown_at = now
        report = self._report
        seen = report.num_answers + report.num_left_out
        speed = f"{report.tokens_per_s / 1000:.1f}k tok/s"
        disk = f"{self._writer.bytes_written * self._total / max(1, seen) / 1e9:.2f} GB in the end"
        self._bar.update(seen - self._bar.n)
        self._bar.set_postfix_str(f"{speed}, {disk}", refresh=False)
        if self._bar.disable:
            left = (self._total - seen) * report.seconds / max(1, seen)
            log.info("%d of %d answers, %s, %.0f s left", seen, self._total, speed, left)

    def close(self) -> None:
        self._report.seconds = time.perf_counter() - self._begin
        self._bar.close()
