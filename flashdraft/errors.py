"""Every error a user can meet, in one tree. Messages say what was wrong, the limit, and the remedy.

FlashdraftError
├── RequestError            the request itself is wrong (HTTP 400)
│   └── ContextLengthError  prompt and answer do not fit the context (HTTP 400)
├── CapacityError           the machine has no room: memory, pages, queue (HTTP 429 or 503)
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


class ModelNotFoundError(FlashdraftError):
    """The model cannot be found or may not be fetched."""


class UnsupportedModelError(FlashdraftError):
    """The model uses a feature flashdraft does not implement."""


class CheckpointError(FlashdraftError):
    """A checkpoint is broken, incomplete, or does not fit its config or its partner."""


class TrainingError(FlashdraftError):
    """Prompts, answers or a training run cannot be used as they are."""
