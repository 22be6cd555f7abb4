"""Which package imports which, how large each may grow (docs/architecture.md), and train.py on one screen."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "dppo_megatron"
EVERYWHERE = {"types", "config", "randomness", "safe_pickle", "files", "texts", "children", "frames", "progress"}
"""Imported by every package."""


class Row(NamedTuple):
    """A package or module in a table of docs/architecture.md."""

    may_import: set[str]
    most_lines: int


def _table(marker: str) -> dict[str, Row]:
    """The rows under `marker`, by name."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = text.split(f"<!-- {marker} -->")[1].strip().split("\n\n")[0].splitlines()[2:]
    found = {}
    for row in rows:
        name, _, allowed, lines = (cell.strip() for cell in row.strip("|").split("|"))
        found[name.strip("`")] = Row(set(re.findall(r"`(\w+)`", allowed)), int(lines.replace(",", "")))
    return found


PACKAGES = _table("packages")
INSIDE = {name: _table(f"packages of {name}") for name in ("rewards", "rollout", "workbench")}
PURE = {"pruning": {"numpy"}, "algorithms": {"numpy", "torch"}, "packing": {"numpy"}}
"""Packages of mathematics, and what they import beside this program and the standard library."""


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def _module(path: Path) -> str:
    """`dppo_megatron.pruning` of `dppo_megatron/pruning/__init__.py`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in [PACKAGE / "__init__.py", *FILES]}


@functools.cache
def _imports(path: Path) -> set[str]:
    """Every module that is imported anywhere in it, in a function or for its types alone too."""
    found: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{path}: relative imports are not looked at here"
            names = {alias: f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in MODULES else node.module for name in names.values())
    return found


def _own(path: Path, prefix: str) -> set[str]:
    """What it imports below `prefix`, by the first name after it."""
    return {name.removeprefix(prefix).split(".")[0] for name in _imports(path) if name.startswith(prefix)}


def _name(path: Path, package: Path = PACKAGE) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_are_those_of_the_table(path: Path) -> None:
    """What every package may, its own package, and what the table allows."""
    name = _name(path)
    assert name in PACKAGES, f"{name} is new: give it a row in the table of docs/architecture.md"
    allowed = PACKAGES[name].may_import | {name} | EVERYWHERE
    used = _own(path, "dppo_megatron.")
    assert used <= allowed, f"{name} must not import {sorted(used - allowed)}"


@pytest.mark.parametrize("package_name", sorted(INSIDE))
def test_imports_inside_a_large_package_are_those_of_its_table(package_name: str) -> None:
    """Bytes below servers, servers below weight sync; a page of figures below the command that asks for it."""
    rows, package = INSIDE[package_name], PACKAGE / package_name
    files = [path for path in FILES if package in path.parents and _name(path, package) in rows]
    assert {_name(path, package) for path in files} == set(rows)
    for path in files:
        name = _name(path, package)
        used = _own(path, f"dppo_megatron.{package_name}.")
        assert used <= rows[name].may_import | {name}, f"{path}: {sorted(used)}"


def test_what_runs_inside_engines_imports_nothing_of_the_program() -> None:
    """It is loaded by path into processes whose Python need not have this package."""
    files = sorted((PACKAGE / "rollout" / "servers" / "in_engine").rglob("*.py"))
    assert len(files) > 2
    assert not [path.name for path in files if any(name.startswith("dppo_megatron") for name in _imports(path))]


def test_the_trainer_does_without_the_workbench() -> None:
    """A rank loads no plotting and no parser of command lines: only the program's entry imports the workbench."""
    users = {_name(path) for path in FILES if "workbench" in _own(path, "dppo_megatron.")}
    assert users == {"workbench", "__main__"}


def _metric_reads(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines of `metrics.get(...)` and of `.get("section/name", ...)`, whatever it is called on."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            of_metrics = re.search(r"(^|[._])metrics$", ast.unparse(node.func.value))
            names = [
                one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            if of_metrics or any(re.match(r"[a-z]+/", name) for name in names):
                yield node.lineno


def test_nothing_is_decided_by_a_metric_that_may_be_missing() -> None:
    """A renamed metric would silently become its default: what decides something is a typed field."""
    found = ['m.get("time/step_s", 0.0)', "step.metrics.get(name)", 'm["a/b"]', 'http.get("/health")', "names.get(a)"]
    assert [len(list(_metric_reads(ast.walk(ast.parse(line))))) for line in found] == [1, 1, 0, 0, 0]
    files = [path for path in FILES if _name(path) not in ("observe", "workbench")]
    assert not [f"{path}:{line}" for path in files for line in _metric_reads(_nodes(path))]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Circles of any length, inside packages too, those for types alone included."""
    edges = {name: {found for found in _imports(path) if found in MODULES} - {name} for name, path in MODULES.items()}
    assert sum(map(len, edges.values())) > 1000
    while free := {name for name, used in edges.items() if not used}:  # nothing left to import: in no circle
        edges = {name: used - free for name, used in edges.items() if name not in free}
    assert not edges, f"in a circle, or importing one: {sorted(edges)}"


def _with_lines() -> Iterator[tuple[str, Path, int]]:
    tables = [(PACKAGE, PACKAGES), *((PACKAGE / package_name, rows) for package_name, rows in INSIDE.items())]
    for package, rows in tables:
        for name, row in rows.items():
            yield name, package, row.most_lines


@pytest.mark.parametrize(("name", "package", "most_lines"), list(_with_lines()), ids=lambda value: str(value)[-20:])
def test_a_package_stays_within_its_lines(name: str, package: Path, most_lines: int) -> None:
    """Growth is a decision: the number in docs/architecture.md is raised in the same change, for all to see."""
    root = package / name
    files = [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else [root.with_suffix(".py")]
    text = [path for path in files if "__pycache__" not in path.parts and path.suffix != ".npz"]  # arrays have none
    lines = sum(path.read_bytes().count(b"\n") for path in text)
    assert 0 < lines <= most_lines, f"{name} has {lines} lines, docs/architecture.md allows {most_lines}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if _name(p) in PURE], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_pure_packages_are_pure(path: Path) -> None:
    """No Megatron, no engine, no process group where the mathematics is."""
    import sys

    outside = {name.split(".")[0] for name in _imports(path)} - PURE[_name(path)] - {"dppo_megatron"}
    assert outside <= set(sys.stdlib_module_names)
    assert not any(name.startswith("torch.distributed") for name in _imports(path))
    if _name(path) == "pruning":
        assert _own(path, "dppo_megatron.") <= {"types", "randomness", "config", "pruning"}
        assert _own(path, "dppo_megatron.config.") <= {"pruning", "plugins"}


def test_train_is_one_screen() -> None:
    """The loop can be read without scrolling."""
    assert len((PACKAGE / "train.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sizes(path: Path) -> None:
    """Files under 500 lines, functions under 80."""
    assert path.read_text(encoding="utf-8").count("\n") <= 500
    for node in _nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 80, f"{node.name} is too long"


def test_the_table_names_only_what_there_is() -> None:
    assert set(PACKAGES) == {_name(path) for path in FILES}
