"""What the selector refuses, what it learns from seconds, and the counts of CPPO: by arrays alone, no model."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.job import job_config, write_job_files
from support.settings import rollout_config

from dppo_megatron.algorithms.advantages import group_advantages
from dppo_megatron.config.pruning import CompletionPruningConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.job import prepare_job
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.pruning import CompletionBatch, LedgerRow, StepCost, make_completion_policy
from dppo_megatron.pruning.designs import count_kept, floor_kept
from dppo_megatron.pruning.policies import METHODS, check_methods, with_method
from dppo_megatron.rollout.engine import RolloutStats
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.steps.coordinator import Coordinator, server_rows
from dppo_megatron.steps.loop import Loop
from dppo_megatron.steps.step import RolloutTable, Step
from dppo_megatron.types import Completion, Grade, Group, Prompt, RolloutPrompt, RunAborted, UserError

N, G = 16, 4
RNG = np.random.default_rng(0)
REWARDS = RNG.integers(0, 2, (64, G)).astype(np.float64)
LENGTHS = RNG.integers(1, 12, (64, G))
LOGIT_GRAD_NORM = RNG.uniform(0.5, 2.0, (64, G))


def _config(prompt: str = "dppo", completion: str = "dppo") -> Config:
    config = Config(steps=1000)
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = N, G
    config.pruning.prompt.method, config.pruning.completion.method = prompt, completion
    config.pruning.completion.rate, config.pruning.completion.max_design_effect = 0.5, 0.0
    return config


def _step(selector: Selector, step: int) -> TrainSelection:
    rows = selector.begin(step).prompt_index
    while (more := selector.refill(REWARDS[rows], step)) is not None:
        rows = np.concatenate([rows, more.prompt_index])
    return selector.finish(Rollouts(REWARDS[rows], LENGTHS[rows], LOGIT_GRAD_NORM[rows]), step)


def test_under_the_beta_score_rewards_are_refused_before_the_update_but_for_rounding() -> None:
    """Graders of weight .2, .4, .3 and .1 that are all right sum to 1 + 2e-16, which the start check takes for 1."""
    config = _config()
    config.pruning.prompt.score = "beta"
    for best, fits in ((0.2 + 0.4 + 0.3 + 0.1, True), (1.5, False)):
        selector = Selector(selection_settings(config), 64)
        rows = selector.begin(1).prompt_index
        rollouts = Rollouts(best * REWARDS[rows], LENGTHS[rows], LOGIT_GRAD_NORM[rows])
        if fits:
            assert best > 1
            selector.finish(rollouts, 1)
            selector.feedback(StepCost(1, 1.0, 1.0, 1.0))
            continue
        with pytest.raises(UserError, match=r"reward of prompt .* is 1\.5: must be within 0 and 1 .*score=rms"):
            selector.finish(rollouts, 1)


@pytest.mark.parametrize("ahead", [0, 1])
def test_seconds_are_divided_by_what_their_own_step_had_kept(ahead: int) -> None:
    """The self-tuned rule's cost ratio, from each step's own seconds and kept share, while the next has begun."""
    config = _config("dppo_auto", "dppo_auto")
    config.rollout.async_steps, config.pruning.prompt.warmup_epochs = ahead, 0.0
    selector, rng = Selector(selection_settings(config), N), np.random.default_rng(4)
    ratios, shares = {"prompt": 0.0, "completion": 0.0}, set()
    chosen, heard = selector.begin(1), 0.0
    for step in range(1, 25):
        rows = chosen.prompt_index
        if ahead:
            chosen = selector.begin(step + 1)
        outcomes = Rollouts(rng.integers(0, 2, (len(rows), G)) * 1.0, LENGTHS[rows], LOGIT_GRAD_NORM[rows])
        metrics = selector.finish(outcomes, step).metrics
        # in proportion to what was kept, or a part of them would count as fixed
        rollout, update, other = (
            rng.uniform(0.5, 9, 3) * [*[metrics.get("prune/prompt_kept_cost", 1.0)] * 2, 1]
        ).tolist()
        selector.feedback(StepCost(step, rollout, update, other))
        heard = ratios["prompt"]  # a step that begins ahead has not heard of the one before it
        for level, saved in (("prompt", rollout + update), ("completion", update)):
            kept = metrics.get(f"prune/{level}_kept_cost", 1.0)
            ratio = (rollout + update + other - saved) / (saved / kept)
            ratios[level] = 0.9 * ratios[level] + 0.1 * ratio if ratios[level] else ratio
            shares.add((level, kept))
        state = selector.state_dict()
        assert state["completion"]["control"]["cost_ratio"] == pytest.approx(ratios["completion"])
        assert state["prompt"]["control"]["cost_ratio"] == pytest.approx(heard if ahead else ratios["prompt"])
        if not ahead:
            chosen = selector.begin(step + 1)
    assert all(sum(level == one for one, _ in shares) > 5 for level in ratios), (
        "the shares must differ to be told apart"
    )


# ------------------------------------------------------------------------------------------------ bad outcomes


def _finish(rewards: np.ndarray, lengths: np.ndarray, logit_grad_norm: np.ndarray, **score: Any) -> TrainSelection:
    config = _config()
    config.pruning.prompt.score = score.get("score", "beta")
    selector = Selector(selection_settings(config), N)
    rows = selector.begin(1).prompt_index
    for step in (1, 2, 3):
        if step > 1:
            rows = selector.begin(step).prompt_index
        decision = selector.finish(Rollouts(rewards[rows], lengths[rows], logit_grad_norm[rows]), step)
        selector.feedback(StepCost(step, rollout_s=1.0, update_s=1.0, other_s=0.1))
    return decision


@pytest.mark.parametrize(
    ("column", "value", "error", "message"),
    [
        ("lengths", 0, RunAborted, "completion 2 of prompt 5 has 0 tokens"),
        ("lengths", -3, RunAborted, "completion 2 of prompt 5 has -3 tokens"),
        ("logit_grad_norm", np.nan, RunAborted, "completion 2 of prompt 5 has invalid log-probabilities"),
        ("logit_grad_norm", np.inf, RunAborted, "completion 2 of prompt 5 has invalid log-probabilities"),
        ("logit_grad_norm", -1.0, RunAborted, "completion 2 of prompt 5 has invalid log-probabilities"),
        ("rewards", np.inf, UserError, "reward of prompt 5, completion 2 is inf: must be within -1e\\+15"),
        ("rewards", 1e300, UserError, "reward of prompt 5, completion 2 is 1e\\+300: must be within -1e\\+15"),
        ("rewards", -1e16, UserError, "reward of prompt 5, completion 2 is -1e\\+16: must be within -1e\\+15"),
    ],
)
def test_an_absurd_outcome_is_named(column: str, value: float, error: type[Exception], message: str) -> None:
    """Before anything is chosen by it: an engine's bad answer stops the run, a grader's is the user's."""
    table = {
        "rewards": REWARDS[:N].copy(),
        "lengths": LENGTHS[:N].copy(),
        "logit_grad_norm": LOGIT_GRAD_NORM[:N].copy(),
    }
    table[column][5, 2] = value
    with pytest.raises(error, match=message):
        _finish(**table, score="rms")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"objective__advantage": "posterior_loo"}, "objective.advantage = posterior_loo"),
        ({"objective__advantage": "rloo", "pruning__early_stop__after_tokens": 5}, "pruning.early_stop"),
        ({"objective__advantage": "rloo"}, ""),
    ],
)
def test_a_baseline_of_pass_rates_takes_rewards_in_the_unit_interval(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    """A reward of -1 would be remembered as 0: refused when the grader is tried, and from one that says it later."""
    negative = {"reward__functions__right__function": "final_answer", "reward__functions__right__weight": -1.0}
    plain = {"pruning__prompt__method": "none", "pruning__completion__method": "none", "rollout__prompts_per_step": N}
    config = job_config(write_job_files(tmp_path), tmp_path / "run", **negative, **plain, **changed)
    selector = Selector(selection_settings(config), N)
    rows, size = selector.begin(1).prompt_index, config.rollout.completions_per_prompt
    rewards = np.where(np.arange(size) < size // 2, -1.0, 1.0) * np.ones((len(rows), 1))
    ones = np.ones(rewards.shape)
    outcome = Rollouts(rewards, np.full(rewards.shape, 4), ones, stands_for=ones if "early" in named else None)
    if not named:
        assert prepare_job(config, 1).train_prompts and selector.finish(outcome, 1).kept.any()
        return
    with pytest.raises(UserError, match=f"is -1, and must be from 0 to 1: {named} "):
        prepare_job(config, 1)
    with pytest.raises(UserError, match=rf"completion 0 is -1: must be within 0 and 1 \({named} "):
        selector.finish(outcome, 1)
    rewards[rewards == 1], rewards[rewards == -1] = sum((0.2, 0.4, 0.3, 0.1)), 0.0
    assert rewards.max() > 1 and selector.finish(outcome, 1).kept.any(), "weights of rewards that add up to 1"


EMPTY = ("rollout/missing_reward_mean", "rollout/missing_tokens_mean")
"""Means over what is missing, null where nothing is."""
UNKNOWN = ("reward/mean", "reward/mean_se", *EMPTY)
"""Null also where nothing is graded, or a single group."""

DEGENERATE = {
    "every answer wrong": (0.0, 5, 1.0),
    "every answer right": (1.0, 5, 1.0),
    "one reward that binary numbers do not have": (0.1, 5, 1.0),
    "nothing graded": (np.nan, 5, 1.0),
    "one token each": (None, 1, 1.0),
    "no surprise": (None, 5, 0.0),
    "nothing known": (np.nan, 1, 0.0),
}


@pytest.mark.parametrize("outcome", DEGENERATE)
@pytest.mark.parametrize(("num_prompts", "size"), [(1, 2), (4, 3)])
def test_degenerate_steps(outcome: str, num_prompts: int, size: int) -> None:
    """Every method, one prompt of two completions or a few: steps that all say the same, then one with a difference.
    Weights and figures stay numbers, and a step without any is a step in which nothing is trained."""
    reward, length, surprise = DEGENERATE[outcome]
    rng = np.random.default_rng(1)
    for method in METHODS:
        config = with_method(_config(), method)
        config.rollout.prompts_per_step, config.rollout.completions_per_prompt = num_prompts, size
        config.pruning.prompt.design = config.pruning.completion.design = "poisson"  # now and then nothing is drawn
        config.pruning.prompt.min_inclusion_prob, config.pruning.prompt.warmup_epochs = 0.01, 0.0
        config.pruning.prompt.rate = config.pruning.completion.rate = 0.5
        selector = Selector(selection_settings(config), 2 * num_prompts)
        for step in range(1, 8):
            chosen = selector.begin(step)
            drawn = rng.integers(0, 2, (4 * num_prompts * 10, size)).astype(np.float64)
            rewards = drawn if reward is None or step == 7 else np.full_like(drawn, reward)
            count = len(chosen.prompt_index)
            while (more := selector.refill(rewards[:count], step)) is not None:
                count += len(more.prompt_index)
            shape = (count, size)
            decision = selector.finish(
                Rollouts(rewards[:count], np.full(shape, length), np.full(shape, surprise)), step
            )
            assert np.isfinite(decision.weight).all() and np.isfinite(decision.advantages).all(), method
            figures = {name: value for name, value in decision.metrics.items() if name not in UNKNOWN}
            assert np.isfinite(list(figures.values())).all(), method
            assert not decision.kept[decision.weight == 0].any()
            selector.feedback(StepCost(step, 1.0, 1.0, 0.1))


@given(st.integers(0, 10**6), st.sampled_from([-300, -30, -8, 0, 8, 14]), st.sampled_from(["rms", "mean_abs"]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rewards_of_any_scale_are_selected_by(seed: int, exponent: int, score: str) -> None:
    """Everything that passes the check gives finite weights, also after it went through the history."""
    rng = np.random.default_rng(seed)
    rewards = np.clip(rng.normal(size=(N, G)) * 10.0**exponent, -1e15, 1e15)
    rewards[rng.random((N, G)) < 0.1] = np.nan
    decision = _finish(rewards, LENGTHS[:N], LOGIT_GRAD_NORM[:N], score=score)
    assert np.isfinite(decision.weight).all() and np.isfinite(decision.advantages).all()
    assert np.isfinite([value for name, value in decision.metrics.items() if name not in EMPTY]).all()


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.integers(-300, 300), st.sampled_from([0.0, 1e-300, 1e-6]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_group_deviation_neither_overflows_nor_vanishes(values: list[float], exponent: int, eps: float) -> None:
    """Flat groups have advantage exactly 0 for every eps, 0 too; others the same advantages at any scale, up to eps."""
    rewards = np.array([values]) * 10.0**exponent
    advantages = group_advantages(rewards, divide_by_std=True, eps=eps)
    assert np.isfinite(advantages).all() and np.abs(advantages).max() <= np.sqrt(len(values)) * (1 + 1e-9)
    if rewards.max() == rewards.min():
        assert (advantages == 0).all()
    elif eps == 0 and np.ptp(rewards) > 1e-6 * np.abs(rewards).max() > 1e-300:
        assert np.sqrt(np.mean(advantages**2)) == pytest.approx(1.0, rel=1e-6)


def _rows(settings: dict[str, Any], **happened: int) -> tuple[LedgerRow, ...]:
    """Of a step of 10 groups."""
    return server_rows(rollout_config(settings), RolloutStats(**happened), sizes=np.full(10, 5))


def test_sampling_again_what_was_interrupted_is_labelled() -> None:
    """Long completions are interrupted more often; those that wait or go on are not chosen by their length."""
    servers = {"engine": "vllm", "async_steps": 1}
    [row] = _rows({**servers, "sync.in_flight": "abort"}, groups_aborted=2, completions_aborted=10)
    assert (row.name, row.label, row.bias_estimate) == ("rollout/aborted", "biased", 0.2)
    assert not _rows({**servers, "sync.in_flight": "finish"})
    assert not _rows({**servers, "sync.in_flight": "continue"})
    assert not _rows({"engine": "vllm", "sync.in_flight": "abort"})
    [row] = _rows({"engine": "sglang"}, groups_resent=1)
    assert (row.name, row.label, row.bias_estimate) == ("rollout/resent", "biased", 0.1)
    assert row.note.endswith("without seeds, or through a sync or save; bias about 10 %")
    assert not _rows({"engine": "sglang"}, groups_resent=0)


# ------------------------------------------------------------------------------------------- counts and plans


@given(st.integers(1, 4096), st.integers(0, 10**4 - 1))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_counts_are_those_of_the_decimal(count: int, parts: int) -> None:
    """A rate of k / 10,000 as anybody writes it, against integer arithmetic."""
    rate = float(f"{parts / 10**4:.4f}")
    assert count_kept(count, rate) == count - count * parts // 10**4
    assert floor_kept(count, rate) == count * (10**4 - parts) // 10**4
    whole = count * parts % 10**4 == 0
    assert count_kept(count, rate) - floor_kept(count, rate) == (0 if whole else 1)


def _kept(method: str, groups: int, size: int, rate: float) -> np.ndarray:
    """How many of each group a method keeps."""
    rng, n = np.random.default_rng(1), groups * size
    batch = CompletionBatch(
        prompt_index=np.repeat(np.arange(groups), size),
        completion_index=np.tile(np.arange(size), groups),
        group=np.repeat(np.arange(groups), size),
        rewards=np.zeros(n),
        advantages=rng.normal(size=n),
        lengths=np.ones(n, np.int64),
        logit_grad_norm=np.ones(n),
        denominator=np.ones(n),
        prompt_weight=np.ones(n),
        num_nominal=n,
    )
    policy = make_completion_policy(CompletionPruningConfig(method=method, rate=rate), seed=0, total_steps=9)
    return np.bincount(batch.group, weights=policy.prune(batch, step=0).kept)


@pytest.mark.parametrize("size", [5, 7, 8, 16])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.65, 0.7, 0.8])
def test_the_three_rules_of_cppo(size: int, rate: float) -> None:
    """Restated from where each comes from: the paper's floor(G (1 - P)) a group, the TRL trainer's k = int(G P) dropped
    a group (grpo_trainer_gsm.py 903-916), the verl port's int(n (1 - P)) of all (cppo_ray_trainer.py 311-313)."""
    fraction, groups = Fraction(str(rate)), 6
    assert (_kept("cppo", groups, size, rate) == int(size * (1 - fraction))).all()
    assert (_kept("cppo_trl", groups, size, rate) == size - int(size * fraction)).all()
    assert _kept("cppo_verl", groups, size, rate).sum() == int(groups * size * (1 - fraction))


@pytest.mark.parametrize(
    ("prompts", "rate", "planned"), [(16, 0.95, 320), (32, 0.9, 320), (10, 0.7, 33), (64, 0.0, 64)]
)
def test_allocation_plans_exactly(prompts: int, rate: float, planned: int) -> None:
    """16 / (1 - 0.95) is 319.99... in floating point."""
    config = _config("none", "cppo_trl")
    config.rollout.prompts_per_step, config.pruning.completion.rate = prompts, rate
    config.pruning.completion.allocation = True
    selection = selection_settings(config)
    assert selection.planned_prompts == planned == Selector(selection, planned).prompts_per_step
    assert len(Selector(selection, planned).begin(1).prompt_index) == planned


def test_a_step_needs_the_prompts_it_plans() -> None:
    """N planned of fewer would still be divided by N, and labelled exact."""
    with pytest.raises(UserError, match=r"^prompts_per_step = 16, but the prompt set holds only 15 problems"):
        Selector(selection_settings(_config()), 15)
    config = _config("none", "cppo")
    config.pruning.completion.allocation = True
    with pytest.raises(
        UserError, match=r"pruning.completion.allocation raises to 32, but the prompt set holds only 31"
    ):
        Selector(selection_settings(config), 31)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "greso", "greso__smallest_refill_prompts": 8, "greso__largest_refill_prompts": 8},
        {"method": "dynamic_sampling"},
    ],
)
def test_a_round_that_skips_everything_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """In the trainer as in the selector: the draws of a step keep nothing, all, nothing and all."""
    files = write_job_files(tmp_path)
    of_prompts = {f"pruning__prompt__{name}": value for name, value in changes.items()}
    config = job_config(files, tmp_path / "run", rollout__prompts_per_step=8, **of_prompts)
    job = prepare_job(config, 1)
    asked: list[tuple[int, int]] = []
    loop = Loop.__new__(Loop)  # without engine and actor, which a round's draw has nothing to do with
    loop.job, loop._coordinator = job, Coordinator(job, packing_layout(config.actor, 1))
    policy = loop._coordinator._selector._prompt_policy
    select, turns = policy.select, iter((False, True, False, True))

    def by_turns(ids: Any, **where: Any) -> Any:
        chosen = select(ids, **where)
        return chosen if next(turns) else replace(chosen, kept=np.zeros(len(ids), np.bool_))

    def generate(step: Step, selected: list[RolloutPrompt], first: int) -> None:
        """The first round of groups has no variance, the second has."""
        assert selected
        rewards = np.arange(config.rollout.completions_per_prompt) * float(bool(asked))
        one = Completion(np.arange(3), np.zeros(3, np.float32), "stop", "")
        groups = {first + k: Group(item, (one,) * len(rewards), rewards) for k, item in enumerate(selected)}
        asked.append((first, len(selected)))
        step.reach("generating")
        step.reach("rolled_out")
        loop._coordinator.take([RolloutTable.of(groups, len(rewards), 0)], step.number)

    monkeypatch.setattr(policy, "select", by_turns)
    monkeypatch.setattr(loop, "generate", generate)
    step = Step(1)
    loop._select(step, step.record.timers)
    loop.rollout(step)
    (_, fresh), (first, again) = asked
    assert first == fresh and len(step.selected) == fresh + again and step.reached == "rolled_out"
    plans, *_ = loop._coordinator.decide(step, RolloutStats())
    counts = step.record.counts
    assert len(plans[0].rows) and counts is not None and counts.prompts_generated == fresh + again


@pytest.mark.parametrize("left", [1, 2, 3])
def test_the_parts_of_a_reward_add_up_to_its_mean(tmp_path: Path, left: int) -> None:
    """Some of a group are missing: what is left counts for four in the mean of all, and so in the means of the parts;
    a single one too, although no group of one is trained on."""
    files = write_job_files(tmp_path)
    functions = {f"reward__functions__{name}__function": "final_answer" for name in ("right", "long")}
    plain = {"pruning__prompt__method": "none", "rollout__prompts_per_step": 2, "rollout__completions_per_prompt": 4}
    config = job_config(files, tmp_path / "run", **functions, **plain, reward__min_self_consistency=0)
    coordinator = Coordinator(prepare_job(config, 1), packing_layout(config.actor, 1))
    step, one = Step(1), Completion(np.arange(3), np.zeros(3, np.float32), "stop", "")
    drawn = coordinator.begin(1)
    step.selected = [RolloutPrompt(Prompt(int(i), "", (1,), "", ""), 1.0, 1.0) for i in drawn.prompt_index]
    lost = Grade(np.nan, failure="died")
    groups: dict[int, Group] = {}
    for k, share in enumerate((0.75, 0.0)):
        grade = Grade(share + 0.25 * (k == 0), parts={"right": share, "long": 0.25 * (k == 0)})
        grades = (*(grade,) * left, *(lost if k == 0 else grade,) * (4 - left))
        groups[k] = Group(step.selected[k], (one,) * 4, np.array([item.reward for item in grades]), grades)
    coordinator._outcomes.append(RolloutTable.of(groups, 4, 0))
    coordinator.decide(step, RolloutStats())
    found = step.record.metrics
    assert [found[f"reward/{name}"] for name in ("mean", "right", "long")] == [0.5, 0.375, 0.125]


@pytest.mark.parametrize("biased", ["", "stale", "left out", "in the file's order"])
def test_the_bias_of_all_together_is_not_known_of_one_that_is_not(tmp_path: Path, biased: str) -> None:
    """Also where the row is the job's and not the selector's: absent, where it was that of the others together."""
    config = job_config(write_job_files(tmp_path), tmp_path / "run", rollout__prompts_per_step=8)
    job = prepare_job(config, 1)
    config.rollout.async_steps = int(biased == "stale")  # of servers, which this engine is none of
    config.data.order = "file" if biased == "in the file's order" else "shuffled"
    for name, one in job.train_sets.items():
        job.train_sets[name] = replace(one, filtered=int(biased == "left out"))
    coordinator, size = Coordinator(job, packing_layout(config.actor, 1)), config.rollout.completions_per_prompt
    step, chosen = Step(1), coordinator.begin(1)
    step.selected = [RolloutPrompt(job.train_prompts[k], 1.0, 1.0) for k in chosen.prompt_index.tolist()]
    one = Completion(np.arange(3), np.full(3, -1.0, np.float32), "stop", "")
    groups = {k: Group(item, (one,) * size, np.arange(size) % 2.0) for k, item in enumerate(step.selected)}
    coordinator.take([RolloutTable.of(groups, size, 0)], 1)
    coordinator.decide(step, RolloutStats())
    unknown = [row.name for row in step.record.ledger if row.label == "biased" and row.bias_estimate is None]
    assert len(unknown) == bool(biased)
    assert ("prune/bias_estimate" in step.record.metrics) == (not biased)


def test_the_job_counts_the_planned_prompts(tmp_path: Path) -> None:
    """Before a model is built, with the file's name; 48 problems are enough for 16 prompts and not for 64."""
    files = write_job_files(tmp_path)
    cppo = {"pruning__prompt__method": "none", "pruning__completion__method": "cppo"}
    config = job_config(files, tmp_path / "run", **cppo, pruning__completion__rate=0.75)
    assert len(prepare_job(config, 1).train_prompts) == 48
    config.pruning.completion.allocation = True
    with pytest.raises(UserError, match=r"allocation raises to 64, but .*train.jsonl holds only 48 problems"):
        prepare_job(config, 1)


@pytest.mark.parametrize(
    ("method", "rate", "updates", "message"),
    [
        ("cppo", 0.8, 1, "would keep none of 4 completions; must be at most 0.75, or method=cppo_trl"),
        ("cppo_verl", 0.99, 1, "would keep none of 64 completions; must be at most 0.9844"),
        ("cppo", 0.7, 3, "the 53 nominal prompts of a step by pruning.completion.allocation do not divide by it"),
    ],
)
def test_contradictions_across_sections(method: str, rate: float, updates: int, message: str) -> None:
    """Before the run, and by the selector too; at run time a group that a filter has shortened keeps at least one."""
    config = _config("none", method)
    config.pruning.completion.rate, config.objective.updates_per_step = rate, updates
    config.pruning.completion.allocation = updates > 1
    with pytest.raises(UserError, match=message):
        Selector(selection_settings(config), 64)
    with pytest.raises(UserError, match=message):
        selection_settings(config).check()
        check_methods(config.pruning, group_size=G, minibatch_size=N * G)


@pytest.mark.parametrize("method", ["cppo", "cppo_trl", "cppo_verl", "dppo_paper", "max_variance"])
def test_groups_that_the_filter_has_shortened(method: str) -> None:
    """All but one of most groups are truncated: at rate 0.5 the one is trained on, and the run goes on."""
    config = _config("none", method)
    config.objective.overlong.filter = True
    selector = Selector(selection_settings(config), N)
    rows = selector.begin(1).prompt_index
    truncated = np.ones((N, G), dtype=bool)
    truncated[:, 0] = False
    truncated[0] = False
    decision = selector.finish(Rollouts(REWARDS[rows], LENGTHS[rows], LOGIT_GRAD_NORM[rows], None, truncated), 1)
    assert decision.kept.any() and np.isfinite(decision.weight).all()
