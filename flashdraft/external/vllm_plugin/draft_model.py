"""vLLM's block drafter with its embeddings and logits scaled as it was trained.

vLLM shares the target's bare embedding table with the drafter. A drafter of a Gemma 4 target was
trained on rows that are sqrt(hidden_size) times larger, and on capped logits. Nothing else of
vLLM's class changes (but see cpu.py), and where there is nothing to scale its own inner model is
used. vLLM imports this module by name when it loads a drafter; nobody else does.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.platforms import current_platform

from flashdraft.external.vllm_plugin.cpu import mend_context_norm
from flashdraft.external.vllm_plugin.scaling import embed_scale, logit_scaling

logger = logging.getLogger("vllm.plugins.flashdraft")


class ScaledDraftModel(DFlashQwen3Model):
    """vLLM's drafter layers over scaled embeddings."""

    def __init__(self, *, vllm_config: Any, start_layer_id: int = 0, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        scale = _embed_scale(vllm_config)
        assert scale is not None, "made for scaled embeddings alone"
        # a buffer, rounded as the target's own is: compiled code takes it as an input
        rounded = torch.tensor(scale, dtype=vllm_config.model_config.dtype)
        self.register_buffer("embed_scale", rounded, persistent=False)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return super().embed_input_ids(input_ids) * self.embed_scale

    def forward(
        self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None = None
    ) -> Tensor:
        # Compiled code is cached under the name and place of `forward`. With the inherited one, a
        # graph that vLLM compiled before the plugin was installed would be found and run.
        return super().forward(input_ids, positions, input_embeds)


class TrainedDraft(DFlashQwen3ForCausalLM):
    """The architecture DFlashDraftModel, as its checkpoints were trained."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        scale = _embed_scale(vllm_config)
        if scale is not None:
            self.model_cls = ScaledDraftModel
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if current_platform.is_cpu():
            mend_context_norm(self.model)
        logits = logit_scaling(self.config)
        if logits is not None:
            self.logits_processor.scale, self.logits_processor.soft_cap = logits
        if scale is not None or logits is not None:
            logger.info(
                "flashdraft: the drafter's embeddings are multiplied by %.4g, its logits by %.4g "
                "(soft cap %s)",
                scale or 1.0,
                self.logits_processor.scale,
                self.logits_processor.soft_cap,
            )


def _embed_scale(vllm_config: Any) -> float | None:
    speculative = vllm_config.speculative_config
    return embed_scale(
        speculative.draft_model_config.hf_config, speculative.target_model_config.hf_text_config
    )
