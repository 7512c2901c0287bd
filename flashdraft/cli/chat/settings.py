"""What `/set` shows and changes: the settings of sampling that the flags have too.

A value is read as its flag reads it and checked by SamplingParams itself; "default" brings back
what the chat began with.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from flashdraft.cli.arguments import SAMPLING_FLAGS
from flashdraft.core import SamplingParams
from flashdraft.errors import RequestError, did_you_mean, quoted

NAMES = (*SAMPLING_FLAGS, "stop", "ignore_eos")
DEFAULT = "default"
MAX_STOPS = 16  # as at the server
MAX_SHOWN = 100  # characters of a value in a message
_ELSEWHERE = {  # what follows /set in Ollama's chat
    "parameter": "Leave the word out: /set temperature 0.8.",
    "system": "/system TEXT sets the system prompt.",
}
_SWITCH = {"on": True, "true": True, "off": False, "false": False}


def shown_name(name: str) -> str:
    """A setting as its flag has it."""
    return name.replace("_", "-")


def describe_settings(params: SamplingParams) -> str:
    """Every setting and its value, a line each."""
    width = max(map(len, NAMES))
    lines = [f"{shown_name(n):<{width}}  {_shown(params, n)}" for n in NAMES]
    return "\n".join([*lines, f"/set NAME VALUE changes one, /set NAME {DEFAULT} takes it back."])


def describe_setting(params: SamplingParams, argument: str) -> str:
    """What the setting that `/set NAME VALUE` names is."""
    name = argument.partition(" ")[0].replace("-", "_").lower()
    return f"{shown_name(name)} is {_shown(params, name)}."


def change_setting(
    params: SamplingParams, argument: str, initial: SamplingParams
) -> SamplingParams:
    """The settings after `/set NAME VALUE`."""
    word, _, text = argument.partition(" ")
    name, text = word.replace("-", "_").lower(), text.strip()
    if name not in NAMES:
        known = [shown_name(one) for one in NAMES]
        instead = _ELSEWHERE.get(name, "/set lists them.")
        raise RequestError(
            f"There is no setting {quoted(word)}.{did_you_mean(word, known)} {instead}"
        )
    if not text:
        raise RequestError(
            f"/set {shown_name(name)} needs a value; it is {_shown(params, name)} now."
        )
    if text == DEFAULT:
        return take_settings(params, {name: getattr(initial, name)})
    return take_settings(params, {name: _read(name, text)})


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """The settings as a file keeps them."""
    values = {name: getattr(params, name) for name in NAMES}
    return {**values, "stop": list(params.stop)}


def take_settings(params: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """The settings with others in their place, checked."""
    for name in given:
        if name not in NAMES:
            known = ", ".join(map(repr, NAMES))  # quoted: a file has them so, no flags
            raise RequestError(f"There is no setting {quoted(name)}; known are {known}.")
        value = given[name]
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise RequestError(f"{name} has {len(value)} texts; at most {MAX_STOPS} are taken.")
        if (
            isinstance(value, str | list | dict)
            and len(quoted(value)) > MAX_SHOWN
            and not (name == "stop")
        ):
            raise RequestError(f"{name} is {quoted(value)}; that is no value of it.")
    try:
        return dataclasses.replace(params, **given)
    except RequestError as error:
        words = str(error)
        for name in NAMES:  # as it is typed here, and not as Python has it
            if words.startswith(f"{name} "):
                words = f"/set {shown_name(name)}{words.removeprefix(name)}"
        raise RequestError(words) from None


def _read(name: str, text: str) -> Any:
    """A value from what was typed; what is no value of the kind goes on, to be refused in words."""
    if name == "ignore_eos":
        return _SWITCH.get(text.lower(), text)
    if name == "stop":
        return _stops(text)
    if name == "max_tokens" and text.lower() == "none":
        return None
    try:
        return SAMPLING_FLAGS[name].type(text)
    except ValueError:
        return text


def _stops(text: str) -> Any:
    """A text to stop at, or several as a JSON list; an escape such as \\n needs the list."""
    if text.startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return [text]
    return [] if text == "off" else [text]


def _shown(params: SamplingParams, name: str) -> str:
    value = getattr(params, name)
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "a fresh one for every answer" if name == "seed" else "to the end of the context"
    if isinstance(value, list | tuple):
        return json.dumps(list(value), ensure_ascii=False) if value else "off"
    return str(value)
