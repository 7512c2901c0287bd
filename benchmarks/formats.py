"""What weights in few bits cost in quality on the default pair, format by format.

    python -m benchmarks.formats --output benchmarks/results/formats_cpu.json
    python -m benchmarks.formats --activations --output FILE.json   # 8 bits, and activations too
    python -m benchmarks.formats --docs   # the committed results become the tables of the docs

The reference, bf16, is the shipped Q4_1 GGUF file dequantised and rounded to bfloat16; every other
format is made from these values. GGUF formats are written as real files and loaded as any other.
int4, int8 and fp8 are `quantize` on a GPU; on the CPU, where `dtype` alone decides, their values
come in a float32 file, and the drafter's likewise. Measured for each: perplexity, most likely
tokens and divergence against bf16 over the same tokens, and greedy answers, plain and drafted.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.accepted_length import describe_environment, report_progress, write_results
from benchmarks.formats_files import (
    FALLBACKS,
    FORMATS,
    REFERENCE,
    ROUNDED,
    Checkpoint,
    Format,
    make_checkpoint,
)
from benchmarks.formats_measure import (
    ROWS_AT_ONCE,
    Answers,
    Text,
    answer_prompts,
    compare_texts,
    describe_answers,
    plain_engine,
    read_text,
    sample_texts,
)
from benchmarks.formats_table import table, write_docs
from flashdraft import LLM
from flashdraft.engine.engine import Engine
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.kernels.cpu.backend import CpuKernels
from flashdraft.kernels.kinds import Scheme
from flashdraft.kernels.quantized import Matrix, round_rows
from flashdraft.llm import loaded
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.drafter.model import PackedDrafter
from flashdraft.models.drafter.opening import read_drafter_config
from flashdraft.models.gguf.file import GGUFFile
from flashdraft.models.sources import default_drafter, resolve_source
from tests.prompts import PROMPTS

MODEL = "smollm2-135m"
LICENSE = Path(__file__).parents[1] / "LICENSE"
LICENSE_TOKENS = 900
MAX_TOKENS = 96
_TRITON_BACKEND = "flashdraft.kernels.cuda.backend"
_TRITON_LAYOUT = "flashdraft.kernels.cuda.quantized.layout"


class RoundingKernels(CpuKernels):
    """The CPU's kernels in float32, and before weights from `pack` rows as a GPU rounds them."""

    def __init__(self, activations: Scheme) -> None:
        super().__init__(quantize=False)
        self.activations = activations
        self._before: dict[int, Any] = {}

    def pack(self, *parts: Matrix, quantize: bool = True) -> Any:
        weight = super().pack(*parts, quantize=quantize)
        if quantize:
            self._before[id(weight)] = weight
        return weight

    def pack_head(self, *parts: Matrix) -> Any:
        return super().pack(*parts)

    def pack_drafter(self, *parts: Matrix) -> Any:
        return super().pack(*parts)

    def linear(self, x: Tensor, weight: Any) -> Tensor:
        if id(weight) in self._before:
            x = round_rows(x, self.activations)
        return super().linear(x, weight)


@contextmanager
def rounding(activations: Scheme) -> Iterator[None]:
    """Models that are loaded meanwhile have such kernels: no CPU is told to round so."""
    select = loaded.select_kernels
    loaded.select_kernels = lambda *given: RoundingKernels(activations)
    try:
        yield
    finally:
        loaded.select_kernels = select


class Bench:
    """Measures one format after the other against the first."""

    def __init__(self, device: str, max_tokens: int = MAX_TOKENS) -> None:
        self._device = device
        self._max_tokens = max_tokens
        self._prompts: list[list[int]] = []
        self._texts: dict[str, list[Text]] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._answers: Answers | None = None

    def measure(self, form: Format, checkpoint: Checkpoint) -> dict[str, Any]:
        """One row of the results."""
        llm = self._load(form, checkpoint)
        engine = plain_engine(llm.engine.target)
        if not self._texts:
            self._prepare(llm, engine)
        row = {"format": form.name, "bits": checkpoint.bits, "held_as": checkpoint.held_as}
        row["texts"] = {
            name: compare_texts(texts, self._rows[name], lambda text: read_text(engine, text))
            for name, texts in self._texts.items()
        }
        answers = self._answer(engine, checkpoint)
        self._answers = self._answers or answers
        row["answers"] = describe_answers(answers, self._answers)
        if llm.kernels.device.type == "cuda":
            row["num_packed"] = count_packed(form)
            del llm, engine
            gc.collect()
            exact = plain_engine(self._load(form, checkpoint, exact=True).engine.target)
            row["answers_exact"] = describe_answers(self._answer(exact, checkpoint))
        return row

    def _load(self, form: Format, checkpoint: Checkpoint, exact: bool = False) -> LLM:
        on_gpu = self._device.startswith("cuda")
        if form.activations is not None and not on_gpu:
            with rounding(form.activations):
                return self._load(replace(form, activations=None), checkpoint, exact)
        return LLM(
            checkpoint.target,
            draft=checkpoint.drafter,
            verify=0,  # the engines that measure are made around the target
            device=self._device,
            dtype=form.dtype or ("bfloat16" if on_gpu else "float32"),
            quantize=form.scheme if on_gpu else None,
            activations=form.activations,
            exact=exact,
            max_batch=1,
            max_context=64,
            cache_gb=0.1,
        )

    def _prepare(self, llm: LLM, engine: Engine) -> None:
        """The texts that all formats read, and the reference's word on them."""
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise FlashdraftError(f"{llm.model} has no tokenizer; the prompts are text.")
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        self._prompts = [llm.chat_prompt(messages) for messages in chats]
        license_ids = tokenizer.encode(LICENSE.read_text(encoding="utf-8"))[:LICENSE_TOKENS]
        self._texts = {
            "answers": sample_texts(engine, self._prompts, self._max_tokens),
            "license": [Text(license_ids, 1)],
        }
        self._rows = {
            name: [read_text(engine, text) for text in texts] for name, texts in self._texts.items()
        }

    def _answer(self, engine: Engine, checkpoint: Checkpoint) -> Answers:
        target = engine.target
        drafter = PackedDrafter(load_drafter(checkpoint.drafter, target.config), target.kernels)
        return answer_prompts(engine, drafter, self._prompts, self._max_tokens)


def run(
    source: GGUFFile,
    drafter: Path,
    bench: Bench,
    folder: Path,
    on_gpu: bool,
    keep: bool,
    forms: Sequence[Format] = FORMATS,
) -> Iterator[dict[str, Any]]:
    """The rows of all these formats that the device has."""
    for form in forms:
        if form.dtype is not None and on_gpu:
            continue
        report_progress(f"{form.name}: writing the checkpoint")
        checkpoint = make_checkpoint(form, source, drafter, folder, on_gpu)
        report_progress(f"{form.name}: measuring")
        yield bench.measure(form, checkpoint)
        gc.collect()
        if not keep:
            checkpoint.target.unlink()


def breaks_law(row: Mapping[str, Any], on_gpu: bool) -> bool:
    """Whether drafted answers differ from plain ones where they must not."""
    return bool(row["answers_exact" if on_gpu else "answers"]["num_parted"])


def describe_settings(on_gpu: bool, max_tokens: int, verify: int) -> dict[str, str]:
    """What the figures depend on besides the machine."""
    fallbacks = ", ".join(f"{other} for {named}" for named, other in FALLBACKS.items())
    settings = {
        "model": f"{MODEL}: bf16 is the shipped Q4_1 GGUF file dequantised (its table is Q8_0) and "
        "rounded to bfloat16; all formats are made from these values, which lie near a 4-bit grid",
        "drafter": f"the shipped one for {MODEL}; with int8 and fp8 in that format, with int4 int8",
        "gguf": "one format for all matrices of the layers; rows that 256 does not divide get "
        f"{fallbacks}, and the head with its tied table Q8_0, as llama.cpp does",
        "dtype": "bfloat16" if on_gpu else "float32; with dtype int8 int8, activations too",
        "bits": "a weight over all matrices, in the file or as quantised, scales included",
        "answers": f"sampled by bf16 at temperature 1 to the {len(PROMPTS)} prompts of "
        f"tests/prompts.py, {max_tokens} tokens at most, seeds 0 to {len(PROMPTS) - 1}",
        "license": f"the first {LICENSE_TOKENS} tokens of LICENSE",
        "decoding": f"greedy, {max_tokens} tokens at most; plain against whole blocks of the "
        f"drafter, verify length {verify}; accepted length pooled, tokens over decode steps",
    }
    if on_gpu:
        return settings | {
            "small_weights": "MIN_QUANTIZED_VALUES lowered to 0: this model's weights are small, "
            "and would become bfloat16",
            "rows": f"at most {ROWS_AT_ONCE} where texts are read and blocks verified, so "
            "that the kernels which read the codes are measured",
        }
    return settings | {
        "quantize": "int8, fp8 and int4 by their dequantised values in a float32 file: on the CPU "
        "dtype alone decides",
        "activations": "rows before the target's linears, but for its head, rounded in float32 as "
        "a GPU rounds them",
    }


def hold_small_weights() -> None:
    """Let weights of any size stay quantised on a GPU; all of this model's are small."""
    backend: Any = importlib.import_module(_TRITON_BACKEND)
    backend.MIN_QUANTIZED_VALUES = 0


def count_packed(form: Format) -> int:
    """Weights that lie packed on the GPU now; a format that is measured must have some."""
    packed = importlib.import_module(_TRITON_LAYOUT).PackedWeight
    count = sum(type(one) is packed for one in gc.get_objects())
    if count == 0 and form is not REFERENCE:
        raise FlashdraftError(f"{form.name}: every weight became bfloat16 on this GPU.")
    return count


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quality of the default pair by weight format.")
    parser.add_argument("--model", default=MODEL, help=f"{MODEL}, or where its GGUF file lies")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--activations", action="store_true", help="8 bits, and activations too")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here; about 2 GB")
    parser.add_argument("--docs", action="store_true", help="write the docs' tables and leave")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all formats; 1 where drafted answers differ that must not."""
    options = parse_arguments(arguments)
    on_gpu = options.device == "cuda"
    try:
        if options.docs:
            write_docs()
            return 0
        if on_gpu and not torch.cuda.is_available():
            raise RequestError(
                "device is 'cuda', but torch finds no CUDA device; use --device cpu."
            )
        name = default_drafter(MODEL)
        assert name is not None, f"{MODEL} ships with a drafter"
        drafter = resolve_source(name).path
        source = GGUFFile(resolve_source(options.model).path)
        if on_gpu:
            hold_small_weights()
        verify = read_drafter_config(drafter).block_size - 1
        document: dict[str, Any] = {
            "environment": describe_environment("benchmarks.formats", torch.device(options.device)),
            "settings": describe_settings(on_gpu, MAX_TOKENS, verify),
            "rows": [],
        }
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.folder or Path(scratch)
            bench = Bench(options.device)
            settings = bench, folder, on_gpu, options.folder is not None
            forms = ROUNDED if options.activations else FORMATS
            for row in run(source, drafter, *settings, forms):
                document["rows"].append(row)
                write_results(options.output, document)
    except (FlashdraftError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(document)))
    broken = [row["format"] for row in document["rows"] if breaks_law(row, on_gpu)]
    if broken:
        print(f"error: drafted answers differ in {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
