"""Every loss, as the Megatron actor differentiates it, against plain autograd on the Hugging Face model.

The formulas are written here again, from the papers and case by case, on one unpacked sequence at a time. One process
launch for each layout computes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.job import REPOSITORY
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, hf_logprobs, plan_for, random_samples, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from dppo_megatron.algorithms.objectives import Objective, PolicyLoss, TokenBatch, make_objective, supervised
from dppo_megatron.algorithms.policy_losses import POLICY_LOSSES
from dppo_megatron.config.objective import CorrectionConfig, DivergenceConfig, KLConfig, ObjectiveConfig
from dppo_megatron.config.plugins import load_function
from dppo_megatron.types import TrainSample

TEMPERATURE = 0.9
NUM_SAMPLES = 16
LONGEST = 32
NORMALIZATIONS: dict[str, Callable[[TrainSample], float]] = {
    "sequence_mean": lambda sample: float(NUM_SAMPLES * sample.num_completion_tokens),
    "token_mean": lambda sample: 250.0,  # a count of the full batch, frozen
    "constant": lambda sample: float(NUM_SAMPLES * LONGEST),
}


@dataclass(frozen=True)
class Sequence:
    """One completion's tokens, on the Hugging Face side."""

    logprobs: Tensor
    entropy: Tensor
    behaviour: list[float]
    old: list[float]
    reference: list[float]
    advantage: float


def _surrogate(ratio: Tensor, advantage: float, low: float, high: float, dual: float = math.inf) -> Tensor:
    """By the sign of the advantage: good samples gain nothing above `high`, bad ones nothing below `low`."""
    value = ratio.item()
    if advantage >= 0:
        return -advantage * (ratio if value <= high else torch.tensor(high))
    if value < low:
        return torch.tensor(-advantage * low)
    return -advantage * (ratio if value <= dual else torch.tensor(dual))


def _clip(low: float, high: float, dual: float = math.inf) -> Callable[[Sequence], Tensor]:
    def loss(s: Sequence) -> Tensor:
        ratios = [(lp - old).exp() for lp, old in zip(s.logprobs, s.old, strict=True)]
        return torch.stack([_surrogate(ratio, s.advantage, low, high, dual) for ratio in ratios])

    return loss


def _gspo(s: Sequence) -> Tensor:
    mean = sum(lp - old for lp, old in zip(s.logprobs, s.old, strict=True)) / len(s.old)
    return _surrogate(mean.exp(), s.advantage, 0.98, 1.01).repeat(len(s.old))  # type: ignore[union-attr]


def _cispo(low: float) -> Callable[[Sequence], Tensor]:
    def loss(s: Sequence) -> Tensor:
        losses = []
        for lp, old in zip(s.logprobs, s.old, strict=True):
            weight = min(max(math.exp(lp.item() - old), low), 1.28)
            losses.append(-weight * s.advantage * lp)
        return torch.stack(losses)

    return loss


def _divergence(s: Sequence) -> Tensor:
    losses = []
    for lp, mu in zip(s.logprobs, s.behaviour, strict=True):
        now, then = math.exp(lp.item()), math.exp(mu)
        up, down = now > then + 0.01, now < then - 0.01
        masked = (s.advantage > 0 and up) or (s.advantage < 0 and down)
        losses.append(0.0 * lp if masked else -min(now / then, 1.5) * s.advantage * lp)
    return torch.stack(losses)


def _soft_gate(s: Sequence) -> Tensor:
    tau = 1.0 if s.advantage > 0 else 1.05
    ratio = (s.logprobs - torch.tensor(s.old)).exp()
    return -s.advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())


def _with_kl(estimator: str) -> Callable[[Sequence], Tensor]:
    def loss(s: Sequence) -> Tensor:
        reference = torch.tensor(s.reference)
        kl = {
            "k1": s.logprobs - reference,
            "k2": (s.logprobs - reference) ** 2 / 2,
            "k3": reference.exp() / s.logprobs.exp() - 1 + s.logprobs - reference,
        }
        kl["k3_unbiased"] = kl["k3"] * s.logprobs.exp() / torch.tensor(s.behaviour).exp()
        return _clip(0.8, 1.28)(s) + 0.3 * kl[estimator]

    return loss


def _corrected(level: str, mode: str) -> Callable[[Sequence], Tensor]:
    def loss(s: Sequence) -> Tensor:
        ratios = [math.exp(old - mu) for old, mu in zip(s.old, s.behaviour, strict=True)]
        if level == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        power = [0.5 if level == "cumulative" else 0.0] * len(ratios)
        if level == "cumulative":
            ratios = [math.prod(ratios[: place + 1]) for place in range(len(ratios))]
        bounds = [(0.7 ** (place**p), 1.2 ** (place**p)) for place, p in enumerate(power, 1)]
        if mode == "truncate":
            factors = [min(r, high) for r, (_, high) in zip(ratios, bounds, strict=True)]
        else:
            factors = [r if low <= r <= high else 0.0 for r, (low, high) in zip(ratios, bounds, strict=True)]
        return _clip(0.8, 1.28)(s) * torch.tensor(factors)

    return loss


CLIP = ObjectiveConfig(clip_low=0.2, clip_high=0.28)
CASES: dict[str, tuple[ObjectiveConfig, Callable[[Sequence], Tensor]]] = {
    "clip": (CLIP, _clip(0.8, 1.28)),
    "dual_clip": (replace(CLIP, dual_clip=1.5), _clip(0.8, 1.28, 1.5)),
    "gspo": (ObjectiveConfig(loss="gspo", clip_low=0.02, clip_high=0.01), _gspo),
    "cispo": (ObjectiveConfig(loss="cispo", clip_low=1.0, clip_high=0.28), _cispo(0.0)),  # no lower bound
    "cispo_low": (ObjectiveConfig(loss="cispo", clip_low=0.1, clip_high=0.28), _cispo(0.9)),
    "divergence_tv": (ObjectiveConfig(loss="divergence_tv", divergence=DivergenceConfig(0.01, 1.5)), _divergence),
    "soft_gate": (ObjectiveConfig(function="examples.custom_loss:soft_gate"), _soft_gate),
    "entropy": (replace(CLIP, entropy_coef=0.3), lambda s: _clip(0.8, 1.28)(s) - 0.3 * s.entropy),
}
for name in ("k1", "k2", "k3", "k3_unbiased"):
    CASES[f"clip+{name}"] = (replace(CLIP, kl=KLConfig(0.3, name)), _with_kl(name))  # type: ignore[arg-type]
for level in ("token", "cumulative", "sequence"):
    for mode in ("truncate", "mask"):
        correction = CorrectionConfig(level, mode, 1.2, 0.7)  # type: ignore[arg-type]
        given = replace(CLIP, correction=correction, old_logprobs="recompute")  # those of the samples here
        CASES[f"clip*{level}-{mode}"] = (given, _corrected(level, mode))
OF_ALL_NORMALIZATIONS = ("clip", "dual_clip", "gspo", "cispo", "divergence_tv", "soft_gate")
RUNS = [(name, "sequence_mean") for name in CASES] + [
    (name, norm) for name in OF_ALL_NORMALIZATIONS for norm in ("token_mean", "constant")
]


def _objective(name: str) -> Objective:
    if name == "supervised":
        return supervised()
    config = CASES[name][0]
    function: PolicyLoss | None = load_function("objective.function", config.function) if config.function else None
    return make_objective(config, function)


def _normalized(samples: list[TrainSample], normalization: str) -> list[TrainSample]:
    return [replace(sample, denominator=NORMALIZATIONS[normalization](sample)) for sample in samples]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, hidden_size=32, intermediate_size=48)


@pytest.fixture(scope="module")
def samples(model_path: Path) -> list[TrainSample]:
    """Behaviour, old and reference policies near the model's own, so that every case of a formula occurs."""
    plain = random_samples(NUM_SAMPLES, 37, seed=1, longest=LONGEST + 8)
    rng = np.random.default_rng(2)
    own = hf_logprobs(AutoModelForCausalLM.from_pretrained(model_path), plain, TEMPERATURE)
    moved = [[lp + scale * rng.normal(size=len(lp)) for scale in (0.3, 0.25, 0.4)] for lp in own]
    return [
        replace(
            sample,
            behaviour_logprobs=np.minimum(behaviour, -1e-3).astype(np.float32),
            old_logprobs=np.minimum(old, -1e-3),
            reference_logprobs=np.minimum(reference, -1e-3),
        )
        for sample, (behaviour, old, reference) in zip(plain, moved, strict=True)
    ]


Gradients = dict[str, np.ndarray]


def _all_on_the_actor(
    model_path: Path, parallel: Parallel, samples: list[TrainSample]
) -> dict[tuple[str, str], tuple[float, Gradients]]:
    actor = build_actor(model_path, parallel)
    out = {}
    for name, normalization in [*RUNS, ("supervised", "token_mean")]:
        batch = _normalized(samples, normalization)
        plan = plan_for(batch, parallel, cap=256)
        assert plan.num_microbatches > 1
        sums = actor.accumulate(batch, plan, _objective(name), temperature=TEMPERATURE)
        out[name, normalization] = (sums["loss"], {key: t.clone().numpy() for key, t in actor.gradients()})
    return out


@pytest.fixture(scope="module")
def on_transformers(model_path: Path, samples: list[TrainSample]) -> Callable[[str, str], tuple[float, Gradients]]:
    """Loss and gradient by name and normalization, from one forward pass a sequence."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    sequences = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids)
        logits = model(ids[None]).logits[0, sample.num_prompt_tokens - 1 : -1] / TEMPERATURE
        every = logits.log_softmax(-1)
        picked = every.gather(1, ids[sample.num_prompt_tokens :, None])[:, 0]
        others = [values.tolist() for values in (sample.behaviour_logprobs, sample.old_logprobs)]  # type: ignore[union-attr]
        reference = sample.reference_logprobs.tolist()  # type: ignore[union-attr]
        sequences.append(Sequence(picked, -(every.exp() * every).sum(-1), *others, reference, sample.advantage))

    def compute(name: str, normalization: str) -> tuple[float, Gradients]:
        textbook = (lambda s: -s.logprobs) if name == "supervised" else CASES[name][1]
        batch = _normalized(samples, normalization)
        terms = [w.weight / w.denominator * textbook(s).sum() for w, s in zip(batch, sequences, strict=True)]
        total = torch.stack(terms).sum()
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(total, parameters, retain_graph=True)
        return total.item(), {key: g.numpy() for key, g in zip(names, gradients, strict=True)}

    return compute


@pytest.mark.parametrize("parallel", [Parallel(), pytest.param(Parallel(tp=2, pp=2), marks=pytest.mark.slow)], ids=str)
def test_gradients_equal_autograd_on_transformers(
    model_path: Path,
    samples: list[TrainSample],
    on_transformers: Callable[[str, str], tuple[float, Gradients]],
    parallel: Parallel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss to 1e-5 and every parameter's gradient to 1e-4 relative (float32, unpacked, single process)."""
    monkeypatch.chdir(REPOSITORY)  # where a user's module is looked for
    actor = run_ranks(_all_on_the_actor, parallel.world_size, model_path, parallel, samples)[0]
    for (name, normalization), (loss, gradients) in actor.items():
        expected_loss, expected = on_transformers(name, normalization)
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6), (name, normalization)
        for key, reference in expected.items():
            difference = np.linalg.norm(gradients[key] - reference) / np.linalg.norm(reference)
            assert difference < 1e-4, f"{name}, {normalization}: {key}: gradient differs by {difference:.1e}"


def test_every_case_of_the_formulas_occurs(samples: list[TrainSample], model_path: Path) -> None:
    """Guards the test above: for both signs of the advantage, ratios lie inside and outside of every bound used."""
    own = hf_logprobs(AutoModelForCausalLM.from_pretrained(model_path), samples, TEMPERATURE)

    def each() -> Iterator[tuple[int, float, float, float]]:
        for sample, lp in zip(samples, own, strict=True):
            assert sample.old_logprobs is not None
            for p, old, mu in zip(lp, sample.old_logprobs, sample.behaviour_logprobs, strict=True):
                yield int(sample.advantage > 0), math.exp(p - old), math.exp(p) - math.exp(mu), math.exp(old - mu)

    seen: set[tuple[str, int, int]] = set()
    for sign, ratio, shift, correction in each():
        seen |= {("ratio", sign, sum(ratio > b for b in (0.8, 0.9, 1.28, 1.5)))}
        seen |= {("shift", sign, sum(shift > b for b in (-0.01, 0.01)))}
        seen |= {("correction", 0, sum(correction > b for b in (0.7, 1.2)))}
    assert {("ratio", s, k) for s in (0, 1) for k in range(5)} <= seen
    assert {("shift", s, k) for s in (0, 1) for k in range(3)} <= seen
    assert {("correction", 0, k) for k in range(3)} <= seen
    for sample, lp in zip(samples, own, strict=True):
        ratio = np.exp(np.mean(lp - sample.old_logprobs))
        seen |= {("sequence", int(sample.advantage > 0), sum(ratio > b for b in (0.98, 1.01)))}
    assert {("sequence", s, k) for s in (0, 1) for k in range(3)} <= seen


def _of_one(
    config: ObjectiveConfig, log_ratio: list[float], advantages: list[float], correction: list[float] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradient of one sequence's loss in its log-probabilities, which are `log_ratio` above the old ones, as these are
    `correction` above the behaviour's; and the diagnostics."""
    shift, zero = torch.tensor(log_ratio, dtype=torch.float64), torch.zeros(len(log_ratio), dtype=torch.float64)
    old = zero - 30.0
    behaviour = old - (zero if correction is None else torch.tensor(correction, dtype=torch.float64))
    logprobs = (old + shift).requires_grad_()
    fixed = torch.tensor(advantages, dtype=torch.float64), torch.ones_like(zero), zero.long()
    result = make_objective(config)(TokenBatch(logprobs, zero, behaviour, old, zero, *fixed))
    return torch.autograd.grad(result.loss.sum(), logprobs)[0], result.diagnostics


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_what_one_token_has_stays_with_it(loss: str) -> None:
    """An advantage or a correction's factor at one token gives the others no gradient, as if it were spread over them;
    the ratio is that of the whole sequence for `gspo` all the same."""
    second, several = [False, True, False, False], 2
    config = ObjectiveConfig(loss=loss, updates_per_step=several)  # type: ignore[arg-type]
    gradient, found = _of_one(config, [0.3, -0.1, -0.1, 0.1], [0.0, 1.0, 0.0, 0.0])
    assert (gradient != 0).tolist() == second
    assert found["ratio"].tolist() == pytest.approx(np.exp([0.05] * 4 if loss == "gspo" else [0.3, -0.1, -0.1, 0.1]))
    if loss != "divergence_tv":  # which takes no correction
        masked = replace(config, correction=CorrectionConfig("token", "mask", 5.0, 0.5))
        gradient, _ = _of_one(masked, [0.0] * 4, [1.0] * 4, correction=[3.0, 0.0, 3.0, -3.0])
        assert (gradient != 0).tolist() == second


@pytest.mark.parametrize("dual", [0.0, 2.0])
def test_a_token_without_gradient_is_counted(dual: float) -> None:
    """By one of the two fractions, where the clip or the dual clip has taken it, and nowhere else."""
    log_ratio = [-5.0, -0.3, -0.1, 0.0, 0.1, 0.5, 0.69, 0.7, 1.0, 5.0] * 2
    config = ObjectiveConfig(dual_clip=dual, updates_per_step=2)
    gradient, found = _of_one(config, log_ratio, [1.0] * 10 + [-1.0] * 10)
    fractions = [values for name, values in found.items() if name != "ratio"]
    assert sum(fractions).tolist() == (gradient == 0).double().tolist()  # type: ignore[union-attr]
    assert [values.sum().item() for values in fractions] == [5 + 2] + [3] * bool(dual)


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_ratios_end_at_a_log_of_20(loss: str) -> None:
    """Beyond it the clip has no gradient, on the side that it does not bound either; CISPO keeps its own."""
    config = ObjectiveConfig(loss=loss, updates_per_step=2)  # type: ignore[arg-type]
    for sign in (1.0, -1.0):
        for size, moves in ((19.0, True), (21.0, loss == "cispo")):
            gradient, found = _of_one(config, [sign * size] * 2, [-sign] * 2)
            assert (gradient != 0).tolist() == [moves] * 2
            assert found["ratio"].tolist() == pytest.approx([math.exp(sign * min(size, 20.0))] * 2)
