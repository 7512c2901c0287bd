"""Chat messages to prompt text or token ids, by the model's own Jinja template.

It knows no family: what a turn looks like is the template's business. Where the template runs, and
within which limits, is the tokenizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

from flashdraft.chat.messages import Message, check_messages, check_tools
from flashdraft.chat.pictures import (
    NO_FILMS,
    NO_SIGHT,
    PicturePrompt,
    check_places,
    has_media,
    place_pictures,
    take_pictures,
    with_pages,
    write_films,
)
from flashdraft.chat.prompted_tools import ignores_tools, prompt_tools
from flashdraft.chat.sight import Sight
from flashdraft.errors import RequestError, quoted
from flashdraft.models.tokenizer import Tokenizer, is_long
from flashdraft.text.protocol import MAX_CHARS

_Given = TypeVar("_Given")
_Opened = TypeVar("_Opened")
_OWN_NAMES = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt; `_encode` has the defaults.

    `extra` holds template switches such as enable_thinking. `allowed` lists the switches that may
    be given, None for any; none can replace what the prompt is made of. `continues_last` leaves the
    last message open: the answer goes on where its text ends. For the rest see
    `Tokenizer.encode_rendered`.
    """

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    extra: Mapping[str, Any] | None
    allowed: Collection[str] | None
    max_chars: int
    waits: bool | None
    continues_last: bool


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    extra: Mapping[str, Any] | None = None,
    allowed: Collection[str] | None = None,
) -> str:
    """The prompt text of a conversation without pictures.

    The text carries its own special tokens: encode it without adding any.
    """
    checked = check_messages(messages)
    if has_media(checked):
        raise RequestError("Only text is taken here; leave the pictures out of the conversation.")
    return tokenizer.render(
        _variables(tokenizer, checked, tools, add_generation_prompt, extra, allowed)
    )


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], **options: Unpack[ChatOptions]
) -> list[int]:
    """The token ids of what `render_chat` gives; a picture is the model's one placeholder.

    `place_pictures` does the rest for those who open pictures themselves.
    """
    return _encode(tokenizer, take_pictures(check_messages(messages)).messages, **options)


def encode_with_pictures(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    sight: Sight | None,
    *,
    may_name_files: bool = False,
    **options: Unpack[ChatOptions],
) -> PicturePrompt:
    """The prompt of a conversation that may have pictures, as `check_messages` takes them.

    They are opened last, once the rest is known to be right; but PDFs first, for each of their
    pages has a place of its own. A model without `sight` is shown none.
    """
    checked = check_messages(messages, may_name_files=may_name_files)
    if sight is None:
        if has_media(checked):
            raise RequestError(NO_SIGHT)
        return PicturePrompt(_encode(tokenizer, checked, **options))
    bare, given, given_films = take_pictures(with_pages(checked, sight.pages))
    if given_films and sight.tokens.video is None:
        raise RequestError(NO_FILMS)
    ids = _encode(tokenizer, bare, **options)
    check_places(ids, len(given), sight.tokens, len(given_films))
    pictures = _opened(sight.open, given, "Picture")
    films = _opened(sight.film, given_films, "Film")
    written = write_films(films, tokenizer.encode_batch)
    return place_pictures(ids, pictures, sight.tokens, written)


def _opened(open_one: Callable[[_Given], _Opened], given: list[_Given], name: str) -> list[_Opened]:
    """All of them; a complaint says which one it is of."""
    opened = list[_Opened]()
    for number, one in enumerate(given, 1):
        try:
            opened.append(open_one(one))
        except RequestError as error:
            if len(given) == 1:
                raise
            raise RequestError(f"{name} {number} of {len(given)}: {error}") from None
    return opened


def _encode(
    tokenizer: Tokenizer,
    checked: list[dict[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    extra: Mapping[str, Any] | None = None,
    allowed: Collection[str] | None = None,
    max_chars: int = MAX_CHARS,
    waits: bool | None = None,
    continues_last: bool = False,
) -> list[int]:
    begins_turn = add_generation_prompt and not continues_last
    variables = _variables(tokenizer, checked, tools, begins_turn, extra, allowed)
    return tokenizer.encode_rendered(variables, max_chars, waits, continues_last)


def _variables(
    tokenizer: Tokenizer,
    checked: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    extra: Mapping[str, Any] | None,
    allowed: Collection[str] | None,
) -> dict[str, Any]:
    """What a template is given."""
    if tokenizer.chat_template is None:
        raise RequestError("The model has no chat template; use generate with a plain prompt.")
    offered = check_tools(tools)
    if ignores_tools(tokenizer.chat_template, offered):
        is_long([checked, offered])  # refuses what is nested too deeply to be written
        checked, offered = prompt_tools(checked, offered, tokenizer.chat_template), None
    return {
        "documents": None,
        **_check_extra(extra or {}, allowed),
        **tokenizer.special_tokens,
        "messages": checked,
        "tools": offered,
        "add_generation_prompt": add_generation_prompt,
    }


def _check_extra(extra: Mapping[str, Any], allowed: Collection[str] | None) -> dict[str, Any]:
    for name in extra:
        if not isinstance(name, str) or name in _OWN_NAMES or name.endswith("_token"):
            raise RequestError(
                f"The template switch {quoted(name)} is reserved: it is made from the request and "
                "the model, and cannot be given."
            )
        if allowed is not None and name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise RequestError(
                f"The template switch {quoted(name)} is not allowed; allowed are: {known}."
            )
    return dict(extra)
