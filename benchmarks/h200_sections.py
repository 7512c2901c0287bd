"""The sections of h200.py: what is run, in which order, and how a section's outcome is recorded."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.accepted_length import describe_environment
from benchmarks.h200_inject import PrescribedAcceptance, Routing
from benchmarks.h200_measure import (
    Deadline,
    cold_start,
    collect_logs,
    free_memory,
    measure_context,
    measure_load,
)
from benchmarks.h200_models import MODELS, RandomPair, build_pair, first_layers, tiny
from benchmarks.h200_profile import count_bytes, measure_bandwidth, profile_steps
from benchmarks.h200_real import RealSettings, measure_exact, measure_tasks
from benchmarks.h200_table import merge_section
from benchmarks.h200_trial import describe_trial, summarize
from benchmarks.traffic.engines import prepare
from flashdraft.bench.plan.pairs import expected_length
from flashdraft.engine.config import MAX_VERIFY, CacheOptions, EngineConfig
from flashdraft.engine.engine import Engine
from flashdraft.kernels.kinds import WeightOptions
from flashdraft.kernels.select import select_kernels

PROMPT_TOKENS = 128
WARM_UP_TOKENS_PLAIN = 48
CONTEXT_TOKENS_PLAIN, CONTEXT_STEPS_DRAFTED = 24, 14
# Context, and gigabytes of cache for it: windows hold a chunk of the prompt besides.
RESIDENT = {"31b": (8192, 2.4), "26b": (32768, 1.3)}
RESIDENT_CHUNK = 512
MAX_CONTEXT = 1024  # of the engines under load
Record = dict[str, Any]


@dataclass
class Run:
    """One invocation: its settings, the file it writes, and the model at hand."""

    arguments: argparse.Namespace
    begin: float
    pair: RandomPair | None = None
    routing: Routing | None = None
    read_tb_s: float = 0.0

    def say(self, line: str) -> None:
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    @property
    def trial(self) -> str:
        """What is not as in the real thing, in words; empty where everything is."""
        return describe_trial(self.arguments.layers, self.arguments.set)

    @property
    def loaded(self) -> RandomPair:
        if self.pair is None:
            raise RuntimeError("the model could not be loaded: see its section")
        return self.pair

    # -- engines -------------------------------------------------------------------------------

    def engine(
        self,
        *,
        drafted: bool,
        verify: int | None = None,
        context: int = 0,
        cache_gb: float | None = None,
        chunk: int | None = None,
    ) -> Engine:
        """An engine for load, or with `context` for a single request of that length."""
        arguments, pair = self.arguments, self.loaded
        batch = 1 if context else max(arguments.concurrency)
        config = EngineConfig(
            max_batch=batch,
            max_context=context or MAX_CONTEXT,
            cache=CacheOptions(cache_gb=cache_gb or arguments.cache_gb),
            max_step_tokens=chunk or arguments.step_tokens,
            prefill_chunk=chunk or arguments.prefill_chunk,
            prefix_cache=False,  # prompts are random, and runs must not feed one another
            verify=verify if drafted else 0,
            ngram=False,
            run_ahead=True,
        )
        if not drafted:
            return Engine(pair.plain_target, None, config)
        device = pair.target.kernels.device
        accept = PrescribedAcceptance(pair.model.alpha, 2 * batch, device, arguments.seed)
        return Engine(pair.target, pair.drafter, config, accept=accept)

    def conditions(self, *, drafted: bool) -> str:
        alpha = self.loaded.model.alpha
        few = f" in {self.arguments.quantize}" if self.arguments.quantize else ""
        few += " and activations too" if self.arguments.activations else ""
        text = f"random weights{few}, "
        text += f"prescribed acceptance {alpha} per slot" if drafted else "plain decoding"
        if self.routing is not None:
            text += f", {self.routing.name_of_routing} routing"
        return f"{text}; {self.trial}" if self.trial else text

    # -- sections ------------------------------------------------------------------------------

    def load_model(self, record: Record, deadline: Deadline) -> None:
        """Bandwidth of the device, then target and drafter."""
        arguments = self.arguments
        model = MODELS[arguments.model]
        model = tiny(model) if arguments.tiny else model
        model = model if arguments.layers is None else first_layers(model, arguments.layers)
        weights = WeightOptions(quantize=arguments.quantize, activations=arguments.activations)
        kernels = select_kernels(arguments.device, arguments.dtype, weights=weights)
        record["kernels"] = kernels.name
        record["bandwidth"] = measure_bandwidth(kernels.device)
        free_memory()
        self.read_tb_s = record["bandwidth"]["read_tb_s"]
        config = model.target_config()
        if config.experts is not None:
            experts, most = config.experts, 2 * arguments.step_tokens
            self.routing = Routing(
                kernels, experts.num_experts, experts.num_chosen, most, arguments.seed
            )
            kernels = self.routing.kernels
        self.pair = build_pair(model, kernels, arguments.seed)
        record["model"] = self.pair.facts
        self.say(f"read {self.pair.facts}, {record['bandwidth']}")

    def measure(
        self,
        record: Record,
        deadline: Deadline,
        *,
        drafted: bool,
        verify: int | None = None,
        cold: bool = False,
        profiled: tuple[int, ...] = (),
    ) -> None:
        """Load at every concurrency, and kernel tables."""
        arguments = self.arguments
        build, before = partial(self.engine, drafted=drafted, verify=verify), _allocated_gb()
        record["conditions"] = self.conditions(drafted=drafted)
        if cold:
            record["triton_cache_was_empty"] = _triton_cache_is_empty()
            started = cold_start(build, PROMPT_TOKENS, arguments.seed)
            engine, record["cold_start"] = started.engine, started.found
            self.say(f"cold start {started.found}")
        else:
            engine = build()
        prepare(engine)  # as a server does before it is ready
        record["engine"] = _describe_engine(engine)
        engine_gb = round(_allocated_gb() - before, 2)  # cache and state; graphs come later
        rows = record["load"] = {}
        for count in arguments.concurrency if verify is None else arguments.concurrency[:1]:
            if deadline.seconds_left <= 0:
                record.setdefault("skipped", []).append(f"load c={count}")
                continue
            rows[f"c={count}"] = row = self._load_row(engine, count, drafted)
            median = row["median"]
            self.say(
                f"c={count}: {median['tok_s']} tok/s, steady {median.get('steady_tok_s')}, "
                f"step {median.get('step_ms')} ms, {median['accepted_length']} tokens a step, "
                f"widths {median.get('verify_widths')}"
            )
        record["memory"] = {"engine_gb": engine_gb, **_memory()}
        tables = record["profile"] = {}
        for count in profiled:
            if count not in arguments.concurrency or deadline.seconds_left <= 0:
                record.setdefault("skipped", []).append(f"profile c={count}")
                continue
            tables[f"c={count}"] = {
                "conditions": record["conditions"],
                **profile_steps(
                    engine, count, PROMPT_TOKENS, seed=arguments.seed + 77, num_steps=5
                ),
            }
            self.say(f"profile c={count}: {tables[f'c={count}']['kernels_ms_per_step']} ms a step")

    def _load_row(self, engine: Engine, count: int, drafted: bool) -> Record:
        arguments = self.arguments
        tokens = arguments.new_tokens_alone if count == 1 else arguments.new_tokens
        row: Record = {"conditions": self.conditions(drafted=drafted)}
        row |= measure_load(
            engine,
            count,
            PROMPT_TOKENS,
            tokens,
            seed=arguments.seed,
            repeats=2 * arguments.repeats + 1 if drafted else arguments.repeats,
            warm_up_tokens=tokens if drafted else min(tokens, WARM_UP_TOKENS_PLAIN),
        )
        median, experts = row["median"], 0.0
        if drafted:
            alpha = self.loaded.model.alpha
            row["accepted_length_if_15_verified"] = round(expected_length(alpha, MAX_VERIFY), 3)
        if "step_ms" not in median:
            return row
        if self.routing is not None:
            experts = self.routing.distinct_experts(round(median["rows_per_step"]))
            row["distinct_experts_per_layer"] = round(experts, 1)
        row["bytes"] = count_bytes(
            engine,
            self.loaded.drafter.config if drafted else None,
            requests=count,
            context=PROMPT_TOKENS + tokens / 2,
            experts=experts,
            step_s=median["step_ms"] / 1e3,
            read_tb_s=self.read_tb_s,
            scheme=self.arguments.quantize,
        )
        return row

    def measure_resident(self, record: Record, deadline: Deadline) -> None:
        """Memory with the drafter and one request of a long context, prompt and answer."""
        context, cache_gb = RESIDENT[self.arguments.model]
        context = min(context, self.loaded.target.config.max_position)
        free_memory()
        engine = self.engine(drafted=True, context=context, cache_gb=cache_gb, chunk=RESIDENT_CHUNK)
        record["conditions"] = self.conditions(drafted=True)
        record["engine"] = _describe_engine(engine)
        new_tokens = min(64, context // 4)
        record["context"] = measure_context(
            engine, context - 2 * new_tokens, new_tokens, seed=self.arguments.seed, repeats=1
        )
        record["memory"] = _memory()
        self.say(f"resident with a context of {context}: {record['memory']}")

    def measure_contexts(self, record: Record, deadline: Deadline, *, drafted: bool) -> None:
        """Prefill and step times of one request, by the length of its context."""
        lengths = sorted(self.arguments.contexts)
        # a fixed width, so that steps differ by nothing but their context
        verify = MAX_VERIFY if drafted else None
        engine = self.engine(drafted=drafted, verify=verify, context=lengths[-1] + 512)
        record["conditions"] = self.conditions(drafted=drafted)
        record["engine"] = _describe_engine(engine)
        rows: Record = {}
        record["contexts"] = rows
        per_step = expected_length(self.loaded.model.alpha, MAX_VERIFY)
        tokens = round(CONTEXT_STEPS_DRAFTED * per_step) if drafted else CONTEXT_TOKENS_PLAIN
        expected = 0.0
        for place, length in enumerate(lengths):
            if expected > max(0.0, deadline.seconds_left):
                skipped = f"context {length}: its prefill would take about {expected:.0f} s"
                record.setdefault("skipped", []).append(skipped)
                continue
            row = measure_context(
                engine,
                length,
                tokens,
                seed=self.arguments.seed + place,
                repeats=2 if length <= 8192 else 1,
            )
            rows[str(length)] = {"conditions": record["conditions"], **row}
            self.say(
                f"context {length}: prefill {row['prefill_s']} s ({row['prefill_tflops_s']} "
                f"TFLOP/s), step {row.get('step_ms')} ms"
            )
            if place + 1 < len(lengths):
                expected = row["prefill_s"] * (lengths[place + 1] / length) ** 1.3
        record["memory"] = _memory()

    def with_routing(self, function: Callable[..., None], is_uniform: bool) -> Callable[..., None]:
        """The section under one kind of routing."""

        def run(record: Record, deadline: Deadline) -> None:
            if self.routing is None:
                raise RuntimeError("the model could not be loaded: see its section")
            self.routing.is_uniform = is_uniform
            function(record, deadline)

        return run

    def sections(self) -> dict[str, Callable[..., None]]:
        """What is measured for the chosen model, in order."""
        name = self.arguments.model
        if name == "real":
            return {"real tasks": self.run_tasks, "real exact": self.run_exact}
        drafted = partial(self.measure, drafted=True)
        plain = partial(self.measure, drafted=False, profiled=(1, 8, 32))
        fixed = partial(self.measure, drafted=True, verify=MAX_VERIFY)
        if self.arguments.quantize:
            too = ", activations too" if self.arguments.activations else ""
            return self._quantized_sections(f"{name} {self.arguments.quantize}{too}")
        found: dict[str, Callable[..., None]] = {f"{name} load": self.load_model}
        if name == "31b":
            found |= {
                "31b drafted": partial(drafted, cold=True, profiled=(1, 8, 32)),
                "31b fixed": fixed,
                "31b plain": plain,
                "31b contexts drafted": partial(self.measure_contexts, drafted=True),
                "31b contexts plain": partial(self.measure_contexts, drafted=False),
            }
            return found
        for routing in ("degenerate", "uniform"):
            with_routing = partial(self.with_routing, is_uniform=routing == "uniform")
            cold = routing == "degenerate"
            found[f"26b drafted {routing}"] = with_routing(
                partial(drafted, cold=cold, profiled=(1, 8, 32))
            )
            found[f"26b fixed {routing}"] = with_routing(fixed)
            found[f"26b plain {routing}"] = with_routing(plain)
        return found

    def _quantized_sections(self, label: str) -> dict[str, Callable[..., None]]:
        plain = partial(self.measure, drafted=False, profiled=(1, 8, 32))
        drafted = partial(self.measure, drafted=True, profiled=(1,))
        found: dict[str, Callable[..., None]] = {f"{label} load": self.load_model}
        if self.arguments.model == "31b":
            found |= {f"{label} plain": plain, f"{label} drafted": drafted}
        else:
            for routing in ("degenerate", "uniform"):
                with_routing = partial(self.with_routing, is_uniform=routing == "uniform")
                found[f"{label} plain {routing}"] = with_routing(plain)
                found[f"{label} drafted {routing}"] = with_routing(drafted)
        return found | {f"{label} resident": self.measure_resident}

    def run_tasks(self, record: Record, deadline: Deadline) -> None:
        record["conditions"] = "real weights, real prompts, greedy"
        measure_tasks(self._real_settings(), record, deadline, self.say)

    def run_exact(self, record: Record, deadline: Deadline) -> None:
        record["conditions"] = "real weights, real prompts, greedy; exact=True and the default"
        measure_exact(self._real_settings(), record, self.say)

    def _real_settings(self) -> RealSettings:
        arguments = self.arguments
        return RealSettings(
            arguments.target,
            arguments.bench,
            arguments.device,
            arguments.dtype,
            arguments.prompts,
            arguments.tokens,
            arguments.exact_prompts,
            arguments.seed,
        )

    def run_section(self, name: str, function: Callable[..., None]) -> bool:
        """Run a section, record how it went, and free what it held."""
        self.say(f"section {name}")
        begin = time.perf_counter()
        device = torch.device("cuda" if self._on_gpu else "cpu")
        record: Record = {
            "status": "ok",
            "environment": {
                **describe_environment("benchmarks.h200", device),
                "cuda": torch.version.cuda,
                "triton": _version("triton"),
                "seed": self.arguments.seed,
                "tiny": self.arguments.tiny,
            },
        }
        with collect_logs() as warnings:
            try:
                function(record, Deadline(begin + self.arguments.section_seconds))
            except Exception as error:
                record["status"] = "failed"
                record["error"] = f"{type(error).__name__}: {error}"[:2000]
                traceback.print_exc()
        if record.get("skipped"):
            record["status"] = "cut short" if record["status"] == "ok" else record["status"]
        if warnings:
            record["warnings"] = sorted(set(warnings))
        record["seconds"] = round(time.perf_counter() - begin, 1)
        self._keep(name, record)
        self.say(f"section {name}: {record['status']}, {record['seconds']} s")
        free_memory()
        return record["status"] != "failed"

    def _keep(self, name: str, record: Record) -> None:
        """Into the results file; a trial into one of its own, if any, under another name."""
        if not self.trial:
            merge_section(self.arguments.output, name, record)
            return
        num_layers = 1 if self.pair is None else len(self.pair.target.config.layers)
        print(summarize(name, record, num_layers), flush=True)
        said = record.get("conditions", "")
        if self.trial not in said:
            record["conditions"] = f"{said}; {self.trial}" if said else self.trial
        if self.arguments.output is not None:
            merge_section(self.arguments.output, f"{name}, trial", record)

    @property
    def _on_gpu(self) -> bool:
        return self.arguments.device != "cpu" and torch.cuda.is_available()


def _describe_engine(engine: Engine) -> Record:
    config = engine.config
    names = ("max_batch", "max_context", "max_step_tokens", "prefill_chunk", "verify")
    return {name: getattr(config, name) for name in names} | {"cache_gb": config.cache.cache_gb}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _allocated_gb() -> float:
    return torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def _memory() -> Record:
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_gb": round(_allocated_gb(), 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "device_used_gb": round((total - free) / 1e9, 2),
    }


def _triton_cache_is_empty() -> bool:
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return not folder.is_dir() or not any(folder.iterdir())
