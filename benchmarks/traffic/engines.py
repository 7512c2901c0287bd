"""The engines under test: a random-weight pair, and what is prescribed for it.

One engine at a time: the cache of the last one is freed before the next is made. Acceptance is
injected by h200_inject.py, on every path that commits tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from benchmarks.h200_inject import PrescribedAcceptance, PrescribedWalks, Routing
from benchmarks.h200_measure import free_memory
from benchmarks.h200_models import MODELS, RandomModel, RandomPair, build_pair, seeing, tiny
from benchmarks.traffic.vocabulary import schema_compiler
from benchmarks.walks import Walks
from flashdraft.chat.grammar.compiler import LlguidanceCompiler
from flashdraft.engine.config import CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.engine.output import TextDecoder
from flashdraft.engine.step.pieces import AcceptFunction
from flashdraft.kernels.kinds import AS_STORED, WeightOptions
from flashdraft.kernels.select import select_kernels

MODEL_NAMES = ("31b", "26b", "tiny", "tiny-26b")
DEGENERATE, UNIFORM = "degenerate", "uniform"
CACHE_GB, TINY_CACHE_GB = 48.0, 0.05
NUM_SLOWEST = 8
PREPARE_S = 90.0  # for what an engine captures before it says that it is ready


def model_named(name: str) -> RandomModel:
    """A published pair, or its structure in miniature; it sees pictures, as the published does."""
    if name.startswith("tiny"):
        return seeing(tiny(MODELS[name.removeprefix("tiny").removeprefix("-") or "31b"]))
    return seeing(MODELS[name])


Acceptance = float | Walks | None
"""A chance for every draft token in turn, or how far drafts are walked; None = plain decoding."""


@dataclass(frozen=True)
class EngineSpec:
    """What sets one engine apart from another."""

    acceptance: Acceptance
    routing: str | None  # None where there are no experts
    max_batch: int
    max_context: int
    prefix_cache: bool = False
    tree: int | str | None = None  # as in EngineConfig
    verify: int | None = None

    @property
    def label(self) -> str:
        if isinstance(self.acceptance, Walks):
            words = [f"drafted walks {self.acceptance.chain_mean:.3g}"]
        else:
            words = ["plain" if self.acceptance is None else f"drafted α {self.acceptance:g}"]
        words += [f"tree {self.tree}"] if self.tree is not None else []
        words += [f"{self.routing} routing"] if self.routing else []
        return ", ".join(words)

    @property
    def facts(self) -> dict[str, Any]:
        """What a row of results says about it."""
        if isinstance(self.acceptance, Walks):
            walks = {str(n): round(self.acceptance.mean(n), 3) for n in self.acceptance.by_size}
            told: Any = {"chain": round(self.acceptance.chain_mean, 3), **walks}
        else:
            told = self.acceptance
        facts = {"acceptance": told, "routing": self.routing}
        return facts if self.tree is None else facts | {"tree": self.tree}


@dataclass
class Bench:
    """The weights, which all engines share."""

    name: str
    pair: RandomPair
    routing: Routing | None
    seed: int
    cache_gb: float
    limits: dict[str, int]  # settings of the engine that were asked for
    compiler: LlguidanceCompiler | None = None  # of grammars, where they are wanted
    new_decoder: Callable[[], TextDecoder] | None = None  # where answers are to be text
    walks: PrescribedWalks | None = None  # of the engine that is used

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: str,
        dtype: str,
        weights: WeightOptions = AS_STORED,
        seed: int,
        cache_gb: float | None,
        limits: dict[str, int],
        has_grammars: bool,
    ) -> Bench:
        """Draw the weights of a pair."""
        model = model_named(name)
        kernels = select_kernels(device, dtype, weights=weights)
        experts, routing = model.target_config().experts, None
        if experts is not None:
            config = EngineConfig.for_device(kernels.device.type, **limits)
            most = 2 * max(config.max_step_tokens, config.max_batch)
            routing = Routing(kernels, experts.num_experts, experts.num_chosen, most, seed)
            kernels = routing.kernels
        pair = build_pair(model, kernels, seed)
        is_tiny = name.startswith("tiny")
        size = cache_gb or (TINY_CACHE_GB if is_tiny else CACHE_GB)
        compiler = schema_compiler(pair.target.config.vocab_size) if has_grammars else None
        return cls(name, pair, routing, seed, size, limits, compiler)

    @property
    def device_type(self) -> str:
        return self.pair.target.kernels.device.type

    def use(self, spec: EngineSpec, work: Callable[[Engine], None]) -> None:
        """Make an engine, work with it under what is prescribed, and free it."""
        if self.routing is not None:
            self.routing.is_uniform = spec.routing == UNIFORM
        free_memory()
        config = EngineConfig.for_device(
            self.device_type,
            max_batch=spec.max_batch,
            max_context=spec.max_context,
            cache=CacheOptions(cache_gb=self.cache_gb),
            prefix_cache=spec.prefix_cache,
            ngram=False,  # random text has no sense to look up
            verify=0 if spec.acceptance is None else spec.verify,
            tree=spec.tree,
            run_ahead=isinstance(spec.acceptance, Walks),  # on a CPU, as trees do
            **self.limits,
        )
        pair, decoder, compiler = self.pair, self.new_decoder, self.compiler
        if spec.acceptance is None:
            work(Engine(pair.plain_target, None, config, decoder, grammar_compiler=compiler))
            return
        accept = self._prescribe(spec)
        work(
            Engine(
                pair.target,
                pair.drafter,
                config,
                decoder,
                accept=accept,
                grammar_compiler=compiler,
            )
        )

    def _prescribe(self, spec: EngineSpec) -> AcceptFunction:
        common = 2 * spec.max_batch, self.pair.target.kernels.device, self.seed
        assert spec.acceptance is not None
        if not isinstance(spec.acceptance, Walks):
            return PrescribedAcceptance(spec.acceptance, *common)
        self.walks = PrescribedWalks(spec.acceptance, spec.tree is not None, *common)
        return self.walks


def prepare(engine: Engine) -> float:
    """Have the engine capture what it can before the first request; the seconds that took."""
    return prepare_timed(engine)["seconds"]


def prepare_timed(engine: Engine) -> dict[str, Any]:
    """The same, and what took the host longest of it: a piece's first runs and its capture."""
    graphs, took = engine.steps.graphs, Counter[str]()
    call = graphs.call

    def timed(key: tuple[object, ...], function: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        try:
            return call(key, function)
        finally:
            took[" ".join(map(str, key))] += time.perf_counter() - begin

    begin = time.perf_counter()
    with patch.object(graphs, "call", timed):
        engine.prepare(PREPARE_S)
    seconds = time.perf_counter() - begin
    slowest = {key: round(one, 2) for key, one in took.most_common(NUM_SLOWEST)}
    return {"seconds": round(seconds, 2), "pieces": len(took), "slowest": slowest}
