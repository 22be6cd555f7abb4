"""Runs a function on several ranks of a gloo job, cheaply enough for a test to have many layouts.

`torchrun` starts a fresh interpreter for each rank, and each imports torch and megatron-core: 10-20 s for four ranks on
two cores before the first line of a test. Here this process imports them once and forks; four ranks then start in well
under a second. The price is the care that forking needs: one thread only, no CUDA, and everything that torch imports
late imported before (see `_import_once`).

    from support.launch import run_ranks
    losses = run_ranks(train, 4, layout, timeout_s=60)     # one value for each rank, in rank order

A result goes through a file and only one byte through a pipe, so that a big result cannot block a rank, and a rank that
is killed half-way cannot leave the parent reading. Each rank leads its own process group, so that what it started
(checkpoint writers, say) ends with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from dppo_megatron.rewards.work import GradingQueue
from support.processes import patient

torch.set_num_threads(1)  # before any operation: the OpenMP pool of a parent is dead in its children

Result = TypeVar("Result")

_GRACE_S = 15.0
"""How long the other ranks may take to report their own error once one has failed."""

_INTERFACE = "GLOO_SOCKET_IFNAME"
_STACK_S = 3.0
"""How long a rank may take to tell where it is; one that is stopped never does."""


_graders: weakref.WeakSet[GradingQueue] = weakref.WeakSet()
_reset = GradingQueue.reset


def _note_and_reset(grader: GradingQueue) -> None:
    _graders.add(grader)
    _reset(grader)


GradingQueue.reset = _note_and_reset  # type: ignore[method-assign]


class RankError(RuntimeError):
    """A rank raised, died or did not finish; the message holds its traceback, exit code or stack."""


@dataclass
class _Rank:
    process: Any  # multiprocessing's ForkProcess, which type stubs offer on POSIX only
    pipe: Connection
    folder: Path
    reported: bool = False

    @property
    def stack(self) -> str:
        """Where the rank and what it has forked are now, told by themselves, down to where the rank began."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no group yet
            os.killpg(self.process.pid, signal.SIGUSR2)
        deadline = time.monotonic() + _STACK_S
        while not (told := (self.folder / "stack").read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)  # it writes line by line
        told = (self.folder / "stack").read_text() or told or "(no stack)"
        lines, below = [], False
        for line in told.splitlines():
            if line.startswith(("Thread", "Current thread")):
                below = False
            if not below:
                lines.append(line)
            below |= line.endswith(" in _rank_main")  # the rest is the test runner's, and long: reports truncate
        return "\n".join(lines)


def run_ranks(
    fn: Callable[..., Result], world_size: int, *args: Any, timeout_s: float = 300.0, dies: int | None = None
) -> list[Result]:
    """Call `fn(*args)` on `world_size` ranks of one gloo process group and return their results in rank order.

    Results must be picklable; `fn` and `args` need not be. If a rank fails, the others are ended and RankError carries
    the traceback, or the exit code of a rank that died without one. After `timeout_s` (more on a busy machine) all are
    ended, and RankError says where each one was.

    Args:
        dies: the rank whose death the caller is waiting for. The others are ended as soon as it is seen; they get no
            time to report errors of their own.
    """
    if torch.cuda.is_available():
        import pytest

        pytest.skip("ranks of CPU tests are forked, which CUDA forbids: run them with CUDA_VISIBLE_DEVICES= (empty)")
    _import_once()
    timeout_s = patient(timeout_s)
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                ranks.append(_fork(fn, args, rank, world_size, listener, Path(folder), timeout_s))
            listener.close()  # rank 0 has its own copy; when it dies, nobody should be able to connect any more
            _await_reports(ranks, deadline, timeout_s, dies)
            return [pickle.loads((rank.folder / "outcome").read_bytes())[1] for rank in ranks]
        finally:
            _end(ranks)


@functools.cache
def _import_once() -> None:
    """Import, in the parent, all that ranks would otherwise each import after the fork."""
    from dppo_megatron import platform

    platform.prepare()
    import megatron.core.dist_checkpointing.strategies.filesystem_async
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.optimizer_param_scheduler
    import megatron.core.pipeline_parallel  # noqa: F401
    import torch._dynamo  # noqa: F401 (torch's optimizers import it in their first step: 1.3 s)


def _fork(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    listener: socket.socket,
    folder: Path,
    timeout_s: float,
) -> _Rank:
    mine, theirs = multiprocessing.Pipe()
    own_folder = folder / str(rank)
    own_folder.mkdir()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each rank would print what is buffered here
    process = multiprocessing.get_context("fork").Process(
        target=_rank_main,
        args=(fn, args, rank, world_size, listener, theirs, own_folder, timeout_s),
        name=f"rank {rank}",
    )
    gc.disable()  # the child must not collect before it has frozen what it inherits: see _rank_main
    try:
        process.start()
    finally:
        gc.enable()
    theirs.close()  # so that the pipe ends when the rank does
    return _Rank(process, mine, own_folder)


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    listener: socket.socket,
    pipe: Connection,
    folder: Path,
    timeout_s: float,
) -> NoReturn:
    """A rank's whole life. It never returns: the exit handlers it inherited belong to the test runner."""
    outcome: tuple[str, Any]
    # Garbage of earlier tests stays the parent's: a destructor that joins a thread (a process group's, a pool's) waits
    # for ever here, where no thread but this one survived the fork. CI once lost 12 tests to that.
    gc.freeze()
    gc.enable()
    # The same of a process group that a job in the parent has left in Megatron's globals: what is held here does not
    # end when a new group takes its place.
    _inherited = list(vars(sys.modules["megatron.core.parallel_state"]).values())
    # Graders that have graded in the parent wait for its threads, and two ranks would read each other's answers.
    for grader in list(_graders):
        _reset(grader)
    # A save in the parent has made a queue for results that all ranks of this job would otherwise share.
    sys.modules["megatron.core.dist_checkpointing.strategies.filesystem_async"]._results_queue = None  # type: ignore[attr-defined]
    try:
        os.setpgid(0, 0)
        faulthandler.register(signal.SIGUSR2, file=open(folder / "stack", "w"), all_threads=True)  # noqa: SIM115
        _join_group(rank, world_size, listener, timeout_s)
        outcome = ("returned", fn(*args))
        payload = pickle.dumps(outcome)
    except BaseException:
        outcome = ("raised", traceback.format_exc())
        payload = pickle.dumps(outcome)
    (folder / "outcome").write_bytes(payload)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with contextlib.suppress(OSError, EOFError):  # the parent has gone
        pipe.send_bytes(b"done")
        if outcome[0] == "returned":
            # Rank 0 serves the store, so nobody leaves before all have finished: the parent ends them, or its end of
            # the pipe closes. A rank that failed leaves at once, so that the others' collectives fail instead of wait.
            pipe.recv_bytes()
    os._exit(0 if outcome[0] == "returned" else 1)


def _join_group(rank: int, world_size: int, listener: socket.socket, timeout_s: float) -> None:
    import torch.distributed as dist

    port = listener.getsockname()[1]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # Else gloo looks the host's own name up, which containers often cannot.
    names = [name for _, name in socket.if_nameindex()]
    os.environ[_INTERFACE] = next(name for name in ("lo", "lo0", *names) if name in names)
    _share_gloo_threads()
    timeout = timedelta(seconds=timeout_s + 60)  # the parent's limit comes first and says more
    # Rank 0 takes over the socket that the parent holds, so that no other program can have the port in between.
    descriptor = listener.detach()
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor
        )
    else:
        os.close(descriptor)
        store = dist.TCPStore("127.0.0.1", port, world_size, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()  # a rank that makes a group of its own would close connections while another still makes them


def _share_gloo_threads() -> None:
    """All groups of this process send through one thread. Each has one of its own otherwise, which wakes up a hundred
    times a second: of a test of eight ranks with twenty groups each that was a seventh of the CPU time."""
    from torch.distributed import ProcessGroupGloo  # type: ignore[attr-defined]

    make = ProcessGroupGloo.__init__

    @functools.cache
    def device(_interfaces: str | None) -> Any:
        return ProcessGroupGloo.create_default_device()

    def make_with_it(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = timeout  # which a caller may give in its place
        if isinstance(timeout, timedelta):
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout, options._threads = [device(os.environ.get(_INTERFACE))], timeout, 2
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_with_it


def _await_reports(ranks: list[_Rank], deadline: float, timeout_s: float, dies: int | None) -> None:
    """Return when every rank has reported a result; raise RankError at a failure or at the deadline."""
    failures: dict[int, str] = {}
    while waiting := [rank for rank in ranks if not rank.reported]:
        if time.monotonic() > deadline or dies in failures:
            break
        wait([rank.pipe for rank in waiting], timeout=0.1)
        for index, rank in enumerate(ranks):
            if not rank.reported and (failure := _report(rank)) is not None:
                failures.setdefault(index, failure)
                deadline = min(deadline, time.monotonic() + _GRACE_S) if len(failures) == 1 else deadline
    if not failures and not waiting:
        return
    lines = [f"rank {index} of {len(ranks)} {failure}" for index, failure in failures.items() if failure]
    for index, rank in enumerate(ranks):
        if not rank.reported:
            what = f"did not finish within {timeout_s:.0f} s" if not failures else "was still running"
            stack = rank.stack if dies not in failures else "(not asked)"
            lines.append(f"rank {index} of {len(ranks)} {what}; it was at:\n{stack}")
    raise RankError("\n\n".join(lines))


def _report(rank: _Rank) -> str | None:
    """Note whether the rank has reported; the text of its failure, if it failed."""
    # In this order: a rank that reports and then exits must not look as if it had died silently.
    exit_code = rank.process.exitcode
    said_done = False
    with contextlib.suppress(EOFError, OSError):
        if rank.pipe.poll():
            said_done = bool(rank.pipe.recv_bytes())
    if said_done:
        rank.reported = True
        kind, value = pickle.loads((rank.folder / "outcome").read_bytes())
        return f"raised:\n{value}" if kind == "raised" else None
    if exit_code is None:
        return None
    rank.reported = True
    name = f" ({signal.Signals(-exit_code).name})" if exit_code < 0 else ""
    return f"died without a message: exit code {exit_code}{name}"


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no such group: it had not made one yet
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.kill()
        # Not join(): it waits for a pipe to close that the rank's own children may have inherited.
        while rank.process.exitcode is None:
            time.sleep(0.005)
        rank.process.close()
        rank.pipe.close()
