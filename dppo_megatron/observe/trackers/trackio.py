"""trackio: a local database in `trackers/trackio`, or the Space or server that trackio's own variables name.

`TRACKIO_DIR` chooses another directory, such as one for all runs of a project.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dppo_megatron.observe.trackers.messages import Begin, StepLine
from dppo_megatron.observe.trackers.process import Mark

_SERVERS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio:
    """See `Tracker`."""

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        """Begin or resume the run, which trackio knows by its name alone: a stable one."""
        os.environ.setdefault("TRACKIO_DIR", str(Path(begin.directory) / "trackio"))
        if begin.offline:
            for name in _SERVERS:
                os.environ.pop(name, None)
        import trackio  # reads its directory now

        self._table = trackio.Table
        mark.id = mark.id or (begin.name if mark.begun <= 1 else f"{begin.name}-{mark.begun}")
        self._run = trackio.init(
            project=begin.project,
            name=mark.id,
            group=begin.tags[0] if begin.tags else None,
            config=begin.config | {"tags": ", ".join(begin.tags), "run": run},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return None

    def step(self, line: StepLine) -> None:
        """One row of its database."""
        row: dict[str, Any] = dict(line.metrics)
        if line.rows:
            row["samples"] = self._table(columns=line.columns, data=line.rows)
        self._run.log(row, step=line.step)

    def end(self, *, finished: bool) -> None:
        """Wait until everything is written."""
        self._run.finish()


def make() -> Trackio:
    """The adapter."""
    return Trackio()
