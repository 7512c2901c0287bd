"""Why the Hub does not deliver, in words, with the page of a licence and the token's variable.

Nothing of what the Hub says reaches a terminal unescaped, and a token is named by where it stands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

_OTHERWISE = "or name a folder or a .gguf file"


class _Refusal(NamedTuple):
    """What the Hub answered, if it answered at all."""

    error: BaseException
    status: int | None = None
    headers: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of(cls, error: BaseException) -> _Refusal:
        """From the error, or from the one that the client had before it looked into its cache."""
        cause: BaseException | None = error
        while cause is not None:
            response: Any = getattr(cause, "response", None)
            if response is not None:
                return cls(cause, response.status_code, response.headers)
            cause = cause.__cause__ or cause.__context__
        return cls(error)

    @property
    def wait(self) -> str:
        """When to try again, as far as the Hub says."""
        limits = re.search(r";\s*t=(\d{1,9})\b", self.headers.get("RateLimit") or "")
        seconds = limits[1] if limits else self.headers.get("Retry-After") or ""
        return f"in {int(seconds)} s" if re.fullmatch(r"[0-9]{1,9}", seconds) else "in some minutes"


def explain(repository: str, file: str, given: Exception) -> str:
    """Why a repository, or a file of it, cannot be had."""
    refusal, token = _Refusal.of(given), _token_name()
    error = refusal.error
    words = _explain_refusal(repository, refusal, token)
    if words is not None and not isinstance(error, hub_errors.DisabledRepoError):
        return words
    if isinstance(error, hub_errors.RepositoryNotFoundError) or refusal.status == 401:
        remedy = "set HF_TOKEN" if token is None else f"use a token that may read it in {token}"
        return (
            f"There is no model {repository!r} on the Hugging Face Hub, or it is private: check "
            f"the name, or {remedy}."
        )
    if is_unreachable(error):
        return (
            f"{repository} is not on this machine and the Hugging Face Hub cannot be reached: "
            f"check the network (HF_HUB_OFFLINE and HF_ENDPOINT too), {_OTHERWISE}."
        )
    if isinstance(error, hub_errors.EntryNotFoundError):
        return f"{repository} on the Hugging Face Hub has no file {file!r}."
    return (
        f"The Hugging Face Hub could not deliver {repository}: {type(error).__name__}: "
        f"{' '.join(str(error).split())}. Try again, {_OTHERWISE}."
    )


def explain_briefly(given: Exception) -> str:
    """What the Hub did instead of answering, as the end of a sentence about it."""
    refusal = _Refusal.of(given)
    if refusal.status is not None:
        return f"answered with status {refusal.status}"
    if is_unreachable(refusal.error):
        return "cannot be reached"
    text = " ".join(str(refusal.error).split()).rstrip(".")
    return f"could not be asked ({type(refusal.error).__name__}: {text[:200]})"


def is_unreachable(error: BaseException) -> bool:
    """Whether nobody answered: the network failed, or is switched off."""
    if isinstance(error, hub_errors.LocalEntryNotFoundError | ConnectionError | TimeoutError):
        return True
    is_answer = isinstance(error, hub_errors.HfHubHTTPError)
    return not is_answer and type(error).__module__.partition(".")[0].startswith("httpx")


def licence_page(repository: str) -> str:
    """Where a repository's licence is read and accepted."""
    return f"https://huggingface.co/{repository}"


def _explain_refusal(repository: str, refusal: _Refusal, token: str | None) -> str | None:
    """What a status means, given what was sent with the request; None where its text says more."""
    page = licence_page(repository)
    status = refusal.status
    if status == 401 and token is not None:
        return (
            f"The Hugging Face Hub refused the token in {token}: it is mistyped, expired or "
            "revoked. Make another at https://huggingface.co/settings/tokens, or remove it if "
            f"{repository} is public."
        )
    if status == 403 and token is not None:
        return (
            f"The account of the token in {token} may not read {repository}: accept its licence "
            f"at {page} with that account (some owners then have to agree), or let the token "
            "itself read gated repositories."
        )
    if status == 403 or isinstance(refusal.error, hub_errors.GatedRepoError):
        return (
            f"{repository} is gated: accept its licence at {page} and set HF_TOKEN to a token of "
            "that account."
        )
    if status == 429:
        more = "" if token is not None else ", set HF_TOKEN (accounts may ask more often)"
        return (
            f"{repository} cannot be fetched: the Hugging Face Hub has been asked too often from "
            f"here (status 429). Try again {refusal.wait}{more}, {_OTHERWISE}."
        )
    if status is not None and status >= 500:
        return (
            f"{repository} cannot be fetched: the Hugging Face Hub is out of order or overloaded "
            f"(status {status}). Try again {refusal.wait}, {_OTHERWISE}."
        )
    return None


def _token_name() -> str | None:
    """Where the token that goes with a request comes from; None where none does."""
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN or huggingface_hub.get_token() is None:
        return None
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    stored = "the file that `hf auth login` wrote"
    return next((name for name in names if os.environ.get(name)), stored)
