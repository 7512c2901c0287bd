"""LLM: the Python API for threads, each of which waits for its answers.

from flashdraft import LLM, SamplingParams
print(LLM("smollm2-135m").generate("The capital of France is")[0].text)

There is no thread of its own: whoever waits steps the engine, for everybody.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Collection, Generator, Sequence
from typing import Self, overload

import torch

from flashdraft.core import Generation, GrammarSpec, Request, SamplingParams, TokenEvent
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


class LLM(LoadedModel):
    """A model that answers whoever waits. Threads may share it: their requests run together."""

    def _begin(self) -> None:
        self._mailboxes: dict[str, deque[TokenEvent]] = {}  # those of one call share one
        self._lock = threading.RLock()
        self._is_stepping = self._is_closing = False
        _LIVING.add(self)

    @explained(CALLS, "generate", SETTINGS)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Settings = None,
        grammar: GrammarSpec | None = None,
        *,
        sampling_params: Settings = None,
        use_tqdm: Choice = True,
    ) -> list[Generation]:
        """Continue every prompt (text or token ids) as it is, all of them in one batch.

        There is one `Generation` for each prompt, in order; with `SamplingParams(n=…)` it has the
        further answers in `others`. With a `grammar`, every answer's text is one of its sentences,
        unless max_tokens cuts it. A prompt whose computation fails costs the others nothing: its
        `Generation` has the finish_reason "error" and says why. If all of them fail, the first
        one's error is raised. `use_tqdm`: several prompts show a bar where somebody watches.
        """
        asked = self._asker.texts(prompts, one_of(params, sampling_params), grammar)
        return self._run(asked, use_tqdm)

    @overload
    def chat(
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
    def chat(
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
    def chat(
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
        """Answer a conversation in the model's own chat format, or each of several.

        The answer's `content`, `reasoning` and `calls` are its parts. With a `tool_choice` of
        "required", or of a tool's name, it is a call. Thoughts stay free before what a `grammar`
        says, where the model thinks.
        """
        many, is_many = conversations(messages)
        settings, tool_use = one_of(params, sampling_params), tool_use_of(tools, tool_choice)
        asked = self._asker.chats(many, settings, tool_use, grammar, chat_template_kwargs)
        found = self._run(asked, use_tqdm)
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
    ) -> Generator[TokenEvent]:
        """Committed tokens as they come; the last event carries the whole `Generation`.

        A list of messages is a conversation. Closing the iterator cancels the request.
        """
        settings, tool_use = one_of(params, sampling_params), tool_use_of(tools, tool_choice)
        asked = self._asker.one(prompt, settings, grammar, tool_use, chat_template_kwargs, verify)
        answers, mailbox = Answers([asked]), deque[TokenEvent]()
        with self._asking(answers, mailbox):
            while answers.waiting:
                event = self._next_event(mailbox, answers.waiting)
                answers.take(event)
                yield event

    def close(self) -> None:
        """Free the model's memory. Whoever still waits for an answer gets an error."""
        self._is_closing = True  # now: a thread that steps takes the lock again and again
        with self._lock:
            self._mailboxes.clear()
            if self._engine is not None:
                self._forget_engine()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------

    def _run(self, asked: Sequence[Asked], use_tqdm: Choice) -> list[Generation]:
        answers, mailbox = Answers(asked), deque[TokenEvent]()
        with (
            contextlib.closing(AnswerBar(len(asked), use_tqdm)) as bar,
            self._asking(answers, mailbox),
        ):
            while answers.waiting:
                event = self._next_event(mailbox, answers.waiting)
                self._submit(answers.take(event), mailbox)
                bar.take(event, answers.num_done)
        return answers.generations()

    @contextlib.contextmanager
    def _asking(self, answers: Answers, mailbox: deque[TokenEvent]) -> Generator[None]:
        """The requests of one call; those that are not done at its end are cancelled."""
        try:
            self._submit(answers.first_requests, mailbox)
            yield
        finally:
            for request_id in answers.request_ids:
                self._abandon(request_id)

    def _submit(self, requests: Sequence[Request], mailbox: deque[TokenEvent]) -> None:
        for request in requests:
            with self._lock:
                self.engine.submit(request)
                self._mailboxes[request.id] = mailbox

    def _next_event(self, mailbox: deque[TokenEvent], waiting: Collection[str]) -> TokenEvent:
        """A call's next event, stepping the engine for everyone until there is one."""
        with self._lock:
            while not mailbox:
                if self._is_closing:
                    raise EngineLostError("The LLM was closed before the answer was complete.")
                if not all(map(self.engine.is_running, waiting)):  # an interrupt tore a step
                    raise FlashdraftError("The request was interrupted; send it again.")
                self._is_stepping = True
                try:
                    events = self.engine.step()
                finally:
                    self._is_stepping = False
                for event in events:
                    if event.request_id in self._mailboxes:
                        self._mailboxes[event.request_id].append(event)
            return mailbox.popleft()

    def _abandon(self, request_id: str) -> None:
        """Forget a request; cancel it if it still runs."""
        with self._lock:
            if self._mailboxes.pop(request_id, None) is not None and self._engine is not None:
                self._engine.cancel(request_id)
                # The garbage collector may close a stream in the middle of a step, in this very
                # thread: then the next step ends it.
                if not self._is_stepping:
                    self._engine.flush_cancelled()


# -- forks -----------------------------------------------------------------------------------------

_LIVING: weakref.WeakSet[LLM] = weakref.WeakSet()
_held: list[LLM] = []  # by the thread that forks


def _before_fork() -> None:
    """Fork between steps: a child must find neither a held lock nor a torn engine."""
    for llm in list(_LIVING):
        llm._lock.acquire()
        _held.append(llm)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop()._lock.release()


def _after_fork_in_child() -> None:
    # torch's own threads do not live here, and it would wait for them; the native kernels' do
    torch.set_num_threads(1)
    for llm in _held:  # nobody in this process waits for the requests of the parent's threads
        for request_id in list(llm._mailboxes):
            llm._abandon(request_id)
    _after_fork_in_parent()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
