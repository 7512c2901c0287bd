"""Our renderings beside those of transformers, and why some differ.

transformers removes fields that are null and gives the rest to a template as it comes: what the
template cannot read is lost, fails or is printed in Python's spelling. There we give it what it can
read. A reason is a change of the messages, and holds only where the changed messages, with their
nulls, are rendered to our text by the environment of transformers.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import transformers
from tokenizers import models
from transformers.utils.chat_template_utils import render_jinja_template

from flashdraft.chat.prompted_tools import ignores_tools, prompt_tools
from flashdraft.chat.templates import render_chat
from flashdraft.errors import RequestError
from flashdraft.models.tokenizer import Tokenizer
from tests.unit.chat.renderings.conversations import CONVERSATIONS, Conversation, Messages

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(Path(__file__).parent.glob("*.jinja"))
}
KEPT_NULL = "kept null"  # holds for every template
PROMPTED = "prompted tools"  # holds for every template that has no word for tools
_FIRST_PLACEHOLDER = 770_001


class Reason(NamedTuple):
    """Why we differ from transformers: the messages that it would need to say the same."""

    why: str
    change: Callable[[Messages], Messages | None]  # None: we refuse them


def _each(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Messages], Messages]:
    return lambda messages: [change(dict(message)) for message in messages]


def _join_parts(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message.get("content"), list):
        message["content"] = "\n".join(part["text"] for part in message["content"])
    return message


def _join_parts_of(*roles: str) -> Callable[[Messages], Messages]:
    return _each(lambda message: _join_parts(message) if message["role"] in roles else message)


def _make_parts(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message.get("content"), str):
        message["content"] = [{"type": "text", "text": message["content"]}]
    return message


def _fill_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if message.get("content", "") is None else message


def _fill_absent(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": None, **message}


def _with_arguments(change: Callable[[Any], Any]) -> Callable[[Messages], Messages]:
    def changed(message: dict[str, Any]) -> dict[str, Any]:
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": change(call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ]
        return message

    return _each(changed)


def _read(arguments: Any) -> Any:
    """An object whose odd numbers are placeholders: transformers would write them anew."""
    if not isinstance(arguments, str):
        return arguments
    numbers = placeholders(arguments)
    names = {text: number for number, text in numbers.items()}
    return json.loads(
        arguments or "{}",
        parse_float=lambda text: names.get(text, float(text)),
        parse_int=lambda text: names.get(text, int(text)),
    )


def placeholders(text: str) -> dict[int, str]:
    """The numbers of a JSON text that Python writes otherwise, by integers in their places."""
    found: list[str] = []
    with contextlib.suppress(ValueError):
        json.loads(text or "{}", parse_float=found.append, parse_int=found.append)
    odd = [one for one in dict.fromkeys(found) if json.dumps(json.loads(one)) != one]
    return {_FIRST_PLACEHOLDER + place: one for place, one in enumerate(odd)}


def _write(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _no_developers(message: dict[str, Any]) -> dict[str, Any]:
    return message if message["role"] != "developer" else {**message, "role": "system"}


def _name_parts(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message.get("content"), list):
        kinds = {"input_text": "text"}
        message["content"] = [
            {**part, "type": kinds.get(part["type"], part["type"])} for part in message["content"]
        ]
    return message


def _name_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    thoughts = message.get("reasoning_content")
    return {"reasoning": thoughts, **message} if thoughts else message


def _fold(messages: Messages) -> Messages:
    folded: Messages = []
    for message in messages:
        last = folded[-1] if folded else {}
        if message["role"] == "tool":
            names = {call["id"]: call["function"]["name"] for call in last["tool_calls"]}
            given = {"name": names[message["tool_call_id"]], "response": message["content"]}
            folded[-1] = {**last, "tool_responses": [*last.get("tool_responses", []), given]}
        elif (
            message["role"] == "assistant"
            and "tool_responses" in last
            and "tool_calls" not in (message)
        ):
            folded[-1] = {**last, "content": message["content"]}
        else:
            folded.append(message)
    return folded


REASONS = {
    PROMPTED: Reason(
        "The template has no word for tools, and drops them, their calls and what came of them; "
        "they are told as text.",
        lambda messages: messages,  # the tools are changed too: see compare
    ),
    "part names": Reason(
        "The Responses API's input_text and output_text are text; templates know that name alone.",
        _each(_name_parts),
    ),
    "developer": Reason(
        "A template that has never heard of developers drops their message or fails; they are the "
        "system.",
        _each(_no_developers),
    ),
    "parts": Reason(
        "The template loses parts, fails on them or prints the list in Python's or JSON's "
        "spelling; it gets one text, a line for each part.",
        _each(_join_parts),
    ),
    "parts of the system": Reason(
        "As for parts; the template reads those of other roles.",
        _join_parts_of("system", "developer"),
    ),
    "parts of answers and the system": Reason(
        "As for parts; the template reads those of the user.",
        _join_parts_of("system", "assistant", "tool"),
    ),
    "parts of results": Reason(
        "As for parts; the template reads those of other roles.", _join_parts_of("tool")
    ),
    "absent": Reason(
        "The template fails on an absent content; it gets one that is null.", _each(_fill_absent)
    ),
    "null": Reason(
        "The template fails on a content that is null, or prints the word None; it gets the empty "
        "text.",
        _each(_fill_content),
    ),
    KEPT_NULL: Reason(
        "transformers removes a content that is null, as if it had never been sent; a template "
        "that tests for none then drops the call or fails. It gets the null that it can read.",
        lambda messages: messages,
    ),
    "text": Reason(
        "The template reads parts alone and drops a text; it gets the text as a part.",
        _each(_make_parts),
    ),
    "text of arguments": Reason(
        "The template wants the arguments as an object and fails on JSON text, drops it, or quotes "
        "it as a string; it gets the object, whose numbers are printed as they were written.",
        _with_arguments(_read),
    ),
    "object of arguments": Reason(
        "The template wants the arguments as JSON text and fails on an object or prints it in "
        "Python's spelling; it gets the JSON text.",
        _with_arguments(_write),
    ),
    "thoughts": Reason(
        "transformers fills reasoning_content and thinking from any of three names; we fill "
        "reasoning too, which newer templates read.",
        _each(_name_thoughts),
    ),
    "results": Reason(
        "The template reads results from the message that called; messages with the role tool are "
        "put there.",
        _fold,
    ),
    "refused": Reason(
        "We refuse what cannot be meant or read: a message that says nothing, media, and arguments "
        "that are not a JSON object.",
        lambda messages: None,
    ),
}
REFUSED = {"nobody speaks", "media", "broken arguments"}


class Outcome(NamedTuple):
    """One template with one conversation: the two texts, None where it was refused."""

    template: str
    conversation: str
    ours: str | None
    theirs: str | None
    reasons: tuple[str, ...]  # that together explain a difference; none where there is none


@functools.lru_cache(maxsize=4)  # the processes of a tokenizer end with it
def _tokenizer(template: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    return Tokenizer(backend, special_tokens=TOKENS, chat_template=template)


def our_rendering(template: str, given: Conversation) -> str | None:
    try:
        return render_chat(
            _tokenizer(template),
            given.messages,
            tools=given.tools,
            add_generation_prompt=given.add_generation_prompt,
            extra=given.switches,
        )
    except RequestError:
        return None


_REFERENCE = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(models.BPE()), **TOKENS
)


def their_rendering(template: str, given: Conversation) -> str | None:
    # Releases before 5.23 leave the nulls: they are removed here for every release.
    messages = [
        {name: value for name, value in message.items() if value is not None}
        for message in given.messages
    ]
    try:
        return _REFERENCE.apply_chat_template(
            messages,
            tools=given.tools,
            tokenize=False,
            chat_template=template,
            add_generation_prompt=given.add_generation_prompt,
            **given.switches,
        )
    except Exception:  # a template fails in as many ways as a program
        return None


def rendering_with_nulls(template: str, given: Conversation) -> str | None:
    """What transformers' environment makes of the messages as they are."""
    try:
        rendered, _ = render_jinja_template(
            [given.messages],
            tools=given.tools,
            chat_template=template,
            add_generation_prompt=given.add_generation_prompt,
            **TOKENS,
            **given.switches,
        )
    except Exception:
        return None
    return rendered[0]


def compare(template: str, text: str, conversation: str, allowed: tuple[str, ...]) -> Outcome:
    """Both renderings; a difference has its reasons from `allowed`, in this order, or none."""
    given = CONVERSATIONS[conversation]
    ours, theirs = our_rendering(text, given), their_rendering(text, given)
    if ours == theirs:
        return Outcome(template, conversation, ours, theirs, ())
    reasons = []
    if conversation not in REFUSED and ignores_tools(text, given.tools):
        told = prompt_tools(given.messages, given.tools, text)
        if told != given.messages:
            reasons.append(PROMPTED)
            given = given._replace(messages=told, tools=None)
    messages: Messages | None = given.messages
    for name in ("refused",) if conversation in REFUSED else allowed:
        changed = None if messages is None else REASONS[name].change(messages)
        if changed != messages:
            reasons.append(name)
            messages = changed
    wanted = None
    if messages is not None:
        if any(None in message.values() for message in messages):
            reasons.append(KEPT_NULL)
        wanted = rendering_with_nulls(text, given._replace(messages=messages))
        for number, written in _all_placeholders(given).items():
            wanted = None if wanted is None else wanted.replace(str(number), written)
    return Outcome(template, conversation, ours, theirs, tuple(reasons) if wanted == ours else ())


def _all_placeholders(given: Conversation) -> dict[int, str]:
    texts = (
        call["function"]["arguments"]
        for message in given.messages
        for call in message.get("tool_calls") or ()
    )
    return {
        number: written
        for text in texts
        if isinstance(text, str)
        for number, written in placeholders(text).items()
    }


def outcomes() -> Iterator[Outcome]:
    """Every template with every conversation."""
    for template, text in TEMPLATES.items():
        for conversation in CONVERSATIONS:
            yield compare(template, text, conversation, EXPECTED.get(template, ()))


def summary(found: list[Outcome]) -> dict[str, Any]:
    """Counts for a report."""
    different = [one for one in found if one.ours != one.theirs]
    by_reason = {name: [one for one in different if name in one.reasons] for name in REASONS}
    return {
        "templates": len({one.template for one in found}),
        "conversations": len({one.conversation for one in found}),
        "compared": len(found),
        "equal_texts": sum(one.ours is not None and one.ours == one.theirs for one in found),
        "refused_by_both": sum(one.ours is None and one.theirs is None for one in found),
        "different": len(different),
        "different_where_transformers_fails": sum(one.theirs is None for one in different),
        "unexplained": sum(not one.reasons for one in different),
        "by_reason": {
            name: {
                "why": REASONS[name].why,
                "renderings": len(held),
                "where_transformers_fails": sum(one.theirs is None for one in held),
            }
            for name, held in by_reason.items()
        },
    }


# Which reasons hold for a template, in the order in which its messages are changed.
EXPECTED: dict[str, tuple[str, ...]] = {
    "alternates": ("parts",),
    "arguments_as_json": ("developer", "parts", "text of arguments"),
    "arguments_in_a_form_of_their_own": ("developer", "text of arguments"),
    "arguments_one_by_one": (
        "part names",
        "developer",
        "parts of results",
        "null",
        "text of arguments",
    ),
    "arguments_printed": ("developer", "parts", "object of arguments"),
    "arguments_text_or_json": ("developer", "parts"),
    "call_as_json": ("developer", "parts", "null", "text of arguments"),
    "call_blocks": ("developer", "parts"),
    "chatml": ("developer", "parts", "null"),
    "dated": ("developer", "parts", "null"),
    "developer_and_channels": ("parts", "null", "text of arguments"),
    "groups_results_by_neighbours": ("developer", "parts"),
    "joins_parts_by_a_filter": ("part names", "developer"),
    "loop_controls": ("developer", "parts"),
    "marks_generation": ("developer", "parts", "null"),
    "methods_and_filters": ("developer", "parts", "null"),
    "reads_parts": ("developer", "text of arguments"),
    "reads_parts_alone": ("part names", "developer", "null", "text"),
    "reads_parts_of_some_roles": ("part names", "parts of the system"),
    "reads_the_first_part": ("developer", "parts of answers and the system", "null"),
    "results_in_the_callers_message": ("developer", "parts", "text of arguments", "results"),
    "spaces": ("parts",),
    "system_in_the_first_question": ("part names", "developer", "parts of the system"),
    "tests_for_absence": ("developer", "parts"),
    "tests_for_none": ("developer", "parts", "absent", "object of arguments"),
    "thoughts_by_another_name": ("developer", "parts", "thoughts"),
    "thoughts_of_the_last_turn": ("developer", "parts"),
    "tools_by_macro": ("developer", "parts", "null"),
    "tools_indented": ("developer", "parts", "absent"),
    "trims_content": ("developer", "parts"),
}
