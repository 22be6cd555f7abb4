"""The process of one tracker: reads messages from stdin, passes each to the tool, and answers it.

It is a process and not a thread of the trainer, because mlflow takes six seconds to import, and wandb and trackio keep
global state, print, and wait for the network when Python exits. When the trainer is killed, stdin ends, and what was
sent is still delivered.

Messages and answers are JSON objects in frames. A resumed run repeats steps after its checkpoint, with the same result
(docs/checkpoints.md); the tool does not get them again. `trackers/NAME.json` records the last step that it has.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import msgspec

from dppo_megatron.children import ignore_signals
from dppo_megatron.files import make_directory, write_text
from dppo_megatron.frames import framed, read_frame
from dppo_megatron.texts import one_line

T = TypeVar("T")

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_LEAST_SECRET = 6
"""Shorter values of such variables are not treated as secrets: replacing every occurrence would garble the text."""
Cell = str | float | int | bool | None


class Begin(msgspec.Struct, frozen=True, tag=True):
    run: str
    directory: str
    """`trackers/` in it, absolute."""
    project: str
    name: str
    tags: list[str]
    offline: bool
    config: dict[str, Cell]
    """Dotted key -> value. References to environment variables are not resolved."""
    resumed_step: int | None
    """The step that the run resumes from; None: a new run."""


class StepLine(msgspec.Struct, frozen=True, tag=True):
    """A finished step, or the evaluation before the first (step 0)."""

    step: int
    time_s: float
    """Since the epoch."""
    metrics: dict[str, float]
    """All finite."""
    columns: list[str] = []
    rows: list[list[Cell]] = []
    """A table of samples; empty if this step has none."""


class EndRun(msgspec.Struct, frozen=True, tag=True):
    finished: bool
    """False if an error ended the run."""


class Answer(msgspec.Struct, frozen=True):
    """Sent for each message, once the tool has processed it."""

    failure: str = ""
    note: str = ""
    """For the log, after the tracker's name."""


class Mark(msgspec.Struct):
    """The last step that a tool has, kept in the run directory."""

    begun: int = 0
    """How often the run has begun at its first step."""
    last_step: int = -1
    id: str = ""
    """The tool's own id of its run, if it assigns one."""

    @staticmethod
    def read(path: Path) -> Mark:
        """The mark at `path`; a new one if there is none or it cannot be read."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=Mark)
        except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return Mark()

    def write(self, path: Path) -> None:
        write_text(path, msgspec.json.encode(self).decode() + "\n")


ToTracker = Begin | StepLine | EndRun
ENCODER = msgspec.json.Encoder()
TO_TRACKER = msgspec.json.Decoder(ToTracker)
ANSWER = msgspec.json.Decoder(Answer)


class Tracker(Protocol):
    """One tool. Its exceptions are reported to the trainer, which carries on."""

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        """Open or continue the tool's run.

        Args:
            mark: `begin` may set its `id`.
            run: id of the run; a new one each time the run begins again at its first step.

        Returns:
            The last step that the tool has; steps up to it are skipped. None: unknown, `mark.last_step` is used.
        """

    def step(self, line: StepLine) -> None:
        """Log a step. Called in the order of steps, once for each."""

    def end(self, *, finished: bool) -> None:
        """Deliver everything and close the tool's run."""


class TensorBoard:
    """An event file in `trackers/tensorboard`, written by torch's SummaryWriter.

    TensorBoard groups metrics by the part before the first slash, which is how ours are named. A resumed run opens a
    new file with `purge_step`, from which on TensorBoard hides what older files contain. tensorboardX would need less
    memory in this process than torch, but writes `pass@1` as `pass_1`.
    """

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        folder = _folder(begin, "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        next_step = 0 if begin.resumed_step is None else begin.resumed_step + 1
        self._writer = SummaryWriter(folder, purge_step=next_step)
        rows = [[key, value] for key, value in sorted(begin.config.items())]  # a resume may have changed some
        self._writer.add_text("config", _markdown(["setting", "value"], rows), max(begin.resumed_step or 0, 0), 0.0)
        return next_step - 1

    def step(self, line: StepLine) -> None:
        for name, value in line.metrics.items():
            self._writer.add_scalar(name, value, line.step, line.time_s)
        if line.rows:
            self._writer.add_text("samples", _markdown(line.columns, line.rows), line.step, line.time_s)
        self._writer.flush()

    def end(self, *, finished: bool) -> None:
        self._writer.close()


class _Rows:
    """Shared by wandb and trackio: a step is a row, and the samples are a table in one of its columns."""

    _table: Any
    _run: Any
    _log_options: Mapping[str, Any] = {}

    def step(self, line: StepLine) -> None:
        row: dict[str, Any] = dict(line.metrics)
        if line.rows:
            row["samples"] = self._table(columns=line.columns, data=line.rows)
        self._run.log(row, step=line.step, **self._log_options)


class Wandb(_Rows):
    """Weights & Biases: one run with the run directory's id and our step numbers.

    wandb accepts steps only in increasing order, so a resumed run goes on after the last step that its server has.
    Offline it goes on after the mark's step, in a second `offline-run-*` directory that `wandb sync` adds to the first.
    What wandb would collect by itself (console, git, code, command line) is turned off: it may contain secrets.
    """

    _log_options = {"commit": True}  # else each row would be sent only with the next one

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        _folder(begin, "wandb")  # wandb puts its files there, given `dir=begin.directory`
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
            mode="offline" if begin.offline else None,  # None: from WANDB_MODE
            resume="allow",
            settings=settings,
        )
        self._run.config.update(begin.config, allow_val_change=True)  # settings that a resume may change
        return self._run.step - 1 if self._run.resumed and not offline else None

    def end(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class Trackio(_Rows):
    """A local database in `trackers/trackio`, or the Space or server that trackio's own environment variables name.

    `TRACKIO_DIR` selects another directory, such as one for all runs of a project.
    """

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        if "TRACKIO_DIR" not in os.environ:
            os.environ["TRACKIO_DIR"] = str(_folder(begin, "trackio"))
        if begin.offline:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        import trackio  # only now: its import reads TRACKIO_DIR

        self._table = trackio.Table
        mark.id = mark.id or (begin.name if mark.begun <= 1 else f"{begin.name}-{mark.begun}")  # its runs have no id
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

    def end(self, *, finished: bool) -> None:
        self._run.finish()


class Mlflow:
    """One run of an experiment, on the server at MLFLOW_TRACKING_URI or in files under `trackers/mlruns`.

    `mlflow-skinny` is enough for both. MLflow's file store is in maintenance and has to be confirmed by a variable,
    which is set here if the user names no server, since a database would need all of mlflow.
    """

    def begin(self, begin: Begin, mark: Mark, run: str) -> int | None:
        uri = "" if begin.offline else os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = _folder(begin, "mlruns").as_uri()
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        if mark.id:
            self._run = mark.id
            self._client.update_run(self._run, status="RUNNING")
            return int(self._client.get_run(self._run).data.metrics.get("step", -1))
        existing = self._client.get_experiment_by_name(begin.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(begin.project)
        tags = {"dppo_megatron.run": run} | dict.fromkeys(begin.tags, "")
        self._run = mark.id = self._client.create_run(experiment, run_name=begin.name, tags=tags).info.run_id
        parameters = [Param(metric_name(key), str(value)[:6000]) for key, value in begin.config.items()]
        for batch in _batches(parameters, 100):  # MLflow's own limits: 100 parameters, 6000 characters, 1000 metrics
            self._client.log_batch(self._run, params=batch)
        return None

    def step(self, line: StepLine) -> None:
        metrics = [self._at(line, metric_name(name), value) for name, value in line.metrics.items()]
        for batch in _batches(metrics, 1000):
            self._client.log_batch(self._run, metrics=batch)
        if line.rows:
            columns = {name: [row[column] for row in line.rows] for column, name in enumerate(line.columns)}
            self._client.log_table(self._run, columns, f"samples/step_{line.step:06d}.json")
        self._client.log_batch(self._run, metrics=[self._at(line, "step", line.step)])  # last: `begin` reads it back

    def end(self, *, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "FAILED")

    def _at(self, line: StepLine, name: str, value: float) -> Any:
        return self._metric(name, value, int(line.time_s * 1000), line.step)


TOOLS: dict[str, Callable[[], Tracker]] = {
    "mlflow": Mlflow, "tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb,
}  # fmt: skip


def _folder(begin: Begin, name: str) -> Path:
    """A tool's folder in the run directory, created if missing. Raises OSError if it is a link."""
    folder = Path(begin.directory) / name
    make_directory(folder)
    return folder


def metric_name(name: str) -> str:
    """A name that MLflow allows, of letters, digits, slashes and `_-. `. A hash keeps changed names distinct.

    Example: `eval/math/pass@1` -> `eval/math/pass_at_1`; `eval/é/x` -> `eval/_/x-1d9b0c` or the like.
    """
    spelled = name.replace("@", "_at_")
    plain = re.sub(r"[^A-Za-z0-9_\-. /]", "_", spelled)
    if plain != spelled or "_at_" in name or not re.fullmatch(r"[^/.][^/]*(/[^/.][^/]*)*", plain):
        plain = re.sub(r"(^|/)(?=[/.]|$)", r"\1_", plain)  # MLflow treats names as paths, and refuses `..` and `//`
        return f"{plain}-{hashlib.blake2b(name.encode(), digest_size=3).hexdigest()}"
    return plain


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for first in range(0, len(items), size):
        yield list(items[first : first + size])


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table as text, for TensorBoard. What a model wrote is escaped, so that it is not rendered as markup."""
    lines = [f"|{'|'.join(columns)}|", f"|{'|'.join('---' for _ in columns)}|"]
    lines += [f"|{'|'.join(_cell(cell) for cell in row)}|" for row in rows]
    return "\n".join(lines)


def _cell(value: Cell) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;")):
        text = text.replace(plain, escaped)
    return " ".join(text.split())


class Sink:
    """Passes the messages to the tool without the steps that it already has, and keeps its mark."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._mark, self._path = Mark(), Path()

    def take(self, message: Begin | StepLine | EndRun) -> str:
        """Pass `message` to the tool; returns a note for the log, or "". Raises whatever the tool raises."""
        if isinstance(message, Begin):
            return self._begin(message)
        if isinstance(message, EndRun):
            self._tracker.end(finished=message.finished)
        elif message.step > self._mark.last_step:
            self._tracker.step(message)
            self._mark.last_step = message.step
            self._mark.write(self._path)
        return ""

    def _begin(self, begin: Begin) -> str:
        directory = Path(begin.directory)
        make_directory(directory)
        self._path = directory / f"{self._name}.json"
        self._mark = mark = Mark.read(self._path)
        if begin.resumed_step is None:  # an earlier attempt that left no checkpoint stays a run of its own in the tool
            self._mark = mark = Mark(begun=mark.begun + 1)
        run = begin.run if mark.begun <= 1 else f"{begin.run}-{mark.begun}"
        last_step = self._tracker.begin(begin, mark, run)
        mark.last_step = mark.last_step if last_step is None else last_step
        mark.write(self._path)
        if begin.resumed_step is None or mark.last_step <= begin.resumed_step:
            return ""
        return (
            f"has steps up to {mark.last_step} from before this resume at step {begin.resumed_step}, and keeps them; if"
            " settings were changed, they differ from those in metrics.jsonl"
        )


def scrubbed(text: str) -> str:
    """`text` without the values of environment variables that are named like secrets, and without users in URLs."""
    secrets = {value.strip() for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    for value in sorted(secrets, key=len, reverse=True):  # longest first: one may be the beginning of another
        if len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return _USER_IN_URL.sub("***", text)


def serve(sink: Sink, messages: IO[bytes], answers: IO[bytes]) -> None:
    """Answer messages until they end. If none was an `EndRun`, the trainer was killed, perhaps while it sent one."""
    ended = False
    while (frame := read_frame(messages.read)) is not None:
        message = TO_TRACKER.decode(frame)
        ended = isinstance(message, EndRun)
        answer = ENCODER.encode(_answer(sink, message))
        with suppress(OSError):  # the trainer has died; the messages it has sent are still read to their end
            answers.write(framed(answer))
            answers.flush()
    if not ended:
        _answer(sink, EndRun(finished=False))


def _answer(sink: Sink, message: Begin | StepLine | EndRun) -> Answer:
    try:
        return Answer(note=sink.take(message))
    except (Exception, SystemExit) as error:  # a tool that exits must not end this process
        text = scrubbed(f"{type(error).__name__}: {error}")
        return Answer(one_line(text, 500))  # shortened last: half a key is secret too


def _leave_after(limit_s: float, messages: IO[bytes]) -> None:
    """End this process `limit_s` after the other end of `messages` was closed, whatever the tool is doing."""
    poll = select.poll()
    poll.register(messages, 0)  # reports only the hang-up, at once, even while unread messages are in the pipe
    poll.poll()
    time.sleep(limit_s)
    os._exit(1)


def main() -> None:
    """`NAME LIMIT_S`: messages on stdin, answers on stdout, until stdin ends."""
    name, limit_s = sys.argv[1], float(sys.argv[2])
    ignore_signals(signal.SIGINT, signal.SIGTERM)  # the trainer handles them; this process ends with stdin
    messages, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # tools print, and read answers to their questions
        os.dup2(nowhere, descriptor)
    threading.Thread(target=_leave_after, args=(limit_s, messages), daemon=True).start()
    serve(Sink(name, TOOLS[name]()), messages, answers)
    answers.close()
    os._exit(0)  # everything is delivered: the tools' own exit hooks would wait for their servers


if __name__ == "__main__":
    main()
