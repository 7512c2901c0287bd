"""The sampling settings that a checkpoint recommends in its generation_config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flashdraft.core import SamplingParams
from flashdraft.errors import RequestError
from flashdraft.models.config.recommended import SAMPLING_KEYS

MIN_ANSWER = 1024  # tokens of an answer that nobody limits, at least
CONTEXT_SHARE = 8  # and such a part of the context

logger = logging.getLogger(__name__)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that a request gets where it says nothing.

    `do_sample: false` is greedy. A value that SamplingParams refuses is left out, with a warning.
    """
    defaults: dict[str, Any] = {}
    for name in SAMPLING_KEYS:
        value = generation_config.get(name)
        if value is None:
            continue
        if name == "top_k":
            value = _count(value)
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            logger.warning("generation_config is passed over in one point: %s", error)
            continue
        defaults[name] = value
    if generation_config.get("do_sample") is False:
        kept = {"repetition_penalty"} & defaults.keys()  # the others have no meaning without draws
        return {"temperature": 0.0, **{name: defaults[name] for name in kept}}
    return defaults


def _count(value: Any) -> Any:
    """top_k as an integer; -1 is another way to say off."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return 0 if value == -1 and not isinstance(value, bool) else value


def answer_limit(generation_config: Mapping[str, Any], max_context: int) -> int:
    """The longest answer, in tokens, where nobody says how long it may be.

    The model's own limit, else an eighth of its context: a small model that never comes to an end
    is stopped soon, a large one has room to think.
    """
    own = generation_config.get("max_new_tokens")
    if isinstance(own, int) and not isinstance(own, bool) and own >= 1:
        return own
    return max(MIN_ANSWER, max_context // CONTEXT_SHARE)
