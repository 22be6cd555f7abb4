"""Keeps a run alive through failures of Megatron's checkpoint writers that would leave ranks waiting for each other.

    trainer (each rank)        writers, forked, one per file
    save() ──▶ write_files ──▶ write, fsync ──▶ result in a memory file ──▶ trainer, once the writer has ended

Megatron waits for a report of every writer, and one that is killed never reports. Here the trainer waits for each
writer to end and reads its result. Some files are written by one rank alone, between collectives. `in_step` catches an
exception there, such as for a full disk, and raises it on every rank at the end of the save.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import pickle
import queue
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import async_utils, common, filesystem_async

from dppo_megatron.distributed import gather_all

_REPLACED = ("write_preloaded_data_multiproc", "write_preloaded_data_multithread")
"""Megatron's method until 0.16, and the one since 0.19, whose threads' failures leave ranks waiting too."""
_PRELOAD = filesystem_async.FileSystemWriterAsync.preload_tensors
_LENGTH_BYTES = 8
_PARAMETERS = ["transform_list", "use_msc", "rank", "write_buckets", "global_results_queue"]


class Results:
    """The methods that Megatron calls on the queue through which a writer returns its result, for one save.

    Megatron uses a queue of `multiprocessing.Manager`: one more process of about 100 MB for every rank, and a directory
    that is left behind if the rank is killed. A pipe would deadlock, as the trainer reads only after the writer has
    ended. The writer is forked, so an unnamed file that both have open is enough.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # in memory on Linux: a rank whose /tmp is full would leave the others waiting
            self._file = os.fdopen(os.memfd_create("checkpoint-results"), "w+b")
        else:
            self._file = tempfile.TemporaryFile()  # type: ignore[assignment]  # noqa: SIM115 - open until the save is over

    def put(self, result: Any) -> None:
        """Store the result. Called in the writer."""
        payload = pickle.dumps(result)
        os.pwrite(self._file.fileno(), payload, _LENGTH_BYTES)
        # the length last: if the writer is killed before that, the trainer finds no result, and not half a pickle
        os.pwrite(self._file.fileno(), len(payload).to_bytes(_LENGTH_BYTES, "little"), 0)

    def get_nowait(self) -> Any:
        """Take the result, in the trainer, once the writer has ended. Raises queue.Empty if there is none."""
        length = int.from_bytes(os.pread(self._file.fileno(), _LENGTH_BYTES, 0), "little")
        if not length:
            raise queue.Empty
        payload = os.pread(self._file.fileno(), length, _LENGTH_BYTES)
        os.ftruncate(self._file.fileno(), 0)
        return pickle.loads(payload)


@contextmanager
def in_step() -> Iterator[None]:
    """Around a save or its completion: a failure on one rank is raised as OSError on all of them. Collective."""
    failures: list[str] = []
    with ExitStack() as undo:
        for owner, name in _done_by_one_rank():
            original = getattr(owner, name)
            setattr(owner, name, _collecting(original, failures))
            undo.callback(setattr, owner, name, original)
        yield
    for failure in gather_all(failures):
        raise OSError(failure)


def use_own_writers() -> None:
    """Make Megatron's next save use the functions of this file and a new result queue, because a writer of an abandoned
    save may still put its result into the old one."""
    filesystem_async._results_queue = Results()
    writer = filesystem_async.FileSystemWriterAsync
    for name in _REPLACED:
        original = getattr(writer, name, None)
        if original is not None and list(inspect.signature(original).parameters) == _PARAMETERS:
            setattr(writer, name, staticmethod(write_files))
    writer.preload_tensors = staticmethod(stage)


def stage(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """Copy the device's tensors to pageable memory, even though Megatron asks for non-blocking copies, which torch
    makes in pinned memory. Forked writers share pinned pages with the trainer, which frees them right after the fork:
    its next pinned tensor would overwrite what the writers still read."""
    staged: list[Any] = _PRELOAD(write_buckets, non_blocking=False)
    return staged


def write_files(
    transform_list: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], global_results_queue: Any
) -> None:
    """Write each bucket to its file in a separate process, and report what each has written, or the first failure.
    Replaces a method of Megatron's `FileSystemWriterAsync` and takes its parameters."""
    collector_was_on = gc.isenabled()
    gc.disable()  # as Megatron does: in a forked process the collector may touch the parent's CUDA tensors
    context = multiprocessing.get_context("fork")
    started: list[tuple[Any, Results]] = []
    outcome: dict[int, list[Any]] | Exception = {}
    try:
        for number, bucket in enumerate(write_buckets):
            result = Results()
            options = {"count_queue": _Uncounted(), "use_fsync": True, "use_msc": use_msc}
            process = context.Process(
                target=filesystem_async.FileSystemWriterAsync.write_preloaded_data,
                args=(transform_list, number, bucket, result),
                kwargs=options,
            )
            process.start()
            started.append((process, result))
        outcome = {number: _result_of(process, result) for number, (process, result) in enumerate(started)}
    except Exception as error:
        outcome = error
    for process, _ in started:
        process.join()
    with suppress(OSError):  # no room for the result: Megatron then finds none, and raises on every rank
        global_results_queue.put(outcome)
    if collector_was_on:
        gc.enable()


def _result_of(process: Any, result: Results) -> list[Any]:
    process.join()
    try:
        _, written = result.get_nowait()
    except queue.Empty:
        how = f"exit code {process.exitcode}"
        if process.exitcode < 0:
            how = f"killed by {signal.Signals(-process.exitcode).name}"
        raise OSError(f"a process that wrote the checkpoint has ended without a result: {how}") from None
    if isinstance(written, Exception):
        raise written
    items: list[Any] = written
    return items


class _Uncounted:
    """In place of the queue with which Megatron counts the writers that have ended."""

    def get(self) -> None: ...

    def task_done(self) -> None: ...


def _done_by_one_rank() -> list[tuple[Any, str]]:
    """Megatron's functions that may fail on one rank while the others go on: they write rank 0's files, or fork."""
    functions: list[tuple[Any, str]] = [
        (filesystem_async.FileSystemWriterAsync, "finish"),
        (serialization, "save_config"),
        (async_utils.TemporalAsyncCaller, "schedule_async_call"),
    ]
    common_state = getattr(common, "TorchCommonSaveStrategy", None)  # None in 0.19, which saves it with the tensors
    return functions if common_state is None else [(common_state, "save_common"), *functions]


def _collecting(original: Callable[..., None], failures: list[str]) -> Callable[..., None]:
    def write(*arguments: Any, **keywords: Any) -> None:
        try:
            original(*arguments, **keywords)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            failures.append(str(error).strip() or type(error).__name__)

    return write
