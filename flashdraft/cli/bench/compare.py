"""`flashdraft bench compare A.json B.json`: two results side by side."""

from __future__ import annotations

import argparse

from flashdraft.bench.report.compare import compare_files


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    print(compare_files(arguments.a, arguments.b))
    return 0
