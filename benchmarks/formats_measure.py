"""How far a target in few bits is from its reference, and what drafting does with it.

Teacher-forced figures over the same tokens, and greedy answers plain and drafted. It knows engines
and tokens; what a format is, and how its checkpoint was made, is formats.py's business.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_divergence import first_difference
from flashdraft.core import FinishReason, Generation, Request, SamplingParams
from flashdraft.engine.cache.storage import Span
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.sequence import Sequence as RunningSequence
from flashdraft.errors import FlashdraftError
from flashdraft.models.drafter.model import PackedDrafter
from flashdraft.models.layers import ForwardBatch, Target
from tests import zoo

# A GPU multiplies more rows than this by weights that are bfloat16 for the moment: texts are read,
# and blocks verified, so many rows at a time, and the kernels that read the codes are measured.
ROWS_AT_ONCE = 64
CACHE_GB = 1.0


@dataclass(frozen=True)
class Text:
    """Token ids, and the place of the first one that counts."""

    ids: list[int]
    first: int

    @property
    def scored(self) -> list[int]:
        """The ids that count; the row before each of them foretells it."""
        return self.ids[self.first :]


@dataclass(frozen=True)
class Answers:
    """Greedy answers to the same prompts, in their order."""

    plain: list[Generation]
    drafted: list[Generation]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Of every drafted answer the tokens of its decode steps, and the steps."""
        return [(one.stats.decode_tokens, one.stats.steps) for one in self.drafted]

    @property
    def margins(self) -> list[float]:
        """For every prompt whose answers differ the plain run's top-2 margin where they part."""
        found = []
        for plain, drafted in zip(self.plain, self.drafted, strict=True):
            if plain.token_ids != drafted.token_ids:
                margin = first_difference(plain, drafted)[1]
                found.append(0.0 if margin is None else margin)
        return sorted(round(margin, 4) for margin in found)


def plain_engine(target: Target) -> Engine:
    """An engine that never drafts and recomputes every prompt."""
    return Engine(target, config=_config(target, verify=0, prefix_cache=False))


def sample_texts(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, temperature: float = 1.0
) -> list[Text]:
    """Answers drawn from the target with the seeds 0, 1, …; only their own tokens count."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    done = _run(engine, [Request(str(i), ids, params, i) for i, ids in enumerate(prompts)])
    return [
        Text(ids + list(one.token_ids), len(ids)) for ids, one in zip(prompts, done, strict=True)
    ]


def read_text(engine: Engine, text: Text) -> Tensor:
    """Log-probabilities where each scored token is foretold: [tokens, vocabulary]."""
    ids = text.ids
    request = Request("text", ids, SamplingParams(max_tokens=1), 0)
    sequence = RunningSequence(request, frozenset(), len(ids))
    engine.book.open(sequence, sequence.tokens)
    try:
        if not engine.book.reserve(sequence, len(ids)):
            raise FlashdraftError(f"A text of {len(ids)} tokens does not fit the cache.")
        rows = []
        for start in range(0, len(ids), ROWS_AT_ONCE):
            rows.append(_read_rows(engine, sequence, ids[start : start + ROWS_AT_ONCE], start))
    finally:
        engine.book.close(sequence)
    return torch.cat(rows)[text.first - 1 : -1].log_softmax(-1)


def _read_rows(engine: Engine, sequence: RunningSequence, ids: list[int], start: int) -> Tensor:
    """Logits after each of these tokens, which follow what the cache holds of the sequence."""
    target, cache = engine.target, engine.cache
    placed = cache.rows(engine.book, [Span(sequence, start, len(ids))])
    layers = cache.layers(placed.views, 0, len(target.config.cached_layers))
    batch = ForwardBatch(placed.positions, placed.end_position, layers)
    hidden = target.forward(torch.tensor(ids, device=target.kernels.device), batch).hidden
    return target.logits(hidden).float()


def compare_texts(
    texts: Sequence[Text], reference: Sequence[Tensor], read: Callable[[Text], Tensor]
) -> dict[str, Any]:
    """Perplexity, its ratio to the reference's, agreement and divergence over all scored tokens.

    The error of the ratio is a standard error that takes the tokens as independent.
    """
    losses, excesses, agreements, divergences = [], [], [], []
    for text, expected in zip(texts, reference, strict=True):
        rows = read(text)
        ids = torch.tensor(text.scored, device=rows.device).unsqueeze(1)
        loss, least = (-some.gather(1, ids).squeeze(1).double() for some in (rows, expected))
        losses.append(loss)
        excesses.append(loss - least)
        agreements.append(rows.argmax(-1) == expected.argmax(-1))
        divergences.append((expected.exp() * (expected - rows)).sum(-1).double())
    excess = torch.cat(excesses)
    ratio, count = math.exp(excess.mean()), len(excess)
    return {
        "tokens": count,
        "perplexity": round(math.exp(torch.cat(losses).mean()), 4),
        "perplexity_ratio": round(ratio, 4),
        "perplexity_ratio_error": round(ratio * float(excess.std()) / math.sqrt(count), 4),
        "top1_agreement": round(float(torch.cat(agreements).double().mean()), 4),
        "mean_kl": round(float(torch.cat(divergences).mean()), 6),
    }


def answer_prompts(
    plain: Engine, drafter: PackedDrafter, prompts: Sequence[list[int]], max_tokens: int
) -> Answers:
    """Greedy answers, without drafts and with whole blocks of the drafter verified."""
    target, params = plain.target, SamplingParams(max_tokens=max_tokens)
    requests = [Request(str(i), ids, params, 0) for i, ids in enumerate(prompts)]
    watched = [
        dataclasses.replace(one, params=dataclasses.replace(params, logprobs=2)) for one in requests
    ]
    block_size = drafter.config.block_size
    config = _config(target, verify=block_size - 1, max_batch=max(1, ROWS_AT_ONCE // block_size))
    return Answers(_run(plain, watched), _run(Engine(target, drafter, config), requests))


def describe_answers(answers: Answers, reference: Answers | None = None) -> dict[str, Any]:
    """Accepted length, pooled, and where drafted answers part from plain ones."""
    lengths = answers.lengths
    found = {
        "prompts": len(lengths),
        "tokens": sum(tokens for tokens, _ in lengths),
        "steps": sum(steps for _, steps in lengths),
        "accepted_length": round(pooled(lengths), 4),
        "repeated": round(repeated_share([one.token_ids for one in answers.plain]), 4),
        "num_parted": len(answers.margins),
        "margins": answers.margins,
    }
    if reference is not None:
        ratio, error = compare_lengths(lengths, reference.lengths)
        found |= {"accepted_ratio": round(ratio, 4), "accepted_ratio_error": round(error, 4)}
    return found


def repeated_share(answers: Sequence[Sequence[int]], width: int = 4) -> float:
    """The share of an answer's runs of `width` tokens that it has had before, over all answers.

    Text that repeats itself is foretold easily: a long accepted length may be a bad sign.
    """
    runs = [[tuple(ids[i : i + width]) for i in range(len(ids) - width + 1)] for ids in answers]
    return 1 - sum(len(set(one)) for one in runs) / max(1, sum(len(one) for one in runs))


def pooled(lengths: Sequence[tuple[int, int]]) -> float:
    """All tokens over all steps."""
    return sum(tokens for tokens, _ in lengths) / max(1, sum(steps for _, steps in lengths))


def compare_lengths(
    lengths: Sequence[tuple[int, int]], reference: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    """The ratio of two pooled lengths, and its standard error over prompts (jackknife)."""

    def ratio(left_out: int | None) -> float:
        ours, theirs = (
            pooled([one for index, one in enumerate(many) if index != left_out])
            for many in (lengths, reference)
        )
        return ours / theirs

    count = len(lengths)
    others = [ratio(index) for index in range(count)]
    mean = sum(others) / count
    error = math.sqrt((count - 1) / count * sum((one - mean) ** 2 for one in others))
    return ratio(None), error


def _config(target: Target, **settings: Any) -> EngineConfig:
    device = target.kernels.device.type
    return EngineConfig.for_device(
        device, cache=CacheOptions(cache_gb=CACHE_GB), ngram=False, **settings
    )


def _run(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    done: Mapping[str, Generation] = zoo.run(engine, requests, check=False)
    for one in done.values():
        if one.finish_reason is FinishReason.ERROR:
            raise FlashdraftError(one.error or "The engine could not decode a prompt.")
    return [done[request.id] for request in requests]
