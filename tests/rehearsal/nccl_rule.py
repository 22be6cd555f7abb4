"""NCCL's rule of communicators, enforced over gloo: what would hang on GPUs fails here at once, with names.

NCCL makes the communicator of a group in the group's first call (a collective, or a batch of sends and receives), and
`all ranks must participate; otherwise the behavior is undefined` (torch's `batch_isend_irecv`): those who came wait for
the others. A send or receive outside a batch makes one of the two ranks alone (ProcessGroupNCCL.cpp,
`getKeySendRecv`). Over gloo a group is connected when it is made, so a test over gloo cannot see any of this.

    from rehearsal.nccl_rule import install
    install()        # in each rank of one machine, before the job's first collective; before or after its group exists

From there the first call of each communicator waits until all its members have come to theirs, and a rank that can
tell that one of them never will (`board.py`; no clock) raises `RuleBroken`, which no `except Exception` takes for
something else. `under_rule(fn)` is the same around a function for `run_ranks`, and returns the communicators too.

What travels in device memory: everything but the calls that torch sends over gloo in a group of `cpu:gloo,cuda:nccl`
(objects, and barriers without `device_ids`), groups that were asked to be gloo's, and the functions in `ON_THE_HOST`,
which make their tensors on the CPU whatever the device is (a test reads them).

Streams, as far as they can be seen from here: what is received arrives in its buffer only in `wait`, and until then the
buffer holds NaN; what is sent must still be the same in `wait`. A reader or writer that does not wait gets NaN into
its results, or RuleBroken.

Not seen: kernels' own order, two communicators used at the same time in another order on another rank (NCCL forbids
it, and may hang), memory that is freed while it is sent, tensors on another rank's device, links that are down.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rehearsal.board import Board, Wait, number_of

T = TypeVar("T")

ON_THE_HOST = {("dppo_megatron.steps.exchange", "_send"), ("dppo_megatron.distributed", "clock_offset")}
AT_START = "dppo_megatron.distributed"
"""The module that connects groups at start."""

_GROUP = torch._C._distributed_c10d.ProcessGroup
_ALL = [
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
]
_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
_OBJECTS: set[CodeType] = set()
for _name in dir(dist):
    if "object" in _name and callable(getattr(dist, _name)):
        _function = getattr(dist, _name)
        _OBJECTS.add(getattr(_function, "__wrapped__", _function).__code__)


class RuleBroken(BaseException):
    """A call that would hang, or read what has not arrived, over NCCL."""


@dataclass
class Communicator:
    """One that this rank has had made."""

    group: str
    """What the group is for, and torch's number of it."""
    members: tuple[int, ...]
    is_pair: bool
    """Of a send outside a batch; made by both ends when they need it."""
    call: str
    at_start: bool
    uses: int = 0
    """Calls through it, but for the one that made it at start."""


@dataclass
class _Call:
    """A call of torch.distributed as its caller wrote it."""

    text: str
    module: str
    is_host: bool
    in_batch: bool


@dataclass
class Rule:
    """The rule in this rank."""

    patience_s: float
    communicators: dict[str, Communicator] = field(default_factory=dict)
    host_groups: set[str] = field(default_factory=set)
    """Names of groups that were asked to be gloo's: they have no NCCL."""
    unwaited: dict[int, str] = field(default_factory=dict)
    """Messages in device memory that nobody has waited for yet."""
    _board: Board | None = None
    _world: Any = None
    _waits: dict[int, Wait] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock)

    def end(self, where: str = "no call: it has finished") -> None:
        """This rank makes no more calls."""
        if self._board is not None:
            self._board.wait(Wait("end", where))

    # ---------------------------------------------------------------------------------------- calls

    def together(self, name: str, real: Callable[..., Any], group: Any, args: Any, kwargs: Any) -> Any:
        """A collective."""
        call, board = _caller(name), self._board_of_now()
        if board is None or group.size() == 1:
            return real(group, *args, **kwargs)
        members = tuple(dist.get_process_group_ranks(group))
        if name == "barrier":
            options = [*args, *kwargs.values()]
            call.is_host = call.is_host or not any(getattr(option, "device_ids", None) for option in options)
        if not self._is_host(call, group):
            self._communicator(group.group_name, group, members, call)
        needs = members
        if name in _FROM_ROOT + _TO_ROOT:
            root = next(o.rootRank for o in [*args, *kwargs.values()] if hasattr(o, "rootRank"))
            at_root = group.rank() == root
            needs = (() if at_root else (members[root],)) if name in _FROM_ROOT else (members if at_root else ())
        number = number_of(group.group_name)
        with self._lock:
            count = board.begin(number)
        wait = Wait("together", f"{call.text} of {_named(group)}", needs, number, count)
        return _Waiting(self, self._during(wait, lambda: real(group, *args, **kwargs)), wait)

    def message(
        self, real: Callable[..., Any], group: Any, tensor: torch.Tensor, peer: int, tag: int, sent: bool
    ) -> Any:
        """A send or a receive."""
        call, board = _caller("send" if sent else "recv"), self._board_of_now()
        if board is None:
            return real(group, [tensor], peer, tag)
        members = tuple(dist.get_process_group_ranks(group))
        other, on_device = members[peer], not self._is_host(call, group)
        if on_device:
            pair = tuple(sorted((dist.get_rank(), other)))
            key = group.group_name if call.in_batch else f"{group.group_name}:{pair[0]}-{pair[1]}"
            self._communicator(key, group, members if call.in_batch else pair, call)
        number = number_of(group.group_name)
        with self._lock:
            count = board.message(number, other, sent=sent)
        text = f"{call.text} of {_named(group)}, {'to' if sent else 'from'} rank {other}"
        wait = Wait("departure" if sent else "arrival", text, (other,), number, count)
        if not on_device:
            return _Waiting(self, real(group, [tensor], peer, tag), wait)
        self.unwaited[id(wait)] = text
        if sent:
            return _Sending(self, real(group, [tensor], peer, tag), wait, tensor)
        aside = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return _Receiving(self, real(group, [aside], peer, tag), wait, tensor, aside)

    def _is_host(self, call: _Call, group: Any) -> bool:
        return call.is_host or group.group_name in self.host_groups

    def _communicator(self, key: str, group: Any, members: tuple[int, ...], call: _Call) -> None:
        """Return when the communicator `key` exists."""
        if key in self.communicators:
            self.communicators[key].uses += 1
            return
        board = self._board_of_now()
        assert board is not None
        made = Communicator(
            _named(group), members, ":" in key, call.text, call.module == AT_START, int(call.module != AT_START)
        )
        with self._lock:
            board.come_to(key)
        what = f"the first {call.text} of {_named(group)}" + f", which is one of ranks {members}" * made.is_pair
        wait = Wait("communicator", what, members, key=key)
        self._during(wait, lambda: self._await_members(wait, board))
        self.communicators[key] = made

    def _await_members(self, wait: Wait, board: Board) -> None:
        deadline, pause = time.monotonic() + self.patience_s, 0.001
        while len(come := board.have_come(wait.key, wait.needs)) < len(wait.needs):
            late = time.monotonic() > deadline
            stuck = board.stuck()
            if stuck is None and not late:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
                continue
            absent = [rank for rank in wait.needs if rank not in come]
            doing = [f"rank {rank} is in {stuck[rank].what}" for rank in absent if stuck and rank in stuck]
            after = f" in {self.patience_s:g} s" if late else ""
            raise RuleBroken(
                f"NCCL makes the communicator of {wait.what}, in that call, so all of ranks {list(wait.needs)} have to"
                f" make it. Ranks {come} do, ranks {absent} do not{after}: {'; '.join(doing) or 'they are in no call'}"
            )

    # ---------------------------------------------------------------------------------------- the board

    def _during(self, wait: Wait, act: Callable[[], T]) -> T:
        """`act`, while all can see that this rank is in `wait`. A rank whose other thread is busy elsewhere may still
        go on, so that counts as waiting for nothing."""
        me = threading.get_ident()
        with self._lock:
            self._waits[me] = wait
            self._tell()
        try:
            return act()
        except BaseException:
            self.end(f"{wait.what}, and has failed there")
            raise
        finally:
            with self._lock:
                del self._waits[me]
                if sys.exc_info()[0] is None:
                    self._tell()

    def _tell(self) -> None:
        assert self._board is not None
        self._board.wait(next(iter(self._waits.values())) if len(self._waits) == 1 else None)

    def _board_of_now(self) -> Board | None:
        """The board of the present job; None for a job of one."""
        world = dist.group.WORLD
        if world is not self._world:
            self._world, self._board = world, None
            self.communicators, self.host_groups = {}, set()
            if dist.get_world_size() > 1:
                store, path = c10d._get_default_store(), Path(tempfile.gettempdir())
                if dist.get_rank() == 0:
                    path = Path(tempfile.mkstemp(prefix="nccl-rule-")[1])
                    Board.create(path, dist.get_world_size())
                    store.set("nccl-rule", str(path))
                path = Path(store.get("nccl-rule").decode())
                self._board = Board(path, dist.get_rank(), dist.get_world_size())
                if store.add("nccl-rule-open", 1) == dist.get_world_size():
                    path.unlink()
        return self._board


class _Waiting:
    """A `Work` during whose `wait` all can see what this rank waits for."""

    def __init__(self, rule: Rule, work: Any, wait: Wait) -> None:
        self._rule, self._work, self._wait = rule, work, wait

    def wait(self, *args: Any) -> Any:
        """As torch's."""
        return self._rule._during(self._wait, lambda: self._work.wait(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Sending(_Waiting):
    """What is sent may not change before `wait`: NCCL reads it when its stream gets there."""

    def __init__(self, rule: Rule, work: Any, wait: Wait, tensor: torch.Tensor) -> None:
        super().__init__(rule, work, wait)
        self._tensor, self._sum = tensor, _sum(tensor)

    def wait(self, *args: Any) -> Any:
        """As torch's."""
        self._rule.unwaited.pop(id(self._wait), None)
        done = super().wait(*args)
        if _sum(self._tensor) != self._sum:
            raise RuleBroken(f"{self._wait.what}: the memory was written to before the send was waited for")
        return done


class _Receiving(_Waiting):
    """What is received is there after `wait`, not before."""

    def __init__(self, rule: Rule, work: Any, wait: Wait, tensor: torch.Tensor, aside: torch.Tensor) -> None:
        super().__init__(rule, work, wait)
        self._tensor, self._aside = tensor.detach(), aside
        self._tensor.fill_(float("nan") if tensor.is_floating_point() else 1)

    def wait(self, *args: Any) -> Any:
        """As torch's."""
        self._rule.unwaited.pop(id(self._wait), None)
        done = super().wait(*args)
        self._tensor.copy_(self._aside)
        return done


def _sum(tensor: torch.Tensor) -> int:
    return crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _named(group: Any) -> str:
    return f"group {group.group_desc} ({group.group_name})"


def _caller(name: str) -> _Call:
    """Who calls, from the stack: functions of torch may have been imported by name long before."""
    frame: FrameType | None = sys._getframe(2)
    is_host = in_batch = False
    call = name
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        is_host |= frame.f_code in _OBJECTS
        in_batch |= frame.f_code is _BATCH
        if frame.f_code.co_filename.endswith(_C10D):
            call = frame.f_code.co_name
        frame = frame.f_back
    assert frame is not None
    module, function = frame.f_globals["__name__"], frame.f_code.co_name
    text, own = f"{call} at {_place(frame)}", frame
    while own is not None and not own.f_globals["__name__"].startswith("dppo_megatron."):
        own = own.f_back
    if own is not None and own is not frame:
        text += f" (from {_place(own)})"
    return _Call(text, module, is_host or (module, function) in ON_THE_HOST, in_batch)


def _place(frame: FrameType) -> str:
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"


_C10D = "torch/distributed/distributed_c10d.py"
_WRAPPERS = (_C10D, "c10d_logger.py", "rehearsal/nccl_rule.py", "contextlib.py", "typing_extensions.py")
_BATCH = getattr(dist.batch_isend_irecv, "__wrapped__", dist.batch_isend_irecv).__code__
_installed: Rule | None = None


def install(patience_s: float = 120.0) -> Rule:
    """Enforce the rule in this process from now on. Once more does nothing.

    Args:
        patience_s: how long a first call waits for a rank that is busy with something else.
    """
    global _installed
    if _installed is not None:
        return _installed
    rule = _installed = Rule(patience_s)
    for name in (*_ALL, *_FROM_ROOT, *_TO_ROOT):
        setattr(_GROUP, name, _hooked(rule, name, getattr(_GROUP, name)))
    real_send, real_recv = _GROUP.send, _GROUP.recv
    _GROUP.send = lambda group, tensors, peer, tag: rule.message(real_send, group, tensors[0], peer, tag, True)
    _GROUP.recv = lambda group, tensors, peer, tag: rule.message(real_recv, group, tensors[0], peer, tag, False)
    real_new = dist.new_group

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        group = real_new(ranks, timeout, backend, *args, **kwargs)
        if backend is not None and "nccl" not in str(backend) and isinstance(group, _GROUP):
            rule.host_groups.add(group.group_name)
        return group

    dist.new_group = c10d.new_group = new_group
    if dist.is_initialized():
        rule._board_of_now()  # a rank that makes no call must be seen too
    return rule


def _hooked(rule: Rule, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda group, *args, **kwargs: rule.together(name, real, group, args, kwargs)


def under_rule(fn: Callable[..., T], *args: Any) -> tuple[T, list[Communicator]]:
    """In a rank: `fn(*args)`, and the communicators that it has had made.

    Example:
        results = run_ranks(under_rule, 4, train, model_path, layout)
    """
    rule = install()
    try:
        result = fn(*args)
        if rule.unwaited:
            raise RuleBroken(f"never waited for: {sorted(set(rule.unwaited.values()))}")
        rule.end()
    except BaseException as error:
        if not isinstance(error, RuleBroken):
            rule.end(f"no call: {type(error).__name__}")
        raise
    return result, list(rule.communicators.values())


def start_as_the_job_does() -> Any:
    """Leave the process group of `run_ranks` and meet again with the product's own start, through the same store.

    Returns what must be kept: the store serves all ranks.
    """
    from dppo_megatron.actor.layout import start_process_group

    store = c10d._get_default_store()
    dist.destroy_process_group()
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="1")
    start_process_group(60.0)
    return store
