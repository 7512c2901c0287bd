"""Before anybody comes: what steps take, and steps that are captured so that nobody waits for it.

All slots are empty, and what they write goes to the page of nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np

from flashdraft.engine.drafts import Draft
from flashdraft.engine.policy.times import StepTimes
from flashdraft.engine.step.device import DeviceSteps
from flashdraft.engine.step.guide import StepGuide
from flashdraft.engine.step.shape import (
    FEW_SLOTS,
    LONE_ROWS,
    MAX_CHUNKS,
    MIXED_ROWS,
    PromptChunk,
    StepShape,
)

log = logging.getLogger(__name__)

NUM_TIMED = 2  # runs of a step once it is captured: the faster one counts
MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


def prepare_steps(steps: DeviceSteps, times: StepTimes, max_rows: int, seconds: float) -> None:
    """Have everything captured and timed that steps may need, largest first, for about so long."""
    deadline = time.perf_counter() + seconds
    for shape, chunks in planned_steps(steps, max_rows):
        longest = max((len(chunk.tokens) for chunk in chunks), default=None)
        try:
            while not steps.is_ready(shape, chunks, longest):
                if time.perf_counter() > deadline:
                    log.warning("after %.0f s not all steps are captured: some stall", seconds)
                    return
                steps.launch(shape, chunks, longest=longest).read()
            timed = [steps.launch(shape, chunks, longest=longest) for _ in range(NUM_TIMED)]
            timed[-1].read()
        except Exception as error:  # a step that is needed will say so itself
            log.warning("steps of %d requests cannot be prepared: %s", shape.batch, error)
            return
        finally:
            steps.slots.clear([0])
        if steps.is_failed(shape):  # memory, most likely: leave what there is
            return
        took = min((one.device_seconds for one in timed), key=lambda one: one.total)
        prompt_rows = sum(len(chunk.tokens) for chunk in chunks)
        pass_rows = shape.num_rows + prompt_rows if prompt_rows else 0
        times.remember(*shape[:3], took.draft, took.total - took.draft, pass_rows)
        steps.row_s = times.row_price() or steps.row_s


def planned_steps(steps: DeviceSteps, max_rows: int) -> list[tuple[StepShape, list[PromptChunk]]]:
    """Everything that is captured, largest first."""
    return [*_with_prompts(steps, max_rows), *_without(steps)]


def _without(steps: DeviceSteps) -> list[tuple[StepShape, list[PromptChunk]]]:
    """Steps without prompts."""
    widest = (
        one._replace(width=steps.widths_for(one.batch, one.num_rows)[-1])
        for one in steps.sizes.shapes
    )
    return [(one, []) for one in widest]


def _with_prompts(
    steps: DeviceSteps, max_rows: int
) -> Iterator[tuple[StepShape, list[PromptChunk]]]:
    """Passes with prompts, whose rows are of nobody, and which wake the first slot."""
    slots, page_size = steps.slots, steps.page_size
    num_pages = min(-(-max_rows // page_size), slots.max_pages)
    for pool, page in enumerate(steps.scratch_pages):
        places = slots.place_of(pool, 0) + np.arange(num_pages)
        slots.write_pages(places, np.full(num_pages, page))
    most = min(max_rows, slots.max_pages * page_size, steps.max_length)
    longest = min(max_rows, MAX_CHUNKS * most)
    for size in (longest, *(size for size in reversed(LONE_ROWS) if size < longest)):
        yield StepShape(0, 0), _chunks(size, most)
    for size in reversed(MIXED_ROWS):
        for batch in sorted({min(FEW_SLOTS, slots.count), slots.count}):
            num_rows = max(batch, size - max_rows)
            left = size - num_rows
            is_possible = num_rows <= batch * (1 + steps.max_width) and left > 0
            if is_possible and left <= MAX_CHUNKS * most:
                yield StepShape(batch, num_rows), _chunks(left, most)


def _chunks(num_rows: int, most: int) -> list[PromptChunk]:
    """So many rows of prompts for the first slot, which the last of them wakes."""
    cuts = [min(most, num_rows - first) for first in range(0, num_rows, most)]
    chunks = [PromptChunk(0, 0, [0] * count, False) for count in cuts]
    return [*chunks[:-1], chunks[-1]._replace(emits=True)]


def measure_rows(
    steps: DeviceSteps, counts: Sequence[int] = MEASURED_ROWS, repeats: int = 5
) -> dict[int, float]:
    """Seconds of a step over n rows, for each n: the fastest of a few, nothing kept.

    The counts take turns, so that a busy moment of the machine does not hit one of them alone.
    """
    times: dict[int, float] = {}
    most = 1 + steps.max_width  # rows of one slot
    for turn in range(repeats + 1):
        for count in counts:
            if count > steps.slots.count * most:
                continue
            batch = -(-count // most)
            drafts = {slot: min(most, count - slot * most) - 1 for slot in range(batch)}
            given = {slot: Draft([0] * n, [0.0] * n) for slot, n in drafts.items()}
            shape = StepShape(batch, count, max(drafts.values()), is_given=True)
            guide = StepGuide({}, {}, steps.slots.settings.vocab_size, given, lambda _, sure: sure)
            step = steps.launch(shape, guide=guide, longest=most)
            step.read()
            if turn > 0:  # the first one warms up
                seconds = step.device_seconds.total
                times[count] = min(seconds, times.get(count, seconds))
    return times
