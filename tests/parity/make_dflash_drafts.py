"""Records what the reference (PyPI `dflash` 0.1.0) drafts with the exported default drafter.

For test_dflash_drafts.py, and to be run again whenever the shipped drafter changes. It needs the
environment that make_dflash_fixture.py describes, with `pip install --no-deps gguf` to read the
default target; flashdraft itself is found in the repository's root, where it is run:

    reference/bin/python -m tests.parity.make_dflash_drafts

Our export writes the drafter, the reference loads the folder by its own from_pretrained
and answers prompts by its own loop, with transformers' Llama holding the default target's weights
in float32. Where two tokens are so close that rounding decides, the prompt is left out.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel
from transformers import LlamaConfig, LlamaForCausalLM

from flashdraft.models.loading import Checkpoint, open_checkpoint
from flashdraft.models.sources import default_drafter, resolve_source
from flashdraft.models.tokenizer import Tokenizer
from flashdraft.train.data.prompts import Prompt
from flashdraft.train.data.regenerate import prompt_ids
from flashdraft.train.export import export
from tests.prompts import PROMPTS

MODEL = "smollm2-135m"
RECORDING = Path(__file__).parent / "dflash_0_1_0_drafts.json"
NEW_TOKENS = 64
NUM_CASES = 8
LEAST_MARGIN = 1e-3  # between the best two logits; two float32 implementations differ by 1e-4


def load_target(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The default target as the reference wants it."""
    config = {k: v for k, v in checkpoint.raw_config.items() if k != "model_type"}
    target = LlamaForCausalLM(LlamaConfig(**config)).eval()
    names = checkpoint.source.names()
    state = {name: checkpoint.source.read(name).float() for name in names}
    missing, unexpected = target.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    target.tie_weights()
    return target


def margins(logits: torch.Tensor) -> torch.Tensor:
    """How far the best of every row is above the second."""
    best = logits.topk(2).values
    return best[..., 0] - best[..., 1]


@torch.inference_mode()
def answer(
    drafter: DFlashDraftModel, target: LlamaForCausalLM, prompt: list[int], stop: list[int]
) -> dict[str, Any] | None:
    """The draft tokens of every step and the answer; None where rounding could change them."""
    blocks: list[list[int]] = []
    closest: list[torch.Tensor] = []

    def compute_logits(hidden: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
        logits = DFlashDraftModel.compute_logits(drafter, hidden, head)
        blocks.append(logits[0].argmax(-1).tolist())
        closest.append(margins(logits).min())
        return logits

    drafter.compute_logits = compute_logits
    ids = drafter.spec_generate(target, torch.tensor([prompt]), NEW_TOKENS, stop)
    closest.append(margins(target(ids).logits[0, len(prompt) - 1 : -1]).min())
    if min(closest) < LEAST_MARGIN:
        return None
    return {"prompt": prompt, "drafts": blocks, "answer": ids[0, len(prompt) :].tolist()}


def main() -> None:
    checkpoint = open_checkpoint(resolve_source(MODEL).path)
    tokenizer = Tokenizer.from_checkpoint(checkpoint.path)
    target, stop = load_target(checkpoint), sorted(checkpoint.config.eos_token_ids)
    with tempfile.TemporaryDirectory() as parent:
        folder = export(default_drafter(MODEL), Path(parent) / "drafter", "zlab", MODEL)
        files = {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in ("config.json", "model.safetensors")
        }
        drafter, report = DFlashDraftModel.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    assert not any(report.values()), report  # every tensor found, and every one used
    cases: list[dict[str, Any]] = []
    for text in PROMPTS:
        if len(cases) == NUM_CASES:
            break
        case = answer(drafter, target, prompt_ids(tokenizer, Prompt.of(text, "")), stop)
        print("left out" if case is None else f"{len(case['drafts'])} steps", text[:60])
        cases += [] if case is None else [case]
    document = {
        "made_by": "reference/bin/python -m tests.parity.make_dflash_drafts",
        "files": files,
        "new_tokens": NEW_TOKENS,
        "cases": cases,
    }
    RECORDING.write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
