"""Replays each method on one epoch of recorded completions: the rows of docs/referee.md.

A replay takes the training prompts in a shuffled order, as an epoch of the trainer does, draws a group of each from its
recorded completions, and lets the method choose. Methods of the package choose through its own `Selector`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.config.load import read_config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.pruning import StepCost
from dppo_megatron.pruning.policies import with_method
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.types import FloatArray, IntArray
from referee import methods
from referee.record import KINDS, PROMPTS, REPOSITORY

GROUP = 8
"""Completions of a group, as in the quickstart."""


@dataclass(frozen=True)
class World:
    """What was recorded at one step: arrays [prompts, completions]."""

    rewards: FloatArray
    lengths: IntArray
    logit_grad_norm: FloatArray
    logprob: FloatArray
    marker: IntArray
    gradients: dict[str, FloatArray] = field(default_factory=dict)
    """Kind -> sketches [prompts, completions, SKETCH]."""
    designs: dict[str, FloatArray] = field(default_factory=dict)

    @staticmethod
    def read(path: Path, *, gradients: bool) -> World:
        """A recorded world, with its gradients or without."""
        with np.load(path) as file:
            designs = {name: file[name] for name in file if name.startswith("design_")}
            kinds = {kind: file[kind] for kind in KINDS} if gradients else {}
            columns = {name: file[name] for name in ("rewards", "lengths", "logit_grad_norm", "logprob", "marker")}
            return World(**columns, gradients=kinds, designs=designs)

    def rollouts(self, prompts: IntArray, chosen: IntArray) -> Rollouts:
        """The outcomes of the `chosen` [K, n] completions of `prompts` [K]."""
        at = prompts[:, None], chosen
        return Rollouts(self.rewards[at], self.lengths[at], self.logit_grad_norm[at])

    def groups(self, prompts: IntArray, size: int, rng: np.random.Generator) -> IntArray:
        """[K, size] different completions of each prompt."""
        return rng.random((len(prompts), self.rewards.shape[1])).argsort(1)[:, :size]

    def gradient(self, prompts: IntArray, chosen: IntArray, factors: FloatArray, kind: str = "unit") -> FloatArray:
        """sum of factors [K, n] times gradients."""
        row, column = np.nonzero(factors)
        rows = self.gradients[kind][prompts[row], chosen[row, column]]
        return np.asarray(factors[row, column].astype(np.float32) @ rows, dtype=np.float64)

    def expected(self, kind: str = "unit", size: int = GROUP) -> FloatArray:
        """E g of the full batch over every group of `size`: exact, for rewards of 0 and 1.

        A completion's mean advantage over the groups it is in depends on its reward and on how many of the others are
        right, which is hypergeometric.
        """
        factors = self.mean_power(1, size) / self.rewards.size
        return np.asarray(np.einsum("qr,qrs->s", factors, self.gradients[kind]), dtype=np.float64)

    def mean_power(self, power: int, size: int = GROUP) -> FloatArray:
        """[prompts, completions] mean of A^power of each completion over the groups of `size` that it is in."""
        total = self.rewards.shape[1]
        table = np.array([[_mean_power(r, m, total, size, power) for r in (0, 1)] for m in range(total + 1)])
        found: FloatArray = table[self.rewards.sum(1).round().astype(int)[:, None], self.rewards.round().astype(int)]
        return found


def _mean_power(reward: int, right: int, total: int, size: int, power: int) -> float:
    """Mean A^power of a completion with this reward among `total`, of which `right` are right."""
    others, good = total - 1, right - reward
    if good < 0 or good > others:
        return 0.0  # there is no such completion
    mean = 0.0
    for k in range(max(0, size - 1 - (others - good)), min(size - 1, good) + 1):
        chance = comb(good, k) * comb(others - good, size - 1 - k) / comb(others, size - 1)
        group = np.array([[float(reward)] + [1.0] * k + [0.0] * (size - 1 - k)])
        mean += chance * float(methods.advantages_of(group)[0, 0]) ** power
    return mean


@dataclass(frozen=True)
class Outcome:
    """One step's gradient under a method."""

    gradient: FloatArray
    full: FloatArray
    """The full batch's gradient, on the same rollouts if there is one, else its expectation."""
    generated: float
    """Completions rolled out over those of a full step."""
    trained: float
    """Tokens trained on over those of a full step."""


Replay = Callable[[World, list[World], int], Iterable[Outcome]]
"""(world, earlier worlds, seed) -> the steps of one epoch."""


# ------------------------------------------------------------------------------------------------- the package's


def package(method: str, **settings: Any) -> Replay:
    """A method of the package through its own `Selector`; `prompt_*` and `completion_*` are settings of that level."""

    def run(world: World, earlier: list[World], seed: int) -> Iterable[Outcome]:
        config, count = _config(method, settings), len(world.rewards)
        if config.pruning.prompt.method == "none":
            earlier = []  # a method that only chooses among completions has no memory
        config.seed = 10_000 + seed
        rng, per_step = np.random.default_rng(seed), config.rollout.prompts_per_step
        order = PromptOrder(count, seed)
        selector = Selector(selection_settings(config), count, order=order)
        epoch = count // per_step
        for step in range(1, (len(earlier) + 1) * epoch + 1):
            there = [*earlier, world][(step - 1) // epoch]
            outcome = _step(selector, step, there, rng, per_step, judged=there is world)
            if outcome is not None:
                yield outcome

    return run


def _step(
    selector: Selector, step: int, world: World, rng: np.random.Generator, per_step: int, *, judged: bool
) -> Outcome | None:
    chosen = selector.begin(step).prompt_index
    # a group for every prompt, rolled out or not, so that the two gradients differ by the selection alone
    group = world.groups(np.arange(len(world.rewards)), GROUP, rng)
    while (more := selector.refill(world.rollouts(chosen, group[chosen]).rewards, step)) is not None:
        chosen = np.concatenate([chosen, more.prompt_index])
    decision = selector.finish(world.rollouts(chosen, group[chosen]), step)
    selector.feedback(StepCost(step, rollout_s=1.0, update_s=1.0, other_s=0.0))
    if not judged:
        return None
    nominal = decision.offered[:per_step]
    lengths = world.lengths[chosen[:, None], group[chosen]]
    factors = (decision.weight * decision.advantages / decision.denominator).reshape(lengths.shape) * lengths
    full = methods.advantages_of(world.rewards[nominal[:, None], group[nominal]]) / (per_step * GROUP)
    tokens = world.lengths[nominal[:, None], group[nominal]].sum()
    return Outcome(
        world.gradient(chosen, group[chosen], factors),
        world.gradient(nominal, group[nominal], full),
        len(chosen) / per_step,
        float(lengths.ravel()[decision.kept].sum() / tokens),
    )


def _config(method: str, settings: dict[str, Any]) -> Config:
    config = with_method(copy.deepcopy(_base()), method)
    for name, value in settings.items():
        level, key = name.split("_", 1)
        section: Any = config.pruning.prompt if level == "prompt" else config.pruning.completion
        if not hasattr(section, key):
            raise AttributeError(f"pruning.{level}.{key}")
        setattr(section, key, value)
    prompt = config.pruning.prompt
    config.pruning.prompt = replace(prompt, warmup_epochs=1.0, anneal_fraction=1.0, fixed_cost_ratio=1.0)
    config.pruning.completion.rollout_cost_ratio = 1.0
    return config


@lru_cache(maxsize=1)
def _base() -> Config:
    settings = "steps=1000000", f"rollout.prompts_per_step={PROMPTS}", f"rollout.completions_per_prompt={GROUP}"
    return read_config(str(REPOSITORY / "configs/quickstart.yaml"), list(settings))


# ------------------------------------------------------------------------------------------------- the others


def batches(world: World, seed: int) -> Iterable[tuple[IntArray, np.random.Generator]]:
    """The prompts of each step of an epoch."""
    rng = np.random.default_rng(seed)
    count = len(world.rewards)
    for rows in rng.permutation(count)[: count // PROMPTS * PROMPTS].reshape(-1, PROMPTS):
        yield rows, rng


Choose = Callable[[FloatArray, FloatArray, IntArray, np.random.Generator], FloatArray]
"""(rewards, advantages, lengths, each [prompts, G], rng) -> weights; 0: not trained on."""


def random_half(rewards: FloatArray, _a: FloatArray, _l: IntArray, rng: np.random.Generator) -> FloatArray:
    """Half of each group at random, weighted alike: the yardstick."""
    return np.where(rng.random(rewards.shape).argsort(1).argsort(1) < rewards.shape[1] // 2, 2.0, 0.0)


def cost_aware(draws: float) -> Choose:
    """Cost-aware GRPO with `draws` draws for each completion."""

    def choose(_r: FloatArray, advantages: FloatArray, lengths: IntArray, rng: np.random.Generator) -> FloatArray:
        count = round(draws * advantages.size)
        return methods.cost_aware(advantages.ravel(), lengths.ravel(), count, rng).reshape(lengths.shape)

    return choose


def pods_half(rewards: FloatArray, full: FloatArray, _l: IntArray, rng: np.random.Generator) -> FloatArray:
    """Weights that turn the full group's advantages into those of PODS's subset, in a mean over the subset."""
    subsets = np.stack([methods.pods(one, rewards.shape[1] // 2, rng)[1] for one in rewards])
    return np.asarray(2.0 * subsets / np.where(full != 0, full, 1.0))


def everything(rewards: FloatArray, _a: FloatArray, _l: IntArray, _g: np.random.Generator) -> FloatArray:
    """GRPO: no selection."""
    return np.ones(rewards.shape)


CHOICES: dict[str, Choose] = {
    "completions, random 50 %": random_half,
    "completions, cost_aware 50 %": cost_aware(0.5),
    "completions, cost_aware 200 %": cost_aware(2.0),
    "completions, pods 50 %": pods_half,
    "completions, nonzero": lambda _r, advantages, _l, _g: (advantages != 0).astype(np.float64),
    "completions, survivors": lambda rewards, _a, _l, _g: methods.divide_by_survivors(rewards),
}


def weighted(choose: Choose, kind: str = "unit", share: float = 1.0) -> Replay:
    """A method that gives each completion of a full batch a weight: choose(rewards, advantages, lengths, rng)."""

    def run(world: World, _: list[World], seed: int) -> Iterable[Outcome]:
        for rows, rng in batches(world, seed):
            group = world.groups(rows, GROUP, rng)
            at = rows[:, None], group
            advantages, lengths = methods.advantages_of(world.rewards[at]), world.lengths[at]
            weight = choose(world.rewards[at], advantages, lengths, rng)
            trained = share * float((lengths * (weight != 0)).sum() / lengths.sum())
            full = world.gradient(rows, group, advantages / advantages.size)
            yield Outcome(world.gradient(rows, group, weight * advantages / advantages.size, kind), full, 1.0, trained)

    return run


def uniform_prompts(rate: float) -> Replay:
    """A fixed number of prompts drawn at random, weighted by the inverse of their share: the yardstick."""

    def run(world: World, _: list[World], seed: int) -> Iterable[Outcome]:
        keep = round(PROMPTS * (1 - rate))
        for rows, rng in batches(world, seed):
            group = world.groups(rows, GROUP, rng)
            at = rows[:, None], group
            advantages, lengths = methods.advantages_of(world.rewards[at]), world.lengths[at]
            full = world.gradient(rows, group, advantages / advantages.size)
            some = rng.permutation(PROMPTS)[:keep]
            kept = world.gradient(rows[some], group[some], advantages[some] / (keep * GROUP))
            yield Outcome(kept, full, keep / PROMPTS, float(lengths[some].sum() / lengths.sum()))

    return run


@dataclass(frozen=True)
class Visit:
    """What a method remembers of each prompt's last group, [prompts]."""

    pass_rate: FloatArray
    spread: FloatArray
    """Standard deviation of A log pi(o)."""
    length: FloatArray

    @staticmethod
    def of(rewards: FloatArray, lengths: IntArray, logprob: FloatArray) -> Visit:
        """From arrays [prompts, n]."""
        spread = np.maximum((methods.advantages_of(rewards) * logprob).std(1), 1e-6)
        return Visit((rewards.sum(1) + 0.5) / (rewards.shape[1] + 1.0), spread, lengths.mean(1))


Plan = Callable[[Visit], tuple[IntArray, FloatArray]]
"""Rollouts of each prompt, and the weight of each rollout in the step's sum of A / len."""


def vip(budget: float) -> Plan:
    """VIP with this share of a full step's rollouts."""

    def plan(last: Visit) -> tuple[IntArray, FloatArray]:
        rollouts = round(budget * len(last.pass_rate) * GROUP)
        count = methods.vip_allocation(last.pass_rate, rollouts, 2, 2 * GROUP)
        return count, 1.0 / (len(count) * count)

    return plan


def half_groups(last: Visit) -> tuple[IntArray, FloatArray]:
    """Half as many rollouts of every prompt: the yardstick for allocations of half the rollouts."""
    count = np.full(len(last.pass_rate), GROUP // 2)
    return count, 1.0 / (len(count) * count)


def duet(budget: float) -> Plan:
    """DUET with this share of a full step's tokens."""

    def plan(last: Visit) -> tuple[IntArray, FloatArray]:
        tokens = budget * GROUP * float(last.length.sum())
        count, weight = methods.duet_allocation(last.spread, last.length, tokens, 2 * GROUP)
        return count, weight / count.sum()

    return plan


def allocated(plan: Plan, *, keep: float = 1.0) -> Replay:
    """As many rollouts of each prompt as `plan` computes from its last visit; `keep` below 1: with DUET's abort."""

    def run(world: World, earlier: list[World], seed: int) -> Iterable[Outcome]:
        before, exact = earlier[-1], world.expected()
        # the grace is 150 of the 1,024 tokens in the paper's jobs; here a completion has at most 56
        latest = float(np.quantile(before.lengths, 0.8)) + 150 / 1024 * 56
        for rows, rng in batches(world, seed):
            at = rows[:, None], before.groups(rows, GROUP, rng)
            count, weight = plan(Visit.of(before.rewards[at], before.lengths[at], before.logprob[at]))
            order = world.groups(rows, int(count.max()), rng)
            gradient, tokens = np.zeros_like(exact), 0.0
            for size in np.unique(count):
                mine = count == size
                at = rows[mine][:, None], order[mine, :size]
                rewards, lengths, own = world.rewards[at], world.lengths[at], weight[mine][:, None]
                if keep < 1:
                    aborted, inverse = methods.duet_abort(world.marker[at], lengths, latest, keep, rng)
                    rewards, own = np.where(aborted, 0.0, rewards), own * inverse * ~aborted
                gradient += world.gradient(rows[mine], order[mine, :size], own * methods.advantages_of(rewards))
                tokens += float((lengths * (own > 0)).sum())
            full = GROUP * world.lengths[rows].mean(1).sum()
            yield Outcome(gradient, exact, float(count.sum()) / (PROMPTS * GROUP), tokens / full)

    return run


def speed(screening: int) -> Replay:
    """A step is filled with prompts that pass the screening, in the order of the epoch."""

    def run(world: World, _: list[World], seed: int) -> Iterable[Outcome]:
        rng = np.random.default_rng(seed)
        order, exact = rng.permutation(len(world.rewards)), world.expected()
        group = world.groups(np.arange(len(world.rewards)), GROUP, rng)
        passes = methods.speed_screen(np.take_along_axis(world.rewards, group, 1), screening)
        start = 0
        while (reached := np.flatnonzero(np.cumsum(passes[order[start:]]) == PROMPTS)).size:
            seen = order[start : start + reached[0] + 1]
            start += len(seen)
            rows = seen[passes[seen]]
            advantages = methods.advantages_of(world.rewards[rows[:, None], group[rows]])
            gradient = world.gradient(rows, group[rows], advantages / advantages.size)
            generated = len(rows) * GROUP + (len(seen) - len(rows)) * screening
            tokens = world.lengths[rows[:, None], group[rows]].sum() / (PROMPTS * GROUP * world.lengths.mean())
            yield Outcome(gradient, exact, generated / (PROMPTS * GROUP), float(tokens))

    return run


# ------------------------------------------------------------------------------------------------- all of them

_ONE_LEVEL = {"prompts": {"completion_method": "none"}, "completions": {"prompt_method": "none"}}


def _prompts(method: str, rate: float = 0.5, **settings: Any) -> Replay:
    return package(method, prompt_rate=rate, **_ONE_LEVEL["prompts"], **settings)


def _completions(method: str, rate: float = 0.5, **settings: Any) -> Replay:
    none: dict[str, Any] = {"completion_max_design_effect": 0.0} if method == "dppo" else {}
    return package(method, completion_rate=rate, **_ONE_LEVEL["completions"], **(none | settings))


ROWS: dict[str, Replay] = {
    "prompts, uniform 50 %": uniform_prompts(0.5),
    "prompts, uniform 70 %": uniform_prompts(0.7),
    "prompts, dppo 15 %": _prompts("dppo", 0.15),
    "prompts, dppo 50 %": _prompts("dppo"),
    "prompts, dppo 70 %": _prompts("dppo", 0.7),
    "prompts, dppo 50 %, mean_abs": _prompts("dppo", prompt_score="mean_abs", prompt_cost_aware=False),
    "prompts, dppo 70 %, mean_abs": _prompts("dppo", 0.7, prompt_score="mean_abs", prompt_cost_aware=False),
    "prompts, dppo_paper 50 %": _prompts("dppo_paper"),
    "prompts, dppo_paper 70 %": _prompts("dppo_paper", 0.7),
    "prompts, infobatch 50 %": _prompts("infobatch"),
    "prompts, infobatch 70 %": _prompts("infobatch", 0.7),
    "prompts, greso": package("greso"),
    "prompts, greso_ht": _prompts("greso_ht"),
    "prompts, dynamic_sampling": package("dynamic_sampling"),
    "prompts, speed": speed(4),
    "prompts, groups of 4": allocated(half_groups),
    "prompts, vip 100 %": allocated(vip(1.0)),
    "prompts, vip 50 %": allocated(vip(0.5)),
    "prompts, duet 100 %, no abort": allocated(duet(1.0)),
    "prompts, duet 50 %, no abort": allocated(duet(0.5)),
    "prompts, duet 50 %": allocated(duet(0.5), keep=0.05),
    **{name: weighted(choose) for name, choose in CHOICES.items()},
    "completions, dppo 50 %": _completions("dppo"),
    "completions, dppo 70 %": _completions("dppo", 0.7),
    "completions, dppo as shipped": _completions("dppo", 0.95, completion_max_design_effect=1.1),
    "completions, dppo_paper 50 %": _completions("dppo_paper"),
    "completions, dppo_paper 70 %": _completions("dppo_paper", 0.7),
    "completions, cppo 50 %": _completions("cppo"),
    "completions, cppo_verl 50 %": _completions("cppo_verl"),
    "completions, infobatch 50 %": _completions("infobatch"),
    "completions, infobatch 70 %": _completions("infobatch", 0.7),
    "completions, max_variance 50 %": _completions("max_variance"),
    "tokens, first half": weighted(everything, "first_half", 0.5),
    "tokens, entropy 20 %": weighted(everything, "entropy", 0.2),
}
