"""Groups in which weights are broadcast: who may be in one, and how it ends. Processes are threads here."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fake_fleet import fleet_of
from support.settings import rollout_config

from dppo_megatron.rollout.servers.http import Refused, Unreachable
from dppo_megatron.rollout.servers.in_engine import dppo_wire
from dppo_megatron.rollout.servers.protocol import GroupRendezvous
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel, TorchBroadcastGroup, listening_store
from dppo_megatron.rollout.sync.channels import Bucket, in_thread


class _NcclOverGloo(dist.ProcessGroupGloo):  # type: ignore[misc]
    """Takes NCCL's arguments, for the code of both ends of an NCCL group."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, world_size: int, options: SimpleNamespace) -> None:
        super().__init__(store, rank, world_size, options._timeout)
        self.timeout = options._timeout


@pytest.mark.parametrize("stranger", [None, 1, 2])
def test_members_of_an_nccl_group_prove_themselves_before_the_first_weight(
    stranger: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stranger among three nobody sends or takes anything; else what was sent comes, then and the next time."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _NcclOverGloo, raising=False)
    soon, weights = timedelta(seconds=60), torch.arange(8, dtype=torch.uint8)
    store = listening_store("127.0.0.1", 3, soon)
    meeting = GroupRendezvous("test", "nccl", "127.0.0.1", store, 3, soon, soon)

    def work(rank: int) -> list[list[int]]:
        theirs = dist.TCPStore("127.0.0.1", store.port, 3, False, soon, wait_for_workers=False)  # type: ignore[attr-defined]
        secret = "guessed" if rank == stranger else meeting.secret
        receiver = dppo_wire.BroadcastReceiver(theirs, rank, 3, soon, secret, torch.device("cpu"))
        assert receiver._group.timeout == 2 * soon, "the trainer gives up first: torch's watchdog ends the process"
        return [receiver.receive(8).tolist() for _ in range(2)]

    workers = [in_thread(partial(work, rank)) for rank in (1, 2)]
    group = TorchBroadcastGroup(meeting, as_torch_does=False)
    if stranger is None:
        group.send(weights)
        group.send(weights + 1)
        expected = [weights.tolist(), (weights + 1).tolist()]
        assert [worker.result(60) for worker in workers] == [expected, expected]
    else:
        named = f"member {stranger} of the group does not know its secret"
        with pytest.raises(RuntimeError, match=named):
            group.send(weights)
        with pytest.raises(RuntimeError, match=named):
            workers[2 - stranger].result(60)  # the other one, who is honest
    group.abandon()


@pytest.mark.parametrize("as_torch_does", [True, False])
def test_a_group_can_be_abandoned_twice(as_torch_does: bool) -> None:
    """By who sees that it is broken, and by who leaves it."""
    second = timedelta(seconds=30)
    meeting = GroupRendezvous("test", "gloo", "127.0.0.1", listening_store("127.0.0.1", 1, second), 1, second, second)
    group = TorchBroadcastGroup(meeting, as_torch_does=as_torch_does)
    group.abandon()
    group.abandon()


class _Nccl:
    """A group whose abort does not return before it is let: NCCL's waits for kernels on the device."""

    def __init__(self, let: threading.Event) -> None:
        self.aborted, self._let = threading.Semaphore(0), let

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborted.release()
        assert self._let.wait(60)


def test_a_broken_group_of_nccl_is_aborted_once_and_not_waited_for() -> None:
    """Dropping it alone would wait for the dead receiver, until torch's watchdog ends the trainer. The class is torch's
    CUDA build's; that it has this call is read from the annotations that every torch brings."""
    annotations = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    assert "def abort(self) -> None" in annotations.partition("class ProcessGroupNCCL")[2].partition("\nclass ")[0]
    let = threading.Event()
    backend, group = _Nccl(let), TorchBroadcastGroup.__new__(TorchBroadcastGroup)
    group._store, group._backend = dist.HashStore(), backend  # type: ignore[attr-defined]
    group.abandon()
    assert group._store.check(["given up"]), "the receivers' kernels are told"
    group.abandon()
    assert backend.aborted.acquire(timeout=60)
    let.set()
    assert not backend.aborted.acquire(blocking=False)


@pytest.mark.parametrize("error", [None, dist.DistNetworkError("connection was closed")])
def test_a_receiver_aborts_when_the_group_is_given_up_or_the_trainer_is_gone(error: Exception | None) -> None:
    """A killed trainer sets no key; what waits for its broadcast would wait for torch's watchdog."""

    class Store:
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            assert keys == [dppo_wire.GIVEN_UP]
            if error is not None:
                raise error

    let = threading.Event()
    let.set()
    dppo_wire._abort_when_given_up(Store(), group := _Nccl(let))  # type: ignore[arg-type]
    assert group.aborted.acquire(blocking=False)


class _Receiving:
    """A server whose worker waits for a bucket until the group is given up, and then answers as its kind does."""

    def __init__(self, name: str, kind: str, store: dist.Store) -> None:  # type: ignore[name-defined]
        self.http = SimpleNamespace(url=name, close=lambda: None)
        self._kind, self._store = kind, store
        self.answered_s = 0.0

    def receive(self, tensors: Any, *, timeout_s: float) -> None:
        began = time.monotonic()
        while time.monotonic() < began + timeout_s and (self._kind == "hangs" or not self._store.check(["given up"])):
            time.sleep(0.01)
        self.answered_s = time.monotonic() - began
        if self._kind == "hangs":
            raise Unreachable("no answer")
        if self._kind == "refuses":
            raise Refused(500, "the weights stopped coming")


@pytest.mark.parametrize(
    ("kinds", "sends", "out"),
    [
        (("refuses", "hangs", "answers"), True, {"b": "weight sync failed: no answer"}),
        (("refuses", "refuses"), False, dict.fromkeys("ab", "our end of the broadcast failed (OSError: no route)")),
        (("answers", "answers"), True, dict.fromkeys("ab", "it did not take a bucket within 3 s")),
    ],
)
def test_who_waits_for_a_broken_broadcast_is_released_in_time(
    kinds: tuple[str, ...], sends: bool, out: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its request is over, and torch's patience: by a server that hangs, which alone is out, and by the
    trainer's own end, which is named, at once. None has the bucket, also if it says so: its broadcast was aborted."""
    store, let = dist.HashStore(), threading.Event()
    servers = [_Receiving(name, kind, store) for name, kind in zip("abc", kinds, strict=False)]
    fleet = fleet_of(servers, rollout_config({}))
    channel = BroadcastChannel(fleet, "nccl", 1 << 20, 4.0)
    group = TorchBroadcastGroup.__new__(TorchBroadcastGroup)
    group._store, group._backend = store, _Nccl(let)  # type: ignore[attr-defined]
    channel._group = group

    def send(memory: torch.Tensor) -> None:
        if not sends:
            raise OSError("no route")
        assert let.wait(60)

    monkeypatch.setattr(group, "send", send)
    assert channel._hand_over(fleet.members, Bucket([("t", torch.ones(2))]), [{}]) == []
    let.set()
    assert {one.name: one.reason for one in fleet.members if one.state == "out"}.keys() == out.keys()
    assert all(out[one.name] in one.reason for one in fleet.members if one.state == "out")
    assert all(one.answered_s < (3.8 if sends else 1.0) for one in servers if one._kind != "hangs")
    fleet.close()
