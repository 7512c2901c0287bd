"""A pair loaded into memory, with its engine: what LLM and AsyncLLM have in common.

It makes requests of prompts (asking.py); who steps the engine is theirs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from flashdraft.chat.grammar.compiler import LlguidanceCompiler, grammar_compiler
from flashdraft.engine.cache.memory import check_cache, check_weights_fit
from flashdraft.engine.config import CacheOptions, EngineConfig, tree_settings
from flashdraft.engine.engine import Engine
from flashdraft.errors import CapacityError, EngineLostError, RequestError
from flashdraft.habits import ExplainsCalls, explained_class
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.kernels.select import select_kernels
from flashdraft.llm.asking import Asker, Messages, Pictures
from flashdraft.models.pairs import find_drafter, open_pair
from flashdraft.models.stream_decoder import StreamDecoder
from flashdraft.models.tokenizer import Tokenizer


@explained_class("LLM(…)")
class LoadedModel(ExplainsCalls):
    """A target with, usually, a drafter, and the engine that runs them."""

    _habits: ClassVar[str] = "llm.…"
    _engine: Engine | None = None

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        draft: str | os.PathLike[str] | None = "auto",
        verify: str | int = "auto",
        tree: str | int | None = None,
        device: str | torch.device = "auto",
        dtype: str = "auto",
        quantize: str | None = None,
        quantize_head: str | None = None,
        activations: str | None = None,
        exact: bool = False,
        max_context: int | None = None,
        max_batch: int | None = None,
        cache_gb: float | None = None,
        kv_dtype: str = CacheOptions.kv_dtype,
        kv_keys: str = CacheOptions.kv_keys,
        vision: bool = True,
        mmproj: str | os.PathLike[str] | None = None,
        lora: str | os.PathLike[str] | None = None,
    ) -> None:
        """Load a target with, usually, a drafter, which only hurries the target's own answers.

        `draft`: "auto" finds the target's known drafter and else looks n-grams up; None decodes
        plainly; "ngram" looks up only; anything else names a drafter. `verify`: "auto", or a
        fixed number of draft tokens to check per step. `tree`: what is checked may have branches,
        "auto" as many as pay, a number that many draft tokens of a step in all (fewer where many
        requests share one), "off" or None none. `exact`: on a GPU too, drafted and plain
        answers are equal bit for bit, at some cost; a CPU is always exact. `kv_dtype`: "fp8"
        stores keys and values in 8 bits, twice as many in a GPU's memory, roughly rounded.
        `kv_keys`: "rebuilt" stores no keys where they can be made of the values: on Gemma 4's
        full layers. `quantize`: on a GPU, float weights become "int4", "int8" or "fp8" as they
        are loaded, those of the head as `quantize_head` says; weights that are stored in few
        bits stay as they are. `activations`: as `quantize`, "fp8" or "int8", rounds the rows before
        the target's linears to as many bits, faster for many rows and less exact. `vision`: False
        leaves the part out that sees pictures, and has its memory for other things. `mmproj`: the
        file that a GGUF model sees with, where it is not the only one beside the model's. `lora`:
        the folder of a LoRA adapter, which is merged into the model's weights as they are loaded.
        """
        self.model = _name("model", model)
        draft = None if draft is None or draft == "none" else _name("draft", draft)
        for switch, value in (("exact", exact), ("vision", vision)):
            if not isinstance(value, bool):
                raise RequestError(f"{switch} is {value!r}; it must be True or False.")
        if not isinstance(device, str | torch.device):
            raise RequestError(f"device is {device!r}; it must be 'auto', 'cpu' or 'cuda'.")
        weights = WeightOptions(quantize, quantize_head, activations)
        self.kernels = select_kernels(device, dtype, exact, weights)
        self.drafter_name = find_drafter(self.model, draft)
        config = _engine_config(
            self.kernels.device.type,
            draft,
            verify,
            max_context,
            max_batch,
            cache=CacheOptions(cache_gb, kv_dtype, kv_keys),
            **tree_settings(tree, self.drafter_name),
        )
        check_cache(self.kernels, config)  # refused before anything is loaded
        tower = None if mmproj is None else _name("mmproj", mmproj)
        adapter = None if lora is None else _name("lora", lora)
        pair = open_pair(self.model, self.drafter_name, vision, tower, adapter)
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
            self._engine = Engine(
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
        seen = target.config.vision if target.vision is not None else None
        self._asker = Asker(self.model, self.tokenizer, seen)
        self._begin()

    def _begin(self) -> None:
        """The engine is there."""

    @property
    def engine(self) -> Engine:
        """The engine; it is gone once this is closed."""
        if self._engine is None:
            raise EngineLostError(f"This {type(self).__name__} is closed; make a new one.")
        return self._engine

    def chat_prompt(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, ready for the model's answer."""
        return self._asker.chat_prompt(messages, tools, chat_template_kwargs).token_ids

    def chat_pictures(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Pictures:
        """The pictures of a conversation as the model sees them, and where in `chat_prompt`."""
        return self._asker.chat_prompt(messages, tools, chat_template_kwargs).pictures

    @property
    def sees_pictures(self) -> bool:
        """Whether conversations may have pictures."""
        return self._asker.sight is not None

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode` and `decode`."""
        return self._asker.tokenizer

    def prepare_grammars(self) -> None:
        """Do now what the first request with a grammar would have to wait for."""
        if self._grammar_compiler is not None:
            self._grammar_compiler.prepare()

    def __repr__(self) -> str:
        name = f"{type(self).__name__}({self.model!r}"
        if self._engine is None:
            return f"{name}, closed)"
        drafter = self.drafter_name or ("ngram" if self._engine.config.ngram else None)
        return (
            f"{name}, draft={drafter!r}, device='{self.kernels.device}', "
            f"dtype={self.kernels.weight_dtype!r}, "
            f"max_context={self._engine.max_context}, max_batch={self._engine.config.max_batch})"
        )

    def _forget_engine(self) -> None:
        """Let go of the model's memory, and of the processes that read texts and pictures."""
        self._engine = None
        if self.tokenizer is not None:
            self.tokenizer.rest()
        if self._asker.sight is not None:
            self._asker.sight.close()
        gc.collect()  # an engine's parts refer to each other
        if self.kernels.device.type == "cuda":
            torch.cuda.empty_cache()

    def _decoder_factory(self) -> Callable[[], StreamDecoder] | None:
        tokenizer = self.tokenizer
        return None if tokenizer is None else lambda: StreamDecoder(tokenizer)


def _engine_config(
    device: str,
    draft: str | None,
    verify: str | int,
    max_context: int | None,
    max_batch: int | None,
    **settings: Any,
) -> EngineConfig:
    if type(verify) is not int and not (isinstance(verify, str) and verify == "auto"):
        raise RequestError(f"verify is {verify!r}; it must be 'auto' or a number of draft tokens.")
    fixed = 0 if draft is None else None if isinstance(verify, str) else verify
    sizes = {} if max_batch is None else {"max_batch": max_batch}
    return EngineConfig.for_device(
        device,
        max_context=max_context,
        verify=fixed,
        ngram=draft is not None,
        **sizes,
        **settings,
    )


def _name(what: str, value: str | os.PathLike[str]) -> str:
    if not isinstance(value, str | os.PathLike):
        raise RequestError(f"{what} is {value!r}; it must be a name or a path.")
    return os.fspath(value)


def _grammar_compiler(
    tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
) -> LlguidanceCompiler | None:
    return None if tokenizer is None else grammar_compiler(tokenizer, vocab_size, eos_token_ids)
