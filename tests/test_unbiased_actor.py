"""Pruning is unbiased through the real Megatron loss and backward pass, by enumeration.

Over all keep patterns of a small batch, the probability-weighted sum of the pruned gradients must equal the full
batch's gradient, and that of every figure's sums the full batch's: no sampling error, only rounding. The actor runs in
float64 (parameters, activations, gradients; Megatron's rotary angles and the RMS norm's inputs follow), so the bound is
1e-10 relative.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.actor.actor import Actor
from dppo_megatron.algorithms.objectives import Objective, make_objective
from dppo_megatron.config.objective import CorrectionConfig, DivergenceConfig, KLConfig, ObjectiveConfig
from dppo_megatron.types import TrainSample

PROBABILITIES = np.array([0.9, 0.5, 0.4, 0.3, 0.6, 0.2])
CAP = 64


CLIP = ObjectiveConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
OBJECTIVES: dict[str, Objective] = {
    name: make_objective(config)
    for name, config in {
        "clip_dual": CLIP,
        "clip_dual_k3": replace(CLIP, kl=KLConfig(coef=0.04, estimator="k3")),
        "gspo": ObjectiveConfig(loss="gspo", clip_low=0.2, clip_high=0.28),
        "cispo_corrected": ObjectiveConfig(
            loss="cispo", clip_low=1.0, clip_high=0.28, correction=CorrectionConfig("sequence", "truncate", 2.0)
        ),
        "divergence_tv": ObjectiveConfig(loss="divergence_tv", divergence=DivergenceConfig(max_shift=0.02)),
    }.items()
}
NORMALIZATIONS = {
    "sequence_mean": lambda sample: float(len(PROBABILITIES) * sample.num_completion_tokens),
    "constant": lambda sample: float(len(PROBABILITIES) * 40),
    "token_mean": lambda sample: 120.0,  # a count of the full batch's tokens, frozen
}


def _gradient(actor: Actor, samples: list[TrainSample], objective: str) -> tuple[np.ndarray, dict[str, float]]:
    """The accumulated gradient of all parameters as one vector, packed as the planner packs these samples, and the
    sums of whatever the hook has measured."""
    parallel = Parallel(tp=actor.layout.tensor_parallel, pp=actor.layout.pipeline_parallel)
    plan = plan_for(samples, parallel, cap=CAP)
    sums = actor.accumulate(samples, plan, OBJECTIVES[objective])
    return np.concatenate([tensor.double().numpy().ravel() for _, tensor in actor.gradients()]), sums


def _batch(normalization: str) -> list[TrainSample]:
    """Samples whose old and reference policies are not the behaviour."""
    samples = random_samples(len(PROBABILITIES), 37, seed=3)
    return [
        replace(
            sample,
            weight=1.0,
            figure_weight=1.0,
            denominator=NORMALIZATIONS[normalization](sample),
            old_logprobs=0.95 * sample.behaviour_logprobs.astype(np.float64) - 0.1,
            reference_logprobs=1.1 * sample.behaviour_logprobs.astype(np.float64) - 0.2,
        )
        for sample in samples
    ]


def _enumerate(model_path: Path, parallel: Parallel, objective: str, normalization: str) -> dict[str, np.ndarray]:
    """Full gradient and sums, their expectations under Horvitz-Thompson weights, and the gradient's with kept-count
    denominators."""
    actor = build_actor(model_path, parallel)
    batch = _batch(normalization)
    full, names = (part := _gradient(actor, batch, objective))[0], sorted(part[1])
    sums = np.array([part[1][name] for name in names])
    weighted, kept_count, expected = np.zeros_like(full), np.zeros_like(full), np.zeros_like(sums)
    for pattern in itertools.product((False, True), repeat=len(batch)):
        probability = np.prod(np.where(pattern, PROBABILITIES, 1 - PROBABILITIES))
        drawn = zip(batch, 1 / PROBABILITIES, pattern, strict=True)
        kept = [replace(s, weight=w, figure_weight=w) for s, w, keep in drawn if keep]
        gradient, found = _gradient(actor, kept, objective)
        weighted += probability * gradient
        expected += probability * np.array([found.get(name, 0.0) for name in names])  # nothing kept, nothing measured
        kept_count += probability * gradient * len(batch) / max(len(kept), 1)
    return {"full": full, "weighted": weighted, "kept_count": kept_count, "sums": sums, "expected": expected}


CASES = [(Parallel(dtype=torch.float64), name, "sequence_mean") for name in OBJECTIVES]
CASES += [(Parallel(dtype=torch.float64), "clip_dual_k3", name) for name in ("constant", "token_mean")]
FOUR_RANKS = (Parallel(tp=2, pp=2, dtype=torch.float64), "clip_dual", "sequence_mean")


@pytest.mark.parametrize(
    ("parallel", "objective", "normalization"), [*CASES, pytest.param(*FOUR_RANKS, marks=pytest.mark.slow)], ids=str
)
def test_expected_gradient_is_the_full_gradient(
    tmp_path: Path, parallel: Parallel, objective: str, normalization: str
) -> None:
    """64 keep patterns with off-policy ratios, packed differently in each pattern, to 1e-10 relative."""
    model_path = write_model(tmp_path / "model", num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    arguments = (model_path, parallel, objective, normalization)
    result = run_ranks(_enumerate, parallel.world_size, *arguments, timeout_s=300)[0]
    scale = np.linalg.norm(result["full"])
    assert scale > 1e-3
    assert np.linalg.norm(result["weighted"] - result["full"]) < 1e-10 * scale
    # the same enumeration sees a bias where there is one: dividing by the survivors' count
    assert np.linalg.norm(result["kept_count"] - result["full"]) > 0.05 * scale
    assert len(result["sums"]) >= 4 and result["expected"] == pytest.approx(result["sums"], rel=1e-10)


def _weights_scale_the_gradient(model_path: Path) -> tuple[np.ndarray, np.ndarray]:
    actor = build_actor(model_path, Parallel(dtype=torch.float64))
    batch = _batch("sequence_mean")
    tripled, _ = _gradient(actor, [replace(sample, weight=3.0) for sample in batch], "clip_dual")
    return _gradient(actor, batch, "clip_dual")[0], tripled


def test_weights_are_outside_the_clip(tmp_path: Path) -> None:
    """Tripling every weight triples the gradient exactly: a weight inside the ratio would meet the clip."""
    plain, tripled = run_ranks(_weights_scale_the_gradient, 1, write_model(tmp_path / "model"))[0]
    np.testing.assert_allclose(tripled, 3 * plain, rtol=1e-9, atol=1e-12 * np.abs(plain).max())


def _own_tokens() -> list[TrainSample]:
    """A batch whose samples have an advantage for each token, a weight for each, both, or neither."""
    rng, batch = np.random.default_rng(7), []
    for place, sample in enumerate(random_samples(12, 37, seed=3)):
        count = sample.num_completion_tokens
        advantages = rng.normal(size=count) if place % 4 in (0, 2) else sample.advantage
        weights = sample.weight * rng.integers(0, 3, count) if place % 4 in (1, 2) else sample.weight
        batch.append(replace(sample, advantage=advantages, weight=weights))
    return batch


def _gradients_of_tokens(model_path: Path, parallel: Parallel) -> dict[str, np.ndarray]:
    actor, batch = build_actor(model_path, parallel), _own_tokens()
    plan = plan_for(batch, parallel, cap=CAP)
    assert any(len(pack.members) > 1 for packs in plan.microbatches for pack in packs), "nothing is packed"
    actor.accumulate(batch, plan, make_objective(ObjectiveConfig()))
    return {name: tensor.numpy() for name, tensor in actor.gradients()}


def _torchs_gradients(model_path: Path) -> dict[str, np.ndarray]:
    """Sum of W_t / D times the clipped loss with A_t, by transformers: no packs, no hook."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    for sample in _own_tokens():
        ids = torch.from_numpy(sample.token_ids)
        logprobs = model(ids[None]).logits[0, sample.num_prompt_tokens - 1 : -1].log_softmax(-1)
        own = logprobs.gather(1, ids[sample.num_prompt_tokens :, None])[:, 0]
        ratio = (own - torch.from_numpy(sample.behaviour_logprobs)).exp()
        advantage, weight = (torch.as_tensor(one) for one in (sample.advantage, sample.weight))
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (weight / sample.denominator * loss).sum().backward()
    return {name: one.grad.numpy() for name, one in model.named_parameters() if one.grad is not None}


TOKEN_LAYOUTS = [Parallel(), Parallel(cp=2), Parallel(dp=2), Parallel(tp=2, cp=2), Parallel(pp=2, dp=2)]


@pytest.mark.parametrize("parallel", TOKEN_LAYOUTS, ids=str)
def test_a_token_may_have_its_own_weight_and_advantage(tmp_path: Path, parallel: Parallel) -> None:
    """The gradient is transformers', to 1e-6 (its rotary angles are float32), wherever a pack's tokens are split."""
    model_path = write_model(tmp_path / "model", num_hidden_layers=2)
    parallel = replace(parallel, dtype=torch.float64)
    found = run_ranks(_gradients_of_tokens, parallel.world_size, model_path, parallel)[0]
    expected = _torchs_gradients(model_path)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) < 1e-6 * np.linalg.norm(gradient), name
