"""What both ends of an NCCL communicator must agree on. Runs in the engines' environments and in the trainer."""

from __future__ import annotations

import os

import torch

DEFAULTS = {"NCCL_CUMEM_ENABLE": "-2", "NCCL_NVLS_ENABLE": "2"}
"""What NCCL takes where the variable is not set: on, if the device can."""


def settings() -> dict[str, str]:
    """`version`, and the variables as NCCL would read them here; empty where torch has no NCCL."""
    try:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except AttributeError:
        return {}
    return {"version": version} | {name: os.environ.get(name, default) for name, default in DEFAULTS.items()}


def difference(theirs: dict[str, str]) -> str:
    """Why `theirs` and this process cannot be in one communicator; empty if they can, or if one is empty. NCCL
    refuses another version when it connects; with cuMem on at one end only it fails in the first transfer."""
    own = settings()
    if not own or not theirs:
        return ""
    if theirs.get("version", own["version"]) != own["version"]:
        return f"NCCL is {theirs['version']} there and {own['version']} in the trainer"
    for name in DEFAULTS:
        if name in theirs and (own[name] == "0") != (theirs[name] == "0"):
            return f"{name} is {theirs[name]} there and {own[name]} in the trainer"
    return ""
