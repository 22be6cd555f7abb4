"""torch's Adam steps in its fused kernel, after a load too, and does what the plain form does."""

from __future__ import annotations

from pathlib import Path

import torch
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model

from dppo_megatron.algorithms.objectives import clipped_surrogate


def _step(model_path: Path, distributed: bool, fused: bool) -> tuple[dict[str, torch.Tensor], list[bool]]:
    actor = build_actor(model_path, Parallel(distributed_optimizer=distributed))
    parts = actor._optimizer.chained_optimizers
    for part in parts:
        part.optimizer.load_state_dict(part.optimizer.state_dict())  # must not undo it
    groups = [group for part in parts for group in part.optimizer.param_groups]
    chosen = [group["fused"] for group in groups]
    if not fused:
        for group in groups:
            group["fused"] = None
    samples = random_samples(12, 37)
    for _ in range(2):
        actor.update(samples, plan_for(samples), clipped_surrogate(0.2, 0.28, 3.0))
    return {name: tensor.clone() for name, tensor in actor.weights()}, chosen


def test_fused_equals_plain(tmp_path: Path) -> None:
    """With and without the distributed optimizer. Two float32 updates: rounding is 1e-7 of a weight's norm or so."""
    path = write_model(tmp_path / "model")
    for distributed in (False, True):
        (fused, chosen), (plain, _) = (run_ranks(_step, 1, path, distributed, how)[0] for how in (True, False))
        assert all(chosen)
        for name, tensor in plain.items():
            assert (fused[name] - tensor).norm() < 1e-6 * tensor.norm(), name
