"""flashdraft: a large language model on your own hardware, several times faster, same output.

`LLM` is imported when it is first asked for: vLLM loads our plugin in each of its processes, and
none of them needs our engine.
"""

import importlib
from typing import TYPE_CHECKING

from flashdraft.core import (
    VERSION,
    FinishReason,
    Generation,
    GenerationStats,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from flashdraft.errors import FlashdraftError

if TYPE_CHECKING:
    from flashdraft.llm import LLM

__version__ = VERSION

__all__ = [
    "LLM",
    "FinishReason",
    "FlashdraftError",
    "Generation",
    "GenerationStats",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprob",
]


if not TYPE_CHECKING:  # a type checker would take every misspelt name for an attribute

    def __getattr__(name: str) -> object:
        if name == "LLM":
            found = importlib.import_module("flashdraft.llm").LLM
            globals()[name] = found  # it is not asked for again
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
