"""A vLLM plugin (entry point group `vllm.general_plugins`): block drafters as they were trained.

vLLM calls `register` in each of its processes, and possibly more than once in one. On a release
that is listed (releases.py) the drafter's architecture gets our class (draft_model.py, which vLLM
imports when a drafter is loaded and not before), and on a CPU three faults are mended (cpu.py). On
another release it says so and changes nothing. It knows nothing of flashdraft's engine or models,
imports neither torch nor vLLM until it is called, and no error of its own ends a vLLM that would
run without it.
"""

from __future__ import annotations

import importlib
import logging

from flashdraft.external.vllm_plugin.releases import MENDED, SCALED, find_release

ARCHITECTURE = "DFlashDraftModel"
DRAFT_MODEL = "flashdraft.external.vllm_plugin.draft_model:TrainedDraft"
CPU_MENDS = "flashdraft.external.vllm_plugin.cpu"  # by name, since it needs torch

# below vLLM's own logger, so that its handlers and its level hold here too
logger = logging.getLogger("vllm.plugins.flashdraft")


def register() -> None:
    """Change what is listed for the vLLM at hand; called by vLLM."""
    try:
        version = str(importlib.import_module("vllm").__version__)
        release = find_release(version)
        if not release.scales_drafters:
            logger.warning(
                "flashdraft's plugin stays out: this is vLLM %s, and it knows %s to %s. Gemma 4 "
                "drafters of z-lab draft badly without it; install a release that it knows.",
                version,
                SCALED[0],
                SCALED[-1],
            )
            return
        _register_drafter()
        if _is_on_cpu():
            _mend_cpu(version, release.mends_cpu)
    except Exception as error:  # vLLM runs without us, and must
        logger.warning(
            "flashdraft's plugin stays out: %s: %s. Please report it with your vLLM's version.",
            type(error).__name__,
            error,
        )


def _mend_cpu(version: str, is_known: bool) -> None:
    if not is_known:
        logger.warning(
            "flashdraft's plugin leaves vLLM %s's CPU sampler alone, which it knows in %s to %s: "
            "beside a drafter, temperatures above 0 and top_k may go wrong.",
            version,
            MENDED[0],
            MENDED[-1],
        )
        return
    importlib.import_module(CPU_MENDS).mend()


def _register_drafter() -> None:
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    if ARCHITECTURE not in registry.models:
        raise LookupError(f"this vLLM has no architecture {ARCHITECTURE}")
    registry.register_model(ARCHITECTURE, DRAFT_MODEL)


def _is_on_cpu() -> bool:
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())
