"""The training loop: batches in, a trained drafter out; logged, resumable, on many devices.

`Trainer` owns the optimizer, the gradient, the log and the states. What a batch is, how the loss is
computed and how a drafter is judged come from outside. On CUDA the host reads nothing from the
device but at every `log_every`-th step.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

import torch.distributed as dist

from flashdraft.errors import TrainingError
from flashdraft.interrupts import interrupt_between_steps
from flashdraft.models.drafter.model import Drafter
from flashdraft.train.fit.batches import PackedBatch, prefetch
from flashdraft.train.fit.meter import Meter
from flashdraft.train.fit.plot import LOG_NAME, draw_plot, keep_rows
from flashdraft.train.fit.schedule import (
    RunClock,
    TrainConfig,
    known_length,
    learning_rate,
    plan_length,
)
from flashdraft.train.fit.state import (
    Gradient,
    RunState,
    build_optimizers,
    drop_later,
    load_tensors,
    prune,
    read_state,
    resumable,
    save_state,
)
from flashdraft.train.fit.step import StepReport
from flashdraft.train.lock import make_folder

# settings that a resumed run may change: they say how long it is and what is seen of it
_LIMITS = ("epochs", "minutes", "steps", "decay_share")
_WATCHING = ("log_every", "evaluate_every", "save_every", "keep_last", "compile")
_log = logging.getLogger(__name__)

LogRow = dict[str, Any]


class BatchSource(Protocol):
    """Where batches come from: the same ones for the same epoch, split among processes."""

    def __len__(self) -> int: ...

    def batches(
        self, epoch: int, rank: int = 0, world: int = 1, skip: int = 0
    ) -> Iterator[PackedBatch]: ...


class Step(Protocol):
    """What adds a batch's gradient to the drafter's, and says how well it drafted."""

    def backward(self, batch: PackedBatch, *, scale: float) -> StepReport: ...


class Trainer:
    """Trains a drafter in place. `folder` holds the log, the plot and the states.

    `identity` is what makes the run this one besides its settings (data, loss, target, …): a stored
    state of another is not resumed.
    """

    def __init__(
        self,
        drafter: Drafter,
        step: Step,
        plan: BatchSource,
        config: TrainConfig,
        folder: Path,
        *,
        identity: Mapping[str, Any] | None = None,
        evaluate: Callable[[], Mapping[str, Any]] | None = None,
        report: Callable[[LogRow], None] = lambda row: None,
    ) -> None:
        self._drafter = drafter
        self._step = step
        self._plan = plan
        self._config = config
        self._folder = folder
        self._evaluate = evaluate
        self._report = report
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._batches_per_epoch = math.ceil(len(plan) / self._world)  # on every process
        self._steps_per_epoch = self._batches_per_epoch / config.accumulation
        self._gradient = Gradient(drafter)
        self._optimizers = build_optimizers(drafter, config)
        settings = {k: v for k, v in asdict(config).items() if k not in _LIMITS + _WATCHING}
        # as JSON gives them back
        self._settings: dict[str, Any] = json.loads(
            json.dumps({**settings, "world": self._world, **(identity or {})})
        )
        self._limits = {name: getattr(config, name) for name in _LIMITS}
        self._length = known_length(config, self._steps_per_epoch)
        self._done = 0  # steps
        self._saved_at: int | None = None
        self._clock = RunClock()
        self._meter = Meter()
        self._last_results: LogRow = {}

    def run(self) -> LogRow:
        """Train to the end, from the last state if there is one; return the last results."""
        make_folder(self._folder)
        self._resume()
        batches = prefetch(self._batches(), self._gradient.flat.device)
        # closing it ends the thread that makes batches ahead
        with (
            interrupt_between_steps(signal.SIGTERM) as is_interrupted,
            closing(cast(Generator[PackedBatch, None, None], batches)),
        ):
            while self._length is None or self._done < self._length.steps:
                self._train(batches)
                self._tend()
                if self._agree(is_interrupted()):
                    self._stop()
        if self._last_results.get("step") != self._done:
            self._judge()
        self._save()
        return self._last_results

    def _stop(self) -> None:
        self._save()
        if self._rank == 0:
            _log.warning(
                "Interrupted after step %d; its state is saved in %s. Run the same command again "
                "to resume.",
                self._done,
                self._folder,
            )
        raise KeyboardInterrupt

    # -- one step --------------------------------------------------------------------------------

    def _batches(self) -> Iterator[PackedBatch]:
        """This process's batches from where the run stands, epoch after epoch, without end."""
        start = self._done * self._config.accumulation
        epoch, number = divmod(start, self._batches_per_epoch)
        while True:
            yield from self._plan.batches(epoch, self._rank, self._world, skip=number)
            epoch, number = epoch + 1, 0

    def _train(self, batches: Iterator[PackedBatch]) -> None:
        config = self._config
        self._gradient.zero()
        for _ in range(config.accumulation):
            scale = 1.0 / (config.accumulation * self._world)
            self._meter.add(self._step.backward(next(batches), scale=scale))
        if self._world > 1:
            dist.all_reduce(self._gradient.flat)
        self._meter.add_norm(self._gradient.clip(config.clip))
        rate = learning_rate(config, self._length, self._done)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self._done += 1

    def _agree(self, interrupted: bool) -> bool:
        """Plan the end of a run with a budget, and decide to stop: the same on every process."""
        if self._world == 1 or self._done % self._config.log_every == 0:
            planned = self._length
            if planned is None and self._rank == 0:
                planned = plan_length(self._config, self._done, self._clock)
            if self._world > 1:
                said: list[Any] = [planned, interrupted]
                dist.broadcast_object_list(said, src=0)
                planned, interrupted = said
            self._length = planned
        else:
            interrupted = False
        if self._length is not None and self._done == self._length.decay_from:
            self._save()  # a longer run can go on from here
        return interrupted and (self._length is None or self._done < self._length.steps)

    # -- what is seen and kept -------------------------------------------------------------------

    def _tend(self) -> None:
        """Log, judge and save where it is time."""
        config = self._config
        if self._done % config.log_every == 0:
            self._write_row(self._measure())
        if config.evaluate_every and self._done % config.evaluate_every == 0:
            self._judge()
        if config.save_every and self._done % config.save_every == 0:
            self._save()

    def _measure(self) -> LogRow:
        row = self._meter.read()  # waits for the device
        seconds, steps = self._clock.lap(self._done)
        if not math.isfinite(row["loss"]):
            raise TrainingError(
                f"The loss is {row['loss']} after step {self._done}; lower --lr. The states saved "
                f"before that are whole, in {self._folder}."
            )
        config = self._config
        rows = steps * config.accumulation * self._world * config.rows
        elapsed, step_s = self._clock.elapsed(), self._clock.step_seconds(self._done)
        if self._length is not None:
            remaining = (self._length.steps - self._done) * step_s
        else:
            remaining = (config.minutes or 0) * 60 - elapsed
        return {
            "step": self._done,
            "epoch": round(self._done / self._steps_per_epoch, 4),
            **row,
            "learning_rate": learning_rate(config, self._length, self._done - 1),
            "tokens_per_s": round(rows / seconds, 1) if seconds > 0 else 0.0,
            "seconds": round(elapsed, 3),
            "remaining_s": round(max(0.0, remaining), 1),
            "steps": self._length.steps if self._length is not None else None,
        }

    def _judge(self) -> None:
        """Measure the held-out answers, and write down what came of it."""
        begin = time.perf_counter()
        results = dict(self._evaluate()) if self._evaluate is not None and not self._rank else {}
        self._clock.exclude(time.perf_counter() - begin)
        self._last_results = {"step": self._done, **results}
        if results:
            self._write_row(self._last_results)

    def _write_row(self, row: LogRow) -> None:
        if self._rank:
            return
        with self._log_written():
            with (self._folder / LOG_NAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if "accepted_length" in row:
                draw_plot(self._folder)
        self._report(row)

    @contextmanager
    def _log_written(self) -> Iterator[None]:
        """Say in words what keeps the log or its plot from being read or written."""
        try:
            yield
        except (OSError, ValueError, KeyError) as error:
            raise TrainingError(
                f"{self._folder / LOG_NAME} cannot be kept: {error}. Make room, or remove what is "
                "broken, and run the same command again; the states beside it are whole."
            ) from None

    def _save(self) -> None:
        if self._rank or self._saved_at == self._done:
            return
        self._saved_at = self._done
        state = RunState(
            self._done, self._clock.elapsed(), self._length, self._settings, self._limits
        )
        save_state(self._folder, state, self._drafter, self._optimizers)
        kept = {self._done} | (set() if self._length is None else {self._length.decay_from})
        prune(self._folder, self._config.keep_last, kept)

    def _resume(self) -> None:
        path = resumable(self._folder, self._limits, self._config, self._length)
        if path is None:
            if self._rank == 0:
                with self._log_written():
                    (self._folder / LOG_NAME).write_text("", encoding="utf-8")
            return
        state = read_state(path)
        for name, ours in self._settings.items():
            if state.settings.get(name, ours) != ours:  # a state may be older than the setting
                raise TrainingError(
                    f"The run in {self._folder} was started with {name} = "
                    f"{state.settings.get(name)!r}, this one has {ours!r}; use the same to resume "
                    "it, another --out folder, or --init-from to go on from its drafter."
                )
        load_tensors(path, self._drafter, self._optimizers)
        self._done = self._saved_at = state.step
        self._clock = RunClock(state.seconds, state.step)
        if state.limits == self._limits:
            self._length = state.length
        if self._world > 1:
            dist.barrier()  # all have read; now the first may remove
        if self._rank == 0:
            drop_later(self._folder, state.step)
            with self._log_written():
                rows = keep_rows(self._folder, state.step)
            judged = [row for row in rows if "accepted_length" in row]
            if judged and judged[-1]["step"] == state.step:
                self._last_results = judged[-1]
        _log.info("resumed from %s", path)
