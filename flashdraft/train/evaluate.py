"""Accepted length of a drafter: offline from stored greedy answers, and online through the engine.

Offline, the drafter predicts at every place of every answer at once, and each answer is then walked
as the engine walks it: from an anchor over the run of agreed draft tokens and the bonus token to
the next one. Online, the engine decodes the prompts. Both count steps as core.GenerationStats does,
and in exact arithmetic they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from flashdraft.core import FinishReason, Generation, Request, SamplingParams
from flashdraft.engine.config import EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.errors import FlashdraftError, TrainingError
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.layers import Target
from flashdraft.train.data.answers import AnswerSet
from flashdraft.train.data.regenerate import find_loop
from flashdraft.train.fit.batches import NO_LABEL, PackedBatch, every_block
from flashdraft.train.fit.step import TrainingStep


@dataclass(frozen=True)
class RequestResult:
    """How one answer was decoded. `histogram[n]` counts decode steps that committed n tokens."""

    source: str
    histogram: Mapping[int, int]
    looped: bool  # the answer fell into a loop, which any drafter finds easy

    @property
    def steps(self) -> int:
        return sum(self.histogram.values())

    @property
    def tokens(self) -> int:
        """Committed by decode steps: the first token of an answer is the prefill's."""
        return sum(length * count for length, count in self.histogram.items())

    @property
    def accepted_length(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class TaskResult:
    """Accepted length over the requests of one task, those without a decode step left out."""

    num_requests: int
    mean: float  # over requests, each counting the same
    pooled: float  # tokens of all over steps of all
    acceptance: list[float]  # share of steps in which draft slot 1, 2, … was committed

    @classmethod
    def of(cls, requests: Iterable[RequestResult]) -> TaskResult:
        counted = [request for request in requests if request.steps]
        histogram: dict[int, int] = {}
        for request in counted:
            for length, count in request.histogram.items():
                histogram[length] = histogram.get(length, 0) + count
        steps, longest = sum(histogram.values()), max(histogram, default=0)
        lengths = [request.accepted_length for request in counted]
        return cls(
            num_requests=len(counted),
            mean=sum(lengths) / max(1, len(lengths)),
            pooled=sum(length * count for length, count in histogram.items()) / max(1, steps),
            acceptance=[
                sum(count for length, count in histogram.items() if length > slot) / steps
                for slot in range(1, longest)
            ],
        )


@dataclass(frozen=True)
class Evaluation:
    """Every request's result."""

    requests: list[RequestResult] = field(default_factory=list)

    def tasks(self, with_loops: bool = True) -> dict[str, TaskResult]:
        """One result per source of prompts, in the order of their first request."""
        kept = self._kept(with_loops)
        sources = dict.fromkeys(request.source for request in kept)
        return {source: TaskResult.of(r for r in kept if r.source == source) for source in sources}

    def overall(self, with_loops: bool = True) -> TaskResult:
        """All requests together."""
        return TaskResult.of(self._kept(with_loops))

    def summary(self) -> dict[str, Any]:
        """What a log says of it: means over requests, and all of them pooled."""
        overall, without_loops = self.overall(), self.overall(with_loops=False)
        return {
            "accepted_length": overall.mean,
            "accepted_length_pooled": overall.pooled,
            "accepted_length_without_loops": without_loops.mean,
            "acceptance": [round(share, 4) for share in overall.acceptance],
            "by_source": {source: task.mean for source, task in self.tasks().items()},
            "num_requests": overall.num_requests,
        }

    def _kept(self, with_loops: bool) -> list[RequestResult]:
        return [request for request in self.requests if with_loops or not request.looped]


def evaluate_offline(
    step: TrainingStep,
    answers: AnswerSet,
    *,
    max_rows: int,
    num_blocks: int,
    max_tokens: int | None = None,
    verify: int | None = None,
) -> Evaluation:
    """Accepted lengths on stored greedy answers.

    max_tokens is the limit under which they were generated: the engine drafts no further than it,
    and a shorter block may draft other tokens. None = it was far away. verify is the most draft
    tokens sent to the target; None = all of a block.
    """
    longest = int(answers.starts.diff().max()) if len(answers) else 0
    if longest > max_rows:
        raise TrainingError(
            f"The longest prompt and answer have {longest} tokens, and a batch has {max_rows} "
            "rows; evaluate with more rows."
        )
    if not bool(answers.greedy.all()):
        raise TrainingError(
            "Some answers were sampled; accepted length is measured on greedy ones: select those."
        )
    size = step.drafter.config.block_size
    verify = size - 1 if verify is None else min(verify, size - 1)
    # runs[i]: agreed draft tokens from token i on, if it is an anchor; over all answers end to end
    runs = np.zeros(len(answers.tokens), dtype=np.int64)
    device, starts = step.target.kernels.device, answers.starts.numpy()
    packs = every_block(answers, max_rows=max_rows, num_blocks=num_blocks, block_size=size)
    for chosen, batches in packs:
        taps = None
        for host in batches:
            batch = host.to(device)
            taps = step.features.run(batch) if taps is None else taps
            rooms = _rooms(host, answers.prompt_lengths.numpy()[chosen], max_tokens, size)
            drafted = np.minimum(rooms, verify) if step.drafter.config.any_width else rooms
            is_cut = bool((drafted < size - 1).any())
            widths = torch.from_numpy(drafted + 1).to(device) if is_cut else None
            count = int((host.labels[:, 0] != NO_LABEL).sum())  # the rest only fills the batch
            agreed = step.predict(batch, taps, widths) == batch.labels
            lengths = agreed.long().cumprod(1).sum(1).cpu().numpy()
            anchors = host.anchors.numpy()[:count]
            places = starts[chosen][host.documents.numpy()[anchors]]
            places = places + host.positions.numpy()[anchors]
            runs[places] = np.minimum(np.minimum(lengths, rooms), verify)[:count]
    results = []
    for index in range(len(answers)):
        first = int(starts[index]) + int(answers.prompt_lengths[index])
        histogram = _walk(runs[first : starts[index + 1]])
        answer = answers.example(index)[1].numpy()
        # a loop may have been cut: then the answer neither ended nor reached its limit
        was_cut = not answers.ended[index] and max_tokens is not None and len(answer) < max_tokens
        looped = was_cut or find_loop(answer) is not None
        results.append(RequestResult(answers.source(index), histogram, looped))
    return Evaluation(results)


def _rooms(
    batch: PackedBatch, prompt_lengths: np.ndarray, max_tokens: int | None, block_size: int
) -> np.ndarray:
    """Draft tokens that the engine would make at each anchor: one less than the answer may grow."""
    anchors = batch.anchors.numpy()
    if max_tokens is None:
        return np.full(len(anchors), block_size - 1)
    written = (
        batch.positions.numpy()[anchors] - prompt_lengths[batch.documents.numpy()[anchors]] + 1
    )
    return np.clip(max_tokens - written - 1, 0, block_size - 1)


def _walk(runs: np.ndarray) -> dict[int, int]:
    """Steps by committed tokens, from the agreed run at every token of one answer."""
    histogram: dict[int, int] = {}
    place, last = 0, len(runs) - 1
    while place < last:
        committed = min(int(runs[place]) + 1, last - place)  # nothing comes after the stop token
        histogram[committed] = histogram.get(committed, 0) + 1
        place += committed
    return histogram


def drafting_engine(target: Target, drafter: Drafter, max_batch: int = 8) -> Engine:
    """An engine that always verifies the whole block, from the block drafter alone."""
    config = EngineConfig(
        max_batch=max_batch,
        max_step_tokens=max(
            EngineConfig.max_step_tokens, 2 * max_batch * drafter.config.block_size
        ),
        verify=drafter.config.block_size - 1,
        ngram=False,
    )
    return Engine(target, PackedDrafter(drafter, target.kernels), config)


def evaluate_online(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sources: Sequence[str],
    *,
    max_tokens: int = 256,
) -> Evaluation:
    """Accepted lengths of greedy answers to prompts of token ids, decoded now."""
    params = SamplingParams(max_tokens=max_tokens)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(f"evaluate-{index}", [int(token) for token in prompt], params, 0))
    done: dict[str, Generation] = {}
    while engine.has_work:
        for event in engine.step():
            if event.generation is not None:
                done[event.request_id] = event.generation
    results = []
    for index, source in enumerate(sources):
        generation = done[f"evaluate-{index}"]
        if generation.finish_reason is FinishReason.ERROR:
            raise FlashdraftError(generation.error or "The engine could not decode a prompt.")
        looped = find_loop(generation.token_ids) is not None
        results.append(RequestResult(source, dict(generation.stats.histogram), looped))
    return Evaluation(results)
