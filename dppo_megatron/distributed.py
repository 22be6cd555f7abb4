"""How ranks communicate in the loop: each does its share and reports to rank 0; rank 0 decides and broadcasts.

An exception on rank 0 is raised on every rank instead of leaving the others waiting. Without a process group these are
plain calls. Objects are sent over gloo on GPUs too (the process group is `cpu:gloo,cuda:nccl`), so that a rank that
waits for a rollout waits on a socket. In an NCCL broadcast it would spin in a kernel, on the GPU on which a colocated
engine generates.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from dppo_megatron.launcher_env import is_on_one_machine, launched_rank
from dppo_megatron.texts import show
from dppo_megatron.types import RunAborted, UserError

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=Exception)

_ROUND_TRIPS = 8
"""Measurements to compare two clocks; the one with the shortest round trip is used."""


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names gloo's network interface. By default gloo uses the interface of the host's name, which other
machines of a cluster can reach."""


def loopback_interface() -> dict[str, str]:
    """The environment variable that restricts gloo to loopback; empty if the user has chosen an interface."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {GLOO_INTERFACE: loopback[0]} if loopback and GLOO_INTERFACE not in os.environ else {}


@contextmanager
def on_loopback_if_one_machine() -> Iterator[None]:
    """Process groups that are made in the block listen only on loopback if the whole job is on this machine.

    Their gloo connects two ranks only when they first communicate. By default every group, even one that uses only
    NCCL, connects all its ranks: some 3,600 sockets per rank at 1,024 ranks.
    """
    added = loopback_interface() if is_on_one_machine() else {}
    if "TORCH_GLOO_LAZY_INIT" not in os.environ:
        added["TORCH_GLOO_LAZY_INIT"] = "1"
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""The variable that names NCCL's network interfaces: prefixes; after `=` exact names; after `^` those not to use."""


def check_interfaces(*, uses_nccl: bool, names: Collection[str] | None = None) -> None:
    """Raise UserError if this machine lacks one of the interfaces that gloo must use, or has none that NCCL may use:
    NCCL 2.27 would then connect to an uninitialised address and only log that. `names`: the machine's interfaces."""
    names = [name for _, name in socket.if_nameindex()] if names is None else names
    gloo, nccl = os.environ.get(GLOO_INTERFACE, ""), os.environ.get(NCCL_INTERFACE, "") if uses_nccl else ""
    rest = nccl.removeprefix("^")
    patterns = [part.partition(":")[0] for part in rest.removeprefix("=").split(",")]

    def is_named(name: str) -> bool:
        return any(name == part if rest.startswith("=") else name.startswith(part) for part in patterns)

    lacks_nccl = bool(nccl) and not any(is_named(name) != nccl.startswith("^") for name in names)
    lacks_gloo = not set(filter(None, gloo.split(","))) <= set(names)
    if lacks_gloo or lacks_nccl:
        setting = f"{GLOO_INTERFACE}={gloo}" if lacks_gloo else f"{NCCL_INTERFACE}={nccl}"
        raise UserError(
            f"{setting} fits no network interface of {socket.gethostname()}, which has {', '.join(names)}: unset it, or"
            " name one by which the machines of the job reach each other"
        )


def meeting_advice(reason: str) -> str:
    """What to check if the ranks could not meet, by torch's `reason`. Where gloo cannot connect them, they have found
    each other; but a machine's own name may be loopback (Debian's 127.0.1.1), which other machines cannot reach."""
    if "gloo" not in reason or is_on_one_machine():
        return "Has every rank been started, with the same MASTER_ADDR and MASTER_PORT?"
    where = f"on {GLOO_INTERFACE}={os.environ.get(GLOO_INTERFACE)}"
    if not os.environ.get(GLOO_INTERFACE):
        host, found = socket.gethostname(), "no address"
        with suppress(OSError, UnicodeError):
            found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        where = f"at the address of this machine's own name ({host}: {found})"
    return (
        f"The ranks have found each other, but gloo cannot connect them: it listens {where}. Set {GLOO_INTERFACE} to"
        " the interface by which the machines reach each other (`ip -br addr`)"
    )


@contextmanager
def reported_by_each_rank() -> Iterator[None]:
    """Print a UserError or RunAborted of the block on its own rank: the command line prints one per machine."""
    try:
        yield
    except (UserError, RunAborted) as error:
        if launched_rank():
            kind = "error" if isinstance(error, UserError) else "stopped"
            show(f"{kind}: rank {launched_rank()}: {error}", file=sys.stderr)
            error.is_reported = True  # type: ignore[union-attr]
        raise


def connect(groups: Sequence[dist.ProcessGroup], device: torch.device, timeout_s: float) -> None:
    """Create the communicators of `groups`, one after the other. Collective over each; groups of one are skipped.

    NCCL creates a group's communicator in the group's first call. All members must make it, or it waits for ever, and
    the first message of a weight sync is only between some ranks. Every rank passes its groups in the same order, and
    groups at the same index share no ranks, so ranks cannot wait in a cycle. Another thread connects, because NCCL
    blocks without a limit while a peer does not answer. `device_id` of `init_process_group` would connect too, but then
    point-to-point messages use the group's communicator, and Megatron's pipeline needs two at the same time.

    Raises:
        UserError: two ranks use one GPU.
        RunAborted: a group cannot be connected within `timeout_s`.
    """
    current = list(groups[:1])
    errors: list[str] = []

    def connect_all() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own
            for group in groups:
                if group.size() > 1:
                    current[:] = [group]
                    flag = torch.ones(1, device=device)
                    dist.all_reduce(flag, group=group)
                    flag.item()  # waits for the kernel
        except Exception as error:  # any: without an entry in `errors` the end of the thread means success
            errors.append((str(error).strip().rpartition("Last error:\n")[2] or repr(error)).splitlines()[0])

    thread = threading.Thread(target=connect_all, name="connecting", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not thread.is_alive() and not errors:
        return
    reason = errors[0] if errors else f"not within guard.rendezvous_timeout_s = {timeout_s:g} s"
    ranks = ", ".join(map(str, dist.get_process_group_ranks(current[0])))
    what = f"could not connect {current[0].group_desc} (ranks {ranks}): {reason}"
    if thread.is_alive():  # it cannot be ended, and NCCL may wait for it while the interpreter shuts down
        atexit.register(_exit_now)
    if "Duplicate GPU" in reason:
        raise UserError(f"{what}. Start as many processes on a machine as it has GPUs, and let each see all of them")
    raise RunAborted(
        f"{what}. Do the machines of these ranks reach each other by the interface that NCCL uses"
        f" ({NCCL_INTERFACE}={os.environ.get(NCCL_INTERFACE, '')})? NCCL_DEBUG=INFO prints what it tries"
    )


def _exit_now() -> None:
    """End the process without waiting for threads, with the exit code of a RunAborted."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(3)


def from_rank_zero(decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 and return its result on every rank. Collective; the result must pickle."""
    if world_size() == 1:
        return decide()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = decide()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise on_every_rank(outcome[1])
    return cast(T, outcome[0])


def on_every_rank(error: E) -> E:
    """Mark an exception that all ranks raise: the command line prints it on rank 0 only. (Tracebacks show a note.)"""
    error.is_reported = True  # type: ignore[attr-defined]
    return error


class OnRankZero(Generic[T]):
    """A value that only rank 0 has. The other ranks have an empty one, through which they can ask.

    Example:
        fleet = OnRankZero(Fleet(...)) if rank() == 0 else OnRankZero[Fleet]()
        names = fleet.ask(lambda fleet: [member.name for member in fleet.live])    # collective: on every rank
        fleet.here(lambda fleet: fleet.revive())                                   # on rank 0, which does not wait
    """

    def __init__(self, value: T | None = None) -> None:
        self._value = value

    @property
    def is_here(self) -> bool:
        return self._value is not None

    def ask(self, question: Callable[[T], R]) -> R:
        """Rank 0's answer, on every rank. Collective, as `from_rank_zero`."""
        return from_rank_zero(lambda: question(cast(T, self._value)))

    def here(self, act: Callable[[T], R]) -> R | None:
        """Call `act` on rank 0 and return its result; None elsewhere."""
        return act(self._value) if self._value is not None else None


def share(items: Sequence[T]) -> list[T]:
    """This rank's part of `items`: every world_size-th, so that the parts of a sorted list are alike."""
    return list(items[dist.get_rank() :: dist.get_world_size()]) if world_size() > 1 else list(items)


def gather_all(mine: Sequence[T]) -> list[T]:
    """The lists of all ranks concatenated, on every rank. Collective."""
    if world_size() == 1:
        return list(mine)
    parts: list[Sequence[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, list(mine))
    return [item for part in parts for item in part]


def from_each(mine: Sequence[T]) -> Iterator[list[T]]:
    """The non-empty lists of all ranks, one after another, so that no rank holds all of them at once. Collective: every
    rank must iterate to the end."""
    if world_size() == 1:
        yield list(mine)
        return
    for source, count in enumerate(gather_all([len(mine)])):
        if count:
            sent: list[Any] = [list(mine) if dist.get_rank() == source else None]
            dist.broadcast_object_list(sent, src=source)
            yield sent[0]


def to_rank_zero(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """All values of `group` (None: all ranks) in rank order, on its rank 0; empty elsewhere. Collective over it."""
    if world_size() == 1:
        return [mine]
    parent, children = _tree(group)
    parts = [pickle.dumps(mine)]
    for child in children:
        box: list[list[bytes]] = [[]]
        dist.recv_object_list(box, group=group, group_src=child)
        parts += box[0]
    if dist.get_rank(group) > 0:
        dist.send_object_list([parts], group=group, group_dst=parent)
        return []
    return [pickle.loads(part) for part in parts]


def barrier() -> None:
    """Return when every rank has called this."""
    if world_size() > 1:
        dist.barrier()


def rank() -> int:
    """This process's rank in the process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Ranks of the process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def clock_offset(clock: Callable[[], float]) -> tuple[float, float]:
    """What to add to this rank's `clock` to get rank 0's, and the largest error of that, in seconds. Collective.

    Each rank asks its parent in the tree, which already knows its own offset; errors add up along the tree. The
    shortest of several round trips is used; the parent read its clock at some time during it.

    Example: asked at 5.0, answered 105.1, back at 5.2 -> offset 100.0, error 0.1.
    """
    question, answer = torch.zeros(1), torch.zeros(2, dtype=torch.float64)
    parent, children = _tree()
    best = (0.0, float("inf") if rank() > 0 else 0.0)
    for _ in range(_ROUND_TRIPS if rank() > 0 else 0):
        sent = clock()
        dist.send(question, dst=parent)
        dist.recv(answer, src=parent)
        half, (parents, parents_error) = (clock() - sent) / 2, answer.tolist()
        best = min(best, (parents - sent - half, parents_error + half), key=lambda estimate: estimate[1])
    for child in children:
        for _ in range(_ROUND_TRIPS):
            dist.recv(question, src=child)
            answer[0], answer[1] = clock() + best[0], best[1]
            dist.send(answer, dst=child)
    return best


def _tree(group: dist.ProcessGroup | None = None) -> tuple[int, list[int]]:
    """This rank's parent and children in a binomial tree over `group` below rank 0, which then connects to log2 of all
    ranks (to all in gloo's own gather). Child r + 2^k of rank r reports for r + 2^k to r + 2^(k + 1) - 1."""
    me, world = dist.get_rank(group), dist.get_world_size(group)
    steps = [1 << bit for bit in range(world.bit_length())]
    return me & (me - 1), [me + step for step in steps if me + step < world and (me == 0 or step < me & -me)]
