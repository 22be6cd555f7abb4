"""This process's place in the job, as the launcher's environment says. Without torch, which help must not wait for."""

from __future__ import annotations

import os


def launched_world_size() -> int:
    """Processes of this job according to the launcher's environment; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's rank according to the launcher's environment; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))
