"""The rule itself, on groups of two and three ranks; and how the product starts where it sees CUDA."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import os
import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launch import RankError, run_ranks

from dppo_megatron.distributed import check_interfaces, clock_offset, connect, gather_all, meeting_advice
from dppo_megatron.platform import prepare
from dppo_megatron.types import RunAborted, UserError
from rehearsal.nccl_rule import AT_START, ON_THE_HOST, RuleBroken, install, start_as_the_job_does, under_rule

CPU = torch.device("cpu")


def _meet() -> None:
    connect([dist.group.WORLD], CPU, 30.0)


def _keeps_the_rule() -> list[float]:
    """Objects and scalars before anything is connected; then batches of two of three ranks, and messages of a pair."""
    assert gather_all([dist.get_rank()]) == [0, 1, 2]
    clock_offset(lambda: 0.0)
    _meet()
    rank, got = dist.get_rank(), torch.zeros(2)
    if rank < 2:
        operation = (dist.isend, torch.ones(2)) if rank == 0 else (dist.irecv, got)
        work = dist.batch_isend_irecv([dist.P2POp(*operation, 1 - rank)])[0]
        before = float(got[0])
        work.wait()
        dist.send(got, 1) if rank == 0 else dist.recv(got, 0)
        return [before, *(got + 1).tolist()]
    return []


def test_who_keeps_the_rule_is_let_be() -> None:
    """What has not been waited for is not there yet; only calls with device memory make communicators."""
    (_, of_first), (values, of_second), (_, of_third) = run_ranks(under_rule, 3, _keeps_the_rule)
    assert math.isnan(values[0]) and values[1:] == [1.0, 1.0]
    assert [(one.members, one.at_start) for one in of_third] == [((0, 1, 2), True)]
    assert [one.members for one in of_first] == [one.members for one in of_second] == [(0, 1, 2), (0, 1)]


def _batch_of_two() -> None:
    if dist.get_rank() < 2:
        operation = dist.isend if dist.get_rank() == 0 else dist.irecv
        dist.batch_isend_irecv([dist.P2POp(operation, torch.ones(1), 1 - dist.get_rank())])[0].wait()
    if dist.get_rank() == 2:
        dist.all_gather_object([None] * 3, "elsewhere")


def _ends_early() -> None:
    if dist.get_rank():
        dist.all_reduce(torch.ones(1))


def _groups_in_two_orders() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)


def _message_without_a_reader() -> None:
    _meet()
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    dist.barrier()


def _writes_too_early() -> None:
    _meet()
    memory = torch.zeros(1)
    operation = dist.isend if dist.get_rank() == 0 else dist.irecv
    work = dist.batch_isend_irecv([dist.P2POp(operation, memory, 1 - dist.get_rank())])[0]
    if dist.get_rank() == 0:
        memory.fill_(1)
    work.wait()


def _does_not_wait() -> None:
    _meet()
    operation = dist.isend if dist.get_rank() == 0 else dist.irecv
    dist.batch_isend_irecv([dist.P2POp(operation, torch.zeros(1), 1 - dist.get_rank())])


@pytest.mark.parametrize(
    ("breaks", "ranks", "said"),
    [
        (_batch_of_two, 3, "Ranks [0, 1] do, ranks [2] do not: rank 2 is in all_gather_object at"),
        (_ends_early, 3, "Ranks [1, 2] do, ranks [0] do not: rank 0 is in no call: it has finished"),
        (_groups_in_two_orders, 2, " is in the first all_reduce at rehearsal/test_nccl_rule.py"),
        (_message_without_a_reader, 2, "(0, 1), in that call, so all of ranks [0, 1] have to make it. Ranks [0] do"),
        (_writes_too_early, 2, "the memory was written to before the send was waited for"),
        (_does_not_wait, 2, "never waited for: ['batch_isend_irecv at rehearsal/test_nccl_rule.py"),
    ],
)
def test_who_breaks_the_rule_is_named(breaks: Any, ranks: int, said: str) -> None:
    """At once: whether a rank will come is known from what all wait for, and no limit is reached."""
    with pytest.raises(RankError) as failed:
        run_ranks(under_rule, ranks, breaks)
    assert said in str(failed.value)


def test_what_the_rule_takes_for_host_memory_is() -> None:
    """Functions that name no device make their tensors on the CPU."""
    for module, function in ON_THE_HOST:
        tree = ast.parse(inspect.getsource(getattr(importlib.import_module(module), function)))
        named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        named |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        assert not named & {"device", "cuda", "to"} and {"zeros", "empty"} & named


# -------------------------------------------------------------------------------------------- connecting


@pytest.mark.parametrize(
    ("chosen", "fits"),
    [("", True), ("eth", True), ("=eth0", True), ("=eth", False), ("ib,eth0:7000", True), ("^lo,eth", False),
     ("^=eth", True), ("eno1", False)],
)  # fmt: skip
def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, chosen: str, fits: bool) -> None:
    """As NCCL reads the variable: prefixes, `=` for whole names, `^` for all others."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
    if fits:
        return check_interfaces(uses_nccl=True, names=["lo", "eth0"])
    with pytest.raises(UserError, match=r"fits no network interface of \S+, which has lo, eth0: unset it"):
        check_interfaces(uses_nccl=True, names=["lo", "eth0"])
    check_interfaces(uses_nccl=False, names=["lo", "eth0"])


_GLOO_SAYS = "[gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]"
"""torch 2.13's, of two machines in network namespaces, each of which had its own name at 127.0.1.1 in /etc/hosts."""


def test_a_machine_whose_name_is_loopback_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks have met at MASTER_ADDR; with an interface named, or on one machine, the name is not at fault."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    monkeypatch.setattr(socket, "gethostname", lambda: "node-b")
    usual = "Has every rank been started"
    for here, chosen, reason, said in (
        ("1", "", _GLOO_SAYS, "at the address of this machine's own name (node-b: 127.0.1.1). Set GLOO_SOCKET_IFNAME"),
        ("1", "eth0", _GLOO_SAYS, "it listens on GLOO_SOCKET_IFNAME=eth0"),
        ("1", "", "Timed out after 20 seconds waiting for clients. 1/2 clients joined.", usual),
        ("2", "", _GLOO_SAYS, usual),
    ):
        for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": here, "GLOO_SOCKET_IFNAME": chosen}.items():
            monkeypatch.setenv(name, value)
        assert said in meeting_advice(reason)


def _connecting(all_reduce: Any, timeout_s: float = 30.0) -> str:
    dist.all_reduce = all_reduce
    with pytest.raises((UserError, RunAborted)) as stop:
        connect([dist.group.WORLD], CPU, timeout_s)
    return f"{stop.type.__name__}: {stop.value}"


def _raises(text: str, kind: type[Exception] = RuntimeError) -> Any:
    def all_reduce(*_: Any, **__: Any) -> None:
        raise kind(text)

    return all_reduce


def test_what_keeps_a_group_from_being_connected_is_a_sentence() -> None:
    """NCCL's words as it says them; a peer that does not answer is a matter of the limit."""
    shared = "NCCL error in: NCCLUtils.hpp:268, invalid usage\nncclInvalidUsage: This ...\nLast error:\nDuplicate GPU"
    for said in run_ranks(_connecting, 2, _raises(shared + " detected : rank 1 and rank 0 both on ...")):
        assert said.startswith("UserError: could not connect default_pg (ranks 0, 1): Duplicate GPU detected")
    silent = run_ranks(_connecting, 2, lambda *_, **__: threading.Event().wait(20), 0.2)
    assert "RunAborted: could not connect default_pg (ranks 0, 1): not within guard.rendezvous_t" in silent[1]
    refused = run_ranks(_connecting, 2, _raises("x\nLast error:\nsocketPollConnect: connect to 10.0.0.7<1> failed"))
    assert "(ranks 0, 1): socketPollConnect: connect to 10.0.0.7<1> failed. Do the machines" in refused[0]
    wordless = run_ranks(_connecting, 2, _raises("", ValueError))  # not taken for connected
    assert "(ranks 0, 1): ValueError(''). Do the machines" in wordless[0]


def _starts_on_cuda(local_ranks: list[int]) -> Any:
    """On ranks: the product's start where torch says that it has CUDA. The rank's device and what it was told."""
    told: list[Any] = []
    rule, init, ones = install(), dist.init_process_group, torch.ones
    os.environ["LOCAL_RANK"] = str(local_ranks[dist.get_rank()])
    current: dict[int, int] = {}

    def set_device(device: Any) -> None:
        current[threading.get_ident()] = torch.device("cuda", device).index if isinstance(device, int) else device.index
        told.append("device")

    def init_process_group(backend: str, **values: Any) -> None:
        told.append(backend)
        init("gloo", **values)

    def device_ones(*shape: int, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda" and current[threading.get_ident()] == device.index
        told.append(device.index)
        return ones(*shape)

    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2  # type: ignore[method-assign]
    torch.cuda.set_device, dist.init_process_group, torch.ones = set_device, init_process_group, device_ones
    torch.cuda.current_device = lambda: current[threading.get_ident()]  # type: ignore[method-assign]
    kept = start_as_the_job_does()
    del kept
    return told, [(one.members, one.at_start) for one in rule.communicators.values()]


def test_a_start_on_cuda_uses_the_ranks_own_device() -> None:
    """Two machines of two ranks: each is on the device of its LOCAL_RANK, in the thread that connects too, before
    anything is sent, and NCCL is connected in a call of all."""
    prepare()
    import dppo_megatron.actor.layout  # noqa: F401 (before torch says in the ranks that it has CUDA)

    results = run_ranks(_starts_on_cuda, 4, [0, 1, 0, 1])
    for rank, (told, made) in enumerate(results):
        assert told == ["device", "cpu:gloo,cuda:nccl", "device", rank % 2]
        assert made == [((0, 1, 2, 3), True)]


def test_the_rule_is_no_exception_that_anybody_takes() -> None:
    """`except Exception` around a sync would make it a failed server."""
    assert not issubclass(RuleBroken, Exception) and connect.__module__ == AT_START
