"""What a request must satisfy before the engine takes it; a message says what, and the remedy."""

from __future__ import annotations

from flashdraft.core import GrammarSpec, Request
from flashdraft.engine.config import MAX_VERIFY
from flashdraft.engine.sampling.process import validate_for_vocab
from flashdraft.errors import ContextLengthError, RequestError
from flashdraft.media.sizes import MOST_TOKENS
from flashdraft.models.config.vision import VisionConfig

MAX_PROMPT_LOGPROBS = 20
MAX_PICTURES = 256  # of a request: pictures, pages, and frames of films


def validate_request(request: Request, vocab_size: int, max_context: int) -> None:
    """Raise RequestError unless the request can be served by this target and this cache."""
    _validate_prompt(request, vocab_size, max_context)
    verify = request.verify
    if verify is not None and (type(verify) is not int or not 0 <= verify <= MAX_VERIFY):
        raise RequestError(
            f"verify is {verify!r}; it must be None ('auto') or an integer from 0 to {MAX_VERIFY}."
        )
    count = request.prompt_logprobs
    if count is not None and (type(count) is not int or not 0 <= count <= MAX_PROMPT_LOGPROBS):
        raise RequestError(
            f"prompt_logprobs is {count!r}; it must be None or an integer between 0 and "
            f"{MAX_PROMPT_LOGPROBS}."
        )
    if request.grammar is not None and not isinstance(request.grammar, GrammarSpec):
        raise RequestError(
            f"grammar is {request.grammar!r:.200}; it must be None or a GrammarSpec, as "
            "GrammarSpec.json(schema) makes one."
        )
    if request.params.n != 1:
        raise RequestError(f"n is {request.params.n}; a request of the engine has one answer.")
    validate_for_vocab(request.params, vocab_size)


def _validate_prompt(request: Request, vocab_size: int, max_context: int) -> None:
    if not request.prompt_ids:
        raise RequestError("The prompt is empty; it must have at least one token.")
    for token in request.prompt_ids:
        if type(token) is not int:  # a bool is no token
            raise RequestError(
                f"The prompt holds {token!r} ({type(token).__name__}); token ids are plain "
                "integers."
            )
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"Token id {token!r} in the prompt is outside the vocabulary (0 to "
                f"{vocab_size - 1}); was it made by another model's tokenizer?"
            )
    if len(request.prompt_ids) >= max_context:
        raise ContextLengthError(
            f"The prompt has {len(request.prompt_ids)} tokens; the context holds {max_context} "
            "with at least one for the answer. Shorten the prompt or raise max_context."
        )


def validate_pictures(request: Request, vision: VisionConfig | None, has_tower: bool) -> None:
    """Raise RequestError unless a valid request's pictures are where its prompt says."""
    pictures, prompt, end = request.pictures, request.prompt_ids, 0
    if vision is None:
        raise RequestError(
            "The request has a picture, and this model takes none; send text alone, or load a "
            "model that takes pictures."
        )
    if not has_tower:
        raise RequestError(
            "The request has a picture; this model could take it, but was loaded without its "
            "vision tower. Send text alone, or load a checkpoint that holds the tower."
        )
    if request.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs does not go with pictures: what stands for them are no tokens of a "
            "text. Leave one of the two out."
        )
    if len(pictures) > MAX_PICTURES:
        raise RequestError(
            f"The request has {len(pictures)} pictures; it may have {MAX_PICTURES}. Leave some out."
        )
    for number, placed in enumerate(pictures, 1):
        name, count = f"Picture {number}", placed.picture.num_tokens
        if not 0 < count <= MOST_TOKENS:
            raise RequestError(
                f"{name} takes {count} tokens; it must be between 1 and {MOST_TOKENS}, for one "
                "step has all of it. Make it smaller (max_soft_tokens)."
            )
        if not end <= placed.start <= len(prompt) - count:
            raise RequestError(
                f"{name} is at tokens {placed.start} to {placed.end} of the prompt; pictures must "
                f"follow one another without overlap, from token {end} on here, and end within "
                f"its {len(prompt)} tokens."
            )
        end = placed.end
        kinds = {vision.tokens.picture, vision.tokens.video} & {prompt[placed.start]}
        if kinds != set(prompt[placed.start : end]):
            film = "" if vision.tokens.video is None else f", or for a film {vision.tokens.video}"
            raise RequestError(
                f"{name} is at tokens {placed.start} to {end} of the prompt; all of them must be "
                f"the placeholder {vision.tokens.picture}{film}."
            )
