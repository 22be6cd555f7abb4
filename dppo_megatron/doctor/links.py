"""What moves bytes in a job, tried with a few: memory shared with a server's process, copies, collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import connect
from dppo_megatron.doctor.rows import Row, Verdict
from dppo_megatron.rollout.servers.connect import ipc_warning, make_servers
from dppo_megatron.rollout.servers.in_engine import dppo_nccl
from dppo_megatron.rollout.transfer.shared_memory import SharedBuffer

_IN_ENGINE = Path(dppo_nccl.__file__).parent
_SHARED_BYTES = 1 << 16
_COPIED_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}
_REDUCED_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
_REPEATS = 5


def server_rows(config: Config | None, device: torch.device, timeout_s: float) -> list[Row]:
    """Start the servers' Python with a server's variables, have it map memory of this rank, compare both NCCLs."""
    if config is not None and config.rollout.servers.launch != "local":
        return [Row("servers", "ok", "none is started here; running ones are compared when a job connects to them")]
    channel, is_shared, python, variables = "", False, sys.executable, dict(os.environ)
    if config is not None:
        channel, python = config.rollout.sync.channel, config.rollout.servers.python or python
        is_shared = channel == "ipc" or config.rollout.servers.colocate
        variables |= make_servers(config)[0].variables
        variables.pop("CUDA_VISIBLE_DEVICES", None)  # a server's may leave this rank's GPU out
    buffer = SharedBuffer(_SHARED_BYTES, device)
    content = torch.randint(256, (_SHARED_BYTES,), dtype=torch.uint8)
    buffer.fill(content.to(device))
    try:
        answer = _ask(python, variables, json.dumps(buffer.handle()), timeout_s)
        came_back = torch.equal(buffer.memory.cpu(), 255 - content)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # the last: torch loads slowly (--limit-s)
        verdict: Verdict = "warning" if isinstance(error, subprocess.TimeoutExpired) else "fault"
        return [Row("servers' Python", verdict, f"rollout.servers.python: {python} cannot be asked: {error}")]
    finally:
        buffer.close()
    what = "CUDA IPC" if device.type == "cuda" else "shared memory"
    shared = Row(what, "ok", f"{python} reads and writes this rank's")
    if not came_back:
        advice = ipc_warning() or "; let the container share IPC and process namespaces, or choose disk"
        said = f"{python}: {answer.get('error') or 'other bytes came back'}{advice} (rollout.sync.channel)"
        shared = Row(what, "fault" if is_shared else "warning", said)
    both = Row("NCCL of both ends", "ok", answer["nccl"].get("version", "none in rollout.servers.python"))
    if unlike := dppo_nccl.difference(answer["nccl"]):
        said = f"{unlike}: make them equal, or choose another rollout.sync.channel than nccl"
        both = Row("NCCL of both ends", "fault" if channel == "nccl" else "warning", said)
    return [shared, both]


def _ask(python: str, variables: dict[str, str], handle: str, timeout_s: float) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, (str(_IN_ENGINE), os.environ.get("PYTHONPATH"))))
    variables |= {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [python, str(_IN_ENGINE / "dppo_probe.py")]
    done = subprocess.run(command, env=variables, input=handle, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise ValueError(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    answer: dict[str, Any] = json.loads((done.stdout.splitlines() or [""])[-1])
    return answer


def copy_rows(device: torch.device) -> list[Row]:
    """GB/s of copies between pinned host memory and the device, all ranks at once, as an offload does them."""
    size = _COPIED_BYTES[device.type]
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    other = torch.zeros(size, dtype=torch.uint8, device=device)
    to, back = _gb_s(lambda: other.copy_(host), size), _gb_s(lambda: host.copy_(other), size)
    if device.type == "cpu":
        return [Row("memory copy", "ok", f"{to:.1f} GB/s; pinned memory is not measured: no GPU")]
    return [
        Row("pinned memory to GPU", "ok", f"{to:.1f} GB/s, all ranks at once", to),
        Row("GPU to pinned memory", "ok", f"{back:.1f} GB/s, all ranks at once", back),
    ]


def reduce_row(name: str, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> Row:
    """Bus bandwidth of an all-reduce, 2 (n - 1) / n x bytes / s: what each link carries however many ranks n take part.
    Collective. Raises RuntimeError if the sum is wrong, and as `connect`."""
    ranks, size = group.size(), _REDUCED_BYTES[device.type]
    connect([group], device, timeout_s)
    tensor = torch.ones(size // 4, device=device)
    dist.all_reduce(tensor, group=group)
    if not bool((tensor == ranks).all()):
        raise RuntimeError(f"the sum over {ranks} ranks is wrong")
    speed = 2 * (ranks - 1) / ranks * _gb_s(lambda: dist.all_reduce(tensor, group=group), size)
    backend = "gloo" if device.type == "cpu" else "nccl"
    said = f"{speed:.3g} GB/s over {ranks} ranks (bus bandwidth; {backend}, {size >> 20} MiB)"
    return Row(f"all-reduce {name}", "ok", said, speed)


def _gb_s(call: Callable[[], object], num_bytes: int) -> float:
    return num_bytes / Timer("call()", globals={"call": call}).timeit(_REPEATS).mean / 1e9
