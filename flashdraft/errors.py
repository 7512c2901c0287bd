"""Every error a user can meet, in one tree. Messages say what was wrong, the limit, and the remedy.

FlashdraftError
├── RequestError            the request itself is wrong (HTTP 400)
│   └── ContextLengthError  prompt and answer do not fit the context (HTTP 400)
├── CapacityError           the machine has no room: memory, pages, time (HTTP 503)
│   └── QueueFullError      too many requests wait already (HTTP 429)
├── EngineLostError         the engine's process is not there to answer (HTTP 503)
├── ModelNotFoundError      no such model, folder or file, or no permission to fetch it
├── UnsupportedModelError   the model is known but uses a feature flashdraft does not implement
├── CheckpointError         the files are broken, incomplete or do not fit each other
└── TrainingError           training data or a training run cannot be used as it is
"""


class FlashdraftError(Exception):
    """Base of every error raised on purpose."""


class RequestError(FlashdraftError):
    """The request itself is wrong; sending it again unchanged cannot help."""


class ContextLengthError(RequestError):
    """The prompt, or prompt plus answer, is longer than the context."""


class CapacityError(FlashdraftError):
    """The machine has no room for this now."""


class QueueFullError(CapacityError):
    """Too many requests wait already; `retry_after_s` is when room may be expected."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineLostError(FlashdraftError):
    """The engine's process died, is being started, or takes no more requests."""

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
