"""The optimizer: torch's AdamW by another way, in its fused kernel, after a load too, as in the plain form."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fused_adam import FusedAdam, installed
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.actor.actor import Actor
from dppo_megatron.algorithms.objectives import clipped_surrogate, supervised
from dppo_megatron.checkpoint.store import CheckpointStore, describe, load_checkpoint


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


RATES = [5e-3, 1e-2, 5e-3]
"""Two updates up, then half of the way down to 0."""
SAMPLES = random_samples(6, 37)


def _three_updates(model_path: Path, distributed: bool) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """On a rank: the weights, and each update's gradient norm and learning rate. An epsilon that is felt: without one,
    Adam makes whole steps of the rounding of gradients that are nearly 0."""
    actor = build_actor(model_path, Parallel(distributed_optimizer=distributed))
    settings = replace(actor._config.optimizer, weight_decay=0.1, adam_eps=1e-3, lr_schedule="linear")
    actor.start_phase(settings, total_steps=4)
    updates = [actor.update(SAMPLES, plan_for(SAMPLES), supervised()) for _ in RATES]
    weights = {name: tensor.clone() for name, tensor in actor.weights()}
    return weights, [(one.grad_norm, one.learning_rate) for one in updates]


@pytest.mark.parametrize("distributed", [False, True])
def test_updates_are_torchs_adamw_on_transformers(tmp_path: Path, distributed: bool) -> None:
    """Clipped to norm 1, decay of 0.1 times the rate of all but norms and biases, and a rate that rises and falls: by
    definition, of a model with biases."""
    path = write_model(tmp_path / "model", family="qwen2", num_hidden_layers=2)
    [(weights, measured)] = run_ranks(_three_updates, 1, path, distributed)
    model = AutoModelForCausalLM.from_pretrained(path)
    named = dict(model.named_parameters())
    groups = [
        {"params": [one for one in named.values() if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in named.values() if one.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-3)
    before = {name: one.detach().clone() for name, one in named.items()}
    for (norm, reported), rate in zip(measured, RATES, strict=True):
        adam.zero_grad()
        for sample in SAMPLES:
            ids, start = torch.from_numpy(sample.token_ids), sample.num_prompt_tokens
            logprobs = model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[start:, None])
            (-sample.weight / sample.denominator * logprobs.sum()).backward()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(named.values(), 1.0)), rel=1e-4) and norm > 1
        assert reported == pytest.approx(rate)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
    assert sum(name.endswith("bias") for name in named) == 6
    for name, one in named.items():
        assert (weights[name] - one).norm() < 1e-3 * (one - before[name]).norm(), name


def _updated(actor: Actor, parallel: Parallel, count: int) -> dict[str, torch.Tensor]:
    for _ in range(count):
        actor.update(SAMPLES, plan_for(SAMPLES, parallel), supervised())
    return {name: tensor.clone() for name, tensor in actor.weights()}


def _saved(model: Path, root: Path, parallel: Parallel, is_fused: bool, updates: int) -> dict[str, torch.Tensor]:
    """On ranks: the weights of a run that goes on for two updates after it has been saved after `updates`."""
    with installed() if is_fused else nullcontext():
        actor = build_actor(model, parallel)
        _updated(actor, parallel, updates)
        store = CheckpointStore(root, run="mine", assets=model, keep=0, async_save=False)
        store.save(actor, {}, describe(1, {}, run="mine"))
        return _updated(actor, parallel, 2)


def _loaded(model: Path, root: Path, parallel: Parallel, is_fused: bool) -> dict[str, torch.Tensor]:
    """On ranks: the same of a run that loads it."""
    with installed() if is_fused else nullcontext():
        actor = build_actor(model, parallel)
        load_checkpoint(root / "step_000001", actor)
        kinds = {type(part.optimizer) for part in actor._optimizer.chained_optimizers}
        assert (kinds == {FusedAdam}) == is_fused
        return _updated(actor, parallel, 2)


_SHARDED, _WHOLE = Parallel(distributed_optimizer=True), Parallel()
_HALF = {"dtype": torch.bfloat16}


@pytest.mark.parametrize("to_fused", [True, False], ids=["to-fused", "to-torch"])
@pytest.mark.parametrize(
    ("parallel", "updates"),
    [(_SHARDED, 2), (_WHOLE, 2), (replace(_SHARDED, **_HALF), 2), (replace(_WHOLE, **_HALF), 2), (_SHARDED, 0)],
    ids=str,
)
def test_a_run_goes_on_with_another_adam(tmp_path: Path, parallel: Parallel, updates: int, to_fused: bool) -> None:
    """Where Transformer Engine is installed, or no longer: step count, moments and settings are those of the save."""
    model, root = write_model(tmp_path / "model", num_hidden_layers=2), tmp_path / "checkpoints"
    [stayed] = run_ranks(_saved, 1, model, root, parallel, not to_fused, updates)
    [moved] = run_ranks(_loaded, 1, model, root, parallel, to_fused)
    bound = 1e-2 if parallel.dtype == torch.bfloat16 else 1e-5
    for name, tensor in stayed.items():
        assert (moved[name] - tensor).norm() < bound * tensor.norm(), name


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "torch"])
@pytest.mark.parametrize("updates", [2, 0])
def test_experts_move_without_the_distributed_optimizer(tmp_path: Path, updates: int, is_fused: bool) -> None:
    """From two ranks that share them to two that have all, with an optimizer less; also of a run that was stopped
    before its first update, which has no moments yet."""
    model, root = write_model(tmp_path / "model", family="qwen3_moe"), tmp_path / "checkpoints"
    stayed, _ = run_ranks(_saved, 2, model, root, Parallel(dp=2, ep=2), is_fused, updates)
    moved, _ = run_ranks(_loaded, 2, model, root, Parallel(dp=2), is_fused)
    for name, tensor in stayed.items():
        assert (moved[name] - tensor).norm() < 1e-5 * tensor.norm(), name
