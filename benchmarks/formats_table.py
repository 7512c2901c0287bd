"""The table of a formats document, and its place in docs/quantized.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.marked import replace_between
from flashdraft.files import write_whole

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs" / "quantized.md", ROOT / "benchmarks" / "results"
PATTERN = "formats_*.json"
BEGIN = "<!-- formats: written by python -m benchmarks.formats --docs -->"
END = "<!-- end of formats -->"
COLUMNS = (
    "format",
    "bits a weight",
    "perplexity, answers",
    "perplexity, LICENSE",
    "same likeliest token",
    "KL",
    "accepted length",
    "repeated",
    "texts that part",
)
REFERENCE_NOTE = "the shipped Q4_1 file dequantised, so near a 4-bit grid already"


def table(document: Mapping[str, Any]) -> list[str]:
    """One line of Markdown for every format, after two that head them."""
    is_exact = any("answers_exact" in row for row in document["rows"])
    columns = [*COLUMNS, "with `exact=True`"] if is_exact else list(COLUMNS)
    lines = [_line(columns), _line(["---"] * len(columns))]
    for index, row in enumerate(document["rows"]):
        cells = _cells(row, is_reference=index == 0)
        if is_exact:
            cells.append(_parted(row["answers_exact"]))
        lines.append(_line(cells))
    return lines


def section(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """What stands between the markers: every results file's table, and where it comes from."""
    parts = []
    for name, document in documents.items():
        found = document["environment"]
        source = (
            f"{found['hardware']}, torch {found['torch']}, {found['date']}: "
            f"`{found['command']}` ([file](../benchmarks/results/{name}))."
        )
        parts += [*table(document), "", source, ""]
    return "\n".join(["", *parts, ""])


def with_section(text: str, new: str) -> str:
    """A text with the section between its markers."""
    return replace_between(text, new, BEGIN, END, DOCS.name)


def read_documents(folder: Path) -> dict[str, Mapping[str, Any]]:
    """The committed results by file name."""
    paths = sorted(folder.glob(PATTERN))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def write_docs() -> None:
    """Bring the docs up to the committed results."""
    text = DOCS.read_text(encoding="utf-8")
    write_whole(DOCS, with_section(text, section(read_documents(RESULTS))))


def _cells(row: Mapping[str, Any], is_reference: bool) -> list[str]:
    texts, answers = row["texts"], row["answers"]
    length, repeated = f"{answers['accepted_length']:.2f}", _percent(answers["repeated"])
    if is_reference:
        perplexities = [f"{texts[name]['perplexity']:.2f}" for name in ("answers", "license")]
        middle = [f"{row['format']}: {REFERENCE_NOTE}", f"{row['bits']:.1f}", *perplexities]
        return [*middle, "", "", length, repeated, _parted(answers)]
    return [
        _name(row),
        f"{row['bits']:.1f}",
        *(_ratio(texts[name], "perplexity") for name in ("answers", "license")),
        _percent(texts["answers"]["top1_agreement"]),
        f"{texts['answers']['mean_kl']:.4f}",
        f"{length} ({_ratio(answers, 'accepted')})",
        repeated,
        _parted(answers),
    ]


def _name(row: Mapping[str, Any]) -> str:
    """The format, and the shares of what the weights are held as where that is not one thing."""
    if len(row["held_as"]) == 1:
        return str(row["format"])
    shares = ", ".join(f"{100 * share:.0f} % {kind}" for kind, share in row["held_as"].items())
    return f"{row['format']} ({shares})"


def _ratio(figures: Mapping[str, Any], name: str) -> str:
    return f"×{figures[f'{name}_ratio']:.3f} ± {figures[f'{name}_ratio_error']:.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _parted(answers: Mapping[str, Any]) -> str:
    found = f"{answers['num_parted']} of {answers['prompts']}"
    return f"{found}, margins ≤ {max(answers['margins']):.3f}" if answers["margins"] else found


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
