"""Records what the reference drafter (PyPI `dflash` 0.1.0) computes, for test_dflash_reference.py.

It needs an environment of its own, because the package pins its dependencies:

    python3 -m venv reference
    reference/bin/pip install torch==2.13.0 transformers==5.15.0
    reference/bin/pip install --no-deps dflash==0.1.0
    reference/bin/python tests/parity/make_dflash_fixture.py

One set of random weights serves every case; a case is a config.json. Each runs several draft steps
with the reference's own cache, in float32.
"""

import json
from pathlib import Path

import torch
from dflash.model import (
    DFlashDraftModel,
    _crop_to,
    _draft_value,
    _make_cache,
    _raw_input_embeddings,
)
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3Config

FOLDER = Path(__file__).parent
HIDDEN, VOCAB, NUM_TAPS, MASK = 48, 64, 3, 4
NEW_TOKENS = (11, 5, 1, 8, 3)  # committed before each step
BLOCK_LENGTHS = (8, 8, 8, 8, 5)  # the last block is cut short, as at the end of an answer
MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
BASE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 8,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "layer_types": MIXED,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_target_layers": 12,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 6,  # shorter than the context and than a block
    "use_sliding_window": True,
    "vocab_size": VOCAB,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 5, 9]},
}
SCALING = {"input_embedding_scale": 7.0, "output_multiplier": 0.5, "final_logit_softcapping": 1.5}
CASES = {
    "mixed": BASE,
    "full": {**BASE, "layer_types": ["full_attention"] * 3, "use_sliding_window": False},
    "bidirectional": {**BASE, "is_causal": False},
    "causal": {**BASE, "is_causal": True},
    "scaled": {**BASE, "dflash_config": {**BASE["dflash_config"], **SCALING}},
}


class Vocabulary(nn.Module):
    """The two modules that the reference borrows from a target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens


def randomise(module: nn.Module) -> None:
    """Weights that bfloat16 holds exactly, norms away from 1."""
    for parameter in module.parameters():
        mean, deviation = (1, 0.3) if parameter.dim() == 1 else (0, parameter.shape[1] ** -0.5)
        values = mean + deviation * torch.randn(parameter.shape)
        parameter.data = values.bfloat16().float()


@torch.inference_mode()
def run(model: DFlashDraftModel, target: Vocabulary, taps, blocks) -> list[torch.Tensor]:
    """The draft logits of every step."""
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
        steps.append(model.compute_logits(hidden, target.lm_head)[0].contiguous())
    return steps


def main() -> None:
    torch.manual_seed(20260206)
    target = Vocabulary()
    randomise(target)
    body = DFlashDraftModel(Qwen3Config.from_dict(BASE))
    randomise(body)
    taps = torch.randn(sum(NEW_TOKENS), NUM_TAPS * HIDDEN)
    blocks = []
    for length in BLOCK_LENGTHS:
        ids = torch.full((length,), MASK)
        ids[0] = torch.randint(VOCAB, ())
        blocks.append(ids)

    tensors = {f"drafter.{k}": v.bfloat16() for k, v in body.state_dict().items()}
    tensors |= {f"target.{k}": v.bfloat16() for k, v in target.state_dict().items()}
    tensors["taps"] = taps
    tensors |= {f"block.{step}": ids for step, ids in enumerate(blocks)}
    for name, config in CASES.items():
        model = DFlashDraftModel(Qwen3Config.from_dict(config)).eval()
        model.load_state_dict(body.state_dict())
        for step, logits in enumerate(run(model, target, taps, blocks)):
            tensors[f"logits.{name}.{step}"] = logits
    save_file(tensors, FOLDER / "dflash_0_1_0.safetensors")
    document = {"cases": CASES, "new_tokens": NEW_TOKENS, "block_lengths": BLOCK_LENGTHS}
    (FOLDER / "dflash_0_1_0.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
