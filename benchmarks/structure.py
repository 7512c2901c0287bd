"""The structure of the package, measured: python -m benchmarks.structure [--before COMMIT]

A folder's *rooms* are its modules and the folders in it. An arrow goes from a room to one that it
imports; the *floors* are the rooms of the longest way along arrows; an arrow on a circle points up.
The *fan-out* of a module is how many modules of ours it imports.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "flashdraft"


@dataclass(frozen=True)
class Folder:
    """One folder of the package, by its dotted name; the package itself is ''."""

    name: str
    modules: int  # side by side, without __init__
    rooms: int  # the same and the folders
    floors: int
    arrows: int
    arrows_up: int


@dataclass(frozen=True)
class Structure:
    """The package at one commit, or as it lies here."""

    modules: int
    folders: list[Folder]
    fan_out_mean: float
    fan_out_max: int
    widest: str  # the module with the largest fan-out


def read_imports(package: Path) -> dict[str, set[str]]:
    """Modules by dotted name within the package, and the modules of ours that each imports."""
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return {name: set(_imported(tree, trees.keys())) - {name} for name, tree in trees.items()}


def _imported(tree: ast.AST, modules: Container[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{PACKAGE}."):
                    yield alias.name.removeprefix(f"{PACKAGE}.")
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == PACKAGE:
            base = str(node.module).removeprefix(PACKAGE).removeprefix(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".removeprefix(".")
                yield name if name in modules else base


def room_of(module: str, folder: str) -> str | None:
    """The room of a folder that a module is in, if it is."""
    inside = module if not folder else module.removeprefix(f"{folder}.")
    if not inside or (folder and inside == module):
        return None  # the folder's own __init__, or elsewhere
    return inside.split(".")[0]


def arrows(imports: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """The rooms of a folder, and which others each imports."""
    found: dict[str, set[str]] = {}
    for module, others in imports.items():
        room = room_of(module, folder)
        if room is not None:
            reached = {room_of(other, folder) for other in others} - {room, None}
            found.setdefault(room, set()).update(name for name in reached if name)
    return found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = set[str](), [*graph.get(start, ())]
    while waiting:
        if (room := waiting.pop()) not in found:
            found.add(room)
            waiting += graph.get(room, ())
    return found


def circles(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that lie on a circle."""
    return [(a, b) for a, others in graph.items() for b in others if a in reachable(graph, b)]


def count_floors(graph: dict[str, set[str]]) -> int:
    """The most rooms on one way along arrows, those of circles left out."""
    up = set(circles(graph))

    @cache
    def height(room: str) -> int:
        below = (height(other) for other in graph.get(room, ()) if (room, other) not in up)
        return 1 + max(below, default=0)

    return max(map(height, graph), default=0)


def measure(package: Path) -> Structure:
    imports = read_imports(package)
    folders = []
    for path in sorted({path.parent for path in package.rglob("*.py")}):
        name = ".".join(path.relative_to(package).parts)
        graph = arrows(imports, name)
        modules = sum(file.stem != "__init__" for file in path.glob("*.py"))
        number = sum(map(len, graph.values()))
        up = len(circles(graph))
        folders.append(Folder(name, modules, len(graph), count_floors(graph), number, up))
    widest = max(imports, key=lambda module: len(imports[module]))
    sizes = [len(others) for name, others in imports.items() if _is_code(package, name)]
    mean = round(sum(sizes) / len(sizes), 2)
    return Structure(len(sizes), folders, mean, len(imports[widest]), widest)


def _is_code(package: Path, name: str) -> bool:
    """Not the empty __init__ of a folder."""
    path = package / name.replace(".", "/") / "__init__.py"
    return not path.exists() or len(ast.parse(path.read_text(encoding="utf-8")).body) > 1


def measure_commit(commit: str) -> Structure:
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, PACKAGE]
    archive = subprocess.run(command, check=True, capture_output=True, env=dict(os.environ)).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        return measure(Path(folder, PACKAGE))


def table(title: str, found: Structure) -> str:
    rows = [
        f"{title}: {found.modules} modules, fan-out {found.fan_out_mean} mean,"
        f" {found.fan_out_max} most ({found.widest})",
        "",
        "| folder | modules | rooms | floors | arrows | up |",
        "|---|---|---|---|---|---|",
    ]
    for one in found.folders:
        name = one.name.replace(".", "/") or PACKAGE
        numbers = (one.modules, one.rooms, one.floors, one.arrows, one.arrows_up)
        rows.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    return "\n".join([*rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", metavar="COMMIT", help="measure a commit as well")
    parser.add_argument("--json", metavar="FILE", type=Path)
    options = parser.parse_args()
    found = {"after" if options.before else "now": measure(ROOT / PACKAGE)}
    if options.before:
        found = {"before": measure_commit(options.before), **found}
    for title, one in found.items():
        print(table(title, one))
    if options.json:
        document = {title: asdict(one) for title, one in found.items()}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
