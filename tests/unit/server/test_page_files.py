"""The page's files: what others wrote stays as they wrote it, and all of it stays small."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "flashdraft" / "server" / "page"
VENDOR = PAGE / "vendor"
MAX_PAGE_BYTES = 425_000
MAX_SIDE_BY_SIDE = 15
SUMS = VENDOR / "SHA256SUMS"
OURS = [path for path in PAGE.rglob("*") if path.is_file() and VENDOR not in path.parents]


def test_vendored_files_are_unmodified_and_licensed() -> None:
    sums = {name: digest for digest, name in map(str.split, SUMS.read_text().splitlines())}
    found = {path.name for path in VENDOR.iterdir()} - {SUMS.name}
    assert found == sums.keys()
    for name, digest in sums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
    libraries = {re.split(r"[-.]", name)[0] for name in found if name.endswith(".js")}
    licences = {name for name in found if name.startswith("LICENSE-")}
    assert libraries == {"prism", "temml"}
    assert licences == {"LICENSE-prismjs.txt", "LICENSE-temml.txt"}
    for name in licences:
        assert "Permission is hereby granted" in (VENDOR / name).read_text()


def test_the_whole_page_is_small() -> None:
    # of what a browser may load: licences and sums lie beside it, and are not served
    served = [path for path in PAGE.rglob("*") if path.suffix in (".html", ".js", ".css", ".svg")]
    total = sum(path.stat().st_size for path in served)
    assert total < MAX_PAGE_BYTES, f"{total} bytes"


def test_our_files_are_few_in_a_folder() -> None:
    folders = {path.parent for path in OURS}
    assert max(sum(path.parent == folder for path in OURS) for folder in folders) <= (
        MAX_SIDE_BY_SIDE
    )


def test_ours_make_no_markup_and_name_no_host() -> None:
    """The browser refuses markup from text too; here it is found before anybody opens it."""
    sinks = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    )
    for path in OURS:
        text = path.read_text(encoding="utf-8")
        assert not re.search(sinks, text), path.name
        hosts = set(re.findall(r"https?://([\w.]+)", text)) - {"www.w3.org"}
        assert hosts == set(), path.name


def test_every_language_of_code_has_its_files() -> None:
    """The worker loads a file by the language's name, with the names in REQUIRES before it."""
    worker = (PAGE / "typesetter.js").read_text()
    requires = worker.split("const REQUIRES = {")[1].split("};")[0]
    code = (PAGE / "answers" / "code.js").read_text()
    names = code.split("const NAMES = {")[1].split("};")[0]
    languages = set(re.findall(r"(\w+): [\"\[]", names + requires)) | {"core"}
    languages |= set(re.findall(r'"(\w+)"', requires))
    files = {path.name[6:-7] for path in VENDOR.glob("prism-*.min.js")}
    assert languages == files
