"""The floors of the house: who may import whom (docs/architecture.md), and train.py on one screen."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dppo_megatron"
GROUND = {"types", "config", "randomness", "safe_pickle", "children", "frames"}


def _table(marker: str) -> dict[str, set[str]]:
    """Room or module -> what else of the package it may import, as the table under `marker` says."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = text.split(f"<!-- {marker} -->")[1].strip().split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): set(re.findall(r"`(\w+)`", allowed)) for name, _, allowed in cells}


MAY_IMPORT = _table("floors")
ROLLOUT_MAY_IMPORT = _table("floors of rollout")
PURE = {"pruning", "algorithms", "packing"}
PURE_MAY_IMPORT = {"numpy", "torch", "dppo_megatron"}


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(
                f"{node.module}.{alias.name}" if node.module == "dppo_megatron" else node.module for alias in node.names
            )
    return found


def _room(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_floors_hold(path: Path) -> None:
    """A room imports the ground, itself and what the table allows."""
    room = _room(path)
    assert room in MAY_IMPORT, f"{room} is a new room: give it a floor in the table of docs/architecture.md"
    allowed = GROUND | {room, "__version__"} | MAY_IMPORT[room] if room not in GROUND else GROUND | MAY_IMPORT[room]
    used = {name.split(".")[1] for name in _imports(path) if name.startswith("dppo_megatron.")}
    assert used <= allowed, f"{room} must not import {sorted(used - allowed)}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent.name in ROLLOUT_MAY_IMPORT], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_floors_of_the_rollout_wing(path: Path) -> None:
    """Bytes below servers, servers below weight sync: `servers/` never imports `sync/`."""
    room = path.parent.name
    used = {name.split(".")[2] for name in _imports(path) if name.startswith("dppo_megatron.rollout.")}
    assert used <= ROLLOUT_MAY_IMPORT[room] | {room}


@pytest.mark.parametrize(
    "path", [p for p in FILES if _room(p) in PURE], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_pure_rooms_are_pure(path: Path) -> None:
    """No Megatron, no engine, no process group where the mathematics is."""
    import sys

    outside = {name.split(".")[0] for name in _imports(path)} - PURE_MAY_IMPORT
    assert outside <= set(sys.stdlib_module_names)
    assert not any(name.startswith("torch.distributed") for name in _imports(path))


def test_train_is_one_screen() -> None:
    """The loop can be read without scrolling."""
    assert len((PACKAGE / "train.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sizes(path: Path) -> None:
    """Files under 500 lines, functions under 80."""
    assert path.read_text(encoding="utf-8").count("\n") <= 500
    for node in _nodes(path):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 80, f"{node.name} is too long"


def test_the_table_names_only_rooms_that_there_are() -> None:
    """And allows only what is below: no room imports one that imports it."""
    assert set(MAY_IMPORT) == {_room(path) for path in FILES}
    for room, allowed in MAY_IMPORT.items():
        assert not {other for other in allowed if room in MAY_IMPORT[other]}, room
