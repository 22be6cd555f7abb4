"""What moves bytes in a job, tried with a few: memory shared with a server's process, copies, ports, collectives."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import connect
from dppo_megatron.doctor.rows import Row
from dppo_megatron.rollout.servers.connect import ipc_warning, make_servers
from dppo_megatron.rollout.servers.in_engine import dppo_nccl
from dppo_megatron.rollout.servers.launch import LaunchedServer
from dppo_megatron.rollout.transfer.shared_memory import SharedBuffer, is_supported

_IN_ENGINE = Path(dppo_nccl.__file__).parent
_SHARED_BYTES = 1 << 16
_COPIED_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}
_REDUCED_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
_REPEATS = 5
_CONNECT_S = 3.0


def server_rows(config: Config | None, device: torch.device, timeout_s: float) -> list[Row]:
    """Start the servers' Python as a server would be, have it map memory of this rank, and compare both NCCLs."""
    if config is not None and config.rollout.servers.launch != "local":
        return [Row("servers", "ok", "none is started here; running ones are compared when a job connects to them")]
    if not is_supported():
        return [Row("shared memory", "ok", "not tried: it needs Linux")]
    server = LaunchedServer([sys.executable], {}, Path()) if config is None else make_servers(config)[0]
    server.variables.pop("CUDA_VISIBLE_DEVICES", None)  # a server's may leave this rank's GPU out
    python = config.rollout.servers.python if config is not None and config.rollout.servers.python else sys.executable
    path = (str(_IN_ENGINE), os.environ.get("PYTHONPATH"))
    variables = server.environment | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONSAFEPATH": "1"}
    buffer = SharedBuffer(_SHARED_BYTES, device)
    content = torch.randint(256, (_SHARED_BYTES,), dtype=torch.uint8)
    buffer.fill(content.to(device))
    try:
        answer = _ask(python, variables, json.dumps(buffer.handle()), timeout_s)
        came_back = torch.equal(buffer.memory.cpu(), 255 - content)
    except subprocess.TimeoutExpired:
        said = f"{python} has not loaded torch in {timeout_s:.0f} s; --limit-s waits longer"
        return [Row("servers' Python", "warning", said)]
    except (OSError, ValueError) as error:
        return [Row("servers' Python", "fault", f"rollout.servers.python: {python} cannot be asked: {error}")]
    finally:
        buffer.close()
    shared = Row(
        "CUDA IPC" if device.type == "cuda" else "shared memory", "ok", f"{python} reads and writes this rank's"
    )
    if not came_back:
        uses = config is not None and (config.rollout.sync.channel == "ipc" or config.rollout.servers.colocate)
        advice = ipc_warning() or "; let the container share IPC and process namespaces, or choose disk"
        said = f"{python}: {answer.get('error') or 'other bytes came back'}{advice} (rollout.sync.channel)"
        shared = replace(shared, verdict="fault" if uses else "warning", said=said)
    return [shared, ends_row(config, answer["nccl"])]


def ends_row(config: Config | None, theirs: dict[str, str]) -> Row:
    """Whether a communicator can have this end and the servers'."""
    if unlike := dppo_nccl.difference(theirs):
        asked = config is not None and config.rollout.sync.channel == "nccl"
        advice = f"{unlike}: make them equal, or choose another rollout.sync.channel than nccl"
        return Row("NCCL of both ends", "fault" if asked else "warning", advice)
    return Row("NCCL of both ends", "ok", theirs.get("version", "none in rollout.servers.python"))


def _ask(python: str, variables: Mapping[str, str], handle: str, timeout_s: float) -> dict[str, Any]:
    command = [python, str(_IN_ENGINE / "dppo_probe.py")]
    done = subprocess.run(
        command, env=dict(variables), input=handle, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise ValueError(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def copy_rows(device: torch.device) -> list[Row]:
    """GB/s of copies between pinned host memory and the device, all ranks at once, as an offload does them."""
    size = _COPIED_BYTES[device.type]
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    other = torch.zeros(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        speed = size / _seconds(lambda: other.copy_(host), device) / 1e9
        return [Row("memory copy", "ok", f"{speed:.1f} GB/s; pinned memory is not measured: no GPU")]
    to = size / _seconds(lambda: other.copy_(host, non_blocking=True), device) / 1e9
    back = size / _seconds(lambda: host.copy_(other, non_blocking=True), device) / 1e9
    return [
        Row("pinned memory to GPU", "ok", f"{to:.1f} GB/s, all ranks at once", to),
        Row("GPU to pinned memory", "ok", f"{back:.1f} GB/s, all ranks at once", back),
    ]


def reduce_row(name: str, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> Row:
    """Bus bandwidth of an all-reduce, 2 (n - 1) / n x bytes / s: what each link carries however many ranks n take part.
    Collective. Raises RuntimeError if the sum is wrong, and as `connect`."""
    ranks, size = dist.get_world_size(group), _REDUCED_BYTES[device.type]
    connect([group], device, timeout_s)
    tensor = torch.ones(size // 4, device=device)
    dist.all_reduce(tensor, group=group)
    if not bool((tensor == ranks).all()):
        raise RuntimeError(f"the sum over {ranks} ranks is wrong")
    seconds = torch.tensor(_seconds(lambda: dist.all_reduce(tensor, group=group), device), device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)  # one speed for a group: its ranks wait for each other
    speed = 2 * (ranks - 1) / ranks * size / float(seconds) / 1e9
    backend = "gloo" if device.type == "cpu" else "nccl"
    said = f"{speed:.3g} GB/s over {ranks} ranks (bus bandwidth; {backend}, {size >> 20} MiB)"
    return Row(f"all-reduce {name}", "ok", said, speed)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of some runs."""
    found = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def unreachable(addresses: Mapping[str, str]) -> list[str]:
    """Of machines that listen, by name ("10.0.0.7 4711"), those that do not answer. Nobody need accept: the kernel
    does."""
    missing = []
    for name, address in addresses.items():
        host, port = address.split()
        try:
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        except OSError as error:
            missing.append(f"{name} at {host} port {port} ({error})")
    return missing
