"""The one table of formats: it names what the readers read, and the documentation has it."""

from __future__ import annotations

from benchmarks.readable_formats import PAGE, written
from flashdraft.models.readable import READABLE, REFUSED
from flashdraft.models.sources import readable_kinds


def test_every_gguf_format_is_in_the_table() -> None:
    said = " ".join(row.names for row in READABLE).replace(",", " ").split()
    assert set(readable_kinds().gguf) <= set(said)
    assert not set(REFUSED) & set(said)


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page
