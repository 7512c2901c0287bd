"""Imports point one way: a module imports its own package and what stands to its left in ORDER."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "flashdraft"
ORDER = (
    "children, errors, files, interrupts, svg | core | killable | text | kernels | models | engine"
    " | chat | llm | server, bench, train, external | cli | __main__"
)
RANK = {name: i for i, group in enumerate(ORDER.split(" | ")) for name in group.split(", ")}
TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}
TORCH_FREE = (
    "errors.py",
    "core.py",
    "engine/scheduler.py",
    "engine/pages.py",
    "text/child.py",
)


def imported(tree: ast.AST) -> Iterator[list[str]]:
    """Every imported name in its parts: `from a.b import c` is a, b, c."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the absolute import"
            yield from ([*str(node.module).split("."), alias.name] for alias in node.names)


def imported_ours(tree: ast.AST) -> list[list[str]]:
    return [parts[1:] for parts in imported(tree) if parts[0] == "flashdraft"]


@pytest.mark.parametrize("name", [name for name in TREES if name != "__init__.py"])
def test_imports_point_left(name: str) -> None:
    own = name.split("/")[0].removesuffix(".py")
    assert own in RANK, f"{own} has no place in ORDER"
    for parts in imported_ours(TREES[name]):
        assert parts, "import a module of flashdraft, not flashdraft itself"
        assert parts[0] == own or RANK.get(parts[0], len(RANK)) < RANK[own], ".".join(parts)


@pytest.mark.parametrize("name", TREES)
def test_no_import_of_ours_inside_a_function(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert imported_ours(node) == [], f"{name}:{node.lineno} {node.name}"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_needs_no_torch(name: str) -> None:
    reached, waiting = set[str](), [name]
    while waiting:
        reached.add(module := waiting.pop())
        assert "torch" not in {parts[0] for parts in imported(TREES[module])}, module
        for parts in imported_ours(TREES[module]):  # the last part may be a name in a module
            paths = {"/".join(parts) + ".py", "/".join(parts[:-1]) + ".py"}
            waiting += paths & TREES.keys() - reached
