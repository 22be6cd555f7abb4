"""Finds the servers of a run and checks that they fit it: at the start, and at every weight sync."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from dppo_megatron.config.resolved_sets import longest_sequence
from dppo_megatron.config.rollout import RolloutConfig, check_endpoint
from dppo_megatron.config.schema import Config
from dppo_megatron.rollout.servers.device_map import CPU, DeviceMap, RankDevice, ranks_of_workers, visible_devices
from dppo_megatron.rollout.servers.directory import (
    Addresses,
    Directory,
    RegistryEntry,
    Router,
    current_entries,
    named_workers,
)
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.http import BadAnswer, Http, NotProven, Refused, Unreachable, clean_key
from dppo_megatron.rollout.servers.in_engine import dppo_wire
from dppo_megatron.rollout.servers.member import Member
from dppo_megatron.rollout.servers.protocol import Server, ServerInfo
from dppo_megatron.rollout.servers.sglang import SGLangServer
from dppo_megatron.rollout.servers.vllm import VLLMServer
from dppo_megatron.texts import log
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture

_FIRST_ANSWER_S = 30.0
_READY_S = 5.0
_ASK_S = 10.0
ROUTED_EXPERTS = "--enable-return-routed-experts"
"""An argument of both engines."""

ChannelName = Literal["disk", "gloo", "nccl", "ipc"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A server that this job has started, as rank 0 knows it."""

    url: str
    api_key: str = field(repr=False)
    node: int
    """The job's machine that it runs on; 0 is rank 0's."""
    visible_devices: str | None


@dataclass
class ConnectedServers:
    servers: list[Server]
    channel: ChannelName
    description: str
    device_map: DeviceMap
    """With the channel ipc, the rank that gives each worker its weights; otherwise empty."""
    addresses: Addresses | None = None
    """Reads the servers' addresses again; None if servers cannot be added during the run."""


def connect(
    config: Config, architecture: Architecture, devices: Sequence[RankDevice], launched: Sequence[Launched] = ()
) -> ConnectedServers:
    """Connect to every server and check it. `devices`: where each rank has the weights that it sends. Raises UserError,
    which names the server and what is wrong with it."""
    rollout = config.rollout
    read_addresses: Addresses | None = None
    if rollout.servers.registry_dir:
        files = Directory(Path(rollout.servers.registry_dir))
        read_addresses, keys = files.entries, _registered(files, rollout)
    elif launched:
        keys = {server.url: server.api_key for server in launched}
    else:
        configured = configured_key(rollout)
        known, routers = resolve_endpoints(rollout, configured)
        keys = dict.fromkeys(known, configured)
        if routers:
            alone = [url for url in known if not any(url in router.workers for router in routers)]
            read_addresses = partial(current_entries, alone, routers, configured, rollout.engine)
    urls = list(keys)
    servers: list[Server] = [make_server(rollout, url, key, architecture.vocab_size) for url, key in keys.items()]
    with ThreadPoolExecutor(len(servers), "describe") as threads:  # vLLM takes seconds to describe itself first
        infos = list(threads.map(lambda server: describe(server, rollout.servers.api_key_env), servers))
    for server, info in zip(servers, infos, strict=True):
        check_server(server.http.url, info, config, architecture)
    on_gpu = any(CPU not in device.names for device in devices)
    device_map = _device_map(launched, infos, devices, all_shared=on_gpu and rollout.servers.colocate)
    unequal = {url: dppo_wire.nccl_difference(info.nccl) for url, info in zip(urls, infos, strict=True)}
    works = {"ipc": [url for url in urls if device_map.get(url)], "nccl": [url for url in urls if not unequal[url]]}
    asked = zip(urls, infos, strict=True)
    offered = [[name for name in info.channels if url in works.get(name, urls)] for url, info in asked]
    unlike = "; ".join(f"{url}: {difference}" for url, difference in unequal.items() if difference)
    colocated = rollout.servers.colocate
    channel, why = choose_channel(rollout.sync.channel, offered, on_gpu=on_gpu, colocated=colocated, unequal=unlike)
    return ConnectedServers(
        servers=servers,
        channel=channel,
        device_map={url: ranks for url, ranks in device_map.items() if ranks} if channel == "ipc" else {},
        description=(
            f"rollout: {rollout.engine} {infos[0].engine_version} at {', '.join(urls)}; weight sync: {channel} ({why})"
            f"{ipc_warning() if channel == 'ipc' and on_gpu else ''}"
        ),
        addresses=read_addresses,
    )


def _registered(directory: Directory, rollout: RolloutConfig) -> dict[str, str]:
    """Address -> key of the registered servers that answer."""

    def answers(entry: RegistryEntry) -> bool:
        check_entry(entry, rollout)
        try:
            make_server(rollout, entry.url, entry.api_key, 0).healthy(timeout_s=_READY_S)
        except (Unreachable, Refused):
            return False
        return True

    entries = directory.wait_for(rollout.servers.min_servers, rollout.limits.start_timeout_s, answers)
    return {url: entry.api_key for url, entry in entries.items()}


def check_entry(entry: RegistryEntry, rollout: RolloutConfig) -> None:
    """Raise UserError for a server of another engine, or one at an address that is not allowed."""
    if entry.engine != rollout.engine:
        raise UserError(f"{entry.url} is a server of engine {entry.engine}; rollout.engine = {rollout.engine}")
    check_endpoint(entry.url, rollout)


def resolve_endpoints(rollout: RolloutConfig, key: str) -> tuple[list[str], list[Router]]:
    """The addresses of configured servers and of the workers of configured routers; and the routers.
    Raises UserError for a router that lists no worker, one twice, or one at an address that is not allowed."""
    servers: list[str] = []
    routers: list[Router] = []
    for url in rollout.servers.endpoints:
        named, http = None, Http(url, key, proves=None)
        with suppress(Unreachable, Refused):  # no such path, or no answer: if that is a fault, `describe` reports it
            named = named_workers(http, _FIRST_ANSWER_S)
        for worker in named or []:
            check_endpoint(worker, rollout)
        if named == []:
            raise UserError(f"rollout.servers.endpoints: {url} is a router without workers")
        if named:
            log(f"rollout: {url} is a router of {len(named)} servers: {', '.join(named)}")
            routers.append(Router(http, named))
        servers += named or [url]
    if len(set(servers)) < len(servers):
        raise UserError(f"rollout.servers.endpoints names a server twice, by itself or as a router's: {servers}")
    return servers, routers


def ipc_warning(variables: Mapping[str, str] = os.environ) -> str:
    """A warning if torch shares memory as file descriptors, for which containers need ptrace rights; else empty."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in variables.get(variable, "").replace(" ", "").lower():
            return (
                f"; {variable} has expandable_segments, with which CUDA IPC needs ptrace rights in a container: if the"
                " first sync fails, unset it or choose rollout.sync.channel = disk"
            )
    return ""


def _device_map(
    launched: Sequence[Launched], infos: Sequence[ServerInfo], devices: Sequence[RankDevice], *, all_shared: bool
) -> dict[str, tuple[int, ...] | None]:
    """Address of each launched server -> the ranks that share its workers' devices; None if a worker has no rank. With
    `all_shared` that is a UserError: its GPU may be another job's."""
    device_map = {}
    for turn, (server, info) in enumerate(zip(launched, infos, strict=False)):  # `launched` may be empty
        workers = info.devices
        if not workers and torch.cuda.is_available():
            workers = tuple(visible_devices(server.visible_devices)[: info.world_size])
        ranks = ranks_of_workers(devices, workers or (CPU,) * info.world_size, turn, server.node)
        if ranks is None and all_shared:
            here = ["/".join(sorted(one.names, key=len)[:2]) for one in devices if one.node == server.node]
            alone = [name for name in info.devices if not ranks_of_workers(devices, [name], 0, server.node)]
            raise UserError(
                f"rollout.servers.colocate: {server.url} has workers on {', '.join(alone) or 'GPUs'} without a rank"
                f" (CUDA_VISIBLE_DEVICES={server.visible_devices or ''}): the ranks of its machine are on"
                f" {', '.join(here)}. rollout.servers.gpus sets its GPUs"
            )
        device_map[server.url] = ranks
    return device_map


def configured_key(rollout: RolloutConfig) -> str:
    """The API key from the environment; empty if there is none. Raises UserError, which does not show the key."""
    name = rollout.servers.api_key_env
    return clean_key(os.environ.get(name, ""), f"the environment variable {name} (rollout.servers.api_key_env)")


def make_server(rollout: RolloutConfig, url: str, api_key: str, vocab_size: int) -> Server:
    http = Http(url, api_key, proves=None if rollout.servers.endpoints else True)  # a user's own may not have the proof
    return VLLMServer(http) if rollout.engine == "vllm" else SGLangServer(http, vocab_size)


def _read_info(server: Server, timeout_s: float) -> ServerInfo:
    """`Server.describe`. Raises Unreachable or Refused, and UserError for invalid answers."""
    try:
        return server.describe(timeout_s=timeout_s)
    except BadAnswer as error:
        problem = f"answers, but is no {server.engine} server that this trainer can read: {error}"
        raise UserError(f"{server.http.url} {problem}") from None


def describe(server: Server, api_key_env: str) -> ServerInfo:
    """`Server.describe` of a healthy server; UserError if it does not answer or refuses."""
    url = server.http.url
    try:
        info = _read_info(server, _FIRST_ANSWER_S)  # before the probe, whose path another engine may not have
        server.healthy(timeout_s=_FIRST_ANSWER_S)
        return info
    except Unreachable as error:
        raise UserError(f"rollout.servers.endpoints: no server answers at {url}: {error}") from None
    except Refused as error:
        if error.status in (401, 403):
            raise UserError(
                f"{url} refuses the API key (HTTP {error.status}); it is read from the environment variable"
                f" {api_key_env} (rollout.servers.api_key_env)"
            ) from None
        raise UserError(f"{url} answers the request for its settings with {error}") from None


def choose_channel(
    wanted: str, offered: Sequence[Sequence[str]], *, on_gpu: bool, colocated: bool, unequal: str = ""
) -> tuple[ChannelName, str]:
    """The sync channel and why. Raises UserError if a server does not offer the one that is set, or `auto` finds none.

    Args:
        wanted: `rollout.sync.channel`.
        offered: the channels that each server supports.
        unequal: how NCCL differs between servers and trainer; those servers do not offer nccl.
    """
    common: set[str] = set(offered[0]).intersection(*offered[1:]) if offered else set()
    if wanted != "auto":
        if wanted == "nccl" and not on_gpu:
            raise UserError("rollout.sync.channel = nccl needs an actor on a GPU, and this one is on a CPU; use gloo")
        if wanted == "nccl" and unequal:
            raise UserError(f"rollout.sync.channel = nccl: {unequal}: no communicator can have both")
        if wanted not in common:
            raise UserError(
                f"rollout.sync.channel = {wanted}, but the servers are started for {', '.join(sorted(common))};"
                " docs/engines.md has the arguments for the others"
            )
        return wanted, "asked for"  # type: ignore[return-value]
    if "ipc" in common and (colocated or not on_gpu):
        return "ipc", "the servers are the trainer's own, on this machine"
    if on_gpu and not colocated and "nccl" in common:
        return "nccl", "the actor is on GPUs and every server offers it"
    if not on_gpu and not colocated and "gloo" in common:
        return "gloo", "the weights are in this machine's memory and every server offers it"
    why = f"no NCCL communicator: {unequal}" if unequal else "not every server is started for a broadcast"
    if colocated:
        why = "NCCL has no groups with two members on one GPU"
    if "disk" not in common:
        raise UserError(
            f"rollout.sync.channel = auto: {why}, and over disk SGLang would load the policy into its draft model too;"
            " docs/engines.md has what the other channels need"
        )
    return "disk", why


def check_server(url: str, info: ServerInfo, config: Config, architecture: Architecture) -> None:
    """Raise UserError unless the server can generate what the actor will train on."""
    model = f"{url} serves '{info.served_model}'"
    if info.architecture is not None and info.architecture != architecture.name:
        raise UserError(f"{model}, a {info.architecture}; the actor is a {architecture.name} ({config.model.hf_path})")
    if info.vocab_size is not None and info.vocab_size != architecture.vocab_size:
        raise UserError(
            f"{model} with {info.vocab_size} tokens in its vocabulary; the actor has {architecture.vocab_size}"
            f" ({config.model.hf_path})"
        )
    longest, whose = longest_sequence(config)
    if info.max_tokens is not None and info.max_tokens < longest:
        raise UserError(
            f"{model} with a context or KV cache of only {info.max_tokens} tokens; {whose} = {longest} must fit"
        )
    rollout = config.rollout
    plain = rollout.sampling.temperature == 1.0 and rollout.sampling.top_p == 1.0 and rollout.sampling.top_k == 0
    if info.logprobs_are_processed is False and not plain:
        raise UserError(
            f"{url} reports log-probabilities before temperature and cuts, which are not those of the behaviour policy;"
            " start it with --logprobs-mode processed_logprobs"
        )
    if info.quantization != ("" if rollout.quantization == "off" else "fp8"):
        raise UserError(
            f"{model} with weights quantized as '{info.quantization or 'none'}'; rollout.quantization ="
            f" {rollout.quantization} does not match that (docs/engines.md#weights-in-fp8)"
        )
    if rollout.pauses_requests and not info.pauses:
        raise UserError(
            f"{url} has several pipeline stages, with which SGLang does not pause, as rollout.async_steps ="
            f" {rollout.async_steps} with rollout.sync.in_flight = continue needs; start it without --pp-size"
        )
    if config.actor.routing_replay == "engine" and not info.returns_experts:
        raise UserError(
            f"{url} does not return the experts that it sends tokens to, as actor.routing_replay = engine needs: start"
            f" it with {ROUTED_EXPERTS} and this project's files (docs/engines.md), or replay the actor's own with"
            " actor.routing_replay = actor"
        )
    _check_cuts(url, info, rollout, architecture.vocab_size)


def _check_cuts(url: str, info: ServerInfo, rollout: RolloutConfig, vocab_size: int) -> None:
    """Check servers that apply top_p before top_k, or return log-probabilities under a cut only up to `max_top_k`."""
    if not info.top_p_after_top_k and rollout.sampling.top_p < 1 and rollout.sampling.top_k > 0:
        raise UserError(
            f"{url} applies rollout.sampling.top_p before rollout.sampling.top_k, all other engines after it: use"
            " one of the two"
        )
    cut = rollout.sampling.top_k or (vocab_size if rollout.sampling.top_p < 1 else 0)
    if info.max_top_k is not None and cut > info.max_top_k:
        raise UserError(
            f"{url} gives log-probabilities under a cut for at most {info.max_top_k} tokens; rollout.sampling.top_k ="
            f" {rollout.sampling.top_k}, rollout.sampling.top_p = {rollout.sampling.top_p:g} need {cut}: start it with"
            f" --sampling-mask-max-tokens {cut}, or leave top_p at 1"
        )


class Membership:
    """Keeps the members of a fleet equal to the servers that are listed now and fit the run.

    At every weight sync the addresses are read again: from a directory, or from routers. A new server that fits becomes
    a stale member, so that the sync brings it the weights before its first request. One that was out and that this job
    has not started is checked again when it is back (`inspect`): it may have been restarted with other arguments.
    `introduce` tells the rollout clients about a server that becomes a member or whose dialect has changed.
    """

    def __init__(
        self, known: ConnectedServers, config: Config, architecture: Architecture, introduce: Callable[[Server], None]
    ) -> None:
        self._known, self._config, self._architecture = known, config, architecture
        self._introduce = introduce
        self._rejected: set[tuple[str, str]] = set()
        """(address, key) of servers that did not fit."""

    def inspect(self, member: Member) -> None:
        """Check a server that is back. Raises Unreachable or Refused, or UserError if it does not fit."""
        previous = member.server.dialect
        self._check(member.server)
        if member.server.dialect != previous:
            self._introduce(member.server)

    def update(self, fleet: Fleet) -> None:
        """Add new servers and remove those that have left."""
        try:
            if self._known.addresses is not None:
                self._update(fleet, self._known.addresses())
        except (OSError, UserError) as error:  # a file system that hangs, a file of another user
            log(f"rollout: the addresses of servers cannot be read: {error}")

    def _update(self, fleet: Fleet, entries: dict[str, RegistryEntry]) -> None:
        for member in fleet.members:
            if member.name in entries and member.server.http.api_key == entries[member.name].api_key:
                with fleet.lock:
                    member.may_return()
            else:
                fleet.mark_left(member, "it has left")
        fleet.clients.gone({member.name for member in fleet.members if member.has_left})
        known = {(member.name, member.server.http.api_key) for member in fleet.members}
        new = [entry for url, entry in entries.items() if (url, entry.api_key) not in known]
        with ThreadPoolExecutor(len(new) or 1, "describe") as threads:
            for server in filter(None, threads.map(self._try, new)):
                self._introduce(server)  # before `add`: the fleet needs to know each member's client
                fleet.add(server)
                log(f"rollout: new server {server.http.url}; it gets requests after a weight sync")

    def _try(self, entry: RegistryEntry) -> Server | None:
        config = self._config
        try:
            check_entry(entry, config.rollout)
            server = make_server(config.rollout, entry.url, entry.api_key, self._architecture.vocab_size)
            server.healthy(timeout_s=_ASK_S)
            self._check(server)
            return server
        except (BadAnswer, NotProven, UserError) as error:
            self._reject(entry, str(error))
        except Refused as error:
            self._reject(entry, f"{entry.url} answers with {error}")
        except Unreachable:
            pass  # tried again at the next sync
        return None

    def _check(self, server: Server) -> None:
        url, channel = server.http.url, self._known.channel
        info = _read_info(server, _ASK_S)
        check_server(url, info, self._config, self._architecture)
        if channel not in info.channels:
            raise UserError(f"{url} is not started for weight sync over {channel}")
        if channel == "nccl" and (unequal := dppo_wire.nccl_difference(info.nccl)):
            raise UserError(f"{url}: {unequal}")

    def _reject(self, entry: RegistryEntry, why: str) -> None:
        """Log it once. The server is tried again at the next sync, since its owner may fix it."""
        rejected = entry.url, entry.api_key
        if rejected not in self._rejected:
            log(f"rollout: a new server is not used yet: {why}")
        self._rejected.add(rejected)
