"""Losses against plain autograd on the Hugging Face model, and advantages against their definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from launch import run_ranks
from tiny import Parallel, build_actor, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.algorithms.advantages import group_advantages
from dppo_megatron.algorithms.objectives import clipped_surrogate, supervised

OBJECTIVES = {
    "grpo": clipped_surrogate(0.2, 0.2, 0.0),
    "clip_higher_dual": clipped_surrogate(0.2, 0.28, 1.5),
    "supervised": supervised(),
}


def _reference_loss(name: str, logp: torch.Tensor, behaviour: torch.Tensor, advantage: float) -> torch.Tensor:
    """The textbook formulas, case by case on the sign of the advantage and not by min and max."""
    if name == "supervised":
        return -logp
    high, dual = (1.28, 1.5) if name == "clip_higher_dual" else (1.2, None)
    ratio = (logp - behaviour).exp()
    if advantage >= 0:
        return -advantage * torch.where(ratio > high, torch.full_like(ratio, high), ratio)
    limited = torch.where(ratio < 0.8, torch.full_like(ratio, 0.8), ratio)
    if dual is not None:
        limited = torch.where(limited > dual, torch.full_like(ratio, dual), limited)
    return -advantage * limited


def _actor_gradient(model_path: Path, parallel: Parallel, name: str) -> tuple[float, dict[str, np.ndarray]]:
    actor = build_actor(model_path, parallel)
    samples = random_samples(16, 37, seed=1)
    plan = plan_for(samples, parallel)
    sums = actor.accumulate(samples, plan, OBJECTIVES[name], temperature=0.9)
    return sums["loss"], {key: tensor.clone().numpy() for key, tensor in actor.gradients()}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_equals_autograd_on_transformers(model_path: Path, parallel: Parallel, name: str) -> None:
    """Loss to 1e-5 and every parameter's gradient to 1e-4 relative (float32, unpacked, single process)."""
    loss, gradients = run_ranks(_actor_gradient, parallel.world_size, model_path, parallel, name)[0]
    model = AutoModelForCausalLM.from_pretrained(model_path)
    total = torch.zeros(())
    for sample in random_samples(16, 37, seed=1):
        ids = torch.from_numpy(sample.token_ids)
        logits = model(ids[None]).logits[0, sample.num_prompt_tokens - 1 : -1] / 0.9
        logp = logits.log_softmax(-1).gather(1, ids[sample.num_prompt_tokens :, None])[:, 0]
        behaviour = torch.from_numpy(sample.behaviour_logprobs)
        token_loss = _reference_loss(name, logp, behaviour, sample.advantage)
        total = total + sample.weight / sample.denominator * token_loss.sum()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    for key, parameter in model.named_parameters():
        expected = parameter.grad.numpy()
        difference = np.linalg.norm(gradients[key] - expected) / np.linalg.norm(expected)
        assert difference < 1e-4, f"{key}: gradient differs by {difference:.1e}"


def test_advantages_by_definition() -> None:
    """GRPO's on a worked example, Dr.GRPO's without the division."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    p = 3 / 8
    expected = np.where(rewards == 1, np.sqrt((1 - p) / p), -np.sqrt(p / (1 - p)))
    two = np.stack([rewards, 3 * rewards + 1])
    scaled = group_advantages(two, divide_by_std=True, eps=0.0)
    np.testing.assert_allclose(scaled, [expected, expected], rtol=1e-12)
    centred = group_advantages(two, divide_by_std=False, eps=0.0)
    np.testing.assert_allclose(centred, [rewards - p, 3 * (rewards - p)], rtol=1e-12)


@pytest.mark.parametrize("rewards", [[1.0] * 8, [0.1] * 8, [0.7], [np.nan] * 4, [np.nan, 0.3]])
def test_groups_without_information_have_advantage_zero(rewards: list[float]) -> None:
    """Exactly zero, not a rounding error divided by epsilon."""
    assert not group_advantages(np.array([rewards]), divide_by_std=True, eps=1e-6).any()


def test_failed_grader_does_not_move_the_others() -> None:
    """A NaN reward gets advantage 0 and leaves the statistics."""
    with_failure = group_advantages(np.array([[1.0, np.nan, 0.0, 0.0]]), divide_by_std=True, eps=1e-6)
    without = group_advantages(np.array([[1.0, 0.0, 0.0]]), divide_by_std=True, eps=1e-6)
    assert with_failure[0, 1] == 0.0
    np.testing.assert_array_equal(with_failure[:, [0, 2, 3]], without)
