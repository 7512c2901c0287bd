"""Every error a user can meet, in one tree. Messages say what was wrong, the limit, and the remedy.

FlashdraftError
├── RequestError            the request itself is wrong (HTTP 400)
│   ├── ContextLengthError  prompt and answer do not fit the context (HTTP 400)
│   └── UnknownWordError    Python has no such keyword; a TypeError too
├── CapacityError           the machine has no room: memory, pages, time (HTTP 503)
│   └── QueueFullError      too many requests wait already (HTTP 429)
├── EngineLostError         the engine is not there to answer (HTTP 503)
├── ModelNotFoundError      no such model, folder or file, or no permission to fetch it
├── UnsupportedModelError   the model is known but uses a feature flashdraft does not implement
├── CheckpointError         the files are broken, incomplete or do not fit each other
└── TrainingError           training data or a training run cannot be used as it is
"""

import difflib
import reprlib
from collections.abc import Iterable

_OTHER_NAMES = {  # by which other programs have it
    **{"gpu": "cuda", "fp32": "float32", "f32": "float32", "half": "float16"},
    **dict.fromkeys(("download", "fetch", "install"), "pull"),
    **dict.fromkeys(("delete", "remove", "uninstall"), "rm"),
    **{"ls": "list", "m": "model"},
    **{"ask": "generate", "complete": "generate", "finetune": "train", "quit": "exit"},
    **{"ps": "list", "show": "models"},
    # flags of vLLM's, llama.cpp's and ollama's, without their dashes
    **dict.fromkeys(("hf", "hf-repo", "model-path"), "model"),
    **dict.fromkeys(("c", "ctx-size", "max-model-len", "num-ctx"), "max-context"),
    **dict.fromkeys(("n", "n-predict", "num-predict", "max-new-tokens"), "max-tokens"),
    **dict.fromkeys(("max-num-seqs", "np", "parallel"), "max-batch"),
    **dict.fromkeys(("md", "model-draft", "draft-model", "speculative-config"), "draft"),
    **dict.fromkeys(("ngl", "n-gpu-layers", "gpu-layers", "main-gpu"), "device"),
    **dict.fromkeys(("gpu-memory-utilization", "kv-cache-memory-bytes"), "cache-gb"),
    **dict.fromkeys(("kv-cache-dtype", "cache-type-k", "cache-type-v"), "kv-dtype"),
    **{
        "repeat-penalty": "repetition-penalty",
        "quantization": "quantize",
        "alias": "served-model-name",
    },
    **{"sys": "system", "system-prompt": "system", "allowed-origins": "allow-origin"},
}
_MAX_MEANT = 3
_SHOWN = 160  # characters of others' text in a message


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message: what was meant, of known words that begin or end so, or the closest."""
    names = {name.lower(): name for name in known}
    plain = word.lower()
    if _OTHER_NAMES.get(plain) in names:
        plain = _OTHER_NAMES[plain]
    begun = [name for name in names if name.startswith(plain) or name.endswith(plain)]
    begun = [plain] if plain in names else begun
    found = begun[:_MAX_MEANT] if plain else []
    found = found or difflib.get_close_matches(plain, names, 1)
    return f" Did you mean {' or '.join(names[name] for name in found)}?" if found else ""


def quoted(value: object) -> str:
    """A value from outside, for a message: as Python writes it, which escapes it, and cut."""
    return shortened(repr(value[: _SHOWN + 1]) if isinstance(value, str) else _BRIEF.repr(value))


def shortened(text: object) -> str:
    """What a library says, for a message: it may quote a file at length."""
    shown = str(text)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"


def printable(text: str) -> str:
    """Text as a terminal may have it: control and direction characters escaped, lines kept."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


class _Brief(reprlib.Repr):
    """Stops early, where repr would write a value of any size, or refuse to."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 6
        self.maxstring = self.maxother = _SHOWN

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < 10**_SHOWN else f"a number of more than {_SHOWN} digits"


_BRIEF = _Brief()


class FlashdraftError(Exception):
    """Base of every error raised on purpose. As text it is fit for a terminal."""

    def __str__(self) -> str:
        return printable(super().__str__())


class RequestError(FlashdraftError):
    """The request itself is wrong; sending it again unchanged cannot help."""


class ContextLengthError(RequestError):
    """The prompt, or prompt plus answer, is longer than the context."""


class UnknownWordError(RequestError, TypeError):
    """A call has a keyword that does not exist here; the message says what to type."""


class CapacityError(FlashdraftError):
    """The machine has no room for this now."""


class QueueFullError(CapacityError):
    """Too many requests wait already; `retry_after_s` is when room may be expected."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineLostError(FlashdraftError):
    """The engine died, is closed or is being started, and takes no more requests."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelNotFoundError(FlashdraftError):
    """The model cannot be found or may not be fetched."""


class UnsupportedModelError(FlashdraftError):
    """The model uses a feature flashdraft does not implement."""


class CheckpointError(FlashdraftError):
    """A checkpoint is broken, incomplete, or does not fit its config or its partner."""


class TrainingError(FlashdraftError):
    """Prompts, answers or a training run cannot be used as they are."""
