"""A checkpoint directory: Megatron's sharded tensors and the loop's own state, complete or invisible.

Everything that is random in this project is a function of (seed, step, ids), so a checkpoint holds no generator
state; Megatron's own generators are seeded anew and nothing in the loop draws from them (no dropout).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from dppo_megatron.types import UserError


class Sharded(Protocol):
    """What can be saved and restored shard by shard (the actor)."""

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Megatron sharded state dict of model, optimizer and schedule."""

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Take over a loaded state."""


def save_checkpoint(root: Path, step: int, sharded_state: dict[str, Any], loop_state: dict[str, Any]) -> Path:
    """Write `root/step_<step>`; it appears under that name only when every rank has written its part. Collective."""
    target = root / f"step_{step:06d}"
    aside = root / f"{target.name}.incomplete"
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save({"actor": sharded_state, "loop": _as_tensors(loop_state)}, str(aside))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
    return target


def load_checkpoint(directory: Path, actor: Sharded) -> dict[str, Any]:
    """Restore `actor` from `directory`, at any layout; returns the loop's state. Collective.

    Raises:
        UserError: no complete checkpoint is there.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise UserError(f"checkpoint.resume_from = '{directory}': holds no complete checkpoint")
    loaded = dist_checkpointing.load({"actor": actor.sharded_state(loading=True)}, str(directory))
    actor.load_sharded_state(loaded["actor"])
    loop_state: dict[str, Any] = _as_arrays(loaded["loop"])
    return loop_state


def _as_tensors(value: Any) -> Any:
    """numpy arrays to tensors: Megatron reads its common file without unpickling other classes, numpy's included."""
    if isinstance(value, dict):
        return {key: _as_tensors(item) for key, item in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
