"""Tables of results: made from the committed files, checked, and nothing else touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import readme_tables
from benchmarks.readme_tables import (
    BEGIN,
    END,
    TRAFFIC,
    TRAFFIC_BEGIN,
    TRAFFIC_END,
    TRAFFIC_VLLM,
    main,
    page_section,
)
from benchmarks.traffic.headline import LOADS
from tests.bench_document import bench_document


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"# It\n\n{TRAFFIC_BEGIN}\n{TRAFFIC_END}\nMore.\n", encoding="utf-8")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(readme_tables, "README", path)
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path / "results")
    return path


@pytest.fixture
def page(readme: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = readme.with_name("results.md")
    path.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe rest.\n", encoding="utf-8")
    monkeypatch.setattr(readme_tables, "PAGE", path)
    return path


def commit(readme: Path, name: str, **changes: object) -> None:
    document = {**bench_document(), **changes}
    (readme.parent / "results" / name).write_text(json.dumps(document))


def test_tables_are_written_between_the_markers(page: Path) -> None:
    commit(page, "bench_cpu.json")
    commit(page, "other.json", format="not ours")
    assert main([]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Title\n\n{BEGIN}\n") and text.endswith(f"{END}\n\nThe rest.\n")
    assert "old" not in text and text.count("| MT-Bench |") == 1
    assert "[file](../benchmarks/results/bench_cpu.json)" in text and "2026-11-15" in text
    assert main([]) == 0 and page.read_text(encoding="utf-8") == text


def test_a_line_holds_every_load_of_a_task() -> None:
    document = bench_document(tasks=("gsm8k", "mbpp"), concurrency=(1, 8))
    for row, speed in zip(document["rows"], (50, 100.4, 200, 300, 1, 1, 1, 1), strict=True):
        row["tokens_per_s"] = speed
    document["rows"][1]["mean_accepted_length"] = 5.5
    document["rows"][3]["mean_accepted_length"] = 4.25
    document["speedup"]["gsm8k"] = {"1": 2.008, "8": 1.5}
    lines = page_section({"bench_a.json": document}).splitlines()
    assert ("| GSM8K | 50.0 → 100 (2.01×) | 200 → 300 (1.50×) | 5.50, 4.25 | 40 of 40 |") in lines
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert widths == {6}, "every line of the table has as many cells"


def test_check_tells_what_is_out_of_date(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(page, "bench_cpu.json")
    before = page.read_text(encoding="utf-8")
    assert main(["--check"]) == 1
    output = capsys.readouterr()
    assert "-old\n" in output.out and "+| task |" in output.out
    assert "python -m benchmarks.readme_tables" in output.err
    assert page.read_text(encoding="utf-8") == before
    assert main([]) == 0 and main(["--check"]) == 0
    commit(page, "bench_cpu.json", speedup={"gsm8k": {"1": 9.99}})
    assert main(["--check"]) == 1


def test_only_what_exists_is_listed(page: Path) -> None:
    assert main([]) == 0
    assert "No results are committed yet." in page.read_text(encoding="utf-8")
    commit(page, "bench_b.json")
    commit(page, "bench_a.json", is_partial=True, problems=["Stopped."])
    assert main([]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.index("bench_a.json") < text.index("bench_b.json")
    assert text.count("**PARTIAL") == 1


@pytest.mark.parametrize("text", ["nothing", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_markers_are_asked_for(page: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    page.write_text(text, encoding="utf-8")
    assert main([]) == 2 and "results.md needs one line" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == text


def test_a_broken_file_is_named_and_nothing_written(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = page.read_text(encoding="utf-8")
    (page.parent / "results" / "bench_bad.json").write_text("{")
    assert main([]) == main(["--check"]) == 2
    assert "bench_bad.json is no JSON file" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == before


def test_names_cannot_break_the_table() -> None:
    document = bench_document(tasks=("gsm8k",), concurrency=(1,))
    document["settings"]["model"] = "<b>a|b</b>\n\nc"
    for row in document["rows"]:
        row["task"] = "x|y"
    document["speedup"], document["identical"] = {}, {}
    text = page_section({"bench_a.json": document})
    assert "x\\|y" in text and "\\<b\\>a\\|b\\</b\\> c" in text


def test_both_are_up_to_date() -> None:
    assert readme_tables.main(["--check"]) == 0


@pytest.mark.usefixtures("page")
def test_traffic_stands_beside_vllm(readme: Path) -> None:
    rows = [
        {"clients": clients, "kind": kind, "acceptance": 0.9, "tokens_per_s": 100.0 + place}
        | {"gap": {"p95_ms": 61.4}, "ttft": {"p95_ms": 447.0}}
        for place, (clients, kind) in enumerate(LOADS)
    ]
    rows.append({"clients": 8, "kind": "sampled", "acceptance": None, "tokens_per_s": 40.2})
    vllm = [{"clients": 8, "kind": "sampled", "drafted": True, "tokens_per_s": 90}]
    for name, content in ((TRAFFIC, {"runs": [{"rows": rows}]}), (TRAFFIC_VLLM, {"rows": vllm})):
        (readme.parent / "results" / name).write_text(json.dumps(content))
    assert main([]) == 0 and main(["--check"]) == 0
    text = readme.read_text(encoding="utf-8")
    assert "| 8 | **103** | 90 | 40 |  | 61 |  | 447 |  |" in text
    assert text.count("**") == 2 * len(LOADS)
