"""AsyncLLM: the Python API for event loops, with the names and arguments of LLM.

async with AsyncLLM("smollm2-135m") as llm:
    async for event in llm.stream("The capital of France is"):
        print(event.text, end="")

Any number of tasks, of any loops, ask at once; a thread steps the engine (stepping.py). Who leaves
the loop over a stream, or is cancelled, cancels the request.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from types import TracebackType
from typing import Self, overload

from flashdraft.core import Generation, GrammarSpec, SamplingParams, TokenEvent
from flashdraft.errors import EngineLostError, FlashdraftError
from flashdraft.habits import explained
from flashdraft.llm.answers import Answers
from flashdraft.llm.asking import (
    CALLS,
    SETTINGS,
    Asked,
    Messages,
    Prompt,
    Settings,
    Switches,
    ToolChoice,
    Tools,
    conversations,
    one_of,
    tool_use_of,
)
from flashdraft.llm.loaded import LoadedModel
from flashdraft.llm.progress import AnswerBar, Choice
from flashdraft.llm.stepping import EngineThread, Mailbox


class AsyncLLM(LoadedModel):
    """A model that answers tasks. Making one takes as long as loading: do it before the loop runs,
    or with `await asyncio.to_thread(AsyncLLM, …)`.
    """

    def _begin(self) -> None:
        self._thread = EngineThread(self.engine)
        self._process = os.getpid()
        # also at the end of Python: a thread must not compute while it is taken apart
        self._finalizer = weakref.finalize(self, _close, self._thread, self._process)

    @explained(CALLS, "generate", SETTINGS)
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Settings = None,
        grammar: GrammarSpec | None = None,
        *,
        sampling_params: Settings = None,
        use_tqdm: Choice = True,
    ) -> list[Generation]:
        """Continue every prompt, as `LLM.generate` does."""
        settings = one_of(params, sampling_params)
        return await self._run(lambda: self._asker.texts(prompts, settings, grammar), use_tqdm)

    @overload
    async def chat(
        self,
        messages: Messages,
        params: Settings = None,
        tools: Tools = None,
        grammar: GrammarSpec | None = None,
        *,
        sampling_params: Settings = None,
        use_tqdm: Choice = True,
        chat_template_kwargs: Switches = None,
        tool_choice: ToolChoice = None,
    ) -> Generation: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Messages],
        params: Settings = None,
        tools: Tools = None,
        grammar: GrammarSpec | None = None,
        *,
        sampling_params: Settings = None,
        use_tqdm: Choice = True,
        chat_template_kwargs: Switches = None,
        tool_choice: ToolChoice = None,
    ) -> list[Generation]: ...

    @explained(CALLS, "chat", SETTINGS)
    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Settings = None,
        tools: Tools = None,
        grammar: GrammarSpec | None = None,
        *,
        sampling_params: Settings = None,
        use_tqdm: Choice = True,
        chat_template_kwargs: Switches = None,
        tool_choice: ToolChoice = None,
    ) -> Generation | list[Generation]:
        """Answer a conversation, or each of several, as `LLM.chat` does."""
        many, is_many = conversations(messages)
        settings, tool_use = one_of(params, sampling_params), tool_use_of(tools, tool_choice)
        found = await self._run(
            lambda: self._asker.chats(many, settings, tool_use, grammar, chat_template_kwargs),
            use_tqdm,
        )
        return found if is_many else found[0]

    @explained(CALLS, "stream", SETTINGS)
    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        verify: int | None = None,
        grammar: GrammarSpec | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        tools: Tools = None,
        chat_template_kwargs: Switches = None,
        tool_choice: ToolChoice = None,
    ) -> TokenStream:
        """Committed tokens as they come: `async for event in llm.stream(…)`.

        The last event carries the whole `Generation`. Leaving the loop cancels the request.
        """
        settings, tool_use = one_of(params, sampling_params), tool_use_of(tools, tool_choice)
        return TokenStream(
            self,
            lambda: self._asker.one(
                prompt, settings, grammar, tool_use, chat_template_kwargs, verify
            ),
        )

    def close(self) -> None:
        """End every request, and free the model's memory; waits for the step that is running."""
        self._check_process()
        self._finalizer()
        if self._engine is not None:
            self._forget_engine()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # -- requests ------------------------------------------------------------------------------

    async def _run(self, ask: Callable[[], list[Asked]], use_tqdm: Choice) -> list[Generation]:
        answers, mailbox = Answers(await self._prepared(ask)), Mailbox()
        try:
            with closing(AnswerBar(len(answers), use_tqdm)) as bar:
                self._thread.submit(answers.first_requests, mailbox)
                while answers.waiting:
                    event = await mailbox.get()
                    if followers := answers.take(event):
                        self._thread.submit(followers, mailbox)
                    bar.take(event, answers.num_done)
        finally:
            if answers.waiting:
                self._thread.cancel(answers.request_ids)
        return answers.generations()

    async def _prepared(self, ask: Callable[[], list[Asked]]) -> list[Asked]:
        """Requests, made in another thread: tokenizing and grammars take their time."""
        self._check_process()
        compiler = self.engine.compile_grammar

        def prepare() -> list[Asked]:
            asked = ask()
            for spec in {r.grammar for one in asked for r in one.requests}:
                if compiler is not None and isinstance(spec, GrammarSpec):
                    compiler(spec)  # kept: the engine's thread finds it ready
            return asked

        return await asyncio.to_thread(prepare)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineLostError(
                "This AsyncLLM belongs to the process that made it; make one after the fork."
            )


class TokenStream:
    """One answer's events, for one task: `async for`. Begins when the first one is asked for.

    Leaving the loop, `aclose()` and the end of `async with` cancel the request.
    """

    def __init__(self, llm: AsyncLLM, ask: Callable[[], Asked]) -> None:
        self._llm = llm
        self._ask = ask
        self._answers: Answers | None = None
        self._mailbox: Mailbox | None = None
        self._is_over = self._is_read = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._is_over:
            raise StopAsyncIteration
        if self._is_read:
            raise FlashdraftError("Another task waits for this stream's next event already.")
        self._is_read = True
        try:
            event = await self._next_event()
        except BaseException:  # a failure, or whoever waits is cancelled
            self._leave()
            raise
        finally:
            self._is_read = False
        self._is_over = event.generation is not None
        return event

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    async def _next_event(self) -> TokenEvent:
        if self._mailbox is None or self._answers is None:
            asked = await self._llm._prepared(lambda: [self._ask()])
            self._answers, self._mailbox = Answers(asked), Mailbox()
            self._llm._thread.submit(self._answers.first_requests, self._mailbox)
        event = await self._mailbox.get()
        self._answers.take(event)
        return event

    def _leave(self) -> None:
        if self._answers is not None and not self._is_over:
            self._llm._thread.cancel(self._answers.request_ids)
        self._is_over = True


def _close(thread: EngineThread, process: int) -> None:
    if os.getpid() == process:  # a forked process has no such thread
        thread.close()
