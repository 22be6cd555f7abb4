"""Figures of the policy mean what they are called: they are of what was rolled out, whatever was kept of it.

Three properties, each over every name that there is, so that a new figure is held to them without being listed:
sums are unbiased over all keep patterns (`test_unbiased_actor.py`, `test_pruning_labels.py`); a completion or prompt
kept with probability 1/2 counts as two certain ones (here); a run reports nothing else (`test_training.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, write_model

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.logprobs import LogprobStore
from dppo_megatron.algorithms.correction import Mismatch
from dppo_megatron.algorithms.objectives import make_objective
from dppo_megatron.config.objective import KLConfig, ObjectiveConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.pruning import CustomPromptPolicy, LedgerRow, logit_grad_norm
from dppo_megatron.pruning.interface import StepCost
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.steps.loop import Loop
from dppo_megatron.steps.step import RolloutTable, Step, StepRecord, Update, UpdatePlan, sample_of
from dppo_megatron.types import Completion, Group, IntArray, Label, Prompt, RolloutPrompt, TrainSample, UpdateResult

GROUPS, SIZE, SEEDS = 16, 8, 20
COUNTS = {"rollout/truncated_count"}
"""Of what happened, no figure of the policy."""


def test_a_completion_kept_with_one_half_counts_twice() -> None:
    """In each figure of the mismatch: the median of 40 completions with weights 1, 2 and 3, and of as many copies."""
    rng = np.random.default_rng(0)
    once, copies = Mismatch(), Mismatch()
    for weight in rng.integers(0, 4, 40).tolist():
        behaviour = -rng.exponential(1.0, int(rng.integers(1, 30)))
        old = behaviour + rng.normal(0, 0.01 + 0.2 * weight, len(behaviour))
        once.add(old, behaviour, weight, 5.0)
        for _ in range(weight):
            copies.add(old, behaviour, 1.0, 5.0)
    figures = once.metrics()
    assert figures == pytest.approx(copies.metrics(), rel=1e-9) and len(figures) >= 4
    assert once.product_ess != pytest.approx(copies.product_ess), "of the kept as they are: no figure of the policy"


def test_a_prompt_rolled_out_with_one_half_counts_twice() -> None:
    """In each figure of the rollouts."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, (6, SIZE))
    step = [
        (RolloutPrompt(Prompt(k, "", (1, 2), "", ""), 1.0, 1.0), [_completion(rng, n) for n in row])
        for k, row in enumerate(lengths.tolist())
    ]
    groups = {k: Group(prompt, tuple(row), np.zeros(SIZE)) for k, (prompt, row) in enumerate(step)}
    prob = np.array([1, 0.5, 1 / 3, 1, 0.5, 1])
    copied = {place: groups[k] for place, k in enumerate(np.repeat(np.arange(6), np.rint(1 / prob).astype(int)))}
    once = RolloutTable.of(groups, SIZE, 0).metrics(prob)
    twice = RolloutTable.of(copied, SIZE, 0).metrics(np.ones(len(copied)))
    assert once.keys() > COUNTS
    for name in once.keys() - COUNTS:
        assert once[name] == pytest.approx(twice[name], rel=1e-12), name
    surprisal = -np.concatenate([c.logprobs for group in copied.values() for c in group.completions])
    assert once["train/entropy"] == pytest.approx(surprisal.mean(), rel=1e-6)
    assert np.isnan(RolloutTable.of({}, SIZE, 0).metrics(np.empty(0))["train/entropy"])


def _completion(rng: np.random.Generator, length: int) -> Completion:
    logprobs = -rng.exponential(1.0 / length, length).astype(np.float32)
    reason = "length" if length > 20 else "stop"
    return Completion(rng.integers(3, 37, length), logprobs, reason, "")


def test_the_labels_that_are_counted_are_those_of_the_whole_ledger() -> None:
    """Also where it is not a selection's own row: groups that were left out, a divisor."""
    labels: list[Label] = ["exact", "biased", "ratio", "biased", "unbiased"]
    line = StepRecord(ledger=tuple(LedgerRow(f"any/{k}", 1.0, one, "") for k, one in enumerate(labels))).line()
    assert (line["prune/biased_selections"], line["prune/ratio_selections"]) == (2, 1)


class Picks(CustomPromptPolicy):
    """The first three prompts, always."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> np.ndarray:
        return np.arange(len(prompt_index)) < 3


@pytest.mark.parametrize(
    ("prompt", "completion", "drawn"),
    [
        ("none", "dppo", True),
        ("dppo", "dppo", True),
        ("dynamic_sampling", "none", False),
        ("none", "cppo", False),
        ("dppo_paper", "none", False),
        ("dppo_paper", "dppo", False),
        (f"{__name__}:Picks", "dppo", False),
    ],
)
def test_no_growth_of_the_variance_by_a_fixed_rule(prompt: str, completion: str, drawn: bool) -> None:
    """It changes the gradient's length, so that its squares over the full batch's are no growth; and its figures are of
    what was kept. Past the warm-up, where prompts are skipped, and in every step alike."""
    config = Config(steps=20)
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 4, SIZE
    config.pruning.prompt.method, config.pruning.completion.method = prompt, completion
    config.pruning.prompt.warmup_epochs = 0.0 if ":" in prompt else 1.0  # one of a user's has yet to be asked in it
    selector, rng, skipped = Selector(selection_settings(config), 16), np.random.default_rng(0), 0
    for step in range(1, 11):
        shape = (len(selector.begin(step).prompt_index), SIZE)
        rewards = np.tile(np.arange(SIZE) % 2.0, (shape[0], 1))
        decision = selector.finish(Rollouts(rewards, rng.integers(1, 9, shape), rng.random(shape)), step)
        selector.feedback(StepCost(step, 1.0, 1.0, 0.1))
        growths = {"prune/realised_design_effect", "prune/design_effect"} & decision.metrics.keys()
        assert (len(growths), decision.has_support) == (2 * drawn, drawn)
        skipped += 4 - shape[0]
    assert (skipped > 0) == (prompt not in ("none", "dynamic_sampling"))


# ---------------------------------------------------------------------------- methods that share a checkpoint agree


def _config(method: str, seed: int, objective: ObjectiveConfig) -> Config:
    config = Config()
    config.seed, config.objective = seed, objective
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = GROUPS, SIZE
    config.pruning.prompt.method, config.pruning.completion.method = "none", method
    if method == "dppo":
        config.pruning.completion.rate, config.pruning.completion.max_design_effect = 0.7, 0.0
    return config


def _rollout(actor: Actor) -> tuple[list[Group], dict[int, TrainSample]]:
    """A step's groups, of which short completions are far from the engine's log-probabilities and long ones near: what
    pruning keeps is not like the rest. A third of the groups has no gradient, and is far too."""
    rng = np.random.default_rng(0)
    prompts = [RolloutPrompt(Prompt(k, "", tuple(rng.integers(3, 37, 3)), "", ""), 1.0, 1.0) for k in range(GROUPS)]
    rewards = np.array([rng.permutation([1.0] * (k % 6) + [0.0] * (SIZE - k % 6)) for k in range(GROUPS)])
    rewards[::3] = 1.0
    lengths = rng.integers(2, 40, (GROUPS, SIZE))
    lengths[::3] = 5
    plain = []
    for k, prompt in enumerate(prompts):
        for n in lengths[k].tolist():
            ids = np.concatenate([prompt.prompt.token_ids, rng.integers(3, 37, n)])
            plain.append(TrainSample("", ids, 3, np.zeros(n, np.float32), 0.0, 1.0, 1.0))
    own = actor.own_logprobs(plain, plan_for(plain, cap=512)).values
    moved = [own[i] + rng.normal(0, 0.3 if len(own[i]) < 12 else 0.02, len(own[i])) for i in range(len(plain))]
    behaviour = [np.minimum(values, -1e-3).astype(np.float32) for values in moved]
    groups = []
    for k, prompt in enumerate(prompts):
        mine = range(k * SIZE, (k + 1) * SIZE)
        texts = tuple(Completion(plain[i].token_ids[3:], behaviour[i], "stop", "") for i in mine)
        groups.append(Group(prompt, texts, rewards[k]))
    return groups, {i: replace(one, reference_logprobs=1.2 * own[i]) for i, one in enumerate(plain)}


def _decide(config: Config, groups: list[Group]) -> TrainSelection:
    selector = Selector(selection_settings(config), GROUPS)
    chosen = selector.begin(1).prompt_index.tolist()  # every prompt, in an order of the seed's
    by_prompt = [groups[k] for k in chosen]
    lengths = np.array([[len(c.token_ids) for c in group.completions] for group in by_prompt])
    norms = np.array([[logit_grad_norm(c.logprobs) for c in group.completions] for group in by_prompt])
    return selector.finish(Rollouts(np.array([group.rewards for group in by_prompt]), lengths, norms), 1)


def _figures(
    actor: Actor, config: Config, groups: list[Group], reference: dict[int, TrainSample], *, unweighted: bool
) -> dict[str, float]:
    """What a step reports of these rollouts, through the selector, the actor's loss hook and the loop."""
    decision = _decide(config, groups)
    chosen = decision.prompts.prompt_index
    order = (chosen[:, None] * SIZE + np.arange(SIZE)).ravel()
    flat = [completion for k in chosen.tolist() for completion in groups[k].completions]
    rows = np.flatnonzero(decision.kept)
    lengths = np.array([len(flat[row].token_ids) for row in rows])
    plan = UpdatePlan.of(decision, rows, lengths, plan_for([reference[order[row]] for row in rows], cap=512))
    if unweighted:
        plan = replace(plan, figure_weights=np.ones(len(rows)))
    selected = [groups[k].selected for k in chosen.tolist()]
    samples = {
        place: replace(
            sample_of(plan, place, selected, SIZE, flat[row].token_ids, flat[row].logprobs),
            reference_logprobs=reference[order[row]].reference_logprobs,
        )
        for place, row in enumerate(rows)
    }
    store, step = LogprobStore(), Step(1, updates=[Update(plan, samples)])
    sums = actor.accumulate(samples, plan.pack, make_objective(config.objective), logprobs_out=store)
    step.measured.append(UpdateResult(sums.pop("loss"), 0.0, 0.0, False, sums.pop("tokens"), sums))
    engine = SimpleNamespace(has_servers=False)
    loop = SimpleNamespace(actor=actor, job=SimpleNamespace(config=config), _engine=engine, _width=SIZE)
    Loop._measure_mismatch(cast(Any, loop), step, [(step.updates[0], store)])
    table = RolloutTable.of({place: groups[k] for place, k in enumerate(chosen.tolist())}, SIZE, 0)
    return step.update_metrics() | step.record.metrics | table.metrics(decision.prompts.inclusion_prob)


def _compare(model_path: Path, objective: ObjectiveConfig) -> dict[str, Any]:
    actor = build_actor(model_path, Parallel())
    groups, reference = _rollout(actor)

    def figures(method: str, seed: int, unweighted: bool = False) -> dict[str, float]:
        config = _config(method, seed, objective)
        return _figures(actor, config, groups, reference, unweighted=unweighted)

    return {
        "grpo": figures("none", 0),
        "dppo": [figures("dppo", seed) for seed in range(SEEDS)],
        "plain": [figures("dppo", seed, True) for seed in range(SEEDS)],
        "cppo": figures("cppo", 0),
        "all kept": figures("none", 0, True),
    }


OWN = {"train/loss", "train/grad_norm", "train/learning_rate", "train/skipped_updates", "kept/product_ess"} | COUNTS


@pytest.mark.slow
@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_dppo_reports_what_grpo_reports(tmp_path: Path, kl: float) -> None:
    """From one checkpoint, in every figure, within 4 standard errors over 20 draws. Plain means over what was kept do
    not, nor does GRPO's over completions without gradient, which no draw of DPPO's reaches."""
    path = write_model(tmp_path / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    found = run_ranks(_compare, 1, path, ObjectiveConfig(kl=KLConfig(coef=kl)))[0]
    names = found["grpo"].keys() - OWN
    assert {"train/entropy", "train/ratio", "train/clip_fraction", "mismatch/kl"} <= names
    assert ("train/kl" in names) == (kl > 0)
    off = {}
    for kind in ("dppo", "plain"):
        for name in names:
            drawn = np.array([one[name] for one in found[kind]])
            error = drawn.std(ddof=1) / np.sqrt(SEEDS)
            off[kind, name] = (drawn.mean() - found["grpo"][name]) / max(error, 1e-12)
    assert all(abs(off["dppo", name]) < 4 for name in names), off
    assert min(abs(off["plain", name]) for name in ("train/clip_fraction", "mismatch/logprob_abs_diff_mean")) > 6
    whole = found["all kept"]["train/clip_fraction"] == pytest.approx(found["grpo"]["train/clip_fraction"], rel=0.01)
    assert whole == (kl > 0), "without a KL term the groups that have no gradient do not count"
    kept = {f"kept/{name}" for name in names if name.startswith(("train/", "mismatch/")) and name != "train/entropy"}
    assert kept <= found["cppo"].keys() and not {name.removeprefix("kept/") for name in kept} & found["cppo"].keys()
