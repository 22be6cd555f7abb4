"""The job's machines and the links between them, tried by the job's own ranks before it starts.

Each rank first looks at itself, then all meet, then the process group and the groups of the layout are made and timed.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from dppo_megatron.actor.layout import build_layout, start_process_group, stop_process_group
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import GLOO_INTERFACE, on_loopback_if_one_machine
from dppo_megatron.doctor.board import Board, Report
from dppo_megatron.doctor.environment import allocator_row
from dppo_megatron.doctor.links import copy_rows, reduce_row, server_rows, unreachable
from dppo_megatron.doctor.machine import machine_rows
from dppo_megatron.doctor.rows import Row
from dppo_megatron.launched import launched_local_rank
from dppo_megatron.rollout.client.remote import Nodes, this_node
from dppo_megatron.rollout.servers.launch import address_toward
from dppo_megatron.types import GuardStop, UserError

_RESERVE_S = 5.0
"""For what a failed rendezvous leaves to say."""


def check_cluster(config: Config | None, limit_s: float, report: Report) -> int:
    """Look at everything, print the report on rank 0, return the exit code: 2 after a fault. Collective.

    Raises:
        GuardStop: the other ranks cannot be found at all.
    """
    board = Board(limit_s, report)
    try:
        _look(config, board)
    except (GuardStop, UserError, RuntimeError, ValueError, OSError) as error:
        board.stop(_said(error))
        return board.end()  # without leaving the groups: NCCL would wait for those that hang
    board.begin("leaving the groups")
    stop_process_group()
    return board.end()


def _look(config: Config | None, board: Board) -> None:
    local, device = launched_local_rank(), torch.device("cpu")
    if local < torch.cuda.device_count():  # else the process group says so
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    board.begin("this machine")
    board.add(machine_rows(board.size, first_here=local == 0))
    board.add([allocator_row(os.environ, device.type, config is not None and config.rollout.servers.colocate)])
    board.begin("servers' Python")
    board.add(server_rows(config, device, board.left_s / 2))
    board.begin("copies")
    board.add(copy_rows(device))
    board.begin("ranks")
    met = [said.split("\n") for said in board.others(f"{this_node()}\n{address_toward(_master())}")]
    nodes = Nodes.of([name for name, _ in met], board.rank)
    board.add([Row("ranks", "ok", f"{board.size} on {nodes.count} machine{'s' * (nodes.count > 1)}")])
    if nodes.count > 1:
        board.add([_ports(nodes, [address for _, address in met], board)])
    board.begin("process group")
    _check_interface()
    start_process_group(max(1.0, board.left_s - _RESERVE_S))
    board.add([Row("process group", "ok", "all ranks have met")])
    groups = _groups_of(config, nodes)
    for name, group in groups.items():
        if dist.get_world_size(group) == 1:
            continue
        board.begin(f"all-reduce {name}")
        board.add([reduce_row(name, group, device, max(1.0, board.left_s - _RESERVE_S))])


def _check_interface() -> None:
    """Raise UserError for one that gloo would not find; NCCL's own variable is checked where NCCL is used."""
    names = [name for _, name in socket.if_nameindex()]
    for chosen in filter(None, os.environ.get(GLOO_INTERFACE, "").split(",")):
        if chosen not in names:
            raise UserError(
                f"{GLOO_INTERFACE}={chosen} is no network interface of this machine, which has {', '.join(names)}:"
                " name the one by which the machines of the job reach each other"
            )


def _master() -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def _ports(nodes: Nodes, toward_master: Sequence[str], board: Board) -> Row:
    """Whether each machine's first rank reaches a port of every other one's. Collective."""
    board.begin("ports")
    # what rank 0's machine calls itself may be loopback: what another one sees of it is right
    host = toward_master[board.rank] if nodes.node else address_toward(toward_master[nodes.of_rank.index(1)])
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        said = board.others(f"{host} {listener.getsockname()[1]}")
        firsts = [nodes.of_rank.index(node) for node in range(nodes.count) if nodes.is_first and node != nodes.node]
        missing = unreachable({f"rank {rank}'s machine": said[rank] for rank in firsts})
        board.begin("ports, all tried")
        board.others("")  # nobody closes its own before
    if missing:
        text = f"cannot reach {'; '.join(missing)}: open the ports between the machines, or choose another interface"
        return Row("ports", "fault", f"{text} (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)")
    return Row("ports", "ok", "every machine reaches every other one")


def _groups_of(config: Config | None, nodes: Nodes) -> Mapping[str, dist.ProcessGroup]:
    """WORLD, and this rank's groups of the layout; without CONFIG that of its machine. Collective."""
    assert dist.group.WORLD is not None
    world = {"WORLD": dist.group.WORLD}
    if config is None:
        with on_loopback_if_one_machine():
            made = [
                dist.new_group([rank for rank, own in enumerate(nodes.of_rank) if own == node])
                for node in range(nodes.count)
            ]
        return world | ({"machine": made[nodes.node]} if nodes.count > 1 else {})
    from megatron.core import parallel_state  # platform has prepared it by now

    build_layout(config.actor.layout, config.seed)
    groups = {
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
    return world | groups


def _said(error: Exception) -> str:
    """Without the rank, which the report adds; NCCL's own reason is its last line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, (GuardStop, UserError)):
        return re.sub(r"^rank \d+( of \d+)?:? ", "", lines[0])
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))
