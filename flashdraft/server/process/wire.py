"""What the front and the engine's process say to each other, in frames (killable/frames.py).

This module knows the form of everything that crosses, and nothing of processes or of asyncio.

The pictures of a request go before it, each in a frame of its own with its pixels as they are; the
request says where they stand.

The last event of a request does not repeat what the earlier ones said: `History`, at the reading
end, puts the tokens back into its `Generation`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flashdraft.core import (
    FinishReason,
    Generation,
    GenerationStats,
    GrammarSpec,
    Picture,
    PlacedPicture,
    Request,
    SamplingParams,
    ShownTree,
    StepStats,
    TokenEvent,
    TokenLogprob,
)
from flashdraft.errors import RequestError
from flashdraft.killable.frames import DATA, Message, WireError
from flashdraft.models.config.vision import VisionConfig, VisionTokens

_LISTS = ("verify_lengths", "depths")  # of a step's statistics
BEAT_S = 1.0  # between two signs of life of an engine that is ready

# -- requests --------------------------------------------------------------------------------------


class Submission(NamedTuple):
    """A message that submits a request or a part of it, and the bytes that go with it."""

    message: Message
    data: bytes | None = None


def submissions(request: Request) -> Iterator[Submission]:
    """What submits a request, in this order: its pictures, each of them once, and itself."""
    for picture in {placed.picture.key: placed.picture for placed in request.pictures}.values():
        yield Submission({"type": "picture", **_picture_to_dict(picture)}, picture.pixels)
    yield Submission({"type": "submit", "request": request_to_dict(request)})


def request_to_dict(request: Request) -> Message:
    """A request in plain JSON."""
    params = {f.name: getattr(request.params, f.name) for f in dataclasses.fields(SamplingParams)}
    params["stop"] = list(request.params.stop)
    params["stop_token_ids"] = list(request.params.stop_token_ids)
    params["logit_bias"] = [[token, bias] for token, bias in request.params.logit_bias.items()]
    grammar = request.grammar
    return {
        "id": request.id,
        "prompt_ids": list(request.prompt_ids),
        "params": params,
        "seed": request.seed,
        "verify": request.verify,
        "grammar": None if grammar is None else [grammar.kind, grammar.text],
        "prompt_logprobs": request.prompt_logprobs,
        "pictures": [[placed.start, placed.picture.key.hex()] for placed in request.pictures],
        "shows_trees": request.shows_trees,
    }


def request_from_dict(
    content: Mapping[str, Any], pictures: Mapping[bytes, Picture] | None = None
) -> Request:
    """The request again. RequestError if its settings are wrong, WireError if it is none.

    `pictures` are those that went before it, by their keys.
    """
    sent = pictures or {}
    try:
        params = dict(content["params"])
        params["stop"] = tuple(params["stop"])
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
        params["logit_bias"] = dict(params["logit_bias"])
        grammar = content["grammar"]
        return Request(
            id=_text(content["id"]),
            prompt_ids=list(content["prompt_ids"]),
            params=SamplingParams(**params),
            seed=int(content["seed"]),
            verify=content["verify"],
            grammar=None if grammar is None else GrammarSpec(*map(_text, grammar)),
            prompt_logprobs=content["prompt_logprobs"],
            pictures=tuple(
                PlacedPicture(int(start), sent[bytes.fromhex(key)])
                for start, key in content["pictures"]
            ),
            shows_trees=content["shows_trees"] is True,
        )
    except RequestError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"A request cannot be read: {type(error).__name__}: {error}.") from None


def _picture_to_dict(picture: Picture) -> Message:
    sizes = {name: getattr(picture, name) for name in ("width", "height", "num_tokens")}
    return {**sizes, "key": picture.key.hex()}


def picture_from_dict(content: Mapping[str, Any]) -> Picture:
    """A picture that was sent. WireError if it is none."""
    try:
        width, height, num_tokens = (int(content[k]) for k in ("width", "height", "num_tokens"))
        pixels, key = content[DATA], bytes.fromhex(content["key"])
        if len(pixels) != 3 * width * height:
            raise ValueError(f"{len(pixels)} bytes for {width} x {height} pixels")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"A picture cannot be read: {type(error).__name__}: {error}.") from None
    return Picture(pixels, width, height, num_tokens, key)


# -- what the front must know of a model's eyes ----------------------------------------------------


class Vision(NamedTuple):
    """How the model takes pictures: as the front must know it to open and place them."""

    cell: int  # pixels along each side of what becomes one token
    default_budget: int  # of tokens for a picture
    tokens: VisionTokens


def vision_to_dict(config: VisionConfig) -> Message:
    """What the front must know of a tower, in plain JSON."""
    tokens = dataclasses.asdict(config.tokens)
    return {"cell": config.cell, "default_budget": config.default_budget, "tokens": tokens}


def vision_from_dict(content: Mapping[str, Any]) -> Vision:
    """The same, as the front has it."""
    tokens = VisionTokens(**content["tokens"])
    return Vision(int(content["cell"]), int(content["default_budget"]), tokens)


# -- events ----------------------------------------------------------------------------------------


def event_to_dict(event: TokenEvent) -> Message:
    """An event in plain JSON; its generation without what earlier events said."""
    content: Message = {
        "id": event.request_id,
        "tokens": list(event.token_ids),
        "text": event.text,
        "drafted": "".join("1" if drafted else "0" for drafted in event.drafted),
        "pieces": list(event.pieces),
    }
    if event.logprobs is not None:
        content["logprobs"] = [_logprob_to_list(one) for one in event.logprobs]
    if event.trees:
        content["trees"] = [[one.at, *map(list, one[1:])] for one in event.trees]
    if event.generation is not None:
        content["generation"] = _generation_to_dict(event.generation)
    return content


def event_from_dict(content: Mapping[str, Any]) -> TokenEvent:
    """The event again; of a last one, `History` completes the generation."""
    try:
        logprobs, generation = content.get("logprobs"), content.get("generation")
        return TokenEvent(
            request_id=_text(content["id"]),
            token_ids=tuple(map(int, content["tokens"])),
            text=_text(content["text"]),
            drafted=tuple(flag == "1" for flag in _text(content["drafted"])),
            logprobs=None if logprobs is None else tuple(map(_logprob_from_list, logprobs)),
            generation=None if generation is None else _generation_from_dict(generation),
            pieces=tuple(content["pieces"]),
            trees=tuple(map(_tree_from_list, content.get("trees", ()))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"An event cannot be read: {type(error).__name__}: {error}.") from None


def _tree_from_list(content: Any) -> ShownTree:
    at, *rest = content
    tokens, parents, path = (tuple(map(int, one)) for one in rest)
    return ShownTree(int(at), tokens, parents, path)


class History:
    """What the events of one request said so far, to complete the last one with."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._drafted: list[bool] = []
        self._logprobs: list[TokenLogprob] | None = None

    def complete(self, event: TokenEvent) -> TokenEvent:
        """Remember an event; the last one gets its generation's tokens back."""
        self._token_ids += event.token_ids
        self._drafted += event.drafted
        if event.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += event.logprobs
        if event.generation is None:
            return event
        generation = dataclasses.replace(
            event.generation,
            token_ids=self._token_ids,
            drafted=self._drafted,
            logprobs=self._logprobs,
        )
        return dataclasses.replace(event, generation=generation)


def _generation_to_dict(generation: Generation) -> Message:
    stats = {
        field.name: getattr(generation.stats, field.name)
        for field in dataclasses.fields(GenerationStats)
    }
    stats["histogram"] = [[length, count] for length, count in generation.stats.histogram.items()]
    prompt = generation.prompt_logprobs
    return {
        "text": generation.text,
        "finish_reason": generation.finish_reason.value,
        "stats": _floats_to_json(stats),
        "error": generation.error,
        "prompt_logprobs": None
        if prompt is None
        else [None if one is None else _logprob_to_list(one) for one in prompt],
    }


def _generation_from_dict(content: Mapping[str, Any]) -> Generation:
    stats = _floats_from_json(content["stats"])
    stats["histogram"] = {int(length): int(count) for length, count in stats["histogram"]}
    prompt = content["prompt_logprobs"]
    return Generation(
        text=_text(content["text"]),
        token_ids=[],
        finish_reason=FinishReason(content["finish_reason"]),
        stats=GenerationStats(**stats),
        error=content["error"],
        prompt_logprobs=None
        if prompt is None
        else [None if one is None else _logprob_from_list(one) for one in prompt],
    )


def step_to_dict(stats: StepStats) -> Message:
    """A step's statistics in plain JSON."""
    content = {field.name: getattr(stats, field.name) for field in dataclasses.fields(StepStats)}
    content |= {name: list(content[name]) for name in _LISTS}
    return _floats_to_json(content)


def step_from_dict(content: Mapping[str, Any]) -> StepStats:
    """The statistics again."""
    try:
        values = _floats_from_json(content)
        return StepStats(**{**values, **{name: tuple(values[name]) for name in _LISTS}})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"A step cannot be read: {type(error).__name__}: {error}.") from None


# -- numbers: JSON has no infinity, and no NaN -----------------------------------------------------


def _number_to_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _number_from_json(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _logprob_to_list(one: TokenLogprob) -> list[Any]:
    return [_number_to_json(one.logprob), [[t, _number_to_json(value)] for t, value in one.top]]


def _logprob_from_list(content: Any) -> TokenLogprob:
    logprob, top = content
    return TokenLogprob(
        _number_from_json(logprob),
        tuple((int(token), _number_from_json(value)) for token, value in top),
    )


def _floats_to_json(content: Mapping[str, Any]) -> Message:
    return {k: _number_to_json(v) if isinstance(v, float) else v for k, v in content.items()}


def _floats_from_json(content: Mapping[str, Any]) -> Message:
    return {k: float(v) if isinstance(v, str) else v for k, v in content.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
