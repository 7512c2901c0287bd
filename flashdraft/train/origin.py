"""The drafter whose weights a run starts from: a checkpoint of either layout, or a run's state.

From a state only the parameters are taken: the new run may have other data, settings and machines.
"""

from __future__ import annotations

from pathlib import Path

import torch

from flashdraft.errors import FlashdraftError, TrainingError
from flashdraft.models.config.target import ModelConfig
from flashdraft.models.drafter.config import DrafterConfig
from flashdraft.models.drafter.loading import load_drafter
from flashdraft.models.drafter.model import Drafter
from flashdraft.models.drafter.opening import check_fit, read_drafter_config
from flashdraft.train.fit.state import is_state, read_parameters, read_state, states


def read_origin_config(folder: Path) -> DrafterConfig:
    """What the drafter in a checkpoint or a state is."""
    if not is_state(folder):
        if kept := states(folder):
            raise TrainingError(
                f"{folder} is a run's folder; name one of its states, such as {kept[-1]}, or the "
                "drafter beside it."
            )
        return read_drafter_config(folder)
    settings = read_state(folder).settings
    try:
        return DrafterConfig.from_hf(settings["drafter"])
    except (FlashdraftError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainingError(
            f"The state in {folder} does not say what its drafter is ({error!r}); name another "
            "state, or a drafter's folder."
        ) from None


def load_origin(folder: Path, target: ModelConfig) -> Drafter:
    """The drafter of a checkpoint or a state, for this target."""
    if not is_state(folder):
        return load_drafter(folder, target)
    config = read_origin_config(folder)
    check_fit(config, target)
    with torch.device("meta"):
        drafter = Drafter(config)
    shapes = {name: parameter.shape for name, parameter in drafter.named_parameters()}
    drafter.load_state_dict(read_parameters(folder, shapes), assign=True)
    return drafter
