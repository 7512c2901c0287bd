"""The tables of models and cards in README and docs are what the command says now."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plan_tables
from benchmarks.plan_tables import BEGIN, END, GPUS, main, page_section, read_cpu, readme_section
from flashdraft.bench.plan.choices import choose
from flashdraft.bench.plan.gpus import custom_card
from flashdraft.bench.plan.pairs import TARGETS
from flashdraft.cli.choices import as_json


def test_both_are_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_an_old_text_is_noticed_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("README", "PAGE"):
        path = tmp_path / f"{name}.md"
        path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
        monkeypatch.setattr(plan_tables, name, path)
    assert main(["--check"]) == 1
    assert "-old" in capsys.readouterr().out
    assert main([]) == 0 and main(["--check"]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n")
    (tmp_path / "PAGE.md").write_text("no markers", encoding="utf-8")
    assert main([]) == 2
    assert "needs one line" in capsys.readouterr().err


def test_every_card_and_every_model_is_there_and_modelled_figures_say_so() -> None:
    page, readme = page_section(read_cpu()), readme_section(read_cpu())
    assert all(f"$ flashdraft plan --gpu {name}" in page for name in GPUS)
    assert "\n$ flashdraft plan\n" in page
    rows = [line for line in readme.splitlines() if line.startswith("| ") and "→" in line]
    assert len(rows) == len(TARGETS) and all("modelled" in line for line in rows)
    speeds = [line for line in page.splitlines() if "→" in line and "plain" not in line]
    assert len(speeds) > 2 * len(GPUS)
    assert all(line.endswith(("modelled", "checked")) for line in speeds)


def test_every_field_of_the_json_is_documented() -> None:
    fields = plan_tables.PAGE.read_text(encoding="utf-8").partition("## As JSON")[2]
    found = as_json(choose(custom_card(20, 1.0)))
    assert found["pairs"] and found["do_not_fit"]
    inner = [found["card"], *found["pairs"][:1], *found["do_not_fit"]]
    inner += [found["pairs"][0][name] for name in ("memory_gb", "accepted_length", "one")]
    names = {*found, *(name for one in inner for name in one)}
    assert [name for name in sorted(names) if name not in fields] == []
