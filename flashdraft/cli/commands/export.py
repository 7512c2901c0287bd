"""`flashdraft export DRAFTER --out DIR`: a drafter in the layout that another engine loads.

`flashdraft export --check FOLDER` writes nothing: it says what vLLM and SGLang would make of one.
"""

from __future__ import annotations

import argparse

from flashdraft.cli.arguments import weight_options
from flashdraft.cli.files import write_json
from flashdraft.errors import RequestError
from flashdraft.external.checkpoint_rules import BOTH, FolderReport, RuleFinding, check_folder
from flashdraft.external.versions import ENGINES
from flashdraft.models.files.opening import reading
from flashdraft.models.loading import open_checkpoint
from flashdraft.models.sources import resolve_source
from flashdraft.train.export import export, read_provenance

EXIT_REFUSED = 1


def run(arguments: argparse.Namespace) -> int:
    """Write the drafter, or check it."""
    formats = weight_options(arguments)
    formats.schemes()  # or a RequestError
    if arguments.check:
        if any(formats):
            raise RequestError(f"{formats.flags()} would not be used with --check; leave it out.")
        return _check(arguments)
    folder = export(arguments.drafter, arguments.out, arguments.layout, arguments.model, formats)
    if arguments.json is not None:
        content = {
            "folder": str(folder),
            "layout": arguments.layout,
            "files": sorted(path.name for path in folder.iterdir()),
            "provenance": read_provenance(folder),
        }
        write_json(arguments.json, content)
    else:
        print(f"wrote {folder} in {arguments.layout} layout")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    folder = resolve_source(arguments.drafter).path
    if not folder.is_dir():
        raise RequestError(f"{arguments.drafter} is a file; a drafter is a folder or a Hub id.")
    target = None
    if arguments.model is not None:
        target = open_checkpoint(resolve_source(arguments.model).path).config
    with reading(f"The drafter in {folder}"):
        report = check_folder(folder, target)
    if arguments.json is not None:
        write_json(arguments.json, _as_json(report))
    else:
        _print(report)
    return 0 if report.is_servable else EXIT_REFUSED


def _print(report: FolderReport) -> None:
    print(f"{report.folder}: {report.layout} layout")
    for engine in BOTH:
        kind = ENGINES[engine]
        verdict = "loads it" if report.passes(engine) else "does not load it"
        print(f"{kind.title} {kind.known}: {verdict}")
        for mark, findings in (("x", report.failures), ("!", report.limits)):
            for one in findings:
                if one.engine == engine:
                    print(f"  {mark} {one.rule}: {one.reason}")


def _as_json(report: FolderReport) -> dict[str, object]:
    engines = {
        engine: {
            "version": ENGINES[engine].known,
            "loads": report.passes(engine),
            "failures": _rows(report.failures, engine),
            "limits": _rows(report.limits, engine),
        }
        for engine in BOTH
    }
    return {"folder": str(report.folder), "layout": report.layout, "engines": engines}


def _rows(findings: tuple[RuleFinding, ...], engine: str) -> list[dict[str, str]]:
    return [{"rule": one.rule, "reason": one.reason} for one in findings if one.engine == engine]
