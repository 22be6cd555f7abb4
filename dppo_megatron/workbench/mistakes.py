"""The page in docs/ that explains a mistake, so that every message can end with it.

A message that names a setting is explained where that setting is. Other messages are about a file, an option or a
machine: for those the room of the house that refused is the subject, and where that room serves everybody (the readers
of settings and paths), the command is.
"""

from __future__ import annotations

import traceback
from pathlib import Path

from dppo_megatron.config.reference import page_for
from dppo_megatron.types import UserError

ROOM_PAGES = {
    "accept": "testing.md",
    "actor": "actor.md",
    "algorithms": "objectives.md",
    "checkpoint": "checkpoints.md",
    "compare": "choosing.md",
    "convert": "checkpoints.md",
    "data": "data.md",
    "distributed": "cluster.md",
    "evaluation": "evaluation.md",
    "job": "configuration.md",
    "launched": "cluster.md",
    "observe": "run_directory.md",
    "packing": "packing.md",
    "planning": "plan.md",
    "platform": "actor.md",
    "pruning": "pruning.md",
    "quickstart": "tutorial.md",
    "report": "report.md",
    "rewards": "rewards.md",
    "rollout": "engines.md",
    "run": "checkpoints.md",
    "selection": "pruning.md",
    "simulate": "choosing.md",
    "weights": "checkpoints.md",
}
"""What a room is about."""
COMMAND_PAGES = {
    "accept": "testing.md",
    "compare": "choosing.md",
    "completion": "configuration.md",
    "config": "configuration.md",
    "convert": "checkpoints.md",
    "data": "data.md",
    "doctor": "actor.md",
    "eval": "evaluation.md",
    "plan": "plan.md",
    "quickstart": "tutorial.md",
    "report": "report.md",
    "serve": "cluster.md",
    "simulate": "choosing.md",
    "train": "configuration.md",
    "watch": "report.md",
}

_PACKAGE = Path(__file__).parents[1]


def explained(error: UserError, command: str) -> str:
    """The message, and the page that explains it unless it names one itself.

    Args:
        command: the subcommand that ran.
    """
    message = str(error)
    if "docs/" in message:
        return message
    page = page_for(message) or ROOM_PAGES.get(_room(error), "") or COMMAND_PAGES.get(command, "configuration.md")
    return f"{message}{chr(10) if chr(10) in message else ' '}(see docs/{page})"


def _room(error: UserError) -> str:
    """The room whose code raised it; empty if it came from another process."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _PACKAGE in (path := Path(frame.filename)).parents:
            parts = path.relative_to(_PACKAGE).with_suffix("").parts
            return parts[1] if parts[0] in ("steps", "workbench") else parts[0]
    return ""
