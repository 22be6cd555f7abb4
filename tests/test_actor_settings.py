"""Megatron's own fields pass through, checked; and those that act on a CPU train the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launch import run_ranks
from support.tiny import Parallel, plan_for, random_samples, write_model

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import build_layout
from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.config.schema import ActorConfig, OptimizerConfig
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader

TWO = Parallel(dp=2, distributed_optimizer=True)


def _train(path: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor] | str:
    optimizer = OptimizerConfig(learning_rate=1e-2)
    config = replace(ActorConfig(layout=TWO.layout, optimizer=optimizer), **settings)
    architecture = read_architecture(path)
    reader = CheckpointReader(path, architecture)
    try:
        actor = Actor(config, build_layout(config.layout, 0), architecture, reader.get, dtype=torch.float32)
    except UserError as error:
        return str(error)
    actor.start_phase(optimizer, 10)
    samples = random_samples(24, 37)
    for _ in range(2):
        actor.update(samples, plan_for(samples, TWO), supervised())
    return {name: tensor.clone() for name, tensor in actor.weights()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "settings",
    [
        {"ddp": {"overlap_grad_reduce": True, "bucket_size": 20_000}},
        {"ddp": {"average_in_collective": True}},
        {"recompute": "selective"},
        {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ],
    ids=str,
)
def test_it_trains_the_same_model(model: Path, settings: dict[str, Any]) -> None:
    """Two updates on two ranks, over several micro-batches: weights to 1e-5 of their norm (test_actor_layouts.py)."""
    plain, other = (run_ranks(_train, 2, model, one)[0] for one in ({}, settings))
    assert isinstance(plain, dict) and isinstance(other, dict), other
    for name, tensor in plain.items():
        assert (other[name] - tensor).norm() < 1e-5 * tensor.norm(), name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"megatron": {"tp_comm_overlop": True}}, "has no such field; did you mean tp_comm_overlap?"),
        ({"megatron": {"hidden_size": 8}}, "actor.megatron.hidden_size: is decided by the model's config.json"),
        ({"megatron": {"apply_rope_fusion": True}}, "rotary embedding is this program's own"),
        ({"ddp": {"overlap_param_gather": True}}, "weights are read between two forward passes"),
        ({"ddp": {"use_distributed_optimizer": False}}, "is decided by"),
    ],
    ids=str,
)
def test_what_cannot_be_set_is_said(model: Path, settings: dict[str, Any], said: str) -> None:
    """One sentence with the key, before a model is built."""
    answer = run_ranks(_train, 2, model, settings)[0]
    assert isinstance(answer, str) and said in answer
