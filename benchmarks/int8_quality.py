"""What int8 costs in quality on the default target: perplexity and top-1 agreement with float32.

    python -m benchmarks.int8_quality --output benchmarks/results/int8_quality.json

Both formats read the same tokens (teacher forcing): answers that float32 sampled at temperature 1
to tests/prompts.py, and the opening of the LICENSE file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdraft import LLM, SamplingParams
from flashdraft.core import Request
from flashdraft.engine.policy import Draft
from flashdraft.engine.scheduler import Work
from flashdraft.engine.sequence import Sequence
from tests.prompts import PROMPTS

MODEL = "smollm2-135m"
LICENSE = Path(__file__).parent.parent / "LICENSE"


def logprobs(llm: LLM, ids: list[int]) -> Tensor:
    """Log-probabilities over the vocabulary after each token of ids: [len(ids), vocab]."""
    request = Request("quality", ids[:1], SamplingParams(), 0)
    sequence = Sequence(request, frozenset(), len(ids))
    book = llm.engine.book
    book.open(sequence, sequence.tokens)
    assert book.reserve(sequence, len(ids)), "the text does not fit the cache"
    work, rest = Work(sequence, 0, 1, emits=True), Draft(ids[1:], [])
    logits = llm.engine.runner.verify([work], [rest]).logits
    book.close(sequence)
    return logits.log_softmax(-1)


def compare(full: LLM, small: LLM, texts: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Perplexity of both and agreement over (ids, first position to score)."""
    loss = {"float32": 0.0, "int8": 0.0}
    agreed = count = 0
    divergence = 0.0
    for ids, first in texts:
        rows = slice(max(0, first - 1), len(ids) - 1)
        targets = torch.tensor(ids)[rows.start + 1 :].unsqueeze(1)
        a, b = logprobs(full, ids)[rows], logprobs(small, ids)[rows]
        loss["float32"] -= float(a.gather(1, targets).sum())
        loss["int8"] -= float(b.gather(1, targets).sum())
        agreed += int((a.argmax(-1) == b.argmax(-1)).sum())
        divergence += float((a.exp() * (a - b)).sum())
        count += len(targets)
    perplexity = {name: math.exp(total / count) for name, total in loss.items()}
    return {
        "tokens": count,
        "perplexity_float32": round(perplexity["float32"], 4),
        "perplexity_int8": round(perplexity["int8"], 4),
        "perplexity_ratio": round(perplexity["int8"] / perplexity["float32"], 4),
        "top1_agreement": round(agreed / count, 4),
        "mean_kl": round(divergence / count, 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="int8 against float32 on the default target.")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    full = LLM(MODEL, dtype="float32", device="cpu", draft=None)
    small = LLM(MODEL, dtype="int8", device="cpu", draft=None)
    tokenizer = full.tokenizer
    assert tokenizer is not None
    prompts = [full.chat_prompt([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    params = [SamplingParams(max_tokens=96, temperature=1.0, seed=i) for i in range(len(prompts))]
    answers = full.generate(prompts, params)
    chats = [(ids + a.token_ids, len(ids)) for ids, a in zip(prompts, answers, strict=True)]
    prose = tokenizer.encode(LICENSE.read_text())[:900]
    result = {
        "environment": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "command": "python -m benchmarks.int8_quality",
            "model": f"{MODEL} (real weights, Q4_1 GGUF dequantised; int8 quantises that again)",
            "seed": "0 to 19, one per prompt",
        },
        "rows": {
            "answers sampled by float32 to tests/prompts.py": compare(full, small, chats),
            "LICENSE, first 900 tokens": compare(full, small, [(prose, 1)]),
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
