"""Prompts beside those that transformers renders: python -m benchmarks.renderings

The suite's templates and conversations (tests/unit/chat/renderings), and with --templates the
.jinja files of a folder, whose differences are explained by the smallest set of the suite's reasons
that does. A difference without a reason is named, and the exit status is 1.

        --output benchmarks/results/renderings.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

from benchmarks.accepted_length import describe_environment, write_results
from tests.unit.chat.renderings.comparison import (
    EXPECTED,
    REASONS,
    REFUSED,
    TEMPLATES,
    Outcome,
    compare,
    summary,
)
from tests.unit.chat.renderings.conversations import CONVERSATIONS

MAX_REASONS = 6


def smallest_reasons(name: str, text: str) -> tuple[str, ...]:
    """The fewest reasons that explain every difference; none where nothing does."""
    found = [compare(name, text, one, ()) for one in CONVERSATIONS]
    different = [
        one.conversation
        for one in found
        if one.ours != one.theirs and one.conversation not in REFUSED
    ]
    names = [reason for reason in REASONS if reason != "refused"]
    for count in range(MAX_REASONS + 1):
        for reasons in itertools.combinations(names, count):
            if all(compare(name, text, one, reasons).reasons for one in different):
                return reasons
    return ()


def main() -> None:
    """Compare, say how many differ and why, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the record to this file")
    parser.add_argument("--templates", type=Path, help="a folder with further .jinja files")
    arguments = parser.parse_args()
    chosen = {name: (text, EXPECTED[name]) for name, text in TEMPLATES.items()}
    for path in sorted(arguments.templates.glob("*.jinja")) if arguments.templates else ():
        text = path.read_text(encoding="utf-8")
        chosen[path.stem] = (text, smallest_reasons(path.stem, text))
    found = [
        compare(name, text, conversation, reasons)
        for name, (text, reasons) in chosen.items()
        for conversation in CONVERSATIONS
    ]
    record = {
        "environment": describe_environment("benchmarks.renderings", torch.device("cpu")),
        **summary(found),
        "by_template": {name: _counts(name, found) for name in chosen},
    }
    write_results(arguments.output, record)
    for name, row in summary(found)["by_reason"].items():
        print(f"{row['renderings']:5} {name}: {row['why']}")
    print(f"{record['compared']} compared, {record['different']} different")
    unexplained = [one for one in found if one.ours != one.theirs and not one.reasons]
    for one in unexplained:
        print(f"without a reason: {one.template}, {one.conversation}", file=sys.stderr)
    sys.exit(1 if unexplained else 0)


def _counts(name: str, found: list[Outcome]) -> dict[str, object]:
    own = [one for one in found if one.template == name]
    different = [one for one in own if one.ours != one.theirs]
    return {
        "compared": len(own),
        "different": {one.conversation: " + ".join(one.reasons) for one in different},
    }


if __name__ == "__main__":
    main()
