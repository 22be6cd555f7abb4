"""What is installed and what the machine can do, in one table."""

from __future__ import annotations

import importlib.metadata
import os
import platform as python_platform
from collections.abc import Mapping

import torch

from dppo_megatron.actor.attention import find_kernel
from dppo_megatron.actor.logprobs import choose_softmax
from dppo_megatron.platform.capabilities import Machine, this_machine, transformer_engine_warning
from dppo_megatron.rollout.servers.connect import ipc_warning
from dppo_megatron.workbench.doctor.check_rows import CheckRow

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
"""Of most models in use; what decides whether a flash kernel can serve."""
_RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


def report() -> list[tuple[str, str]]:
    """(what, finding) rows for people to read."""
    machine = this_machine()
    device = "cpu" if machine.cuda_capability is None else "cuda"
    rows = [("python", python_platform.python_version())]
    rows += [(name, _version(name, purpose)) for name, purpose in _PACKAGES.items()]
    rows.append(("device", _device(machine)))
    spec, reason = machine.choose_layer_spec("auto", "off")
    rows.append(("layers", f"{spec} ({reason})"))
    rows.append(("attention", find_kernel(_HEAD_DIM)[1] if spec == "local" else "Transformer Engine's"))
    rows.append(("norms", "torch's RMSNorm, one kernel on CUDA" if spec == "local" else "Transformer Engine's"))
    rows.append(("optimizer", machine.adam()))
    rows.append(("weight-gradients", machine.weight_gradients()))
    rows.append(("fp8", _recipes(machine)))
    rows.append(("log-probabilities", choose_softmax("auto", torch.device(device), torch.bfloat16)[1]))
    rows.append(("environment", environment(os.environ, device)))
    if warning := transformer_engine_warning():
        rows.append(("warning", warning))
    return rows


def environment(variables: Mapping[str, str], device: str) -> str:
    """What the variables that Megatron and torch read on CUDA are, and what would be better."""
    if device == "cpu":
        return "nothing to set on a CPU"
    connections = variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    said = ["CUDA_DEVICE_MAX_CONNECTIONS=1" + ("" if connections else " (set by the trainer)")]
    if connections not in ("", "1"):
        said = [
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: with tensor or context parallelism Megatron overlaps"
            " communication only at 1"
        ]
    return "; ".join([*said, allocator_row(variables, device, colocated=None).said])


def allocator_row(variables: Mapping[str, str], device: str, colocated: bool | None) -> CheckRow:
    """Whether expandable segments fit the job.

    Args:
        colocated: `rollout.servers.colocate`; None: no job is known.
    """
    if device == "cpu":
        return CheckRow("allocator", "ok", "nothing to set on a CPU")
    if said := ipc_warning(variables).removeprefix("; "):
        return CheckRow("allocator", "warning" if colocated else "ok", said)
    if colocated:
        return CheckRow("allocator", "ok", "no expandable segments, which suits CUDA IPC to colocated servers")
    condition = "" if colocated is False else ", unless servers are colocated,"
    said = f"without expandable segments (PYTORCH_ALLOC_CONF){condition} packs of varied length fragment memory"
    return CheckRow("allocator", "ok" if colocated is None else "warning", said)


def _version(package: str, purpose: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed ({purpose})"


def _device(machine: Machine) -> str:
    if machine.cuda_capability is None:
        return "CPU: megatron-core runs on gloo, for tests and small models"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (
        f"{torch.cuda.device_count()} x {properties.name}, sm_{properties.major}{properties.minor},"
        f" {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    )


def _recipes(machine: Machine) -> str:
    lacks = {recipe: machine.lacks_for_fp8(recipe) for recipe in _RECIPES}
    available = [recipe for recipe in _RECIPES if not lacks[recipe]]
    return ", ".join(available) if available else f"none: {lacks[_RECIPES[0]]}"
