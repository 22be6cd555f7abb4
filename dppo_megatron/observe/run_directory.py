"""A run's directory while the run is active: its id, its lock and its logs. Used on rank 0, but for `sees_lock`.

Whatever could stop a run at the start (no permission, a file in the way, another trainer, another run's directory) is
checked here, before a model is built. A full disk later loses no log line: lines wait until they can be written.
"""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from dppo_megatron.config import save_config
from dppo_megatron.config.schema import Config
from dppo_megatron.files import make_directory, open_own, open_to_read, remove_tree, write_text
from dppo_megatron.observe.json_lines import OLD, JsonLines, move_to_old, rewind
from dppo_megatron.observe.lock import FILE as LOCK
from dppo_megatron.observe.lock import RunLock
from dppo_megatron.observe.samples import SAMPLES, rewind_samples
from dppo_megatron.texts import log
from dppo_megatron.types import UserError

IDENTITY = "run.json"
_TRACE = "trace.jsonl"
RECORDS = ("metrics.jsonl", _TRACE)
FEATURES = "trace_prompts.npz"
"""Features of the prompts of a large training set; those of a small one are in the trace's header."""
SUMMARY = "summary.json"
TIMELINE, PROFILE = "timeline", "profile"
"""Directories of `timeline.py`; named here, since that file imports torch and readers of the directory need none."""
_PRODUCTS = (SAMPLES, TIMELINE, PROFILE, SUMMARY, "hf")
"""Also moved to `old/` when a run starts over: new files would mix with these or replace them."""
_DIRECTORIES = ("checkpoints", SAMPLES, OLD, "prompts", TIMELINE, PROFILE, "trackers", "servers")
_FORMAT = "dppo_megatron run 1"

Sums = dict[str, dict[int, int]]
"""CRC-32 of every line of each log, by step, as stored in checkpoints."""


class RunDirectory:
    """Locked from construction to `close`.

    Args:
        path: created if missing.

    Raises:
        UserError: it cannot be written, another trainer holds its lock, or it holds a run without an id.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, JsonLines] = {}
        with as_user_error(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(path)
            self.lock_text = self._lock.text
            try:
                # after the lock is taken: while we waited for it, another trainer may have begun a run here
                self._was_empty = all(entry.name == LOCK for entry in path.iterdir())
                self.run = read_identity(path) or _begin_identity(path)
                _check_names(path)
            except BaseException:
                self._lock.release()
                raise
        if self._lock.took_over:
            log(f"the last trainer of {path} ended without releasing its lock: {self._lock.took_over}")

    def open_record(self, config: Config, header: dict[str, Any], resumed_step: int | None, sums: Sums) -> None:
        """Write config.yaml and open the logs: truncated to `resumed_step`, or empty for a new run.

        Args:
            header: the first line of trace.jsonl.
            resumed_step: step of this run's own checkpoint that it resumes from; None for a new run.
            sums: checksums of the logs, as stored in that checkpoint.
        """
        with as_user_error(self._path):
            save_config(config, self._path / "config.yaml")
            for name in RECORDS:
                path, is_trace = self._path / name, name == _TRACE
                for folder in (self._path, self._path / OLD):
                    for leftover in folder.glob(f".{path.stem}.*.new"):  # of a killed process; as large as the log
                        remove_tree(leftover)
                if resumed_step is None and (where := move_to_old(path)):
                    log(f"warning: {path} is the record of a run without a checkpoint; it is now {where}")
                max_bytes = int(config.observe.trace_max_gb * 1e9) if is_trace else 0
                lines, kept = rewind(path, resumed_step or 0, sums.get(name), header if is_trace else None, max_bytes)
                log(*lines)
                self._lines[name] = JsonLines(path, kept, max_bytes)
            if resumed_step is not None:
                log(*rewind_samples(self._path / SAMPLES, resumed_step, self._path / OLD))
                return
            for name in _PRODUCTS:
                if where := move_to_old(self._path / name):
                    log(f"warning: {self._path / name} is of a run without a checkpoint; it is now {where}")

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Append a line to a log. If the disk is full the line waits, with one warning."""
        lines = self._lines[name]
        failed_before = bool(lines.waiting)
        try:
            log(*lines.write(row))
        except OSError as error:
            if not failed_before:
                log(
                    f"warning: {self._path / name} cannot be written ({error.strerror}): its lines wait in memory and"
                    " are tried again; until they are on the disk no checkpoint is saved"
                )
            return
        if failed_before:
            log(f"{self._path / name} can be written again; no line is lost")

    def begin_step(self) -> None:
        """Move summary.json to `old/`: its totals end with an earlier step, and others take it as the sign that the run
        is finished."""
        with suppress(OSError):
            move_to_old(self._path / SUMMARY)

    def metrics_of(self, step: int) -> dict[str, Any] | None:
        """The last line of metrics.jsonl if it is that of `step`, else None."""
        with open_to_read(self._path / "metrics.jsonl") as file:
            last: dict[str, Any] = json.loads(next(iter(deque(file, maxlen=1)), "{}"))
        return last if last.get("step") == step else None

    def sync(self) -> Sums:
        """Flush the logs to the disk: after a power failure no checkpoint may exist whose step is not in the logs.

        Returns:
            The checksums to store in that checkpoint.

        Raises:
            OSError: a line could not be written.
        """
        for name, lines in self._lines.items():
            try:
                log(*lines.sync())
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path / name)) from None
        return {name: dict(lines.sums) for name, lines in self._lines.items()}

    def check(self) -> None:
        self._lock.check()

    def undo_start(self) -> None:
        """Close after a failed start; if the directory was empty before, remove what was written, except server logs.

        Otherwise the next attempt would have to keep the settings of a run that never began.
        """
        self.close()
        if not self._was_empty:
            return
        for name in ("config.yaml", IDENTITY, FEATURES, *RECORDS):
            (self._path / name).unlink(missing_ok=True)
        remove_tree(self._path / "prompts")
        for folder in (self._path / "checkpoints", self._path):
            with suppress(OSError):  # not empty: it holds other files
                folder.rmdir()

    def close(self) -> None:
        """Write the waiting lines, or log a warning with the number that could not be written; release the lock."""
        for name, lines in self._lines.items():
            try:
                with closing(lines):
                    if lines.waiting:
                        self.check()  # else they would go into the record of another trainer
                        log(*lines.flush())
            except (OSError, UserError) as error:
                log(f"warning: {self._path / name} ends {len(lines.waiting)} lines early ({error})")
        self._lines = {}
        self._lock.release()


@contextmanager
def as_user_error(path: Path) -> Iterator[None]:
    """An OSError inside the block becomes a UserError about the run directory `path`."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        user_error = UserError(
            f"run_dir = '{path}' cannot be written: {error.strerror or error}{where}; choose another run_dir, or make"
            " room or give permission there"
        )
        user_error.__dict__.update(error.__dict__)  # `is_reported`, if rank 0 prints it for all ranks
        raise user_error from None


def read_identity(path: Path) -> str:
    """The id in run.json; empty if the directory holds no run. Raises UserError for a run without an id."""
    identity = path / IDENTITY
    signs = [name for name in RECORDS if (path / name).exists()]
    signs += [f"checkpoints/{found.name}" for found in sorted((path / "checkpoints").glob("step_[0-9]*"))[:1]]
    reason = "it is missing"
    if identity.exists() and not identity.is_file():
        reason = "it is not a file"
    elif identity.exists():
        try:
            raw = json.loads(identity.read_text(encoding="utf-8"))
            if raw["format"] == _FORMAT and isinstance(raw["run"], str) and raw["run"]:
                return str(raw["run"])
            reason = "it has another format"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"it cannot be read ({type(error).__name__})"
    elif not signs:
        return ""
    raise UserError(
        f"run_dir = '{path}' holds {', '.join(signs) or IDENTITY}, but {IDENTITY} does not say which run that is:"
        f" {reason}. Choose another run_dir; checkpoint.resume=DIR begins it from one of these checkpoints"
    )


def sees_lock(path: Path, lock: bytes) -> bool:
    """Whether this rank sees the directory `path` with rank 0's lock.json of this start. Else each machine would keep
    its own part of a checkpoint, which rank 0 would take for complete. Not for rank 0, whose lock it would end."""
    for wait_s in (0, 1, 2, 4, 8, 16, 32):  # NFS answers from memory for up to a minute
        time.sleep(wait_s)
        with suppress(OSError):
            path.mkdir(parents=True)  # asks the server even if this machine remembers that the directory is missing
            path.rmdir()
            return False
        with suppress(OSError):
            if (path / LOCK).read_bytes() == lock:
                return True
    return False


def _begin_identity(path: Path) -> str:
    run, here = uuid.uuid4().hex, Path.cwd().resolve()
    # The paths in the run's files are relative to working_dir. The run's own place is stored relative to that too, so
    # that both can be moved together.
    places = {"working_dir": str(here), "directory": os.path.relpath(path.resolve(), here)}
    identity = {"format": _FORMAT, "run": run, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **places}
    write_text(path / IDENTITY, json.dumps(identity, indent=1) + "\n", durable=True)
    return run


def _check_names(path: Path) -> None:
    """Raise OSError now, and not at the first save, for what a run could not write: a log that is a pipe, on which
    reading would block, a link, which may lead to any file, or a directory of checkpoints without write permission."""
    for name in RECORDS:
        if os.path.lexists(path / name):
            os.close(open_own(path / name, os.O_RDWR))
    for name in _DIRECTORIES:
        if (path / name).is_symlink():
            make_directory(path / name)  # raises
    root = path / "checkpoints"
    make_directory(root)
    if not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(root))
