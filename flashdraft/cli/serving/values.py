"""What the engine would refuse of the values typed for `serve`, before its process loads."""

from __future__ import annotations

import argparse

from flashdraft.cli.arguments import NATIVE, cache_options, weight_options
from flashdraft.engine.config import EngineConfig, tree_settings
from flashdraft.kernels.select import check_weights
from flashdraft.models.pairs import find_drafter


def check_values(arguments: argparse.Namespace) -> None:
    """Raise RequestError for a value that cannot be; nothing is fetched or loaded for that."""
    given = {name: getattr(arguments, name) for name in ("max_batch", "max_context")}
    if isinstance(arguments.verify, int):
        given["verify"] = arguments.verify
    if arguments.engine == NATIVE:
        drafter = None if arguments.draft == "none" else arguments.draft
        given |= tree_settings(arguments.tree, find_drafter(arguments.model, drafter))
    given = {name: value for name, value in given.items() if value is not None}
    EngineConfig(cache=cache_options(arguments), **given)
    if arguments.engine == NATIVE:
        check_weights(arguments.device, weight_options(arguments))
