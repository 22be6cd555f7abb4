"""`pruning.prompt.group_size_factor`: groups of several sizes have the expected gradient of groups of one size.

By enumeration of every group of a policy with three answers, against the policy gradient in closed form. A whole run
with such groups, killed and resumed, is `test_resume.py`'s.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.job import settings

from dppo_megatron.config.objective import CorrectionConfig, ObjectiveConfig
from dppo_megatron.config.pruning import PruningConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import SelectionSettings, selection_settings
from dppo_megatron.pruning import StepCost
from dppo_megatron.pruning.scores import group_sizes, size_bounds
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.types import UserError
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.runs.trace import read_trace

PROMPTS, USUAL, FACTOR = 2, 4, 2.0
REWARDS, LENGTHS = np.array([1.0, 0.25, 0.0]), np.array([2, 5, 9])
LOGITS = np.array([[0.3, -0.2, 0.9], [-1.0, 0.4, 0.1]])
"""[prompts, answers]"""
CHANCES = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
WORTH = np.array([1.0, 9.0]), np.ones(2)
"""Second moment and cost of each prompt: sizes 2 and 6."""


EXACT, CUT = CorrectionConfig("sequence", max_ratio=1e9), CorrectionConfig("token", max_ratio=1.1)


def _selector(
    monkeypatch: pytest.MonkeyPatch, age: int = 0, quantization: Any = "off", top_k: int = 0, **objective: Any
) -> Selector:
    config = Config(objective=ObjectiveConfig(**{"advantage": "rloo", "normalization": "sequence_mean"} | objective))
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = PROMPTS, USUAL
    config.rollout.sampling.max_completion_tokens, config.rollout.async_steps = 10, age
    config.rollout.quantization, config.rollout.sampling.top_k = quantization, top_k
    config.pruning.prompt.group_size_factor, config.pruning.completion.method = FACTOR, "none"
    selector = Selector(selection_settings(config), PROMPTS)
    monkeypatch.setattr(selector._prompt_policy, "expected", lambda ids, step: tuple(part[ids] for part in WORTH))
    return selector


def _rollouts(groups: list[tuple[int, ...]]) -> Rollouts:
    """Of groups of answers, as wide as the widest may be."""
    width = size_bounds(USUAL, FACTOR)[1]
    rewards, lengths = np.full((len(groups), width), np.nan), np.zeros((len(groups), width), dtype=np.int64)
    for row, group in enumerate(groups):
        rewards[row, : len(group)], lengths[row, : len(group)] = REWARDS[list(group)], LENGTHS[list(group)]
    return Rollouts(rewards, lengths, np.sqrt(lengths), unfinished=lengths == 0)


def _finished(selector: Selector, of: dict[int, tuple[int, ...]], step: int = 1) -> tuple[TrainSelection, list[int]]:
    """A step in which prompt q has the answers `of[q]`, or as many first ones as it was asked for."""
    fresh = selector.state_dict()
    chosen = selector.begin(step)
    index = chosen.prompt_index.tolist()
    groups = [of.get(q, (0,) * size) for q, size in zip(index, chosen.size.tolist(), strict=True)]
    decision = selector.finish(_rollouts(groups), step)
    selector.load_state_dict(fresh)
    return decision, index


@pytest.mark.parametrize(
    ("advantage", "normalization", "changes"),
    [
        ("rloo", "sequence_mean", {}),
        ("group_mean", "constant", {}),
        ("posterior_loo", "sequence_mean", {}),
        ("rloo", "sequence_mean", {"age": 1, "correction": EXACT}),
        ("rloo", "sequence_mean", {"age": 1, "correction": CUT}),
        ("group_mean", "constant", {"age": 1, "correction": CorrectionConfig("token", "mask", 2.0, 0.8)}),
        ("rloo", "sequence_mean", {"top_k": 2, "correction": CUT}),
        ("rloo", "constant", {"age": 1, "loss": "cispo"}),
    ],
)
def test_every_group_of_either_size(
    monkeypatch: pytest.MonkeyPatch, advantage: str, normalization: str, changes: dict[str, Any]
) -> None:
    """E[sum W A f / D grad log pi] = (1 / prompts) E[(r - v) f / len grad log pi], whatever the size: of older weights,
    or without the rarest token, f is what a correction or a clipped weight makes of pi / old, and v is theirs."""
    selector = _selector(monkeypatch, advantage=advantage, normalization=normalization, **changes)
    drawn = np.exp(LOGITS + changes.get("age", 0) * np.array([0.4, -0.3, 0.0]))
    drawn = np.where(("top_k" in changes) & (drawn == drawn.min(axis=1, keepdims=True)), 0.0, drawn)
    drawn /= drawn.sum(axis=1, keepdims=True)
    ratio = CHANCES / np.where(drawn > 0, drawn, 1.0)
    correction = changes.get("correction", EXACT)
    counted = (drawn > 0) & ((correction.mode == "truncate") | ((ratio >= correction.min_ratio) & (ratio <= 2.0)))
    factor_of = np.where(counted, np.minimum(ratio, correction.max_ratio), 0.0)
    if "loss" in changes:
        factor_of = np.clip(ratio, 0.8, 1.2)
    if "age" in changes and correction != EXACT:
        assert (factor_of != ratio).any(), "no bound acts"
    fresh = selector.state_dict()
    chosen = selector.begin(1)
    selector.load_state_dict(fresh)
    sizes = dict(zip(chosen.prompt_index.tolist(), chosen.size.tolist(), strict=True))
    assert sizes == {0: 2, 1: 6}
    divisor = LENGTHS if normalization == "sequence_mean" else np.full(3, 10)
    own = 1.0 - 1.0 / USUAL if advantage == "group_mean" else 1.0  # a full group's mean holds the completion itself
    for prompt, size in sizes.items():
        score = np.eye(3) - CHANCES[prompt]  # [answer, logit] grad log pi
        found = np.zeros(3)
        for group in itertools.product(range(3), repeat=size):
            decision, index = _finished(selector, {prompt: group})
            row = index.index(prompt) * (len(decision.kept) // PROMPTS)
            mine = slice(row, row + size)
            factor = decision.weight[mine] * decision.advantages[mine] / decision.denominator[mine]
            factor = factor * factor_of[prompt][list(group)]
            found += np.prod(drawn[prompt][list(group)]) * (factor @ score[list(group)])
        value = float(drawn[prompt] @ REWARDS)
        wanted = own * (drawn[prompt] * factor_of[prompt] * (REWARDS - value) / divisor) @ score / PROMPTS
        np.testing.assert_allclose(found, wanted, atol=1e-15)
    assert {row.name: row.label for row in decision.ledger}["rollout/group_sizes"] == "unbiased"


def test_what_is_missing_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group stands for one of the usual size, by those that are left of it; what was not asked for is not missing."""
    selector = _selector(monkeypatch)
    decision, index = _finished(selector, {0: (0, 2), 1: (0, 1, 2, 0, 1, 2)})
    assert [decision.missing_weight[index.index(q)] for q in (0, 1)] == [USUAL / 2, USUAL / 6]
    assert decision.metrics["rollout/missing_count"] == decision.metrics["reward/failed_count"] == 0.0
    assert decision.metrics["prune/completions_generated"] == PROMPTS * USUAL
    # of equal weight: the mean of either group, not of the completions
    assert decision.metrics["reward/mean"] == pytest.approx((0.5 + 1.25 / 3) / 2)
    assert "rollout/missing" not in {row.name for row in decision.ledger}
    selector.begin(1)
    rollouts = _rollouts([(0, 2), (0, 1, 2, 0, 1, 2)] if index == [0, 1] else [(0, 1, 2, 0, 1, 2), (0, 2)])
    rollouts.rewards[index.index(1), 3] = np.nan  # its grader failed
    assert rollouts.unfinished is not None and not rollouts.unfinished[index.index(1), 3]
    lost = selector.finish(rollouts, 1)
    assert lost.missing_weight[index.index(1)] == USUAL / 5
    assert lost.metrics["rollout/missing_count"] == lost.metrics["reward/failed_count"] == 1.0


def test_small_groups_are_lost_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one failure a pair is lost and six are not, and all stand for it alike: no ratio, even by chance."""
    selector = _selector(monkeypatch)
    chosen = selector.begin(1)
    groups = [(0, 2) if size == 2 else (0, 1, 2, 0, 1, 2) for size in chosen.size.tolist()]
    rollouts, pair = _rollouts(groups), chosen.size.tolist().index(2)
    rollouts.rewards[pair, 0] = np.nan
    by_chance = np.zeros_like(rollouts.rewards, dtype=np.bool_)
    by_chance[pair, 0] = True
    step = selector.finish(replace(rollouts, by_chance=by_chance), 1)
    assert [(row.name, row.label) for row in step.unforeseen] == [("rollout/missing", "biased")]
    selector.feedback(StepCost(1, 1.0, 1.0, 0.1))
    after, _ = _finished(selector, {}, step=2)
    assert {row.name: row.label for row in after.ledger}["rollout/missing"] == "biased"
    later = _selector(monkeypatch)  # what was lost while all had one size is made up for by groups of several
    later.load_state_dict(later.state_dict() | {"missing": {"lost_share": (0.05,), "known": "ratio"}})
    complete, _ = _finished(later, {})
    assert {row.name: row.label for row in complete.ledger}["rollout/missing"] == "biased"


@pytest.mark.parametrize("normalization", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("method", ["none", "dppo", "max_variance", "cppo", "dppo_paper"])
def test_groups_of_one_size_are_what_they_are_in_plain_arrays(method: str, normalization: str) -> None:
    """The same groups of four, as all are before the score is ready, in arrays of four and of eight columns: weights,
    advantages, divisors and sizes of biases. A divisor of more tokens than there are shortens the gradient."""

    def step(factor: float) -> tuple[TrainSelection, np.ndarray]:
        config = Config(objective=ObjectiveConfig(advantage="rloo", normalization=normalization))  # type: ignore[arg-type]
        config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 6, USUAL
        config.pruning.prompt.group_size_factor, config.pruning.completion.method = factor, method
        selector = Selector(selection_settings(config), 6)
        rng, width = np.random.default_rng(2), int(USUAL * factor)
        selector.begin(1)
        asked = np.arange(width) < np.full((6, 1), USUAL)
        rewards, lengths = np.full(asked.shape, np.nan), np.zeros(asked.shape, dtype=np.int64)
        rewards[asked], lengths[asked] = rng.random(24).round(1), rng.integers(3, 30, 24)
        decision = selector.finish(Rollouts(rewards, lengths, np.sqrt(lengths), unfinished=~asked), 1)
        columns = decision.kept, decision.weight, decision.advantages, decision.denominator
        return decision, np.array([column.reshape(6, width)[:, :USUAL] for column in columns])

    (plain, found), (wide, of_wide) = step(1.0), step(2.0)
    np.testing.assert_allclose(of_wide, found, rtol=1e-12)
    assert wide.kept.sum() == plain.kept.sum() > 0
    biases = [
        next(row.bias_estimate or 0.0 for row in one.ledger if row.name.startswith("completion/"))
        for one in (plain, wide)
    ]
    assert biases[1] == pytest.approx(biases[0], rel=1e-12) and (biases[0] > 0.1 or method in ("none", "dppo"))


def test_labels_and_the_account_of_the_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 / 1 of the variance of a prompt worth 1, and 3 / 5 of one worth 9: 8.4 of 10. A mean of one other is noisier
    than one of three. Off policy a clip goes by the sign of an advantage, which a noisier baseline changes; rounded
    weights are off policy at every age. A posterior's mean goes by the size, which a cut ratio makes count."""
    decision, _ = _finished(_selector(monkeypatch), {0: (0, 2), 1: (0, 1, 2, 0, 1, 2)})
    assert {row.name: row.label for row in decision.ledger}["rollout/group_sizes"] == "unbiased"
    assert decision.metrics["prune/size_design_effect"] == pytest.approx(0.84)
    assert decision.variance.growth.predicted == pytest.approx(0.84)
    masked = {"quantization": "fp8", "loss": "divergence_tv"}
    twice, posterior = {"updates_per_step": 2}, {"advantage": "posterior_loo"}
    of_posterior = ({"top_k": 2, "correction": EXACT}, {"age": 1, "correction": CUT}, {"age": 1, "loss": "cispo"})
    by_sign = (twice, twice | {"loss": "cispo"}, twice | {"correction": EXACT}, {"age": 1}, {"top_k": 2}, masked)
    before = {"age": 1, "correction": CUT, "old_logprobs": "recompute"}  # a pass that may see other log-probabilities
    biased: list[dict[str, Any]] = [*by_sign, before, *(posterior | one for one in of_posterior)]
    for changed in biased:
        clipped, _ = _finished(_selector(monkeypatch, **changed), {})
        assert {row.name: row.label for row in clipped.ledger}["rollout/group_sizes"] == "biased"
    exact, _ = _finished(_selector(monkeypatch, quantization="fp8", correction=EXACT), {})
    assert {row.name: row.label for row in exact.ledger}["rollout/group_sizes"] == "unbiased"
    for code in ({"function": "examples.custom_loss:soft_gate"}, {"token_values": "examples.custom_tokens:repeats"}):
        own, _ = _finished(_selector(monkeypatch, **code), {})
        assert {row.name: row.label for row in own.ledger}["rollout/group_sizes"] == "biased"
    ratio, _ = _finished(_selector(monkeypatch, normalization="token_mean"), {})
    assert {row.name: row.label for row in ratio.ledger}["denominator/token_mean"] == "ratio"
    # what both stages leave: W^2 s^2 with the weight that is trained with
    weight, norms = decision.weight, decision.advantages / decision.denominator
    lengths = np.concatenate([np.pad(LENGTHS[list(g)], (0, 8 - len(g))) for g in _groups_of(decision)])
    assert decision.variance.kept == pytest.approx(float((weight**2 * norms**2 * lengths).sum()))


def _groups_of(decision: TrainSelection) -> list[tuple[int, ...]]:
    """The answers that `test_labels_and_the_account_of_the_variance` gave each group."""
    return [{0: (0, 2), 1: (0, 1, 2, 0, 1, 2)}[q] for q in decision.prompts.prompt_index.tolist()]


def test_sizes_are_whole_bounded_and_follow_worth() -> None:
    rng = np.random.default_rng(7)
    for _ in range(500):
        usual, factor = int(rng.integers(2, 17)), float(rng.choice([1.0, 1.3, 2.0, 4.0]))
        worth = rng.lognormal(0, rng.choice([0.0, 0.5, 2.0]), int(rng.integers(1, 60))) * rng.choice([1e-9, 1.0, 1e9])
        sizes, (least, most) = group_sizes(worth, usual, factor), size_bounds(usual, factor)
        assert sizes.sum() == usual * len(worth) and least <= sizes.min() and sizes.max() <= most
        assert (np.diff(sizes[np.argsort(worth, kind="stable")]) >= 0).all()
        # rounding costs little of what proportion gains
        assert (worth**2 / sizes).sum() <= 1.02 * (worth**2 / usual).sum()
    assert group_sizes(np.array([4.0, 1.0, 1.0, 1.0]), 8, 2.0).tolist() == [16, 6, 5, 5]


def test_sizes_wait_for_a_score_that_is_believed() -> None:
    """All alike until a step has been learned of, and while what skipping by the score does is found wanting."""
    pruning = PruningConfig()
    pruning.prompt.group_size_factor, pruning.prompt.rate = (
        2.0,
        0.0,
    )  # what is drawn by the score has its weight already
    objective = ObjectiveConfig(advantage="rloo")
    selector = Selector(
        SelectionSettings(
            prompts_per_step=8,
            completions_per_prompt=4,
            total_steps=20,
            max_completion_tokens=9,
            objective=objective,
            pruning=pruning,
        ),
        8,
    )
    rng, wide = np.random.default_rng(0), 8
    for step in range(1, 13):
        chosen = selector.begin(step)
        assert chosen.size.sum() == 4 * len(chosen.size)
        assert step > 1 or set(chosen.size.tolist()) == {4}
        asked = np.arange(wide) < chosen.size[:, None]
        rewards = np.where(asked, rng.random((len(chosen.size), wide)) < chosen.prompt_index[:, None] / 9, np.nan)
        lengths = np.where(asked, 5, 0)
        selector.finish(Rollouts(rewards, lengths, np.sqrt(lengths), unfinished=~asked), step)
        selector.feedback(StepCost(step, 1.0, 1.0, 0.1))
    assert len(set(chosen.size.tolist())) > 1
    state = selector.state_dict()
    state["prompt"]["monitor"]["believed"] = False
    selector.load_state_dict(state)
    assert set(selector.begin(13).size.tolist()) == {4}


def test_refusals(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(**changes: Any) -> str:
        given = settings(files, tmp_path / "run", pruning__prompt__group_size_factor=2, **changes)
        assert main(["train", "configs/quickstart.yaml", *given]) == 2
        return capsys.readouterr().err

    assert "use rloo, posterior_loo, group_mean" in refused()
    assert "defined for groups of one size" in refused(pruning__completion__method="greso")
    beta = refused(objective__advantage="rloo", pruning__prompt__score="beta")
    assert "pruning.prompt.group_size_factor = 2: group sizes need score=fit, but pruning.prompt.score = beta" in beta
    config = {"pruning": {"prompt": {"group_size_factor": 2.0}}, "objective": {"advantage": "rloo"}}
    trace, count = tmp_path / "trace.jsonl", {"num_prompts": 512, "set_sizes": {"": 512}, "ranks": 1}
    header = {"format": "dppo_megatron trace 1", **count, "features": "features.npz"}
    trace.write_text(json.dumps(header | {"config": config}) + "\n")
    with pytest.raises(UserError, match="groups of several sizes are not replayed"):
        read_trace(str(trace))
    config = {"pruning": {"early_stop": {"after_tokens": 9}}, "objective": {"advantage": "rloo"}}
    trace.write_text(json.dumps(header | {"config": config}) + "\n")
    with pytest.raises(UserError, match="after_tokens = 9, and the outcomes of the completions that it stopped"):
        read_trace(str(trace))
