"""LLM: the public Python API. Loads a target and its drafter, and runs prompts through the engine.

    from flashdraft import LLM, SamplingParams
    print(LLM("smollm2-135m").generate("The capital of France is")[0].text)
"""

from __future__ import annotations

import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flashdraft.chat.templates import render_chat
from flashdraft.core import FinishReason, Generation, Request, SamplingParams, TokenEvent
from flashdraft.engine.config import EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.output import StreamDecoder as Decoder
from flashdraft.errors import CapacityError, RequestError, UnsupportedModelError
from flashdraft.kernels.interface import Kernels
from flashdraft.kernels.select import select_kernels
from flashdraft.models.drafter import PackedDrafter
from flashdraft.models.drafter_loading import load_drafter
from flashdraft.models.layers import Target
from flashdraft.models.loading import Checkpoint, loading_progress, open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.sources import default_drafter, resolve_source
from flashdraft.models.tokenizer import StreamDecoder, Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


class LLM:
    """A target with, usually, a drafter. Answers are the target's own; drafting only hurries them.

    `draft`: "auto" finds the target's known drafter and else looks n-grams up; None decodes plainly;
    "ngram" looks up only; anything else names a drafter. `verify`: "auto", or a fixed number of
    draft tokens to check per step.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        draft: str | None = "auto",
        verify: str | int = "auto",
        device: str = "auto",
        dtype: str = "auto",
        exact: bool = False,
        max_context: int | None = None,
        max_batch: int | None = None,
        cache_gb: float | None = None,
    ) -> None:
        config = _engine_config(draft, verify, max_context, max_batch, cache_gb)
        self.kernels = select_kernels(device, dtype)
        if exact and self.kernels.device.type != "cpu":
            raise UnsupportedModelError(
                "exact=True is not available on a GPU yet; a CPU is always exact (device='cpu')."
            )
        self.model = model
        path = resolve_source(model).path
        checkpoint = open_checkpoint(path)
        self.generation_config = checkpoint.generation_config
        self.tokenizer = Tokenizer.from_checkpoint(path)
        drafter_name = default_drafter(model) if draft == "auto" else draft
        self.drafter_name = None if drafter_name == "ngram" else drafter_name
        target, drafter = _load(checkpoint, self.drafter_name, self.kernels, model)
        self.engine = Engine(target, drafter, config, self._decoder_factory())
        self._mailboxes: dict[str, deque[TokenEvent]] = {}
        self._lock = threading.RLock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Continue every prompt (text or token ids) as it is, all of them in one batch."""
        many = _as_list(prompts)
        settings = [params or SamplingParams()] * len(many)
        if isinstance(params, Sequence):
            if len(params) != len(many):
                raise RequestError(
                    f"There are {len(many)} prompts and {len(params)} SamplingParams; give one for "
                    "all or one for each."
                )
            settings = list(params)
        requests = [self._request(p, s) for p, s in zip(many, settings, strict=True)]  # type: ignore[arg-type]
        with self._lock:
            try:
                for request in requests:
                    self._submit(request)
                return [self._finish(request.id) for request in requests]
            finally:
                for request in requests:
                    self._abandon(request.id)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Generation:
        """Answer a conversation in the model's own chat format."""
        return self.generate([self.chat_prompt(messages, tools)], params)[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        verify: int | None = None,
    ) -> Iterator[TokenEvent]:
        """Committed tokens as they come; the last event carries the whole `Generation`.

        A list of messages is a conversation. Closing the iterator cancels the request.
        """
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            prompt = self.chat_prompt(prompt)  # type: ignore[arg-type]
        request = self._request(prompt, params or SamplingParams(), verify)  # type: ignore[arg-type]
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
        tokenizer = self._require_tokenizer()
        return tokenizer.encode(render_chat(tokenizer, messages, tools=tools))

    # -- requests ------------------------------------------------------------------------------

    def _request(
        self, prompt: Prompt, params: SamplingParams, verify: int | None = None
    ) -> Request:
        if isinstance(prompt, str):
            prompt = self._require_tokenizer().encode(prompt, add_special=True)
        if params.stop:
            self._require_tokenizer()
        seed = random.getrandbits(62) if params.seed is None else params.seed
        return Request(uuid.uuid4().hex, list(prompt), params, seed, verify)

    def _submit(self, request: Request) -> None:
        with self._lock:
            self.engine.submit(request)
            self._mailboxes[request.id] = deque()

    def _next_event(self, request_id: str) -> TokenEvent:
        """The request's next event, stepping the engine for everyone until there is one."""
        with self._lock:
            mailbox = self._mailboxes[request_id]
            while not mailbox:
                for event in self.engine.step():
                    if event.request_id in self._mailboxes:
                        self._mailboxes[event.request_id].append(event)
            return mailbox.popleft()

    def _finish(self, request_id: str) -> Generation:
        while True:
            generation = self._next_event(request_id).generation
            if generation is not None:
                if generation.finish_reason is FinishReason.ERROR:
                    raise CapacityError(generation.error or "The request failed.")
                return generation

    def _abandon(self, request_id: str) -> None:
        """Forget a request; cancel it if it still runs."""
        with self._lock:
            if self._mailboxes.pop(request_id, None) is not None:
                self.engine.cancel(request_id)
                self.engine.flush_cancelled()

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{self.model} has no tokenizer; give prompts as lists of token ids, without stop "
                "strings."
            )
        return self.tokenizer

    def _decoder_factory(self) -> Callable[[], Decoder] | None:
        tokenizer = self.tokenizer
        return None if tokenizer is None else lambda: StreamDecoder(tokenizer)


def _engine_config(
    draft: str | None,
    verify: str | int,
    max_context: int | None,
    max_batch: int | None,
    cache_gb: float | None,
) -> EngineConfig:
    if verify != "auto" and (isinstance(verify, bool) or not isinstance(verify, int)):
        raise RequestError(f"verify is {verify!r}; it must be 'auto' or a number of draft tokens.")
    fixed = 0 if draft is None else None if isinstance(verify, str) else verify
    return EngineConfig(
        max_batch=EngineConfig.max_batch if max_batch is None else max_batch,
        max_context=max_context,
        cache_gb=cache_gb,
        verify=fixed,
        ngram=draft is not None,
    )


def _load(
    checkpoint: Checkpoint, drafter_name: str | None, kernels: Kernels, label: str
) -> tuple[Target, PackedDrafter | None]:
    drafter = None
    if drafter_name is not None:
        drafter = load_drafter(resolve_source(drafter_name).path, checkpoint.config)
    taps = drafter.config.tap_layers if drafter is not None else ()
    try:
        with loading_progress(checkpoint.source, label) as on_read:
            target = build_target(checkpoint.config, checkpoint.source, kernels, taps, on_read)
        packed = PackedDrafter(drafter, kernels) if drafter is not None else None
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{label} does not fit in the device's memory ({error}); use a smaller model, or a CPU."
        ) from error
    return target, packed


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]

