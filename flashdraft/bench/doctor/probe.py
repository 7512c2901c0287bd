"""A pair under examination: its prompts, and answers to them under any one change.

It loads a pair and runs it: other settings, another drafter config, another target. What the
answers mean is checks.py's and causes.py's business.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flashdraft.bench.doctor.settings import Mode, Settings
from flashdraft.chat.templates import encode_chat
from flashdraft.core import FinishReason, Generation, Request, SamplingParams
from flashdraft.engine.config import DEFAULT_CACHE, MAX_VERIFY, CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.errors import RequestError
from flashdraft.llm import LLM, failure_of
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.drafter.model import Drafter, PackedDrafter
from flashdraft.models.layers import Target
from flashdraft.models.sources import resolve_source
from flashdraft.models.tokenizer import Tokenizer

# Our own, of the kinds that drafters are trained on: where a healthy pair accepts much, a fault
# shows. The ranges in expected.py are of these prompts: change both together.
PROMPTS = (
    "A baker fills 12 trays with 8 rolls each and sells 70 rolls. How many rolls are left?",
    "Write a Python function that returns the sum of the even numbers in a list.",
    "Lena reads 15 pages a day for 6 days and then 20 pages a day for 4 days. How many pages does "
    "she read in all?",
    "Solve for x: 3x + 7 = 25. Show every step.",
    "A ticket costs 9 dollars for an adult and 5 dollars for a child. What do 3 adults and 7 "
    "children pay together?",
    "Write a Python function that counts the vowels of a string, with a docstring.",
    "What is the area of a rectangle that is 14 cm long and 9 cm wide? Explain the steps.",
    "Write a Python function is_palindrome(text) and show two examples of how it is called.",
)
MAX_TOKENS = 64
FEW_TOKENS = 100  # below this an accepted length says little
_MAX_CONTEXT = 1024


@dataclass(frozen=True)
class Accepted:
    """Accepted length over some answers, tokens of all over decode steps of all."""

    length: float
    by_position: tuple[float, ...]  # share of steps in which draft slot 1, 2, … was committed
    num_tokens: int
    num_steps: int
    is_cut: bool = False  # whether time ran out before an answer's end

    @property
    def is_known(self) -> bool:
        """Whether there is a figure at all: not where time ran out before the first step."""
        return self.num_steps > 0 or not self.is_cut

    @classmethod
    def of(cls, answers: Sequence[Generation]) -> Accepted:
        histogram: dict[int, int] = {}
        for answer in answers:
            for length, count in answer.stats.histogram.items():
                histogram[length] = histogram.get(length, 0) + count
        steps = sum(histogram.values())
        tokens = sum(length * count for length, count in histogram.items())
        shares = tuple(
            sum(count for length, count in histogram.items() if length > slot) / steps
            for slot in range(1, max(histogram, default=0))
        )
        return cls(tokens / steps if steps else 0.0, shares, tokens, steps, are_cut(answers))


class Probe:
    """One target with one drafter, decoding requests to compare."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        cache: CacheOptions = DEFAULT_CACHE,
        ngram: bool = False,
        tree: str | int | None = None,
    ) -> None:
        """With a `tree` the policy chooses, or all of it is verified where it is a number.

        Then requests run one after another: many would leave a large tree no rows.
        """
        if drafter is not None:
            target = tapped(target, drafter.config.tap_layers)
        packed = None if drafter is None else PackedDrafter(drafter, target.kernels)
        # the whole block is verified: the policy would hide how a bad drafter drafts
        longest = MAX_VERIFY if drafter is None else drafter.config.num_slots
        self.verify = min(longest, MAX_VERIFY) if ngram or drafter is not None else 0
        config = EngineConfig.for_device(
            target.kernels.device.type,
            max_batch=len(PROMPTS) if tree is None else 1,
            max_context=min(_MAX_CONTEXT, target.config.max_position),
            verify=None if tree is not None else self.verify,
            tree=tree,
            ngram=ngram,
            cache=cache,
        )
        self._drafted = config.verify  # of a drafted answer
        self._engine = Engine(target, packed, config)
        self._count = 0

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        drafted: bool = True,
        deadline: float = math.inf,
    ) -> list[Generation]:
        """Answers in the prompts' order, seeded by it; cut short once `deadline` has passed."""
        names = []
        for seed, prompt in enumerate(prompts):
            names.append(f"doctor-{self._count}")
            self._count += 1
            verify = self._drafted if drafted else 0
            self._engine.submit(Request(names[-1], list(prompt), params, seed, verify))
        done: dict[str, Generation] = {}
        is_late = False
        while self._engine.has_work:
            if not is_late and time.monotonic() > deadline:
                is_late = True
                for name in names:
                    self._engine.cancel(name)
            for event in self._engine.step():
                if event.generation is not None:
                    done[event.request_id] = event.generation
        answers = [done[name] for name in names]
        for one in answers:
            if one.finish_reason is FinishReason.ERROR:
                raise failure_of(one)
        return answers


@dataclass(frozen=True)
class Patient:
    """The pair that is examined, as the user would run it."""

    llm: LLM
    drafter: Drafter | None  # in the kernels' dtype, on their device
    folder: Path | None  # the drafter's files
    mode: Mode
    num_prompts: int = len(PROMPTS)  # fewer where rows are slow

    @classmethod
    def load(cls, settings: Settings) -> Patient:
        """Load a target with next to no cache of its own, and its drafter's parameters."""
        llm = LLM(
            settings.model,
            draft=None if settings.draft == "none" else settings.draft,
            verify=0,
            device=settings.device,
            dtype=settings.dtype,
            max_batch=1,
            max_context=64,
            vision=False,  # it is asked in words alone
            **settings.weights._asdict(),
            **asdict(settings.cache),
        )
        if llm.tokenizer is None:
            raise RequestError(
                f"{settings.model} has no tokenizer, so doctor cannot ask it anything; name a "
                "folder with tokenizer.json, or a GGUF file."
            )
        if llm.drafter_name is None:
            return cls(llm, None, None, settings.mode)
        folder = resolve_source(llm.drafter_name).path
        return cls(llm, drafter_for(llm, folder), folder, settings.mode)

    @property
    def target(self) -> Target:
        return self.llm.engine.target

    @property
    def cache(self) -> CacheOptions:
        """How keys and values are stored, as the user said it."""
        return self.llm.engine.config.cache

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.llm.tokenizer is not None, "`load` refuses a model without one"
        return self.llm.tokenizer

    def prompts(self, mode: Mode | None = None) -> list[list[int]]:
        """The built-in prompts as token ids, in this mode's chat format."""
        mode = self.mode if mode is None else mode
        tokenizer, asked = self.tokenizer, PROMPTS[: self.num_prompts]
        if mode.template is not None:
            tokenizer = tokenizer.with_template(mode.template)
        if tokenizer.chat_template is None:
            return [tokenizer.encode(prompt, add_special=True) for prompt in asked]
        switch = {"enable_thinking": mode.thinking}
        return [
            encode_chat(tokenizer, [{"role": "user", "content": prompt}], extra=switch)
            for prompt in asked
        ]


def accepted_by(probe: Probe, prompts: Sequence[Sequence[int]], deadline: float) -> Accepted | None:
    """What a pair accepts greedily; None where time ran out before that could be said."""
    accepted = Accepted.of(probe.answer(prompts, greedy(), deadline=deadline))
    return None if accepted.is_cut and accepted.num_tokens < FEW_TOKENS else accepted


def are_cut(answers: Sequence[Generation]) -> bool:
    """Whether time ran out before the end of any of them."""
    return any(answer.finish_reason is FinishReason.CANCELLED for answer in answers)


def drafter_for(llm: LLM, folder: Path) -> Drafter:
    """A drafter's parameters where the target computes, and in its dtype."""
    kernels = llm.kernels
    return load_drafter(folder, llm.engine.target.config).to(kernels.device, kernels.dtype)


def tapped(target: Target, taps: Sequence[int]) -> Target:
    """The same target, weights shared, that hands out other layers' outputs."""
    twin = copy.copy(target)
    twin.tap_layers = tuple(taps)
    return twin


def greedy(max_tokens: int = MAX_TOKENS, logprobs: int | None = None) -> SamplingParams:
    """Settings of a greedy answer."""
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs)


def reconfigured(drafter: Drafter, **changes: object) -> Drafter:
    """The same drafter, weights shared, under a changed config."""
    twin = copy.copy(drafter)
    twin.config = dataclasses.replace(drafter.config, **changes)  # type: ignore[arg-type]
    return twin


def is_on_gpu(target: Target) -> bool:
    """Whether the target's arithmetic may depend on how many rows there are."""
    return torch.device(target.kernels.device).type == "cuda"
