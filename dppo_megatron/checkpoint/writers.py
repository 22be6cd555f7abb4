"""Keeps a run alive through failures of Megatron's checkpoint writers that would leave ranks waiting for each other.

    trainer (each rank)        writers, forked, one a file
    save() ──▶ write_files ──▶ write, fsync ──▶ result in a memory file ──▶ trainer, once the writer has ended

Megatron counts its writers' reports. One that is killed (the kernel's out-of-memory killer picks large processes) never
reports, and the save never ends. Here each writer is waited for, and has its own place for a result.

Some files are written by one rank alone, between collectives. If the disk is full at that moment, an exception would
take this rank out of step: the others would wait in a collective that it never joins. `in_step` notes such a failure
and raises it on every rank at the end of the save.
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
"""Until 0.16 and from 0.19 on: its threads' failures leave ranks waiting too."""
_PRELOAD = filesystem_async.FileSystemWriterAsync.preload_tensors
_LENGTH_BYTES = 8
_PARAMETERS = ["transform_list", "use_msc", "rank", "write_buckets", "global_results_queue"]


class Results:
    """The methods that Megatron calls on the queue through which a writer returns its result, for one save.

    Megatron uses a queue of `multiprocessing.Manager`: one more process of about 100 MB for every rank, and a directory
    /tmp/pymp-* that stays behind when the rank is killed. A pipe would deadlock: the trainer reads only after the
    writer has ended, and a writer with more results than a pipe holds (64 KiB) blocks. The writer is forked, so an
    unnamed file that both have open is enough.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open until the save is over
        if hasattr(os, "memfd_create"):  # in memory on Linux: works with a full /tmp too
            self._file.close()
            self._file = os.fdopen(os.memfd_create("checkpoint-results"), "w+b")

    def put(self, result: Any) -> None:
        """In the writer: leave the result."""
        payload = pickle.dumps(result)
        os.pwrite(self._file.fileno(), payload, _LENGTH_BYTES)
        # last: if the writer is killed before, there is no result rather than half a pickle
        os.pwrite(self._file.fileno(), len(payload).to_bytes(_LENGTH_BYTES, "little"), 0)

    def get_nowait(self) -> Any:
        """In the trainer, once the writer has ended: take the result. Raises queue.Empty if there is none."""
        length = int.from_bytes(os.pread(self._file.fileno(), _LENGTH_BYTES, 0), "little")
        if not length:
            raise queue.Empty
        payload = os.pread(self._file.fileno(), length, _LENGTH_BYTES)
        os.ftruncate(self._file.fileno(), 0)
        return pickle.loads(payload)


@contextmanager
def in_step() -> Iterator[None]:
    """Around a save or its completion: what fails on one rank is an OSError on all of them. Collective."""
    failures: list[str] = []
    with ExitStack() as undo:
        for owner, name in _done_by_one_rank():
            plain = getattr(owner, name)
            setattr(owner, name, _noting(plain, failures))
            undo.callback(setattr, owner, name, plain)
        yield
    for failure in gather_all(failures):
        raise OSError(failure)


def use_own_writers() -> None:
    """Let Megatron's next save report to a fresh queue and wait for writers as is done here.

    The queue is fresh because an abandoned writer may still put its result into the last one.
    """
    filesystem_async._results_queue = Results()
    writer = filesystem_async.FileSystemWriterAsync
    for name in _REPLACED:
        plain = getattr(writer, name, None)
        if plain is not None and list(inspect.signature(plain).parameters) == _PARAMETERS:
            setattr(writer, name, staticmethod(write_files))
    writer.preload_tensors = staticmethod(stage)


def stage(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """Copy the device's tensors to pageable memory, whatever Megatron asks for.

    It asks for copies that do not block, which torch makes into pinned memory. Forked writers share pinned pages with
    the trainer, which gives them back right after the fork: its next pinned tensor would be written over what is still
    read, and the checksum be of the damaged file. And torch keeps pinned memory for good, rounded up to powers of two.
    """
    staged: list[Any] = _PRELOAD(write_buckets, non_blocking=False)
    return staged


def write_files(
    transform_list: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], global_results_queue: Any
) -> None:
    """Write each bucket to its file in a separate process, and report what each has written, or the first failure.

    In place of the method of Megatron's `FileSystemWriterAsync`, whose parameters these are.
    """
    collects = gc.isenabled()
    gc.disable()  # as Megatron does: in a forked process the collector may touch the parent's CUDA tensors
    context = multiprocessing.get_context("fork")
    started: list[tuple[Any, Results]] = []
    outcome: dict[int, list[Any]] | Exception = {}
    try:
        for number, bucket in enumerate(write_buckets):
            result = Results()
            process = context.Process(target=_write_one, args=(transform_list, use_msc, number, bucket, result))
            process.start()
            started.append((process, result))
        outcome = {number: _result_of(process, result) for number, (process, result) in enumerate(started)}
    except Exception as error:
        outcome = error
    for process, _ in started:
        process.join()
    with suppress(OSError):  # no room for the result: that there is none is an error on every rank
        global_results_queue.put(outcome)
    if collects:
        gc.enable()


def _write_one(transforms: list[Any], use_msc: bool, number: int, bucket: Any, result: Results) -> None:
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        transforms,
        local_proc_idx=number,
        write_bucket=bucket,
        results_queue=result,
        count_queue=_Uncounted(),
        use_fsync=True,
        use_msc=use_msc,
    )


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
    found: list[Any] = written
    return found


class _Uncounted:
    """The queue by which Megatron counts writers that have ended."""

    def get(self) -> None: ...

    def task_done(self) -> None: ...


def _done_by_one_rank() -> list[tuple[Any, str]]:
    """Functions of Megatron that may fail on one rank without the others noticing: files of rank 0, and a fork."""
    found: list[tuple[Any, str]] = [
        (filesystem_async.FileSystemWriterAsync, "finish"),
        (serialization, "save_config"),
        (async_utils.TemporalAsyncCaller, "schedule_async_call"),
    ]
    common_state = getattr(common, "TorchCommonSaveStrategy", None)  # 0.19 keeps it with the tensors
    return found if common_state is None else [(common_state, "save_common"), *found]


def _noting(plain: Callable[..., None], failures: list[str]) -> Callable[..., None]:
    def write(*arguments: Any, **keywords: Any) -> None:
        try:
            plain(*arguments, **keywords)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            failures.append(str(error).strip() or type(error).__name__)

    return write
