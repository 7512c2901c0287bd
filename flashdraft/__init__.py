"""flashdraft: a large language model on your own hardware, several times faster, same output."""

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
