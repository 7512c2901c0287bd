"""LLM: the public Python API. Loads a target and its drafter, and runs prompts through the engine.

from flashdraft import LLM, SamplingParams
print(LLM("smollm2-135m").generate("The capital of France is")[0].text)
"""

from __future__ import annotations

import os
import random
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from flashdraft.chat.grammar.compiler import LlguidanceCompiler, grammar_compiler
from flashdraft.chat.templates import encode_chat
from flashdraft.core import (
    FinishReason,
    Generation,
    GrammarSpec,
    Request,
    SamplingParams,
    TokenEvent,
)
from flashdraft.engine.cache.memory import check_cache, check_weights_fit
from flashdraft.engine.config import OUT_OF_MEMORY, CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.errors import CapacityError, FlashdraftError, RequestError
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.kernels.select import select_kernels
from flashdraft.models.pairs import find_drafter, open_pair
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.models.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


class LLM:
    """A target with, usually, a drafter. Answers are the target's own; drafting only hurries them.

    `draft`: "auto" finds the target's known drafter and else looks n-grams up; None decodes
    plainly; "ngram" looks up only; anything else names a drafter. `verify`: "auto", or a fixed
    number of draft tokens to check per step. `exact`: on a GPU too, drafted and plain answers are
    equal bit for bit, at some cost; a CPU is always exact. `kv_dtype`: "fp8" stores keys and values
    in 8 bits, twice as many in a GPU's memory, roughly rounded. `kv_keys`: "rebuilt" stores no keys
    where they can be made of the values: on Gemma 4's full layers. `quantize`: on a GPU, float
    weights become "int4", "int8" or "fp8" as they are loaded, those of the head as `quantize_head`
    says; weights that are stored in few bits stay as they are. Threads may share an LLM: their
    requests run together.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        draft: str | os.PathLike[str] | None = "auto",
        verify: str | int = "auto",
        device: str | torch.device = "auto",
        dtype: str = "auto",
        quantize: str | None = None,
        quantize_head: str | None = None,
        exact: bool = False,
        max_context: int | None = None,
        max_batch: int | None = None,
        cache_gb: float | None = None,
        kv_dtype: str = CacheOptions.kv_dtype,
        kv_keys: str = CacheOptions.kv_keys,
    ) -> None:
        self.model = _name("model", model)
        draft = None if draft is None or draft == "none" else _name("draft", draft)
        if not isinstance(exact, bool):
            raise RequestError(f"exact is {exact!r}; it must be True or False.")
        if not isinstance(device, str | torch.device):
            raise RequestError(f"device is {device!r}; it must be 'auto', 'cpu' or 'cuda'.")
        self.kernels = select_kernels(device, dtype, exact, WeightOptions(quantize, quantize_head))
        config = _engine_config(
            self.kernels.device.type,
            draft,
            verify,
            max_context,
            max_batch,
            CacheOptions(cache_gb, kv_dtype, kv_keys),
        )
        check_cache(self.kernels, config)  # refused before anything is loaded
        self.drafter_name = find_drafter(self.model, draft)
        pair = open_pair(self.model, self.drafter_name)
        check_cache(self.kernels, config, pair.checkpoint.config)
        self.generation_config = pair.checkpoint.generation_config
        self.tokenizer = Tokenizer.from_checkpoint(pair.path)
        try:
            pair = pair.with_drafter()
            check_weights_fit(pair.checkpoint.source, pair.drafter, self.kernels, self.model)
            target, drafter = pair.build(self.kernels, self.model)
            del pair  # the drafter's own weights: they are packed now
            ids = target.config.vocab_size, target.config.eos_token_ids
            self._grammar_compiler = _grammar_compiler(self.tokenizer, *ids)
            self.engine = Engine(
                target,
                drafter,
                config,
                self._decoder_factory(),
                grammar_compiler=self._grammar_compiler,
            )
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CapacityError(
                f"{self.model} does not fit in the device's memory ({error}); use a smaller model, "
                "a smaller cache_gb, or a CPU."
            ) from error
        self._mailboxes: dict[str, deque[TokenEvent]] = {}
        self._lock = threading.RLock()
        self._is_stepping = False
        _LIVING.add(self)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        grammar: GrammarSpec | None = None,
    ) -> list[Generation]:
        """Continue every prompt (text or token ids) as it is, all of them in one batch.

        With a `grammar`, every answer's text is one of its sentences, unless max_tokens cuts it. A
        prompt whose computation fails costs the others nothing: its `Generation` has the
        finish_reason "error" and says why. If all of them fail, the first one's error is raised.
        """
        many = _as_list(prompts)
        requests = [
            self._request(prompt, one, grammar=grammar)
            for prompt, one in zip(many, _settings(params, len(many)), strict=True)
        ]
        try:
            for request in requests:
                self._submit(request)
            done = [self._finish(request.id) for request in requests]
        finally:
            for request in requests:
                self._abandon(request.id)
        if done and all(one.finish_reason is FinishReason.ERROR for one in done):
            raise failure_of(done[0])
        return done

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        grammar: GrammarSpec | None = None,
    ) -> Generation:
        """Answer a conversation in the model's own chat format."""
        return self.generate([self.chat_prompt(messages, tools)], params, grammar)[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        verify: int | None = None,
        grammar: GrammarSpec | None = None,
    ) -> Generator[TokenEvent]:
        """Committed tokens as they come; the last event carries the whole `Generation`.

        A list of messages is a conversation. Closing the iterator cancels the request.
        """
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            prompt = self.chat_prompt(prompt)  # type: ignore[arg-type]
        (settings,) = _settings(params, 1)
        request = self._request(prompt, settings, verify, grammar)  # type: ignore[arg-type]
        self._submit(request)
        try:
            while True:
                event = self._next_event(request.id)
                yield event
                if event.generation is not None:
                    return
        finally:
            self._abandon(request.id)

    def chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The token ids of a conversation, ready for the model's answer."""
        return encode_chat(self._require_tokenizer(), messages, tools=tools)

    def prepare_grammars(self) -> None:
        """Do now what the first request with a grammar would have to wait for."""
        if self._grammar_compiler is not None:
            self._grammar_compiler.prepare()

    # -- requests ------------------------------------------------------------------------------

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        verify: int | None = None,
        grammar: GrammarSpec | None = None,
    ) -> Request:
        if isinstance(prompt, str):
            prompt = self._require_tokenizer().encode(prompt, add_special=True)
        elif not _is_list(prompt):
            raise RequestError(f"A prompt is {prompt!r}; it must be text or a list of token ids.")
        if params.stop or grammar is not None:
            self._require_tokenizer()
        seed = random.getrandbits(62) if params.seed is None else params.seed
        return Request(uuid.uuid4().hex, list(prompt), params, seed, verify, grammar)

    def _submit(self, request: Request) -> None:
        with self._lock:
            self.engine.submit(request)
            self._mailboxes[request.id] = deque()

    def _next_event(self, request_id: str) -> TokenEvent:
        """The request's next event, stepping the engine for everyone until there is one."""
        with self._lock:
            mailbox = self._mailboxes[request_id]
            while not mailbox:
                if not self.engine.is_running(request_id):  # an interrupt tore its last step
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

    def _finish(self, request_id: str) -> Generation:
        while True:
            generation = self._next_event(request_id).generation
            if generation is not None:
                return generation

    def _abandon(self, request_id: str) -> None:
        """Forget a request; cancel it if it still runs."""
        with self._lock:
            if self._mailboxes.pop(request_id, None) is not None:
                self.engine.cancel(request_id)
                # The garbage collector may close a stream in the middle of a step, in this very
                # thread: then the next step ends it.
                if not self._is_stepping:
                    self.engine.flush_cancelled()

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{self.model} has no tokenizer; give prompts as lists of token ids, without stop "
                "strings and grammars."
            )
        return self.tokenizer

    def _decoder_factory(self) -> Callable[[], StreamDecoder] | None:
        tokenizer = self.tokenizer
        return None if tokenizer is None else lambda: StreamDecoder(tokenizer)


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


def failure_of(generation: Generation) -> FlashdraftError:
    """The error behind a generation that ended with one."""
    kind = CapacityError if generation.error == OUT_OF_MEMORY else FlashdraftError
    return kind(generation.error or "The request failed.")


def _engine_config(
    device: str,
    draft: str | None,
    verify: str | int,
    max_context: int | None,
    max_batch: int | None,
    cache: CacheOptions,
) -> EngineConfig:
    if type(verify) is not int and not (isinstance(verify, str) and verify == "auto"):
        raise RequestError(f"verify is {verify!r}; it must be 'auto' or a number of draft tokens.")
    fixed = 0 if draft is None else None if isinstance(verify, str) else verify
    sizes = {} if max_batch is None else {"max_batch": max_batch}
    return EngineConfig.for_device(
        device,
        max_context=max_context,
        cache=cache,
        verify=fixed,
        ngram=draft is not None,
        **sizes,
    )


def _name(what: str, value: str | os.PathLike[str]) -> str:
    if not isinstance(value, str | os.PathLike):
        raise RequestError(f"{what} is {value!r}; it must be a name or a path.")
    return os.fspath(value)


def _grammar_compiler(
    tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
) -> LlguidanceCompiler | None:
    return None if tokenizer is None else grammar_compiler(tokenizer, vocab_size, eos_token_ids)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts is {prompts!r}; it must be text, a list of token ids, or a list of such."
        )
    if prompts and not isinstance(prompts[0], str | Sequence):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


def _settings(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts."""
    params = SamplingParams() if params is None else params
    many = list(params) if isinstance(params, Sequence) else [params] * count
    if len(many) != count:
        raise RequestError(
            f"There are {count} prompts and {len(many)} SamplingParams; give one for all or one "
            "for each."
        )
    for one in many:
        if not isinstance(one, SamplingParams):
            raise RequestError(f"params holds {one!r}; it must be SamplingParams.")
    return many
