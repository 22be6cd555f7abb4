"""Starts the job's own servers on every one of its machines.

    every rank      meets here (gloo)
    first ranks     start `rollout.servers.count` servers each: rank 0 itself, the others through a keeper
    rank 0          gets addresses and keys, and a handle for each server (servers/launch.ServerProcess)

A failure anywhere is raised everywhere, with nothing left running: a run without the servers of one machine would work,
at a fraction of its speed, and nobody would know why.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from ipaddress import ip_address

import torch.distributed as dist

from dppo_megatron.config.rollout import LOOPBACK
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import from_rank_zero, gather_all
from dppo_megatron.rollout.client.remote import Nodes
from dppo_megatron.rollout.servers.connect import launch_servers, make_servers
from dppo_megatron.rollout.servers.keeper import Announced, Keeper, RemoteServer
from dppo_megatron.rollout.servers.launch import LaunchedServer, ServerProcess, address_toward, stop_all
from dppo_megatron.types import UserError


def launch_everywhere(config: Config, nodes: Nodes) -> tuple[list[ServerProcess], Keeper | None]:
    """Servers on all machines of the job, started but not ready yet. Collective.

    Returns:
        On rank 0 all servers, machine by machine, else nothing; and on the other machines' first ranks who keeps those
        of their machine, to be closed.

    Raises:
        UserError: on all ranks, if a server cannot be started on one of them; there, any other error as it is.
    """
    hosts = _listening_addresses(config, nodes)
    job = from_rank_zero(lambda: secrets.token_hex(8))
    own: list[LaunchedServer] = []
    keeper: Keeper | None = None
    announced: list[Announced] = []
    problem, failed = "", None
    try:
        if nodes.rank == 0:
            own = launch_servers(config, hosts[0])
        elif nodes.is_first:
            servers = make_servers(config, hosts[nodes.node], nodes.node, name=f"node{nodes.node}_")
            keeper = Keeper(servers, nodes.node, _store(), job)
            announced = keeper.begin()
    except Exception as error:  # whatever it is: the other ranks wait below
        failed = error
        text = str(error) if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: {error}"
        problem = f"{socket.gethostname()} (rank {nodes.rank}): {text}" if nodes.rank else text
    problems = [said for said in gather_all([problem]) if said]
    elsewhere = sorted(gather_all(announced), key=lambda one: (one.node, one.index))
    if problems:
        stop_all(own)
        if keeper is not None:
            keeper.close()
        if failed is not None and not isinstance(failed, (UserError, OSError)):
            raise failed  # a fault of this program: its traceback says where
        raise UserError(problems[0])
    if nodes.rank != 0:
        return [], keeper
    store = _store() if elsewhere else None
    return [*own, *(RemoteServer(one, store, job) for one in elsewhere)], None


def _listening_addresses(config: Config, nodes: Nodes) -> list[str]:
    """By machine of the job, the address by which the others reach it; loopback if there is one machine. Collective.

    Raises:
        UserError: that address is on a network, and the user has not said that it is theirs.
    """
    if nodes.count == 1:
        return ["127.0.0.1"]
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    toward_master = gather_all([(nodes.node, address_toward(master))])
    found = dict(reversed(toward_master))  # the first rank of each machine decides
    # Rank 0's machine may know itself by a loopback name (Debian's 127.0.1.1): what another one sees of it is right.
    found[0] = from_rank_zero(lambda: address_toward(found[1]))
    addresses = [found[node] for node in range(nodes.count)]
    check_network(addresses, config)
    return addresses


def check_network(addresses: Sequence[str], config: Config) -> None:
    """Raise UserError for servers that would listen on a network which the user has not allowed."""
    outside = [address for address in addresses if not is_loopback(address)]
    if outside and not config.rollout.servers.allow_remote_endpoints:
        raise UserError(
            f"rollout servers on several machines listen on their network ({', '.join(outside)}), over plain HTTP, with"
            " a key; set rollout.servers.allow_remote_endpoints=true if that network is yours"
        )


def is_loopback(address: str) -> bool:
    """Whether no other machine reaches it."""
    return address in LOOPBACK or ip_address(address).is_loopback


def _store() -> object:
    """A connection of our own to the job's store: the trainer's waits in it for hours."""
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
