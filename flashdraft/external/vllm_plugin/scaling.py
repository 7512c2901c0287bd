"""How a drafter's embeddings and logits are scaled, from its config and its target's.

The same rules as in flashdraft's own DrafterConfig, on the config objects that vLLM holds. z-lab's
drafters take the target's embeddings as the target itself does (Gemma 4 multiplies them by the root
of its hidden size) unless their config names a factor; speculators' were trained on the bare ones.
It imports neither torch nor vLLM.
"""

from __future__ import annotations

from typing import Any

# the `model_type` of a target's text part; each multiplies its embeddings by sqrt(hidden_size)
SCALED_TARGETS = ("gemma4_text", "gemma4_unified_text")


def embed_scale(drafter: Any, target_text: Any) -> float | None:
    """What the bare embedding is multiplied by; None if by nothing."""
    if _is_speculators(drafter):
        return None
    named = _option(drafter, "input_embedding_scale")
    if named is not None:
        return None if float(named) == 1.0 else float(named)
    if target_text.model_type in SCALED_TARGETS:
        return float(target_text.hidden_size) ** 0.5
    return None


def logit_scaling(drafter: Any) -> tuple[float, float | None] | None:
    """vLLM's (factor, soft cap) for the draft logits; None if they stay as they are.

    A drafter multiplies and then caps; vLLM caps and then multiplies. With the cap divided by the
    factor both give cap * tanh(factor * logit / cap).
    """
    if _is_speculators(drafter):
        return None
    factor = float(_option(drafter, "output_multiplier") or 1.0)
    cap = float(_option(drafter, "final_logit_softcapping") or 0.0)
    if factor == 1.0 and not cap:
        return None
    return factor, cap / factor if cap else None


def _is_speculators(drafter: Any) -> bool:
    return getattr(drafter, "model_type", None) == "speculators"


def _option(drafter: Any, key: str) -> Any:
    """A value of dflash_config, or of the top level where older files keep it."""
    value = (getattr(drafter, "dflash_config", None) or {}).get(key)
    return getattr(drafter, key, None) if value is None else value
