"""What pictures cost Gemma 4 on a GPU: python -m benchmarks.h200_pictures [FILE.json]

The tower's time for pictures of several sizes that nobody has seen, from pixels in the host's
memory to features, as the engine has them made once it is prepared; and the time to a first token,
from the receipt of two JPEG files of 1280×720 that nobody has seen, with decoding them, the tower,
and a prompt of 500 tokens beside them, against that prompt alone.
Random weights. `--tiny` tries it out on a CPU: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import io
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.accepted_length import describe_environment, write_results
from benchmarks.h200_models import RandomSource, tower_shapes
from benchmarks.traffic.engines import Bench, EngineSpec, model_named, prepare
from benchmarks.traffic.workload import OWN_SAMPLING, made_up, random_tokens
from flashdraft.chat.pictures import place_pictures
from flashdraft.core import Request, SamplingParams
from flashdraft.engine.engine import Engine
from flashdraft.engine.pictures import PictureFeatures
from flashdraft.kernels.select import select_kernels
from flashdraft.media.pictures import PictureRules, open_picture
from flashdraft.models.vision.tower import Gemma4VisionTower
from flashdraft.models.weights import Weights

FORMAT = "flashdraft-pictures/1"
CELLS = {63: (7, 9), 266: (14, 19), 540: (20, 27), 1064: (28, 38)}  # rows and columns
TOGETHER = (1, 2, 4)  # pictures of 266 tokens in one pass
PROMPT_TOKENS, NUM_PICTURES, SIZE = 500, 2, (1280, 720)
WARM_UPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.h200_pictures")
    parser.add_argument("output", nargs="?", type=Path, metavar="FILE.json")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args(arguments)
    device, dtype = ("cpu", "float32") if found.tiny else ("cuda", "bfloat16")
    document: dict[str, Any] = {
        "format": FORMAT,
        "environment": describe_environment("benchmarks.h200_pictures", torch.device(device)),
        "seed": found.seed,
        "weights": "random",
        "tower_prepared_s": {},
        "tower": [],
    }
    for name in ("tiny",) if found.tiny else ("31b", "26b"):
        seconds, rows = measure_tower(name, device, dtype, found.rounds, found.seed)
        document["tower_prepared_s"][name] = seconds
        document["tower"] += rows
        write_results(found.output, document)
    name = "tiny-26b" if found.tiny else "26b"
    document["first_token"] = measure_first_token(name, device, dtype, found.rounds, found.seed)
    write_results(found.output, document)
    print(render(document), end="")
    return 0


# -- the tower -----------------------------------------------------------------------------------


def measure_tower(
    name: str, device: str, dtype: str, rounds: int, seed: int
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds to prepare; milliseconds of pictures of one size each, and of several at once."""
    config = model_named(name).target_config()
    vision = config.vision
    assert vision is not None
    kernels = select_kernels(device, dtype)
    shapes = tower_shapes(vision, config.hidden_size)
    weights = Weights(RandomSource(shapes, kernels.device, kernels.dtype, seed), lambda _: None)
    tower = Gemma4VisionTower(vision, config.hidden_size, weights, kernels)
    features = PictureFeatures(tower)
    seconds = milliseconds(features.prepare, device) / 1e3
    rows = []
    loads = [*((n, 1) for n in CELLS), *((266, n) for n in TOGETHER[1:])]
    for tokens, count in loads if device == "cuda" else loads[:1]:
        times = []
        for turn in range(rounds):
            names = [f"{seed}/{tokens}/{count}/{turn}/{n}" for n in range(count)]
            new = [made_up(vision, one, *CELLS[tokens]) for one in names]
            times.append(milliseconds(lambda pictures=new: features.of(pictures), device))
        row = {"model": name, "tokens": tokens, "pictures": count, "first_ms": times[0]}
        rows.append({**row, **spread(times[WARM_UPS:])})
    return round(seconds, 2), rows


# -- to a first token ----------------------------------------------------------------------------


def measure_first_token(
    name: str, device: str, dtype: str, rounds: int, seed: int
) -> dict[str, Any]:
    """Milliseconds from receipt to first token, with pictures and without, in turns."""
    bench = Bench.load(
        name,
        device=device,
        dtype=dtype,
        seed=seed,
        cache_gb=None,
        limits={},
        has_grammars=False,
    )
    routing = None if bench.routing is None else "uniform"
    result: dict[str, Any] = {}

    def work(engine: Engine) -> None:
        result["prepared_s"] = round(prepare(engine), 1)
        result.update(run_rounds(engine, rounds, seed))

    bench.use(EngineSpec(None, routing, 8, 4096, prefix_cache=True), work)
    return {"model": name, "routing": routing, "prompt_tokens": PROMPT_TOKENS, **result}


def run_rounds(engine: Engine, rounds: int, seed: int) -> dict[str, Any]:
    vision, vocab_size = engine.target.config.vision, engine.target.config.vocab_size
    assert vision is not None
    rules = PictureRules(vision.cell, vision.default_budget)
    chance, plain, shown, opening = np.random.default_rng(seed), [], [], []
    with ThreadPoolExecutor(NUM_PICTURES) as openers:
        for turn in range(rounds):
            files = [jpeg(chance) for _ in range(NUM_PICTURES)]
            dice = random.Random(f"prompt {seed}/{turn}")
            texts = [random_tokens(dice, min(vocab_size, 500), PROMPT_TOKENS) for _ in range(2)]
            begin = time.perf_counter()
            plain.append(first_token(engine, Request(f"text-{turn}", texts[0], params(), 1), begin))
            begin = time.perf_counter()
            pictures = list(openers.map(lambda data: open_picture(data, rules), files))
            opening.append(1e3 * (time.perf_counter() - begin))
            placed = place_pictures(
                [vision.tokens.picture] * NUM_PICTURES + texts[1], pictures, vision.tokens
            )
            request = Request(
                f"shown-{turn}", placed.token_ids, params(), 1, pictures=placed.pictures
            )
            shown.append(first_token(engine, request, begin))
    found = {"text": plain, "pictures": shown, "opening": opening}
    added = [with_them - text for with_them, text in zip(shown, plain, strict=True)][WARM_UPS:]
    return {
        "picture_tokens": sum(one.num_tokens for one in pictures),
        **{what: {"first_ms": all_[0], **spread(all_[WARM_UPS:])} for what, all_ in found.items()},
        "added": spread(added),
    }


def params() -> SamplingParams:
    return SamplingParams(max_tokens=2, ignore_eos=True, **OWN_SAMPLING)


def jpeg(chance: np.random.Generator) -> bytes:
    """A file as a camera would write it: large shapes, and some noise."""
    width, height = SIZE
    coarse = chance.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    smooth = Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth).astype(np.int16) + chance.integers(-12, 13, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def first_token(engine: Engine, request: Request, begin: float) -> float:
    """Milliseconds from `begin` to the first token; the request is then run to its end."""
    engine.submit(request)
    seconds: float | None = None
    while engine.has_work:
        for event in engine.step():
            if event.token_ids and seconds is None:
                seconds = time.perf_counter() - begin
            if event.generation is not None and event.generation.error is not None:
                raise RuntimeError(event.generation.error)
    assert seconds is not None
    return 1e3 * seconds


# -- figures -------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], object], device: str) -> float:
    """Of one call, until the device has done it."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and both ends, without what the first rounds compile."""
    ordered = sorted(values)
    found = {"ms": statistics.median(ordered), "least_ms": ordered[0], "most_ms": ordered[-1]}
    return {name: round(value, 2) for name, value in found.items()}


def render(document: dict[str, Any]) -> str:
    prepared = (f"{name} {seconds:.1f}" for name, seconds in document["tower_prepared_s"].items())
    lines = [f"tower, prepared in s: {', '.join(prepared)}"]
    lines.append("tower, ms: pictures × tokens, median (least to most), the first call")
    for row in document["tower"]:
        lines.append(
            f"  {row['model']}: {row['pictures']} × {row['tokens']}: {row['ms']:.2f} "
            f"({row['least_ms']:.2f} to {row['most_ms']:.2f}), {row['first_ms']:.1f}"
        )
    found = document["first_token"]
    lines.append(
        f"first token, {found['model']}, {found['prompt_tokens']} tokens of text, two pictures of "
        f"{found['picture_tokens']} tokens, ms:"
    )
    for what in ("text", "pictures", "opening", "added"):
        row = found[what]
        line = f"  {what}: {row['ms']:.1f} ({row['least_ms']:.1f} to {row['most_ms']:.1f})"
        lines.append(line + (f", the first {row['first_ms']:.1f}" if "first_ms" in row else ""))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
