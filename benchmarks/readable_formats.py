"""Write the table of readable formats into docs/models.md: python -m benchmarks.readable_formats"""

from __future__ import annotations

from pathlib import Path

from flashdraft.models.readable import READABLE, REFUSED

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN = "<!-- readable: written by python -m benchmarks.readable_formats -->"
END = "<!-- end of readable -->"


def table() -> str:
    """The table in Markdown, and what is refused."""
    rows = [
        "| from | kept on a GPU as | bits a weight | |",
        "|---|---|---|---|",
        *(f"| {row.names} | {row.kept} | {row.bits} | {row.note} |" for row in READABLE),
    ]
    return "\n".join(rows) + f"\n\nRefused by name: {', '.join(REFUSED)} and every other.\n"


def written(page: str) -> str:
    """The page with the table of today."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
