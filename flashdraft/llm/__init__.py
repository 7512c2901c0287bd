"""The Python API: LLM for threads that wait, AsyncLLM for event loops."""

from flashdraft.llm.answers import failure_of
from flashdraft.llm.asking import Messages, Prompt
from flashdraft.llm.asynchronous import AsyncLLM
from flashdraft.llm.blocking import LLM

__all__ = ["LLM", "AsyncLLM", "Messages", "Prompt", "failure_of"]
