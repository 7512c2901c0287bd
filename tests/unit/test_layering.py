"""Imports point one way, between packages and inside them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from benchmarks.structure import ROOT, arrows, circles, read_imports

PACKAGE = ROOT / "flashdraft"

MAX_MODULES = 15  # side by side in a folder
MAX_IMPORTS = 12  # of modules of ours, by one
WIDE = {"engine.engine"}  # it joins the parts

# A room of a folder imports what stands to its left in the folder's line; rooms between two bars do
# not know each other.
ORDER = {
    "": "children, errors, files, interrupts, markup, status_line, svg | habits | core | killable"
    " | media, text | kernels | models | engine | chat | llm | server, bench, train, external | cli"
    " | __main__",
    "bench": "accuracy, plan, tasks | doctor, results | run | report | traffic",
    "chat": "messages, pictures, sampling, schema | answers, sight | prompted_tools"
    " | grammar, templates | families | answer_format | binding",
    "cli": "choices, clients, files, input, parser, statistics | arguments, completion, display"
    ", pictures, plan | answer, model | bench, chat, flags | serving | commands",
    "engine": "config, drafts, output, sequence, streams, twin | cache, pictures, policy, sampling"
    " | scheduler, validate | draft | live | drafting, step | ahead | engine",
    "external": "command, pairs, processes, tensor_rules, vllm_plugin"
    " | checkpoint_rules, launch, versions | memory | sglang, vllm",
    "kernels": "convolution, kinds, nodes, settle | draw | layout, quantized | accept, tree"
    " | advance, paths"
    " | interface | composed | cpu, torch_backend | cuda, select",
    "kernels.cuda": "plan | card | driver, overlap | ahead, dense"
    " | advance, draw, layout, settle"
    " | paths, tree | attention, dense_backend, loss, quantized | experts | quantized_backend"
    " | expert_backend | backend",
    "models": "readable | config | files, rope | gguf, packed, tables"
    " | other_formats, sources, tokenizer, weights | adapters, layers, stored"
    " | drafter, llama, loading, stream_decoder, vision | gemma | registry | pairs",
    "server": "settings, telemetry | http, process | answering | anthropic, ollama, openai"
    " | service | routes | app | launch",
    "train": "export, initial, lock | data | fit | estimate, evaluate, origin | job"
    " | stages | pipeline",
}
TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}
TORCH_FREE = {
    "errors.py",
    "habits.py",
    "core.py",
    "engine/scheduler.py",
    "engine/cache/pages.py",
    "engine/cache/planning.py",
    "kernels/kinds.py",
    "media/child.py",
    "media/film_child.py",
    "media/page_child.py",
    "media/pictures.py",
    "models/stored.py",
    "text/child.py",
    "cli/__init__.py",
    "cli/choices.py",
    "cli/plan.py",
    "cli/commands/completion.py",
    "cli/commands/connect.py",
    "cli/commands/models.py",
    "cli/commands/plan.py",
    "cli/commands/pull.py",
    "cli/commands/list.py",
    "cli/commands/rm.py",
    *(name for name in TREES if name.startswith(("bench/plan/", "cli/flags/", "models/config/"))),
}


def imported(tree: ast.AST) -> Iterator[list[str]]:
    """Every imported name in its parts: `from a.b import c` is a, b, c."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the absolute import"
            yield from ([*str(node.module).split("."), alias.name] for alias in node.names)


def at_run_time(tree: ast.Module) -> ast.Module:
    """A module without what it imports for type checkers alone."""
    body = [one for one in tree.body if ast.unparse(one).split(":")[0] != "if TYPE_CHECKING"]
    return ast.Module(body, tree.type_ignores)


def imported_ours(tree: ast.AST) -> list[list[str]]:
    return [parts[1:] for parts in imported(tree) if parts[0] == "flashdraft"]


IMPORTS = read_imports(PACKAGE)
FOLDERS = {".".join(p.relative_to(PACKAGE).parts[:-1]) for p in PACKAGE.rglob("*.py")}


def ranks(order: str) -> dict[str, int]:
    groups = order.split(" | ")
    return {name: i for i, group in enumerate(groups) for name in group.split(", ")}


def test_every_folder_with_folders_has_an_order() -> None:
    parents = {name.rpartition(".")[0] for name in FOLDERS - {""}}
    assert parents == ORDER.keys()


@pytest.mark.parametrize("folder", ORDER)
def test_imports_point_left(folder: str) -> None:
    rank, graph = ranks(ORDER[folder]), arrows(IMPORTS, folder)
    assert graph.keys() == rank.keys()
    wrong = [f"{a} -> {b}" for a, others in graph.items() for b in others if rank[b] >= rank[a]]
    assert wrong == []


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_no_circle(folder: str) -> None:
    assert circles(arrows(IMPORTS, folder)) == []


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_a_folder_can_be_looked_over(folder: str) -> None:
    modules = [path.stem for path in (PACKAGE / folder.replace(".", "/")).glob("*.py")]
    assert len(set(modules) - {"__init__"}) <= MAX_MODULES


def test_a_module_leans_on_few_others() -> None:
    wide = {name: len(others) for name, others in IMPORTS.items() if len(others) > MAX_IMPORTS}
    assert wide.keys() <= WIDE, wide


def test_nothing_imports_the_package_that_it_is_in() -> None:
    """What a folder's __init__ has is for those outside of it."""
    above = [
        f"{name} -> {other}"
        for name, others in IMPORTS.items()
        for other in others
        if name.startswith(f"{other}.")
    ]
    assert above == []


def test_the_package_itself_is_not_imported_within() -> None:
    for name, tree in TREES.items():
        assert all(imported_ours(tree)), f"{name}: import a module of flashdraft"


@pytest.mark.parametrize("name", TREES)
def test_no_import_of_ours_inside_a_function(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert imported_ours(node) == [], f"{name}:{node.lineno} {node.name}"


@pytest.mark.parametrize("name", sorted(TORCH_FREE))
def test_needs_no_torch(name: str) -> None:
    reached, waiting = set[str](), [name]
    while waiting:
        reached.add(module := waiting.pop())
        tree = at_run_time(TREES[module])
        assert "torch" not in {parts[0] for parts in imported(tree)}, module
        for parts in imported_ours(tree):  # the last part may be a name in a module
            paths = {"/".join(parts) + ".py", "/".join(parts[:-1]) + ".py"}
            waiting += paths & TREES.keys() - reached
