"""The report of a bench run: one page with everything in it, nothing fetched, nothing unescaped."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from flashdraft.bench.report.page import write_report
from flashdraft.errors import RequestError
from tests.bench_document import bench_document

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags with their attributes, the text, and whether every element is closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def report(document: dict[str, Any], folder: Path) -> Page:
    return Page(write_report(document, folder / "new" / "report"))


def test_the_page_has_table_plots_settings_and_environment(tmp_path: Path) -> None:
    document = bench_document()
    page = report(document, tmp_path)
    assert page.count("section") >= 5 and page.count("table") >= 5
    for words in ("geometric mean", "300 of 300 texts are identical", "mean over requests"):
        assert words in page.text
    for value in ("smollm2-135m", "cpu-int8", "0123abc", document["prompts_sha256"]["mbpp"]):
        assert value in page.text
    assert "Where the time went" in page.text and "drafter's prefill" in page.text
    assert f"{document['speedup']['math500']['4']:.2f}×" in page.text
    assert "PARTIAL" not in page.text


def test_the_plots_lie_beside_the_page(tmp_path: Path) -> None:
    path = write_report(bench_document(), tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert path == tmp_path / "report.html"
    assert names == {
        "report.html",
        "throughput.svg",
        "accepted_lengths.svg",
        "acceptance_by_slot.svg",
        "first_token.svg",
        "between_tokens.svg",
    }
    for file in tmp_path.glob("*.svg"):
        ElementTree.fromstring(file.read_text(encoding="utf-8"))


def test_the_page_loads_nothing_and_suits_phones_and_the_dark(tmp_path: Path) -> None:
    path = write_report(bench_document(), tmp_path)
    text, page = path.read_text(encoding="utf-8"), Page(path)
    assert page.count("script") == page.count("link") == page.count("img") == 0
    assert not any({"src", "href", "style"} & attributes.keys() for _, attributes in page.tags)
    assert not re.search(r"https?://|@import|url\(", text)
    assert (
        "meta",
        {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    ) in page.tags
    assert text.count("prefers-color-scheme:dark") == 2


def test_everything_from_the_file_is_escaped(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>&\"'"
    document = bench_document(tasks=("gsm8k",))
    document["problems"] = [evil]
    document["settings"]["model"] = document["settings"]["draft"] = evil
    document["environment"][evil] = {evil: [evil]}
    document["prompts_sha256"] = {evil: evil}
    for row in document["rows"]:
        row["task"] = evil
    page = report(document, tmp_path)
    assert page.count("img") == 0
    assert page.text.count(evil) >= 8


def test_a_partial_run_says_so_and_why(tmp_path: Path) -> None:
    document = bench_document(tasks=("gsm8k",))
    document["is_partial"], document["problems"] = True, ["Interrupted after 3 rows."]
    page = report(document, tmp_path)
    assert "PARTIAL" in page.text and "Interrupted after 3 rows." in page.text


def test_drafted_rows_of_an_endpoint_alone_make_a_page(tmp_path: Path) -> None:
    document = bench_document(tasks=("gsm8k",))
    document["rows"] = [row for row in document["rows"] if row["mode"] == "draft"]
    document["speedup"], document["identical"] = {}, {}
    document["settings"] |= {"engine": "http", "url": "http://127.0.0.1:8000"}
    for row in document["rows"]:
        row["buckets"] = dict.fromkeys(row["buckets"])
        row["mean_accepted_length"] = None
    page = report(document, tmp_path)
    assert "Where the time went" not in page.text
    assert "cannot be compared in this run" in page.text
    assert "pooled" in page.text


def test_nothing_measured_makes_a_page(tmp_path: Path) -> None:
    assert "Nothing was measured." in report(bench_document(tasks=()), tmp_path).text


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written to .*file"):
        write_report(bench_document(tasks=("gsm8k",)), tmp_path / "file")
