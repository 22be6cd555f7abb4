"""The page in docs/ that explains a mistake, so that every message can end with it.

A message that names a setting is explained where that setting is. Other messages are about a file, an option or a
machine: for those the package that raised it decides, and where that one serves all commands (the readers of
settings and paths), the command does.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from dppo_megatron.config.reference import page_for
from dppo_megatron.types import UserError

_ABOUT = {
    "actor.md": "actor doctor platform",
    "checkpoints.md": "checkpoint convert run weights",
    "choosing.md": "compare simulate",
    "cluster.md": "distributed launcher_env serve",
    "configuration.md": "job",
    "data.md": "data",
    "engines.md": "rollout",
    "evaluation.md": "eval evaluation",
    "objectives.md": "algorithms",
    "packing.md": "packing",
    "plan.md": "plan planning",
    "pruning.md": "pruning selection",
    "report.md": "report watch",
    "rewards.md": "rewards",
    "run_directory.md": "observe",
    "testing.md": "accept",
    "tutorial.md": "quickstart",
}
PAGES = {name: page for page, names in _ABOUT.items() for name in names.split()}
"""The page about a package or a command."""

_PACKAGE = Path(__file__).parents[1]


def explained(error: UserError, command: str) -> str:
    """The message, and the page that explains it unless it names one itself.

    Args:
        command: the subcommand that ran.
    """
    message = str(error)
    if "docs/" in message:
        return message
    page = page_for(message) or PAGES.get(_package(error)) or PAGES.get(command, "configuration.md")
    return f"{message}{chr(10) if chr(10) in message else ' '}(see docs/{page})"


def _package(error: UserError) -> str:
    """The package whose code raised it; empty if it came from another process."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _PACKAGE in (path := Path(frame.filename)).parents:
            parts = path.relative_to(_PACKAGE).with_suffix("").parts
            return parts[1] if parts[0] in ("steps", "workbench") else parts[0]
    return ""
