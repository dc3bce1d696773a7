"""The structure that docs/architecture.md draws: imports point down the layers in no circle; names are documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import unisono

ROOT = Path(unisono.__file__).parent
# From the top. The launcher and the trainer do not need each other.
LAYERS = [
    "cli", "drill", "report", "estimate", "launch", "comm", "trainer", "parallel", "rank_zero", "metrics", "loggers",
    "engine", "servers", "embedding", "data", "state", "collectives", "job", "shm", "plan", "watch",
]  # fmt: skip
APART = {("launch", layer) for layer in ("comm", "trainer", "engine", "data", "state", "collectives", "job", "shm")}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements below a node. To look at their expressions as well would take as long as to parse them."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        found = getattr(node, name, ())
        for child in found if isinstance(found, list) else ():
            yield child
            yield from statements(child)


def imports_of(path: Path) -> set[str]:
    """The modules of unisono that a file imports, wherever in it."""
    found = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("unisono.")}


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else None


def test_every_folder_is_a_layer():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(LAYERS)


def test_imports_point_down_and_in_no_circle():
    """One test, since to parse all modules takes seconds."""
    imports = {module: imports_of(path) for module, path in MODULES.items()}
    wrong = []
    for module, found in imports.items():
        own = layer_of(module)
        for imported in sorted(found) if own else ():
            other = layer_of(imported)
            if other is None or own == other:
                continue
            if LAYERS.index(own) > LAYERS.index(other):
                wrong.append(f"{module} imports {imported}, which is above it")
            if (own, other) in APART:
                wrong.append(f"{module} imports {imported}: the launcher must not need the trainer's side")
    assert wrong == []
    graph = {
        name: {other for other in found if other in MODULES and other != name} - _own_package(name)
        for name, found in imports.items()
        if name != "unisono"
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_two_files_and_no_two_classes_share_a_name():
    files = Counter(path.name for path in MODULES.values() if not path.name.startswith("__"))
    classes = Counter(
        name for path in MODULES.values() for name in re.findall(r"^class _*(\w+)", path.read_text(), re.MULTILINE)
    )
    assert [name for name, count in (files + classes).items() if count > 1] == []


def _own_package(module: str) -> set[str]:
    # A package's __init__ re-exports its modules, which name each other in full.
    return {module.rpartition(".")[0]}


def test_the_launchers_side_starts_without_torch():
    code = """
import sys
for module in ("unisono", "unisono.watch", "unisono.launch", "unisono.report.page", "unisono.cli.main"):
    __import__(module)
    assert not {"torch", "rich"} & set(sys.modules), module
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_changes_nothing():
    code = """
import gc, os, random, signal, sys, threading, torch
def state():
    return (
        dict(os.environ), random.getstate(), torch.get_rng_state().tolist(), threading.active_count(),
        torch.get_num_threads(), list(sys.meta_path), list(sys.path), list(sys.path_hooks), sys.excepthook,
        threading.excepthook, gc.get_threshold(), [signal.getsignal(s) for s in signal.valid_signals()],
        torch.get_default_dtype(),
    )
before = state()
from unisono import Trainer, Checkpoints, Average
import unisono.data, unisono.comm, unisono.loggers, unisono.engine, unisono.launch, unisono.watch, unisono.parallel
import unisono.embedding
assert state() == before
assert "llvmlite" not in sys.modules  # which takes long
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("package", ["unisono", *(f"unisono.{layer}" for layer in LAYERS)])
def test_all_names_exist_and_are_documented(package):
    module = importlib.import_module(package)
    assert module.__doc__
    for name in getattr(module, "__all__", []):
        value = getattr(module, name)
        if inspect.isroutine(value) or inspect.isclass(value):
            assert value.__doc__, f"{package}.{name} has no docstring"


def test_public_names_stand_in_the_docs():
    docs = "\n".join(path.read_text() for path in (ROOT.parents[1] / "docs").glob("*.md"))
    for name in unisono.__all__:
        assert f"unisono.{name}" in docs or f"`{name}" in docs, f"unisono.{name} is in no page of docs/"
