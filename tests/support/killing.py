"""Runs that are killed: SIGKILL at a named moment of a named phase, in forked ranks, and what is then on the disk.

The product knows nothing of this. A rank wraps the methods that the loop calls and, when the moment has come, kills
itself or one of the others; `run_ranks` then ends the rest, as a launcher does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.job import job_config
from support.launch import RankError, run_ranks

PHASES = ("sft", "select", "generate", "reward", "update", "sync", "record", "saving", "evaluate", "finish")
"""Where a run can be killed."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL for `rank` in the `count`-th call of a phase (from 1), on entering it, or `delay_s` later."""

    phase: str
    count: int
    rank: int = 0
    delay_s: float = 0.0

    def strike(self) -> None:
        """On the rank itself, when the call comes."""
        if not self.delay_s:
            os.kill(os.getpid(), signal.SIGKILL)
        _kill_later(self.delay_s)


def train_or_die(files: Path, run_dir: Path, world_size: int, extra: dict[str, Any], kill: Kill | None) -> int:
    """On a rank: the product's own `train`, killed on the way; returns the exit code of the command line."""
    from dppo_megatron.job import prepare_job
    from dppo_megatron.run import Run, Stopped
    from dppo_megatron.train import train
    from dppo_megatron.types import RunAborted

    job = prepare_job(job_config(files, run_dir, **extra), world_size)
    try:
        with Run(job) as run:
            if kill is not None and kill.rank == int(os.environ["RANK"]):
                arm(run, kill, kill.strike)
            train(run)
    except RunAborted:
        return 3
    except Stopped:
        return 0
    return 0


def run_killed(files: Path, run_dir: Path, world_size: int, extra: dict[str, Any], kill: Kill) -> bool:
    """Start a run that gets killed; returns whether it was (else it ended before the moment came)."""
    try:
        run_ranks(train_or_die, world_size, files, run_dir, world_size, extra, kill, dies=kill.rank)
    except RankError as error:
        assert "SIGKILL" in str(error), f"it failed otherwise: {error}"
        return True
    return False


def run_whole(files: Path, run_dir: Path, world_size: int, extra: dict[str, Any]) -> None:
    """Start, or resume, a run and let it end."""
    assert set(run_ranks(train_or_die, world_size, files, run_dir, world_size, extra, None)) == {0}


def arm(run: Any, moment: Kill, strike: Callable[[], None]) -> None:
    """Have `strike` called on this rank when `run` enters the call."""
    from dppo_megatron.checkpoint import store

    targets: dict[str, tuple[Any, str]] = {
        "sft": (run.loop.actor, "update"),
        "select": (run.loop, "_select"),
        "generate": (run.loop, "generate"),
        "reward": (run.loop._engine, "_grade" if hasattr(run.loop._engine, "_grade") else "take_grades"),
        "update": (run.loop, "update"),
        "sync": (run.loop, "sync"),
        "record": (run, "record"),
        "saving": (store.CheckpointStore, "save"),
        "evaluate": (run.loop, "evaluate"),
        "finish": (run, "finish"),
    }
    patch, calls = pytest.MonkeyPatch(), 0
    owner, name = targets[moment.phase]
    plain: Callable[..., Any] = getattr(owner, name)

    def struck_in_time(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == moment.count:
            strike()
            if moment.delay_s:  # a busy machine may end the run sooner than the killer wakes
                patch.setattr(run, "finish", signal.pause)
        return plain(*arguments, **keywords)

    patch.setattr(owner, name, struck_in_time)


def _kill_later(delay_s: float) -> None:
    """From outside, so that it strikes wherever the rank is then, and not only between two lines of Python."""
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(delay_s)
        os.kill(victim, signal.SIGKILL)
        os._exit(0)
