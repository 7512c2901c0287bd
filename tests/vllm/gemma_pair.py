"""A tiny random Gemma 4 with a drafter for it, of sizes that vLLM's CPU kernels take, and ours.

All layers of the drafter see everything: vLLM's CPU runner refuses drafters that mix sliding and
full layers. The soft cap is low, so that it shows in random logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flashdraft.kernels.torch_backend import TorchKernels
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.attention import attend_sequence
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.loading import load_drafter, save_drafter
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.layers import Target
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.registry import build_target
from flashdraft.models.rope import Rope
from flashdraft.train.fit.batches import PackedBatch
from flashdraft.train.fit.features import TargetFeatures
from tests.zoo import CONFIGS, random_tensors

BLOCK_SIZE = 8
MASK_TOKEN = 3
VOCAB = 256
HIDDEN = 64
SOFTCAP = 2.0
TARGET: dict[str, Any] = {
    **CONFIGS["gemma4"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_kv_shared_layers": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "float32",
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "layer_types": ["full_attention", "full_attention"],
    "num_target_layers": 4,
    "block_size": BLOCK_SIZE,
    "final_logit_softcapping": SOFTCAP,
    "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 2]},
}


def write_pair(folder: Path) -> tuple[Path, Path]:
    """The target's and the drafter's checkpoint folders, float32."""
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir(parents=True)
    tensors = random_tensors(ModelConfig.from_hf(TARGET), seed=5)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(TARGET), encoding="utf-8")
    torch.manual_seed(6)
    model = Drafter(DrafterConfig.from_hf(DRAFTER))
    for parameter in model.parameters():
        if parameter.dim() == 2:  # large enough that layers, and not embeddings alone, decide
            torch.nn.init.normal_(parameter, std=3 * parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    save_drafter(model, drafter, torch.float32)
    return target, drafter


class OurPair:
    """The same two folders in flashdraft, without a cache: draft logits after any context."""

    def __init__(self, target_folder: Path, drafter_folder: Path) -> None:
        checkpoint = open_checkpoint(target_folder)
        self.drafter = load_drafter(drafter_folder, checkpoint.config)
        kernels = TorchKernels(torch.device("cpu"), torch.float32)
        self.target: Target = build_target(
            checkpoint.config, checkpoint.source, kernels, self.drafter.config.tap_layers
        )
        self._features = TargetFeatures(self.target, 512)

    @torch.no_grad()
    def draft_logits(self, context: list[int], anchor: int) -> Tensor:
        """[block_size - 1, vocabulary] after the context's tokens and the anchor."""
        config = self.drafter.config
        ids = torch.tensor(context)
        places, none = torch.arange(len(context)), torch.zeros(0, dtype=torch.long)
        batch = PackedBatch(
            ids, places, torch.zeros_like(ids), [len(context)], none, none.view(0, BLOCK_SIZE - 1)
        )
        rows = self.drafter.context(self._features.run(batch))
        positions = torch.arange(len(context), len(context) + config.block_size)[None]
        table = Rope(config.rope, torch.device("cpu")).table(len(context) + config.block_size)
        block = torch.full((config.block_size,), config.mask_token_id)
        block[0] = anchor
        attend = attend_sequence(self.drafter, rows, positions, table)
        hidden = self.drafter(self.drafter.embed(self.target, block), attend)
        return self.drafter.logits(self.target, hidden[1:])
