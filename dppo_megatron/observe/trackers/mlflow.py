"""MLflow: one run of an experiment, on the server of MLFLOW_TRACKING_URI or in files under `trackers/mlruns`.

`mlflow-skinny` is enough for both. MLflow has files in maintenance and asks for a confirmation, which is given here
where the user has named no server: a database would need the whole of mlflow.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dppo_megatron.observe.trackers.messages import Begin, StepLine
from dppo_megatron.observe.trackers.process import Mark

T = TypeVar("T")
_PARAMETERS_A_CALL = 100
_METRICS_A_CALL = 1000
"""MLflow's own limits."""
_LONGEST_VALUE = 6000
_STEP = "step"
"""A metric of our own: the last step that the server has, in one call."""


def metric_name(name: str) -> str:
    """Letters, digits, slashes and `_-. ` are allowed; a hash keeps apart what the allowed form makes equal.

    Example: `eval/math/pass@1` -> `eval/math/pass_at_1`; `eval/é/x` -> `eval/_/x-1d9b0c` or the like.
    """
    named = name.replace("@", "_at_")
    plain = re.sub(r"[^A-Za-z0-9_\-. /]", "_", named)
    if plain != named or "_at_" in name or not re.fullmatch(r"[^/.][^/]*(/[^/.][^/]*)*", plain):
        plain = re.sub(r"(^|/)(?=[/.]|$)", r"\1_", plain)  # MLflow takes names for paths, and refuses `..` and `//`
        return f"{plain}-{hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"
    return plain


class Mlflow:
    """See `Tracker`."""

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        """Create the run, or continue the one of the mark."""
        uri = "" if begin.offline else os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (Path(begin.directory) / "mlruns").as_uri()
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client, self._metric, self._parameter = MlflowClient(tracking_uri=uri), Metric, Param
        if mark.id:
            self._run = mark.id
            self._client.update_run(self._run, status="RUNNING")
            return int(self._client.get_run(self._run).data.metrics.get(_STEP, -1))
        found = self._client.get_experiment_by_name(begin.project)
        experiment = found.experiment_id if found else self._client.create_experiment(begin.project)
        tags = {"dppo_megatron.run": run} | dict.fromkeys(begin.tags, "")
        self._run = mark.id = self._client.create_run(experiment, run_name=begin.name, tags=tags).info.run_id
        parameters = [Param(metric_name(key), str(value)[:_LONGEST_VALUE]) for key, value in begin.config.items()]
        for some in _batches(parameters, _PARAMETERS_A_CALL):
            self._client.log_batch(self._run, params=some)
        return None

    def step(self, line: StepLine) -> None:
        """Metrics, then the table as an artifact, then the mark."""
        metrics = [self._at(line, metric_name(name), value) for name, value in line.metrics.items()]
        for some in _batches(metrics, _METRICS_A_CALL):
            self._client.log_batch(self._run, metrics=some)
        if line.rows:
            columns = {name: [row[place] for row in line.rows] for place, name in enumerate(line.columns)}
            self._client.log_table(self._run, columns, f"samples/step_{line.step:06d}.json")
        self._client.log_batch(self._run, metrics=[self._at(line, _STEP, line.step)])

    def end(self, *, finished: bool) -> None:
        """Set the run's state."""
        self._client.set_terminated(self._run, "FINISHED" if finished else "FAILED")

    def _at(self, line: StepLine, name: str, value: float) -> Any:
        return self._metric(name, value, int(line.time_s * 1000), line.step)


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for first in range(0, len(items), size):
        yield list(items[first : first + size])


def make() -> Mlflow:
    """The adapter."""
    return Mlflow()
