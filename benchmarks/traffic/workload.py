"""What clients send: kinds of requests, lengths, prompts, and when requests arrive. No torch.

Everything follows from a seed: request n is the same whatever was answered before it. A kind says
how tokens are drawn; in the mixed kinds every eighth request, the first one among them, wants more.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flashdraft.bench.traffic.load import LengthRange
from flashdraft.core import GrammarSpec, Picture, PlacedPicture, Request, SamplingParams
from flashdraft.errors import RequestError
from flashdraft.models.config.vision import VisionConfig

EVERY = 8  # of a mixed kind, so many requests have one that wants more
FIRST_TOKEN = 5  # ids below it are special
GREEDY, SAMPLED, SCHEMA = "greedy", "sampled", "schema"
PICTURES, AS_TEXT = "pictures", "pictures-as-text"
KINDS = (GREEDY, SAMPLED, "logprobs", "penalty", "presence", SCHEMA, PICTURES, AS_TEXT)
PICTURE_EVERY = 4  # of the kind with pictures, so many requests have one with a picture
ROWS, COLUMNS = 14, 19  # of its cells: 266 tokens, as 4:3 has by default
PICTURE_TOKENS = ROWS * COLUMNS + 2  # with the marks around it
# Structure at both ends and free text between: random drafts fit nowhere else
SCHEMA_TEXT = json.dumps(
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["question", "answer", "remark"]},
            "is_final": {"type": "boolean"},
            "text": {"type": "string"},
        },
        "required": ["kind", "is_final", "text"],
        "additionalProperties": False,
    }
)


class Span(LengthRange):
    """Lengths, refused as a parser of flags has it."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Span:
        try:
            return cls(*super().parse(text))
        except RequestError as error:
            raise ValueError(str(error)) from None


PROMPTS, ANSWERS = Span(256, 1536), Span(64, 448)
OWN_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 64}  # Gemma 4's own
ALONE_PROMPTS, ALONE_ANSWERS = Span(128, 128), Span(384, 384)  # of a lone client


def params_of(kind: str, index: int, max_tokens: int) -> SamplingParams:
    """How the tokens of a kind's request are drawn; none ends before its length."""
    if kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r}; known are {', '.join(KINDS)}")
    if kind == GREEDY:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sampled = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **OWN_SAMPLING)
    if kind == "presence":
        return replace(sampled, presence_penalty=0.5)
    if kind == "logprobs" and wants_more(index):
        return replace(sampled, logprobs=5)
    if kind == "penalty" and wants_more(index):
        return replace(sampled, repetition_penalty=1.1)
    return sampled


def wants_more(index: int) -> bool:
    """Whether a request of a mixed kind is the one in eight."""
    return index % EVERY == 0


@dataclass(frozen=True)
class Workload:
    """Requests of one kind, by their number."""

    kind: str
    vocab_size: int
    seed: int
    prompts: Span = PROMPTS
    answers: Span = ANSWERS
    name: str = "r"  # ids begin with it
    vision: VisionConfig | None = None  # of the target, where pictures are sent

    def request(self, index: int) -> Request:
        dice = random.Random(f"{self.seed}/{index}")
        length, max_tokens = self.prompts.draw(dice), self.answers.draw(dice)
        prompt = random_tokens(dice, self.vocab_size, length)
        params = params_of(self.kind, index, max_tokens)
        placed: tuple[PlacedPicture, ...] = ()
        if self.kind in (PICTURES, AS_TEXT) and index % PICTURE_EVERY == 0:
            added = random_tokens(dice, self.vocab_size, PICTURE_TOKENS)
            if self.kind == PICTURES:
                assert self.vision is not None, "the target takes no pictures"
                tokens, picture = self.vision.tokens, made_up(self.vision, f"{self.seed}/{index}")
                placed = (PlacedPicture(1, picture),)
                added = [tokens.begin, *[tokens.picture] * picture.num_tokens, tokens.end]
            prompt = added + prompt  # pictures come before the text
        has_grammar = self.kind == SCHEMA and wants_more(index)
        grammar = GrammarSpec("json_schema", SCHEMA_TEXT) if has_grammar else None
        name = f"{self.name}-{index}"
        return Request(name, prompt, params, seed=index, grammar=grammar, pictures=placed)


def made_up(vision: VisionConfig, name: str, rows: int = ROWS, columns: int = COLUMNS) -> Picture:
    """A picture that nobody has seen; only its key is its own, so that making it takes no time."""
    height, width = rows * vision.cell, columns * vision.cell
    key = hashlib.sha256(name.encode()).digest()
    return Picture(_noise(3 * width * height), width, height, rows * columns, key)


@functools.cache
def _noise(count: int) -> bytes:
    return random.Random("pixels").randbytes(count)


def random_tokens(dice: random.Random, vocab_size: int, count: int) -> list[int]:
    """Tokens of a prompt without sense."""
    return dice.choices(range(FIRST_TOKEN, vocab_size), k=count)


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Seconds at which requests arrive, `rate` a second on average, without end."""
    dice, now = random.Random(f"arrivals {seed}"), 0.0
    while True:
        now += dice.expovariate(rate)
        yield now
