"""Weights & Biases: one run, its id the run directory's, its steps ours.

wandb takes steps in rising order only, so a resumed run goes on where its server says it is; offline, where the mark
says, in a second `offline-run-*` directory of the same id, which `wandb sync` adds to the first. What wandb would take
of its own account (console, git, code, command line) stays here: it may hold what a setting may not.
"""

from __future__ import annotations

import os
from typing import Any

from dppo_megatron.observe.trackers.messages import Begin, StepLine
from dppo_megatron.observe.trackers.process import Mark


class Wandb:
    """See `Tracker`."""

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        """Begin or resume the run."""
        import wandb

        self._table = wandb.Table
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        offline = begin.offline or os.environ.get("WANDB_MODE", "online") != "online"
        self._run = wandb.init(
            project=begin.project,
            name=begin.name,
            id=run,
            tags=begin.tags,
            config=begin.config,
            dir=begin.directory,
            mode="offline" if begin.offline else None,  # None: as WANDB_MODE says
            resume="allow",
            settings=settings,
        )
        self._run.config.update(begin.config, allow_val_change=True)  # settings that a resume may change
        return self._run.step - 1 if self._run.resumed and not offline else None

    def step(self, line: StepLine) -> None:
        """One row of the history."""
        row: dict[str, Any] = dict(line.metrics)
        if line.rows:
            row["samples"] = self._table(columns=line.columns, data=line.rows)
        self._run.log(row, step=line.step, commit=True)

    def end(self, *, finished: bool) -> None:
        """Wait until everything is sent or, offline, written."""
        self._run.finish(exit_code=0 if finished else 1)


def make() -> Wandb:
    """The adapter."""
    return Wandb()
