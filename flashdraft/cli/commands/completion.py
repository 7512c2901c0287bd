"""`flashdraft completion bash|zsh|fish`: a script by which that shell completes flashdraft."""

from __future__ import annotations

import argparse

from flashdraft.cli.completion import SHELLS, describe_commands


def run(arguments: argparse.Namespace) -> int:
    """Print it."""
    print(SHELLS[arguments.shell](describe_commands(arguments.root)), end="")
    return 0
