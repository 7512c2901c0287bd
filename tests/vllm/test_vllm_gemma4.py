"""A Gemma 4 drafter in vLLM: its draft logits are ours with the plugin, and not without.

Run here: vLLM's CPU runner (V1, eager, float32), a tiny random Gemma 4 with sliding and full layers
and a drafter of full layers. Not run here, for want of a GPU: the V2 runner, CUDA graphs, bfloat16,
and drafters that mix sliding and full layers, as z-lab's do; benchmarks/vllm_gemma4.py does those.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm import gemma_pair
from tests.vllm.vllm_processes import run_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MAX_TOKENS = 10
SCRIPT = Path(__file__).parent / "record_drafts.py"
# rounding of float32 in two orders of sums; the soft cap keeps logits below 2
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return gemma_pair.write_pair(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Shorter and longer than the target's window of 20."""
    source = random.Random(1)
    return [[source.randrange(4, gemma_pair.VOCAB) for _ in range(n)] for n in (5, 40, 70)]


def record(python: Path, pair: tuple[Path, Path], prompts: Any, **changes: str) -> dict[str, Any]:
    folder = pair[0].parent
    job = {
        "target": str(pair[0]),
        "drafter": str(pair[1]),
        "prompts": prompts,
        "max_tokens": MAX_TOKENS,
        "num_draft_tokens": gemma_pair.BLOCK_SIZE - 1,
        "options": {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 1,
            "enforce_eager": True,
        },
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    done = run_python(
        python,
        [str(SCRIPT), str(folder / "job.json"), str(folder / "out.json")],
        400,
        PYTHONPATH=str(SCRIPT.parent),
        **changes,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


def compare(
    recorded: dict[str, Any], pair: tuple[Path, Path], prompts: list[list[int]]
) -> tuple[float, float]:
    """The largest difference of a draft logit, and the share of equal draft tokens."""
    ours = gemma_pair.OurPair(*pair)
    largest, same = 0.0, list[bool]()
    for prompt, case in zip(prompts, recorded["cases"], strict=True):
        tokens = prompt + case["answer"]
        assert len(case["answer"]) == MAX_TOKENS and len(case["blocks"]) > 1
        for block in case["blocks"]:
            place, theirs = block["position"], torch.tensor(block["logits"])
            if place >= len(tokens):  # drafted after the last token that was wanted
                continue
            assert block["anchor"] == tokens[place]
            mine = ours.draft_logits(tokens[:place], block["anchor"])
            largest = max(largest, float((mine - theirs).abs().max()))
            same += (mine.argmax(-1) == theirs.argmax(-1)).tolist()
    assert len(same) >= 10 * (gemma_pair.BLOCK_SIZE - 1)
    return largest, sum(same) / len(same)


def test_with_the_plugin_draft_logits_are_ours(
    vllm_python: Path, pair: tuple[Path, Path], prompts: list[list[int]]
) -> None:
    recorded = record(vllm_python, pair, prompts)
    assert recorded["model_class"].startswith("flashdraft.external.vllm_plugin.")
    largest, same = compare(recorded, pair, prompts)
    print(f"with the plugin: largest difference {largest:.2g}, same draft tokens {same:.1%}")
    assert largest < TOLERANCE and same > 0.99


def test_without_the_plugin_they_differ(
    vllm_python: Path, pair: tuple[Path, Path], prompts: list[list[int]]
) -> None:
    recorded = record(vllm_python, pair, prompts, VLLM_PLUGINS="none")
    assert recorded["model_class"].startswith("vllm.")
    largest, same = compare(recorded, pair, prompts)
    print(f"without it: largest difference {largest:.2g}, same draft tokens {same:.1%}")
    assert largest > 0.5 and same < 0.8
