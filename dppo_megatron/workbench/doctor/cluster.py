"""Checks a job's machines and the links between them, on the job's own ranks, before the job starts.

With a wrong network interface, ranks hang in a library call that no timeout of ours can end. So each rank runs its
checks in a thread, and posts its rows to torch's store, which needs only MASTER_ADDR and MASTER_PORT: the process group
is what is being tested.

    thread of every rank ── stage, rows ──▶ store ◀── rank 0 reads all, prints
                         ── stop: a fault ─▶      ◀── reported: the other ranks end

Rank 0 waits until all ranks are done, or until the limit; after a fault only 5 s more, for what other ranks report of
it. Then a rank whose thread still hangs ends its process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from dppo_megatron.actor.layout import build_layout, start_process_group, stop_process_group
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import reported_by_each_rank
from dppo_megatron.launcher_env import launched_local_rank, launched_rank, launched_world_size
from dppo_megatron.types import RunAborted
from dppo_megatron.workbench.doctor import machine
from dppo_megatron.workbench.doctor.machine import CheckRow

_TICK_S, _OTHERS_S, _EXIT_S = 0.1, 5.0, 10.0
"""Rank 0's wait between two looks, and after a fault for other ranks' rows; the others' wait for rank 0's report."""
_RESERVE_S = 5.0
"""Time kept back from a rendezvous, to report why it failed."""
_SLOW = 0.5
"""Share of the ranks' median: a link that fell back to a slower path loses a factor, others a few per cent."""
_MAX_NAMED = 3
"""How many ranks are listed by name."""


@dataclass
class _State:
    """What a rank has posted for rank 0."""

    host: str
    stage: str = "ranks"
    is_done: bool = False
    rows: list[CheckRow] = field(default_factory=list)


def check_cluster(config: Config | None, limit_s: float, report: Callable[[list[CheckRow]], None]) -> int:
    """Check everything, have rank 0 `report` it, return the exit code: 2 on rank 0 after a fault. Collective.
    Raises RunAborted if MASTER_ADDR does not answer."""
    state, until, code = _State(socket.gethostname()), time.monotonic() + limit_s, 0
    store = _open_store(limit_s / 2)
    # a second connection for the thread: calls on this one block
    arguments = (config, state, store.clone() if launched_world_size() > 1 else store, until)
    threading.Thread(target=_check_this_rank, args=arguments, daemon=True).start()
    if launched_rank() == 0:
        rows = _wait_for_all(store, until, limit_s)
        report(rows)
        store.set("reported", "")
        code = 2 if any(row.verdict == "fault" for row in rows) else 0
    else:
        with contextlib.suppress(RuntimeError):  # rank 0 has exited, and its own output says why
            store.wait(["reported"], timedelta(seconds=limit_s + _EXIT_S))
    if not state.is_done:
        sys.stdout.flush()
        os._exit(code)
    return code


@reported_by_each_rank()
def _open_store(timeout_s: float) -> Any:
    if launched_world_size() == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = launched_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
    result: list[Any] = []

    def connect() -> None:
        timeout = timedelta(seconds=timeout_s)
        try:
            result.append(dist.TCPStore(host, port, None, serves, timeout, wait_for_workers=False, multi_tenant=True))  # type: ignore[attr-defined]
        except RuntimeError as error:
            result.append(error)

    # in a thread: if another program listens on this port, TCPStore waits for its answer for ever, whatever the timeout
    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(timeout_s + _RESERVE_S)
    if result and not isinstance(result[0], RuntimeError):
        return result[0]
    detail = str(result[0]).splitlines()[0] if result else "what listens there does not answer as torch's store does"
    raise RunAborted(
        f"{socket.gethostname()} cannot reach rank 0 at MASTER_ADDR={host}, MASTER_PORT={port} ({detail}): is rank 0"
        " running there, and is the port open?"
    )


def _check_this_rank(config: Config | None, state: _State, store: Any, until: float) -> None:

    def post() -> None:
        store.set(f"state/{launched_rank()}", msgspec.json.encode(state).decode())

    try:
        post()
        _wait_for_ranks(store, (until - time.monotonic()) / 2)
        for finding in _findings(config, until):
            if isinstance(finding, CheckRow):
                state.rows.append(finding)
            else:
                state.stage = finding
            post()
    except Exception as error:  # every kind: rank 0 has to report it
        state.rows.append(CheckRow(state.stage, "fault", " ".join(str(error).split()) or repr(error)))
        store.set("stop", "")
    state.is_done = True
    post()
    store.set(f"done/{launched_rank()}", "")


def _wait_for_ranks(store: Any, timeout_s: float) -> None:
    keys = [f"state/{rank}" for rank in range(launched_world_size())]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise RunAborted(
            f"{len(missing)} of {len(keys)} ranks did not join (rank {', '.join(missing)}): were they started with this"
            " WORLD_SIZE, MASTER_ADDR and MASTER_PORT, what does their own output say, and do they need longer to load"
            " their libraries (--limit-s)?"
        ) from None


def _findings(config: Config | None, until: float) -> Iterator[str | CheckRow]:
    """This rank's rows, and before each check that may hang or fail its name, for the report. Collective."""
    local, device = launched_local_rank(), torch.device("cpu")
    if local < torch.cuda.device_count():  # else the process group reports it
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    yield "this machine"
    yield from machine.machine_rows(launched_world_size(), first_here=local == 0)
    yield machine.allocator_row(os.environ, device.type, config is not None and config.rollout.servers.colocate)
    yield "servers' Python"
    yield from machine.server_rows(config, device, (until - time.monotonic()) / 2)
    yield "attention"
    if config is None or config.actor.layer_spec != "local":
        yield from machine.attention_rows(device)
    yield "copies"
    yield from machine.copy_rows(device)
    yield "process group"
    start_process_group(max(1.0, until - time.monotonic() - _RESERVE_S))
    yield CheckRow("process group", "ok", "all ranks have met")
    for name, group in _groups(config).items():
        if group.size() > 1:
            yield f"all-reduce {name}"
            yield machine.reduce_row(name, group, device, max(1.0, until - time.monotonic() - _RESERVE_S))
    yield "leaving the groups"
    stop_process_group()


def _groups(config: Config | None) -> dict[str, dist.ProcessGroup]:
    """WORLD, and this rank's groups of the layout. Collective."""
    assert dist.group.WORLD is not None
    groups = {"WORLD": dist.group.WORLD}
    if config is None:
        return groups
    from megatron.core import parallel_state  # other imports have called platform.prepare() by now

    build_layout(config.actor.layout, config.seed)
    groups |= {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if config.actor.layout.expert_parallel > 1:
        groups |= {
            "ep": parallel_state.get_expert_model_parallel_group(),
            "etp": parallel_state.get_expert_tensor_parallel_group(),
            "expert dp": parallel_state.get_expert_data_parallel_group(),
        }
    return groups


def _wait_for_all(store: Any, until: float, limit_s: float) -> list[CheckRow]:
    """The rows that rank 0 reports, once all ranks are done or the time is up."""
    ranks, end = range(launched_world_size()), until
    while not store.check([f"done/{rank}" for rank in ranks]) and time.monotonic() < end:
        if end == until and store.check(["stop"]):
            end = min(until, time.monotonic() + _OTHERS_S)
        time.sleep(_TICK_S)
    known = [rank for rank in ranks if store.check([f"state/{rank}"])]
    states = {rank: msgspec.json.decode(store.get(f"state/{rank}"), type=_State) for rank in known}
    for state in states.values():
        if not state.is_done and not store.check(["stop"]):
            state.rows.append(CheckRow(state.stage, "fault", f"not finished after {limit_s:g} s (--limit-s)"))
    rows = {rank: state.rows for rank, state in states.items()}
    return list(report_of(rows, {rank: state.host for rank, state in states.items()}))


def report_of(all_rows: Mapping[int, Sequence[CheckRow]], hosts: Mapping[int, str]) -> Iterator[CheckRow]:
    """One row for each check that all ranks pass, of speeds the slowest rank's: a slow card, link or node shows beside
    the others, and there is no list of what each should reach. Else one for each distinct detail of the worst verdict.
    `all_rows` has rows by rank."""
    for what in dict.fromkeys(row.what for rows in all_rows.values() for row in rows):
        by_rank = {rank: row for rank, rows in all_rows.items() for row in rows if row.what == what}
        worst = max((row.verdict for row in by_rank.values()), key=("ok", "warning", "fault").index)
        speeds = {rank: row.gb_s for rank, row in by_rank.items() if row.gb_s is not None}
        if worst == "ok" and speeds:
            slowest, median = min(speeds, key=lambda rank: speeds[rank]), statistics.median(speeds.values())
            row = replace(by_rank[slowest], ranks=f"slowest: {_named([slowest], hosts)}" if len(speeds) > 1 else "")
            detail = f"{row.detail}; less than half of the ranks' median, {median:.3g} GB/s"
            yield replace(row, verdict="warning", detail=detail) if speeds[slowest] < _SLOW * median else row
        elif worst == "ok":
            yield next(iter(by_rank.values()))
        else:
            for detail in dict.fromkeys(row.detail for row in by_rank.values() if row.verdict == worst):
                ranks = [rank for rank, row in by_rank.items() if row.detail == detail]
                yield CheckRow(what, worst, detail, None, _named(ranks, hosts) if len(ranks) < len(all_rows) else "")


def _named(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks[:_MAX_NAMED])
    return f"{names} and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else names
