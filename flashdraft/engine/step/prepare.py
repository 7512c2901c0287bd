"""Before anybody comes: what steps take, and steps that are captured so that nobody waits for it.

All slots are empty, and what they write goes to the page of nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from flashdraft.engine.drafts import Draft
from flashdraft.engine.policy.width import WidthChooser
from flashdraft.engine.step.device import DeviceSteps
from flashdraft.engine.step.guide import StepGuide
from flashdraft.engine.step.shape import (
    BATCHES,
    MIXED_ROWS,
    PromptChunk,
    StepShape,
    smallest_batch,
)
from flashdraft.engine.streams import MOST_GRAPHS

log = logging.getLogger(__name__)

MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
NUM_FIRST = 8  # shapes that are captured before the passes that have prompts
MOST_PREPARED = MOST_GRAPHS - 16  # the others are for what nobody foresaw


def prepare_steps(
    steps: DeviceSteps, chooser: WidthChooser, at_once: int, max_rows: int, seconds: float
) -> None:
    """Have shapes of up to so many sequences captured, likeliest first, for about so long."""
    deadline = time.perf_counter() + seconds
    shapes = _likeliest(steps, chooser, at_once)
    for place, shape in enumerate(shapes[:MOST_PREPARED]):
        try:
            if place == NUM_FIRST:  # everybody has a prompt
                _prepare_prompts(steps, max_rows, deadline)
            while not steps.is_ready(shape) and time.perf_counter() < deadline:
                steps.launch(shape).read()
        except Exception as error:  # a step that is needed will say so itself
            log.warning("steps of %d requests cannot be prepared: %s", shape.batch, error)
            return
        if steps.is_failed(shape):  # memory, most likely: leave what there is
            return


def _prepare_prompts(steps: DeviceSteps, max_rows: int, deadline: float) -> None:
    """Have passes with prompts captured; their rows are of nobody."""
    slots, page_size = steps.slots, steps.page_size
    num_pages = min(-(-MIXED_ROWS[-1] // page_size), slots.max_pages)
    for pool, page in enumerate(steps.scratch_pages):
        places = slots.place_of(pool, 0) + np.arange(num_pages)
        slots.write_pages(places, np.full(num_pages, page))
    most = min(max_rows, num_pages * page_size)
    batches = {0, 1, slots.count}
    for batch, size in [(batch, size) for size in reversed(MIXED_ROWS) for batch in batches]:
        if batch < size <= most:
            chunk = PromptChunk(0, 0, [0] * (size - batch), emits=False)
            shape = StepShape(batch, 0, 0)
            while not steps.is_ready(shape, [chunk], size) and time.perf_counter() < deadline:
                steps.launch(shape, [chunk], longest=size).read()


def _likeliest(steps: DeviceSteps, chooser: WidthChooser, at_once: int) -> list[StepShape]:
    """Every batch's best guess first, for those who are all greedy and for others."""
    batches = [size for size in reversed(BATCHES) if size <= smallest_batch(at_once)]
    ranked = {batch: chooser.ranked(batch, steps.max_width) for batch in batches}
    most = max((len(widths) for widths in ranked.values()), default=0)
    return [
        _shape_of(steps, chooser, batch, ranked[batch][place], is_greedy)
        for place in range(most)
        for batch in batches
        if place < len(ranked[batch])
        for is_greedy in (True, False)
    ]


def _shape_of(
    steps: DeviceSteps, chooser: WidthChooser, batch: int, width: int, is_greedy: bool
) -> StepShape:
    shape = steps.shape_of(batch, width, is_greedy)
    # who verifies a fixed number needs no drafts beyond it
    return shape._replace(width=width) if chooser.fixed and width else shape


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
            shape = StepShape(batch, count - batch, max(drafts.values()), False, is_given=True)
            guide = StepGuide({}, {}, steps.slots.settings.vocab_size, given)
            step = steps.launch(shape, guide=guide, longest=most)
            step.read()
            if turn > 0:  # the first one warms up
                seconds = step.device_seconds.total
                times[count] = min(seconds, times.get(count, seconds))
    return times
