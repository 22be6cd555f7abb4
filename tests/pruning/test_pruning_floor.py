"""The room stays pure: its mathematics can be read and tested without a model, an engine or a process group."""

from __future__ import annotations

import ast
from pathlib import Path

import dppo_megatron.pruning

ALLOWED = (
    "numpy",
    "dppo_megatron.types",
    "dppo_megatron.randomness",
    "dppo_megatron.config.pruning",
    "dppo_megatron.config.plugins",
    "dppo_megatron.pruning",
)
STANDARD = ("__future__", "collections", "dataclasses", "copy", "fractions", "hashlib", "math", "typing")


def test_the_room_imports_numpy_and_the_ground_only():
    files = sorted(Path(dppo_megatron.pruning.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                ground = name.startswith(ALLOWED) or name.split(".")[0] in STANDARD
                assert ground, f"{path.name} imports {name}"
