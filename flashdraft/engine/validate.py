"""What a request must satisfy before the engine takes it; a message says what, and the remedy."""

from __future__ import annotations

from flashdraft.core import GrammarSpec, Request
from flashdraft.engine.config import MAX_VERIFY
from flashdraft.engine.sampling.process import validate_for_vocab
from flashdraft.errors import ContextLengthError, RequestError

MAX_PROMPT_LOGPROBS = 20


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
