"""One name for one thing."""

from __future__ import annotations

import ast
from collections import Counter

from support.job import REPOSITORY

COMMAND = "a subcommand's file has the name that is typed, which is that of the package or the verb behind it"
SAME_FILE_NAME = {
    "compare.py": COMMAND,
    "convert.py": COMMAND,
    "data.py": "a section of the schema; a subcommand",
    "evaluate.py": COMMAND,
    "messages.py": "what crosses between a package and its own child process: graders, rollout clients, trackers",
    "plan.py": COMMAND,
    "process.py": "the program of a child process: a rollout client, a tracker",
    "simulate.py": COMMAND,
    "trace.py": "trace.jsonl, its writer in steps/ and its reader in workbench/runs/",
    "train.py": COMMAND,
}
"""File names that there are more than once -> why."""
SAME_CLASS_NAME = {
    "Loader": "both are what their libraries call it: PyYAML's, importlib's",
    "Step": "a step of training; a step of `accept`, which a user chooses by that word",
}
"""Class names, without a leading underscore, that there are more than once -> why."""

FILES = sorted((REPOSITORY / "dppo_megatron").rglob("*.py"))


def _repeated(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_file_name_is_there_twice_without_a_reason() -> None:
    """A search finds the file that is meant; what has a reason no longer leaves the list."""
    assert _repeated([path.name for path in FILES]) - {"__init__.py", "__main__.py"} == SAME_FILE_NAME.keys()


def test_no_class_name_is_there_twice_without_a_reason() -> None:
    """Private ones count too: `_Plan` beside `Plan` reads as the same thing."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    names = [node.name.lstrip("_") for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert len(names) > 300 and _repeated(names) == SAME_CLASS_NAME.keys()
