"""Records what the reference drafters with heads compute, for test_heads_reference.py.

DFlash 2 as PyPI's `dflash` 0.1.0 has it, DSpark's heads as `speculators` 0.9.0 has them. The
packages need an environment of their own:

    python3 -m venv reference
    reference/bin/pip install torch==2.13.0 transformers datasets loguru hs-connectors
    reference/bin/pip install --no-deps dflash==0.1.0 speculators==0.9.0
    reference/bin/python tests/parity/make_heads_fixture.py

DFlash 2 runs several draft steps with the reference's own cache, in float32; what its selector
chooses is recorded beside the logits. The heads of DSpark are recorded alone, on random rows: what
is below them is a plain drafter.
"""

import json
from pathlib import Path

import torch
from dflash.model import (
    DFlash2DraftModel,
    _crop_to,
    _draft_value,
    _make_cache,
    _raw_input_embeddings,
)
from make_dflash_fixture import (
    BASE,
    BLOCK_LENGTHS,
    HIDDEN,
    MASK,
    NEW_TOKENS,
    NUM_TAPS,
    SCALING,
    VOCAB,
    Vocabulary,
    randomise,
)
from safetensors.torch import save_file
from speculators.models.dspark.model_definitions import ConfidenceHead, MarkovHead
from transformers import Qwen3Config

FOLDER = Path(__file__).parent
RANK, TOP_K, ROWS = 6, 10, 5
SECOND = {
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": RANK,
    "selector_top_k": TOP_K,
}
CONFIG = {
    **BASE,
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {**BASE["dflash_config"], **SECOND, "block_size": 8},
}
CASES = {
    "second": CONFIG,
    "three_taps": {**CONFIG, "dflash_config": {**CONFIG["dflash_config"], "conv_kernel_size": 3}},
    "scaled": {**CONFIG, "dflash_config": {**CONFIG["dflash_config"], **SCALING}},
}


@torch.inference_mode()
def run(model, target, taps, blocks):
    """The draft logits and the chosen path of every step."""
    cache, start, steps = _make_cache(model.config), 0, []
    for new, ids in zip(NEW_TOKENS, blocks, strict=True):
        scale = float(_draft_value(model.config, "input_embedding_scale", 1.0))
        end = start + new + len(ids)
        hidden = model(
            target_hidden=taps[None, start : start + new],
            noise_embedding=_raw_input_embeddings(target, ids[None], scale),
            position_ids=torch.arange(start, end)[None],
            past_key_values=cache,
            use_cache=True,
        )
        start += new
        _crop_to(cache, start)
        path, _, _ = model.propose(hidden[:, 1:], ids[:1], target.lm_head, 0.0)
        steps.append((model.compute_logits(hidden, target.lm_head)[0].contiguous(), path[0]))
    return steps


def record_second(tensors):
    """DFlash 2, and what it chooses."""
    target = Vocabulary()
    randomise(target)
    taps = torch.randn(sum(NEW_TOKENS), NUM_TAPS * HIDDEN)
    blocks = []
    for length in BLOCK_LENGTHS:
        ids = torch.full((length,), MASK)
        ids[0] = torch.randint(VOCAB, ())
        blocks.append(ids)
    tensors |= {f"target.{k}": v.bfloat16() for k, v in target.state_dict().items()}
    tensors["taps"] = taps
    tensors |= {f"block.{step}": ids for step, ids in enumerate(blocks)}
    for name, config in CASES.items():
        model = DFlash2DraftModel(Qwen3Config.from_dict(config)).eval()
        randomise(model)
        stored = {
            k.replace("codebook.weight", "codebook"): v.bfloat16()
            for k, v in model.state_dict().items()
        }
        tensors |= {f"drafter.{name}.{k}": v for k, v in stored.items()}
        for step, (logits, path) in enumerate(run(model, target, taps, blocks)):
            tensors[f"logits.{name}.{step}"] = logits
            tensors[f"path.{name}.{step}"] = path


@torch.inference_mode()
def record_dspark(tensors):
    """DSpark's biases of a block's rows behind given tokens, and its confidence."""
    tensors["markov.hidden"] = hidden = torch.randn(1, ROWS, HIDDEN)
    tensors["markov.before"] = before = torch.randint(VOCAB, (1, ROWS))
    for kind in ("vanilla", "gated"):
        head = MarkovHead(
            verifier_vocab_size=VOCAB,
            draft_vocab_size=VOCAB,
            markov_rank=RANK,
            hidden_size=HIDDEN,
            head_type=kind,
        )
        randomise(head)
        tensors |= {f"markov.{kind}.weights.{k}": v for k, v in head.state_dict().items()}
        bias = head.block_bias(prev_token_ids=before, hidden_states=hidden)
        tensors[f"markov.{kind}.bias"] = bias[0].contiguous()
        for sees in (False, True):
            confidence = ConfidenceHead(HIDDEN + RANK * sees)
            randomise(confidence)
            rows = torch.cat([hidden, head.prev_embeddings(before)], dim=-1) if sees else hidden
            name = f"markov.{kind}.{'token' if sees else 'row'}"
            stored = confidence.state_dict().items()
            tensors |= {f"{name}.weights.{k}": v for k, v in stored}
            tensors[f"{name}.sure"] = confidence(rows).sigmoid()[0].contiguous()


def main() -> None:
    torch.manual_seed(20260818)
    tensors: dict[str, torch.Tensor] = {}
    record_second(tensors)
    record_dspark(tensors)
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, FOLDER / "heads.safetensors")
    document = {
        "cases": CASES,
        "new_tokens": NEW_TOKENS,
        "block_lengths": BLOCK_LENGTHS,
        "rank": RANK,
    }
    (FOLDER / "heads.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
