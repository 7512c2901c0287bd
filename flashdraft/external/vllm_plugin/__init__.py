"""A vLLM plugin (entry point group `vllm.general_plugins`): block drafters as they were trained.

vLLM calls `register` in each of its processes, and possibly more than once in one. On a release
that is listed here the drafter's architecture gets our class (draft_model.py, which vLLM imports
when a drafter is loaded and not before), and on a CPU three faults are mended (cpu.py). On another
release it says so and changes nothing. It knows nothing of flashdraft's engine or models, and no
error of its own ends a vLLM that would run without it.
"""

from __future__ import annotations

import importlib
import logging

from flashdraft.external.vllm_plugin import cpu

# read in the sources of each; run on 0.32
DRAFTER_RELEASES = ("0.28", "0.29", "0.30", "0.31", "0.32")
# earlier ones reach their CPU kernels in another way
CPU_RELEASES = ("0.31", "0.32")
ARCHITECTURE = "DFlashDraftModel"
DRAFT_MODEL = "flashdraft.external.vllm_plugin.draft_model:TrainedDraft"

# below vLLM's own logger, so that its handlers and its level hold here too
logger = logging.getLogger("vllm.plugins.flashdraft")


def release_of(version: str) -> str:
    """`0.32` of `0.32.0+cpu`."""
    return ".".join(version.split(".")[:2])


def register() -> None:
    """Change what is listed for the vLLM at hand; called by vLLM."""
    try:
        version = str(importlib.import_module("vllm").__version__)
        release = release_of(version)
        if release not in DRAFTER_RELEASES:
            logger.warning(
                "flashdraft's plugin stays out: this is vLLM %s, and it knows %s to %s. Gemma 4 "
                "drafters of z-lab draft badly without it; install a release that it knows.",
                version,
                DRAFTER_RELEASES[0],
                DRAFTER_RELEASES[-1],
            )
            return
        _register_drafter()
        if release in CPU_RELEASES and _is_on_cpu():
            cpu.mend()
    except Exception as error:  # vLLM runs without us, and must
        logger.warning(
            "flashdraft's plugin stays out: %s: %s. Please report it with your vLLM's version.",
            type(error).__name__,
            error,
        )


def _register_drafter() -> None:
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    if ARCHITECTURE not in registry.models:
        raise LookupError(f"this vLLM has no architecture {ARCHITECTURE}")
    registry.register_model(ARCHITECTURE, DRAFT_MODEL)


def _is_on_cpu() -> bool:
    return bool(importlib.import_module("vllm.platforms").current_platform.is_cpu())
