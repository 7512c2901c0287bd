"""`flashdraft doctor`: whether a pair is healthy on this machine, and what to do if not."""

from __future__ import annotations

import argparse
import math
import textwrap
from pathlib import Path

from flashdraft.bench.doctor.examination import examine
from flashdraft.bench.doctor.files import verify_files
from flashdraft.bench.doctor.report import OK, PROBLEM, WARNING, Finding, Report
from flashdraft.bench.doctor.settings import Mode, Settings
from flashdraft.cli.arguments import cache_options, weight_options
from flashdraft.cli.display import Screen
from flashdraft.cli.files import STDOUT, check_writable, write_json
from flashdraft.core import SamplingParams
from flashdraft.engine.config import EngineConfig, tree_settings
from flashdraft.errors import RequestError
from flashdraft.models.pairs import find_drafter

HEALTHY, UNHEALTHY = 0, 1
_WIDTH = 100
_MAX_TEMPLATE_BYTES = 1 << 20
_COLOURS = {OK: "\x1b[32m", WARNING: "\x1b[33m", PROBLEM: "\x1b[31m"}
_RESET = "\x1b[0m"


def run(arguments: argparse.Namespace) -> int:
    """Examine the pair and report."""
    settings = _settings(arguments)
    if arguments.json not in (None, STDOUT):
        check_writable(Path(arguments.json))
    screen = Screen.detect()
    study = verify_files if arguments.verify_files else examine
    report = study(settings, screen.note if screen.err_is_terminal else lambda _: None)
    if arguments.json is not None:
        write_json(arguments.json, report.to_json())
    if arguments.json != STDOUT:
        for line in render(report, screen.has_colours):
            print(line)
    return HEALTHY if report.is_healthy else UNHEALTHY


def render(report: Report, has_colours: bool = False) -> list[str]:
    """The report as lines: what was found, and under it what to do."""
    lines = []
    area = ""
    for finding in report.findings:
        if finding.area != area:
            area = finding.area
            lines.append(area)
        lines += _render_finding(finding, has_colours)
    counts = {s: sum(f.status == s for f in report.findings) for s in (PROBLEM, WARNING)}
    state = "healthy" if report.is_healthy else "not healthy"
    if report.files is not None:
        state = "no damage was found" if report.is_healthy else "damaged"
    if report.not_judged is not None and not report.has_problems:
        state = f"not judged: {report.not_judged}; raise --seconds"
    if report.causes:
        state += f": {report.causes[0].name}"
    found = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counts.items() if n)
    lines.append(f"{state} ({found or 'no complaints'}, {report.seconds:.0f} s)")
    return lines


def _render_finding(finding: Finding, has_colours: bool) -> list[str]:
    mark = finding.status.ljust(7)
    if has_colours:
        mark = f"{_COLOURS[finding.status]}{mark}{_RESET}"
    indent = " " * 11
    lines = textwrap.wrap(finding.text, _WIDTH - len(indent)) or [""]
    shown = [f"  {mark}  {lines[0]}", *(indent + line for line in lines[1:])]
    if finding.remedy is not None:
        arrow = textwrap.wrap(finding.remedy, _WIDTH - len(indent) - 2)
        shown.append(f"{indent}→ {arrow[0]}")
        shown += [f"{indent}  {line}" for line in arrow[1:]]
    return shown


def _settings(arguments: argparse.Namespace) -> Settings:
    SamplingParams(temperature=arguments.temperature)  # refuses what cannot be sampled with
    if not 1 <= arguments.seconds < math.inf:
        raise RequestError(f"--seconds is {arguments.seconds:g}; it must be a number from 1 up.")
    template = None if arguments.template is None else _read_template(arguments.template)
    mode = Mode(arguments.thinking, arguments.temperature, template)
    return Settings(
        arguments.model,
        arguments.draft,
        arguments.device,
        arguments.dtype,
        mode,
        arguments.seconds,
        weight_options(arguments),
        cache_options(arguments),
        _tree(arguments),
    )


def _tree(arguments: argparse.Namespace) -> str | int | None:
    """What --tree says, refused now where it cannot be."""
    draft = None if arguments.draft == "none" else arguments.draft
    drafter = find_drafter(arguments.model, draft)
    return EngineConfig(**tree_settings(arguments.tree, drafter)).tree


def _read_template(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise RequestError(
                f"The template {path} has {path.stat().st_size} bytes; a chat template has at most "
                f"{_MAX_TEMPLATE_BYTES}."
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"The template {path} cannot be read: {error.strerror or error}."
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"The template {path} is not UTF-8: {error}.") from None
