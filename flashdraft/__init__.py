"""flashdraft: a large language model on your own hardware, several times faster, same output.

`LLM` and `AsyncLLM` are imported when they are first asked for: vLLM loads our plugin in each of
its processes, and none of them needs our engine.
"""

import importlib
from typing import TYPE_CHECKING

from flashdraft.core import (
    VERSION,
    FinishReason,
    Generation,
    GenerationStats,
    GrammarSpec,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
    ToolCall,
)
from flashdraft.errors import FlashdraftError
from flashdraft.habits import import_hint

if TYPE_CHECKING:
    from flashdraft.llm import LLM, AsyncLLM

__version__ = VERSION

__all__ = [
    "LLM",
    "AsyncLLM",
    "FinishReason",
    "FlashdraftError",
    "Generation",
    "GenerationStats",
    "GrammarSpec",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprob",
    "ToolCall",
]


if not TYPE_CHECKING:  # a type checker would take every misspelt name for an attribute

    def __getattr__(name: str) -> object:
        if name in ("LLM", "AsyncLLM"):
            found = getattr(importlib.import_module("flashdraft.llm"), name)
            globals()[name] = found  # it is not asked for again
            return found
        if (hint := import_hint(name)) is not None:
            # of an AttributeError `from flashdraft import …` would keep the type and drop the words
            raise ImportError(hint)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
