"""TensorBoard: an event file in `trackers/tensorboard`, written without torch or TensorFlow.

Metrics are grouped by what stands before the first slash, as ours are. A resumed run opens a new file that begins with
the step it resumes at: TensorBoard drops what older files have from there on (`SessionLog.START`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dppo_megatron.observe.trackers.messages import Begin, StepLine
from dppo_megatron.observe.trackers.process import Mark
from dppo_megatron.observe.trackers.tables import markdown


class TensorBoard:
    """See `Tracker`."""

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        """Open an event file."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, metadata
        self._writer = EventFileWriter(str(Path(begin.directory) / "tensorboard"))
        next_step = 0 if begin.resumed_step is None else begin.resumed_step + 1
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(step=next_step, session_log=start))
        if begin.resumed_step is None:
            rows = [[key, value] for key, value in sorted(begin.config.items())]
            self._write(0, 0.0, [self._table("config", ["setting", "value"], rows)])
        return next_step - 1

    def step(self, line: StepLine) -> None:
        """Scalars, and the samples as text."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in line.metrics.items()]
        if line.rows:
            values.append(self._table("samples", line.columns, line.rows))
        self._write(line.step, line.time_s, values)
        self._writer.flush()

    def end(self, *, finished: bool) -> None:
        """Close the file."""
        self._writer.close()

    def _table(self, tag: str, columns: list[str], rows: list[list[Any]]) -> Any:
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2

        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING, string_val=[markdown(columns, rows).encode()], tensor_shape=shape
        )
        metadata = self._text.create_summary_metadata(display_name=tag, description="")
        return self._summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def _write(self, step: int, time_s: float, values: list[Any]) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time_s, summary=self._summary(value=values)))


def make() -> TensorBoard:
    """The adapter."""
    return TensorBoard()
