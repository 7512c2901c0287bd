"""Families and formats as the tests check them: parity with transformers, the law, bits of weights.

    python -m benchmarks.families --output benchmarks/results/families.json
    python -m benchmarks.readable_tables            # and its tables into docs/models.md

Everything is the tests' own: their models, their requests and what they compare. A check that does
not hold ends the command, and nothing is written; what stands in the file is how far it held.

- parity: the largest difference of a logit from transformers' in float32, of tiny random models:
  a prompt in chunks, the row before wrong drafts, and rows after they were rolled back.
- greedy: whether a text of 24 tokens is transformers', plain and with every kind of draft.
- law: tokens of mixed requests whose drafts are right, sometimes wrong and always wrong, beside
  those decoded plainly.
- formats: values beside those of each format's own tool; and plain and drafted tokens of a model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors import safe_open

from flashdraft.bench.run.environment import describe_environment
from tests.parity import test_transformers as parity
from tests.unit.engine import test_law as law
from tests.unit.models import test_formats_law as formats_law
from tests.unit.models.gguf import test_blocks, test_llama_cpp
from tests.unit.models.packed import test_made

Row = dict[str, Any]


def parity_rows() -> Iterator[Row]:
    """Every family's largest differences, by backend, and whether its texts are transformers'."""
    for name in parity.NAMES:
        with tempfile.TemporaryDirectory() as place:
            model, folder = parity.make_pair(name, Path(place))
            found: Row = {"family": name}
            for backend in parity.BACKENDS:
                largest = parity.differences(model, folder, backend)
                logits = max(largest.prefill, largest.verify, largest.rollback)
                assert logits <= parity.TOLERANCE, (name, backend, largest)
                found[backend] = largest._asdict()
            prompt, expected = parity.expected_answer(model)
            for drafts in parity.DRAFTS:
                done = parity.our_answer(folder, prompt, drafts)
                assert done.token_ids == expected, (name, drafts)
                found[drafts] = {"tokens": len(expected), "drafted": done.stats.drafted}
        yield found


def law_rows() -> Iterator[Row]:
    """Every family's tokens that were compared, by backend."""
    for family in law.FAMILIES:
        found: Row = {"family": family}
        for backend in law.BACKENDS:
            _, expected = law.scripted_answers(family, backend)
            for wrong in law.WRONG:
                law.test_scripted_drafts_do_not_change_a_token(family, backend, wrong)
            compared = len(law.WRONG) * sum(map(len, expected.values()))
            found[backend] = {"tokens": compared, "differing": 0}
        yield found


def format_rows() -> Iterator[Row]:
    """Every format's values that were compared with its tool's."""
    for kind in test_blocks.SCALES:
        told = f"GGUF {kind}", "gguf", metadata.version("gguf")
        yield _compared(*told, *test_blocks.compare_blocks(kind))
    for kind, formats in test_llama_cpp.FORMATS.items():
        told = f"a GGUF file in {kind}: {', '.join(sorted(formats))}", "llama-cpp-python"
        yield _compared(*told, test_llama_cpp.VERSION, *test_llama_cpp.compare_file(kind))
    versions = made_with()
    for case in test_made.MADE:
        with tempfile.TemporaryDirectory() as place:
            counts = test_made.compare_case(Path(place), case)
        tool, _, kind = case.partition(" ")
        package, name = test_made.TOOLS[tool]
        yield _compared(f"{name} {kind}".strip(), package, versions[package], *counts)


def _compared(name: str, tool: str, version: str, values: int, differing: int) -> Row:
    return {
        "format": name,
        "tool": tool,
        "version": version,
        "values": values,
        "differing": differing,
    }


def format_law_rows() -> Iterator[Row]:
    """Tokens of a model of every format, plain and drafted."""
    for kind in formats_law.KINDS:
        found: Row = {"format": kind}
        for backend in formats_law.BACKENDS:
            with tempfile.TemporaryDirectory() as place:
                plain, drafted = formats_law.plain_and_drafted(Path(place), kind, backend)
            assert plain == drafted, (kind, backend)
            compared = sum(map(len, plain.values()))
            found[backend] = {"tokens": compared, "differing": 0}
        yield found


def made_with() -> dict[str, str]:
    """The tools' versions, from the files that they made."""
    found: dict[str, str] = {}
    for path in test_made.FILES:
        with safe_open(path, framework="pt") as file:
            found |= json.loads(file.metadata()["versions"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, help="where the results go")
    arguments = parser.parse_args()
    environment = describe_environment([])
    environment["command"] = " ".join(["python -m benchmarks.families", *sys.argv[1:]])
    environment["transformers"] = metadata.version("transformers")
    document: dict[str, Any] = {"environment": environment}
    parts = {
        "formats": format_rows,
        "formats_law": format_law_rows,
        "parity": parity_rows,
        "law": law_rows,
    }
    for name, rows in parts.items():
        document[name] = []
        for row in rows():
            document[name].append(row)
            print(json.dumps(row), flush=True)
    assert all(row["differing"] == 0 for row in document["formats"])
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
