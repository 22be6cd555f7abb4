"""TensorBoard: an event file in `trackers/tensorboard`, by torch's writer.

Metrics are grouped by what stands before the first slash, as ours are. A resumed run opens a new file that begins with
the step it resumes at: TensorBoard drops what older files have from there on (`purge_step`). tensorboardX would need
less memory in this process than torch, but writes `pass@1` as `pass_1`.
"""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.observe.trackers.messages import Begin, StepLine
from dppo_megatron.observe.trackers.process import Mark
from dppo_megatron.observe.trackers.tables import markdown


class TensorBoard:
    """See `Tracker`."""

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        """Open an event file."""
        from torch.utils.tensorboard import SummaryWriter

        next_step = 0 if begin.resumed_step is None else begin.resumed_step + 1
        self._writer = SummaryWriter(Path(begin.directory) / "tensorboard", purge_step=next_step)
        if begin.resumed_step is None:
            rows = [[key, value] for key, value in sorted(begin.config.items())]
            self._writer.add_text("config", markdown(["setting", "value"], rows), 0, 0.0)
        return next_step - 1

    def step(self, line: StepLine) -> None:
        """Scalars, and the samples as text."""
        for name, value in line.metrics.items():
            self._writer.add_scalar(name, value, line.step, line.time_s)
        if line.rows:
            self._writer.add_text("samples", markdown(line.columns, line.rows), line.step, line.time_s)
        self._writer.flush()

    def end(self, *, finished: bool) -> None:
        """Close the file."""
        self._writer.close()


def make() -> TensorBoard:
    """The adapter."""
    return TensorBoard()
