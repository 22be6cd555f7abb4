"""Checks of one machine: packages, limits, state of its GPUs, and what moves bytes: shared memory, copies, collectives.

Limits and GPUs are judged by functions of numbers and text, which tests can call without such a machine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform as python_platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from dppo_megatron.actor.attention import find_kernel
from dppo_megatron.actor.logprobs import choose_softmax
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import connect
from dppo_megatron.platform.capabilities import this_machine, transformer_engine_warning, why_gpus_are_unused
from dppo_megatron.rollout.servers.connect import ipc_warning
from dppo_megatron.rollout.servers.in_engine import dppo_wire
from dppo_megatron.rollout.servers.server_process import make_servers
from dppo_megatron.rollout.sync.colocated import SharedBuffer

Verdict = Literal["ok", "warning", "fault"]
_PACKAGES = {
    "torch": "required",
    "megatron-core": "required",
    "transformers": "required",
    "triton": "fused log-probabilities on CUDA; torch's CUDA builds bring it",
    "transformer-engine": "FP8 and fused layers on CUDA",
    "flash-attn": "attention of the local layers and of Transformer Engine, where it is installed",
    "apex": "fused optimizer where Transformer Engine is not installed",
    "vllm": "only where the rollout engine runs",
    "sglang": "only where the rollout engine runs",
}
_HEAD_DIM = 128
"""Head dimension of most models in use; it decides whether a flash kernel can serve."""
_RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")
_DOCKERS_SHM, _ENOUGH_SHM = 64 << 20, 1 << 30
"""Bytes: Docker's default; NCCL's segments beside vLLM's ring of 10 chunks of 16 MiB a server."""
_OWN_FILES = 512
"""Open files of a rank, not counting the sockets to its peers."""
_GPU_FIELDS = "index,clocks.sm,clocks.max.sm,clocks_event_reasons.active,ecc.errors.uncorrected.volatile.total"
_SLOWED = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}
"""NVML's clock events that mean trouble. The others are normal: idle, the power cap under load, clocks set by hand."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One finding, of one rank or of the whole job."""

    what: str
    verdict: Verdict
    detail: str
    """What was found; for a warning or a fault also what would be right."""
    gb_s: float | None = None
    """A measured speed, which rank 0 compares across ranks."""
    ranks: str = ""
    """In the job's report, the ranks that it is true of; empty: all."""


def report() -> list[tuple[str, str]]:
    """(what, finding) rows for people to read."""
    machine = this_machine()
    device = "cpu" if machine.cuda_capability is None else "cuda"
    spec, reason = machine.choose_layer_spec("auto", "off", has_experts=False)
    lacks = {recipe: machine.lacks_for_fp8(recipe) for recipe in _RECIPES}
    available = ", ".join(recipe for recipe in _RECIPES if not lacks[recipe])
    mixture_spec = machine.choose_layer_spec("auto", "off", has_experts=True)[0]
    kinds = "mixtures and FP8" if available else "mixtures"
    others = f"; {kinds}: {mixture_spec} (slow attention)" if mixture_spec != spec else ""
    rows = [
        ("python", python_platform.python_version()),
        *((name, _version(name, purpose)) for name, purpose in _PACKAGES.items()),
        ("device", _device() if device == "cuda" else "CPU: megatron-core runs on gloo, for tests and small models"),
        ("layers", f"{spec} ({reason}){others}"),
        ("attention", find_kernel(_HEAD_DIM)[1] if spec == "local" else "Transformer Engine's"),
        ("norms", "torch's RMSNorm, one kernel on CUDA" if spec == "local" else "Transformer Engine's"),
        ("optimizer", machine.adam()),
        ("weight-gradients", machine.weight_gradients()),
        ("fp8", available or f"none: {lacks[_RECIPES[0]]}"),
        ("log-probabilities", choose_softmax("auto", torch.device(device), torch.bfloat16)[1]),
        ("environment", environment(os.environ, device)),
        ("warning", transformer_engine_warning()),
    ]
    return [(what, detail) for what, detail in rows if detail]


def faults() -> list[str]:
    """What would end any job on this machine's GPUs."""
    if why := why_gpus_are_unused():
        return [why]
    rows = attention_rows(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return [row.detail for row in rows if row.verdict == "fault"]


def environment(variables: Mapping[str, str], device: str) -> str:
    """The variables that Megatron and torch read on CUDA, and better values for them."""
    if device == "cpu":
        return "nothing to set on a CPU"
    connections = variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    detail = f"CUDA_DEVICE_MAX_CONNECTIONS={connections or '1 (set by the trainer)'}"
    if connections not in ("", "1"):
        detail += ": with tensor or context parallelism Megatron overlaps communication only at 1"
    return f"{detail}; {allocator_row(variables, device, colocated=None).detail}"


def allocator_row(variables: Mapping[str, str], device: str, colocated: bool | None) -> CheckRow:
    """Whether expandable segments fit the job; `colocated` as `rollout.servers.colocate`, None if no job is known."""
    if device == "cpu":
        return CheckRow("allocator", "ok", "nothing to set on a CPU")
    if detail := ipc_warning(variables).removeprefix("; "):
        return CheckRow("allocator", "warning" if colocated else "ok", detail)
    if colocated:
        return CheckRow("allocator", "ok", "no expandable segments, which suits CUDA IPC to colocated servers")
    condition = "" if colocated is False else ", unless servers are colocated,"
    detail = f"without expandable segments (PYTORCH_ALLOC_CONF){condition} packs of varied length fragment memory"
    return CheckRow("allocator", "ok" if colocated is None else "warning", detail)


def _version(package: str, purpose: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed ({purpose})"


def _device() -> str:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (
        f"{torch.cuda.device_count()} x {properties.name}, sm_{properties.major}{properties.minor},"
        f" {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    )


def machine_rows(world_size: int, *, first_here: bool) -> list[CheckRow]:
    """Limits of this process; on a machine's first rank also what all its ranks share."""
    infiniband = Path("/sys/class/infiniband")
    rows = [
        files_row(resource.getrlimit(resource.RLIMIT_NOFILE)[1], world_size),
        locked_row(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], infiniband.is_dir() and any(infiniband.iterdir())),
    ]
    if why := why_gpus_are_unused():
        rows.append(CheckRow("GPUs", "fault", why))
    return [*rows, shm_row(shutil.disk_usage("/dev/shm").free), *_gpus()] if first_here else rows


def files_row(hard: int, world_size: int) -> CheckRow:
    """`ulimit -Hn`, to which ranks raise their soft limit; -1: no limit. gloo has a socket for each other rank."""
    needed, detail = _OWN_FILES + world_size, f"{'unlimited' if hard < 0 else hard} open files (hard limit)"
    if hard < 0 or hard >= needed:
        return CheckRow("ulimit -n", "ok", detail)
    detail += f", but a rank of {world_size} needs {needed}: raise it (ulimit -Hn)"
    return CheckRow("ulimit -n", "fault", detail)


def locked_row(soft_bytes: int, has_infiniband: bool) -> CheckRow:
    """`ulimit -l`; -1: no limit."""
    detail = f"{'unlimited' if soft_bytes < 0 else f'{soft_bytes} bytes'} may be locked"
    if soft_bytes < 0 or not has_infiniband:
        return CheckRow("ulimit -l", "ok", detail)
    detail += ": InfiniBand registers NCCL's buffers there; `ulimit -l unlimited`, in Docker --ulimit memlock=-1"
    return CheckRow("ulimit -l", "warning", detail)


def shm_row(free: int) -> CheckRow:
    """Shared memory for NCCL and the engines; `free` in bytes."""
    detail = f"{free >> 20:,} MiB free"
    if free >= _ENOUGH_SHM:
        return CheckRow("/dev/shm", "ok", detail)
    detail += ": NCCL and vLLM (160 MiB a server) share memory there; remove what is left in it, or give more (Docker:"
    return CheckRow("/dev/shm", "fault" if free < _DOCKERS_SHM else "warning", f"{detail} --shm-size=16g)")


def _gpus() -> list[CheckRow]:
    query = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        return gpu_rows(subprocess.run(query, capture_output=True, text=True, timeout=15, check=True).stdout)
    except FileNotFoundError:
        return [CheckRow("clocks and ECC", "ok", "not measured: no nvidia-smi")]
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stdout", None) or error
        return [CheckRow("clocks and ECC", "warning", f"nvidia-smi does not answer: {detail}".replace("\n", " "))]


def gpu_rows(text: str) -> list[CheckRow]:
    """Clocks and ECC errors from what nvidia-smi prints for `_GPU_FIELDS`: a line a GPU, `[N/A]` for what it lacks."""
    cards = [line.split(", ") for line in text.splitlines()]
    speeds = ", ".join(f"{now} of {most}" for _, now, most, *_ in cards)
    rows = [CheckRow("clocks", "ok", f"{speeds} MHz; none slowed down"), CheckRow("ECC", "ok", "no uncorrected error")]
    bits = {index: int(reasons, 16) for index, _, _, reasons, _ in cards if reasons.startswith("0x")}
    slowed = {index: ", ".join(name for bit, name in _SLOWED.items() if bits[index] & bit) for index in bits}
    if named := "; ".join(f"GPU {index}: {reasons}" for index, reasons in slowed.items() if reasons):
        rows[0] = CheckRow("clocks", "warning", f"{named}: check cooling and power, or leave the node out")
    if broken := ", ".join(f"GPU {index}: {errors}" for index, *_, errors in cards if errors.isdigit() and int(errors)):
        detail = f"uncorrected errors ({broken}): have the GPU reset, or leave the node out"
        rows[1] = CheckRow("ECC", "fault", detail)
    return rows


_IN_ENGINE = Path(dppo_wire.__file__).parent
_SHARED_BYTES = 1 << 16
_COPIED_BYTES = 256 << 20
_REDUCED_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
_REPEATS = 5


def server_rows(config: Config | None, device: torch.device, timeout_s: float) -> list[CheckRow]:
    """Start the servers' Python with a server's variables, let it map memory of this rank, and compare both NCCLs."""
    if config is not None and config.rollout.servers.launch != "local":
        detail = "none is started here; running ones are compared when a job connects to them"
        return [CheckRow("servers", "ok", detail)]
    channel, is_shared, python, variables = "", False, sys.executable, dict(os.environ)
    if config is not None:
        channel, python = config.rollout.sync.channel, config.rollout.servers.python or python
        is_shared = channel == "ipc" or config.rollout.servers.colocate
        variables |= make_servers(config)[0].variables
        variables.pop("CUDA_VISIBLE_DEVICES", None)  # the server's value may hide this rank's GPU
    buffer = SharedBuffer(_SHARED_BYTES, device)
    content = torch.randint(256, (_SHARED_BYTES,), dtype=torch.uint8)
    buffer.fill(content.to(device))
    try:
        answer = _ask(python, variables, json.dumps(buffer.handle()), timeout_s)
        is_inverted = torch.equal(buffer.memory.cpu(), 255 - content)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # a timeout: torch loads slowly (--limit-s)
        verdict: Verdict = "warning" if isinstance(error, subprocess.TimeoutExpired) else "fault"
        return [CheckRow("servers' Python", verdict, f"rollout.servers.python: {python} does not answer: {error}")]
    finally:
        buffer.close()
    what = "CUDA IPC" if device.type == "cuda" else "shared memory"
    shared = CheckRow(what, "ok", f"{python} reads and writes this rank's memory")
    if not is_inverted:
        advice = ipc_warning() or "; let the container share IPC and process namespaces, or choose disk"
        detail = f"{python}: {answer.get('error') or 'other bytes came back'}{advice} (rollout.sync.channel)"
        shared = CheckRow(what, "fault" if is_shared else "warning", detail)
    nccl = CheckRow("NCCL of both ends", "ok", answer["nccl"].get("version", "none in rollout.servers.python"))
    if difference := dppo_wire.nccl_difference(answer["nccl"]):
        detail = f"{difference}: make them equal, or choose another rollout.sync.channel than nccl"
        nccl = CheckRow("NCCL of both ends", "fault" if channel == "nccl" else "warning", detail)
    return [shared, nccl]


def _ask(python: str, variables: dict[str, str], handle: str, timeout_s: float) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, (str(_IN_ENGINE), os.environ.get("PYTHONPATH"))))
    variables |= {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [python, str(_IN_ENGINE / "dppo_wire.py")]
    done = subprocess.run(command, env=variables, input=handle, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise ValueError(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    answer: dict[str, Any] = json.loads((done.stdout.splitlines() or [""])[-1])
    return answer


def attention_rows(device: torch.device) -> list[CheckRow]:
    """Run Transformer Engine's attention over a pack of two sequences, forwards and backwards: with a cuDNN that it
    cannot use it still imports, and fails in a job's first step. Empty where dense models use local layers."""
    if device.type == "cpu" or this_machine().choose_layer_spec("auto", "off", has_experts=False)[0] == "local":
        return []
    from transformer_engine.pytorch import DotProductAttention

    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.randn(64, heads, 64, **options) for heads in (4, 2, 2))
    ends = torch.tensor([0, 30, 64], dtype=torch.int32, device=device)
    try:
        layer = DotProductAttention(4, 64, num_gqa_groups=2, attn_mask_type="padding_causal", qkv_format="thd")
        longest = {"max_seqlen_q": 34, "max_seqlen_kv": 34}
        layer(query, key, value, cu_seqlens_q=ends, cu_seqlens_kv=ends, **longest).sum().backward()
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever a kernel raises
        detail = f"Transformer Engine's over packs fails: {' '.join(str(error).split())[:300]}; cuDNN is torch's unless"
        detail += " CUDNN_HOME or CUDNN_PATH names another; actor.layer_spec=local does not need it"
        return [CheckRow("attention", "fault", detail)]
    return [CheckRow("attention", "ok", "Transformer Engine's over packs, forwards and backwards")]


def copy_rows(device: torch.device) -> list[CheckRow]:
    """GB/s of copies between pinned host memory and a GPU, all ranks at once, as in an offload."""
    if device.type == "cpu":
        return []
    host = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    gpu = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    rows = []
    for what, target, source in (("pinned memory to GPU", gpu, host), ("GPU to pinned memory", host, gpu)):
        speed = _gb_s(partial(target.copy_, source), _COPIED_BYTES)
        rows.append(CheckRow(what, "ok", f"{speed:.1f} GB/s, all ranks at once", speed))
    return rows


def reduce_row(name: str, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> CheckRow:
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
    detail = f"{speed:.3g} GB/s over {ranks} ranks (bus bandwidth; {backend}, {size >> 20} MiB)"
    return CheckRow(f"all-reduce {name}", "ok", detail, speed)


def _gb_s(call: Callable[[], object], num_bytes: int) -> float:
    return num_bytes / Timer("call()", globals={"call": call}).timeit(_REPEATS).mean / 1e9
