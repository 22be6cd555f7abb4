"""Bias and variance of every selection's gradient, on what `record` has written.

    PYTHONPATH=benchmarks python -m referee.measure [--rows NAME ...] [--replays 300] [--json FILE]

A replay takes the training prompts in a shuffled order, as an epoch of the trainer does, draws a group of each from its
recorded completions, and lets the method choose. Methods that remember have seen the epoch before, played from what
was recorded eight steps earlier. E g of the full batch is known exactly: the mean over all groups that there are.

    bias   |E g_method - E g| / |E g|, by a U-statistic over replays that has no bias of its own; its standard error by
           the jackknife; 0.000 where the estimate of the square is negative
    scale  projection of E g_method on E g: what another step size would undo
    cos    between the two: what no step size undoes
    VR     tr Cov(g_method) / tr Cov(g), both over prompts, rollouts and draws, at equal length (divided by scale^2)
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.config.load import read_config
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.pruning import StepCost
from dppo_megatron.pruning.methods import with_method
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.types import FloatArray, IntArray
from referee import methods
from referee.record import KINDS, MEASURED, RECORDED, REPOSITORY

PROMPTS, GROUP = 64, 8
"""Of the quickstart's step."""


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
        with np.load(path) as file:
            designs = {name: file[name] for name in file if name.startswith("design_")}
            kinds = {kind: file[kind] for kind in KINDS} if gradients else {}
            columns = (file[name] for name in ("rewards", "lengths", "logit_grad_norm", "logprob", "marker"))
            return World(*columns, gradients=kinds, designs=designs)

    def rollouts(self, prompts: IntArray, chosen: IntArray) -> Rollouts:
        """Those of `chosen` [K, n] completions of `prompts` [K]."""
        at = prompts[:, None], chosen
        return Rollouts(self.rewards[at], self.lengths[at], self.logit_grad_norm[at])

    def groups(self, prompts: IntArray, size: int, rng: np.random.Generator) -> IntArray:
        """[K, size] different completions of each prompt."""
        return rng.random((len(prompts), self.rewards.shape[1])).argsort(1)[:, :size]

    def gradient(self, prompts: IntArray, chosen: IntArray, factors: FloatArray, kind: str = "unit") -> FloatArray:
        """sum of factors [K, n] times gradients."""
        rows = self.gradients[kind][np.repeat(prompts, chosen.shape[1]), chosen.ravel()]
        return np.asarray(factors.ravel() @ rows, dtype=np.float64)

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
    """Of a completion with this reward among `total`, of which `right` are right."""
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
    """Of the full batch: on the same rollouts where there is one, else its expectation."""
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
            earlier = []  # what chooses among completions remembers nothing
        config.seed = 10_000 + seed
        rng, per_step = np.random.default_rng(seed), config.rollout.prompts_per_step
        order = PromptOrder(count, seed)
        selector = Selector(config, count, order=order)
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
    # every prompt has a group, rolled out or not: a pair of gradients differs by the selection alone
    group = world.groups(np.arange(len(world.rewards)), GROUP, rng)
    while (more := selector.refill(world.rollouts(chosen, group[chosen]).rewards, step)) is not None:
        chosen = np.concatenate([chosen, more.prompt_index])
    decision = selector.finish(world.rollouts(chosen, group[chosen]), step)
    selector.feedback(StepCost(step, rollout_s=1.0, update_s=1.0, other_s=0.0, grad_norm=1.0))
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


# ------------------------------------------------------------------------------------------------- our own


def batches(world: World, seed: int) -> Iterable[tuple[IntArray, np.random.Generator]]:
    """The prompts of each step of an epoch."""
    rng = np.random.default_rng(seed)
    count = len(world.rewards)
    for rows in rng.permutation(count)[: count // PROMPTS * PROMPTS].reshape(-1, PROMPTS):
        yield rows, rng


def weighted(choose: Callable[..., FloatArray], kind: str = "unit") -> Replay:
    """A method that gives each completion of a full batch a weight: choose(rewards, advantages, lengths, rng)."""

    def run(world: World, _: list[World], seed: int) -> Iterable[Outcome]:
        for rows, rng in batches(world, seed):
            group = world.groups(rows, GROUP, rng)
            at = rows[:, None], group
            advantages, lengths = methods.advantages_of(world.rewards[at]), world.lengths[at]
            weight = choose(world.rewards[at], advantages, lengths, rng)
            share = float((lengths * (weight != 0)).sum() / lengths.sum())
            full = world.gradient(rows, group, advantages / advantages.size)
            yield Outcome(world.gradient(rows, group, weight * advantages / advantages.size, kind), full, 1.0, share)

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


def random_completions(rate: float) -> Replay:
    """Half of each group at random, weighted alike: the yardstick."""

    def choose(rewards: FloatArray, _a: FloatArray, _l: IntArray, rng: np.random.Generator) -> FloatArray:
        keep = round(rewards.shape[1] * (1 - rate))
        return (rng.random(rewards.shape).argsort(1).argsort(1) < keep) * (rewards.shape[1] / keep)

    return weighted(choose)


def _cost_aware(share: float) -> Replay:
    def choose(_r: FloatArray, advantages: FloatArray, lengths: IntArray, rng: np.random.Generator) -> FloatArray:
        draws = round(share * advantages.size)
        return methods.cost_aware(advantages.ravel(), lengths.ravel(), draws, rng).reshape(lengths.shape)

    return weighted(choose)


def _pods(keep: int) -> Replay:
    def choose(rewards: FloatArray, full: FloatArray, _l: IntArray, rng: np.random.Generator) -> FloatArray:
        weight = np.zeros(rewards.shape)
        for row, group in enumerate(rewards):
            kept, advantages = methods.pods(group, keep, rng)
            scale = np.where(full[row] != 0, full[row], 1.0)
            weight[row] = kept * advantages / scale * (len(group) / keep)
        return weight

    return weighted(choose)


def _allocated(
    plan: Callable[[World, IntArray, IntArray], tuple[IntArray, FloatArray]], *, keep: float = 1.0
) -> Replay:
    """n_q rollouts of each prompt, planned from the last visit: plan(earlier world, prompts, groups) -> n_q, weights.

    weights [prompts] are of each rollout, so that the gradient is sum_q weight sum_i A / len. keep below 1: DUET's
    abort.
    """

    def run(world: World, earlier: list[World], seed: int) -> Iterable[Outcome]:
        before, exact = earlier[-1], world.expected()
        latest = float(np.quantile(before.lengths, 0.8)) + 150 / 1024 * 56
        for rows, rng in batches(world, seed):
            count, weight = plan(before, rows, before.groups(rows, GROUP, rng))
            order = world.groups(rows, int(count.max()), rng)
            gradient, tokens = np.zeros_like(exact), 0.0
            for size in np.unique(count):
                mine = count == size
                at = rows[mine][:, None], order[mine, :size]
                rewards, lengths, own = world.rewards[at], world.lengths[at], weight[mine][:, None]
                if keep < 1:
                    aborted, inverse = methods.duet_abort(world.marker[at], lengths, latest, keep, rng)
                    rewards, own = np.where(aborted, 0.0, rewards), own * inverse * ~aborted
                factors = own * methods.advantages_of(rewards)
                gradient += world.gradient(rows[mine], order[mine, :size], factors)
                tokens += float((lengths * (own > 0)).sum())
            full = GROUP * world.lengths[rows].mean(1).sum()
            yield Outcome(gradient, exact, float(count.sum()) / (PROMPTS * GROUP), tokens / full)

    return run


def _vip(budget: float) -> Replay:
    def plan(before: World, rows: IntArray, group: IntArray) -> tuple[IntArray, FloatArray]:
        rewards = before.rewards[rows[:, None], group]
        pass_rate = (rewards.sum(1) + 0.5) / (GROUP + 1.0)
        count = methods.vip_allocation(pass_rate, round(budget * PROMPTS * GROUP), 2, 2 * GROUP)
        return count, 1.0 / (PROMPTS * count)

    return _allocated(plan)


def _duet(budget: float, keep: float) -> Replay:
    def plan(before: World, rows: IntArray, group: IntArray) -> tuple[IntArray, FloatArray]:
        at = rows[:, None], group
        spread = np.maximum((methods.advantages_of(before.rewards[at]) * before.logprob[at]).std(1), 1e-6)
        length = before.lengths[at].mean(1)
        tokens = budget * PROMPTS * GROUP * length.mean()
        count, weight = methods.duet_allocation(spread, length, tokens, 2 * GROUP)
        return count, weight / count.sum()

    return _allocated(plan, keep=keep)


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


def _ones(rewards: FloatArray, advantages: FloatArray, lengths: IntArray, rng: np.random.Generator) -> FloatArray:
    return np.ones(rewards.shape)


def _survivors(rewards: FloatArray, advantages: FloatArray, lengths: IntArray, rng: np.random.Generator) -> FloatArray:
    return methods.divide_by_survivors(rewards)


def _nonzero(rewards: FloatArray, advantages: FloatArray, lengths: IntArray, rng: np.random.Generator) -> FloatArray:
    return (advantages != 0).astype(np.float64)


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
    "prompts, vip 100 %": _vip(1.0),
    "prompts, vip 50 %": _vip(0.5),
    "prompts, duet 100 %, no abort": _duet(1.0, 1.0),
    "prompts, duet 50 %, no abort": _duet(0.5, 1.0),
    "prompts, duet 50 %": _duet(0.5, 0.05),
    "completions, random 50 %": random_completions(0.5),
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
    "completions, pods 50 %": _pods(4),
    "completions, cost_aware 50 %": _cost_aware(0.5),
    "completions, nonzero": weighted(_nonzero),
    "completions, survivors": weighted(_survivors),
    "tokens, first half": weighted(_ones, "first_half"),
    "tokens, entropy 20 %": weighted(_ones, "entropy"),
}


# ------------------------------------------------------------------------------------------------- figures


def judge(replays: list[list[Outcome]], exact: FloatArray) -> dict[str, float]:
    """Figures of one method; each replay is a block that is independent of the others."""
    replays = [block for block in replays if block]
    shift = np.stack([np.mean([o.gradient - o.full for o in block], axis=0) for block in replays])
    squared = np.array([np.mean([o.gradient @ o.gradient for o in block]) for block in replays])
    # the full batch's own: where a method has none of the same rollouts, the variance comes from elsewhere
    base = np.array([np.mean([(o.full - exact) @ (o.full - exact) for o in block]) for block in replays])
    whole = _figures(shift.sum(0), (shift * shift).sum(), squared.sum(), base.sum(), len(replays), exact)
    left = [
        _figures(
            shift.sum(0) - s, (shift * shift).sum() - s @ s, squared.sum() - q, base.sum() - b, len(replays) - 1, exact
        )
        for s, q, b in zip(shift, squared, base, strict=True)
    ]
    count = len(replays)
    figures = dict(zip(FIGURES, whole, strict=True))
    for place, name in enumerate(FIGURES):
        values = np.array([one[place] for one in left])
        figures[f"{name}_error"] = float(np.sqrt((count - 1) / count * np.sum((values - values.mean()) ** 2)))
    bias2, error2 = figures.pop("bias2"), figures.pop("bias2_error")
    figures["bias"] = float(np.sqrt(max(bias2, 0.0)))
    figures["bias_error"] = error2 / (2 * figures["bias"]) if bias2 > error2 else float(np.sqrt(error2))
    flat = [o for block in replays for o in block]
    figures["generated"] = float(np.mean([o.generated for o in flat]))
    figures["trained"] = float(np.mean([o.trained for o in flat]))
    return figures


FIGURES = ("bias2", "scale", "cos", "variance", "variance_full")


def _figures(
    total: FloatArray, squares: float, squared: float, base: float, count: int, exact: FloatArray
) -> tuple[float, ...]:
    """From sums over blocks: |E shift|^2 / |E g|^2, scale, cosine, tr Cov(g_method), tr Cov(g)."""
    norm2 = float(exact @ exact)
    bias2 = (float(total @ total) - squares) / (count * (count - 1))
    along = float(total @ exact) / count
    scale = 1.0 + along / norm2
    mean2 = norm2 + 2 * along + bias2
    cosine = scale * np.sqrt(norm2 / mean2) if mean2 > 0 else float("nan")
    return bias2 / norm2, scale, min(float(cosine), 1.0), squared / count - mean2, base / count


def token_rows(world: World, variance: float) -> dict[str, dict[str, float]]:
    """NAT: no bias, and its added variance exactly, from every token's gradient of some completions.

    The draws of different completions are independent, so a batch's design variance is the sum of theirs, each times
    its advantage squared; it is scaled up by the share of all squared gradients that those completions have.
    """
    power = world.mean_power(2)
    at = np.unravel_index(world.designs["design_index"], world.rewards.shape)
    d = {name.removeprefix("design_"): power[at] * values for name, values in world.designs.items()}
    moment = float((power * np.square(world.gradients["unit"], dtype=np.float64).sum(-1)).mean()) / (PROMPTS * GROUP)
    shares = {"tokens, nat uniform 50 %": ("uniform", 0.5)}
    shares["tokens, nat prefix"] = "prefix", float(world.designs["design_prefix_tokens"].mean())
    found = {}
    for name, (added, share) in shares.items():
        growth = float(d[added].sum() / d["squared"].sum())
        error = float(np.std(d[added] - growth * d["squared"]) / d["squared"].mean() / np.sqrt(len(at[0])))
        found[name] = dict.fromkeys(("bias", "bias_error"), 0.0) | dict.fromkeys(("scale", "cos", "generated"), 1.0)
        found[name] |= {"trained": share, "variance_ratio": 1 + growth * moment / variance}
        found[name] |= {"variance_ratio_error": error * moment / variance}
    return found


def read_worlds(directory: Path, after: int) -> tuple[World, list[World]]:
    """The policy after so many steps, and those that up to three earlier epochs were rolled out with."""
    earlier = [step for step in RECORDED if step < after][-3:]
    history = [World.read(directory / f"step_{step:03d}.npz", gradients=False) for step in earlier]
    return World.read(directory / f"step_{after:03d}.npz", gradients=True), history


def measure(directory: Path, rows: Iterable[str], replays: int, after: int) -> dict[str, dict[str, float]]:
    """Figures of `rows` on the policy after so many steps."""
    world, earlier = read_worlds(directory, after)
    exact = world.expected()
    grpo = judge([list(weighted(_ones)(world, earlier, seed)) for seed in range(replays)], exact)
    variance = grpo["variance_full"]
    found: dict[str, dict[str, float]] = {}
    for name in rows:
        one = judge([list(ROWS[name](world, earlier, seed)) for seed in range(replays)], exact)
        # of the same replays where they have a full batch: what both share then cancels
        full = one["variance_full"] or variance
        one["variance_ratio"] = one["variance"] / full / one["scale"] ** 2
        one["variance_ratio_error"] = one["variance_error"] / full / one["scale"] ** 2
        found[name] = one
        print(_line(after, name, one), flush=True)
    extra = token_rows(world, variance) if world.designs else {}
    for name, one in extra.items():
        print(_line(after, name, one), flush=True)
    snr = {"signal_to_noise": float(exact @ exact) / variance, "mean_reward": float(world.rewards.mean())}
    return found | extra | {"grpo": grpo | snr}


def _line(after: int, name: str, one: dict[str, float]) -> str:
    return (
        f"| {after} | {name} | {one['bias']:.3f} ± {one['bias_error']:.3f} | {one['scale']:.2f} | {one['cos']:.4f}"
        f" | {one['variance_ratio']:.2f} ± {one['variance_ratio_error']:.2f} | {one['generated']:.0%}"
        f" | {one['trained']:.0%} |"
    )


def main() -> None:
    """Print a line for each row and step, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--world", type=Path, default=REPOSITORY / "runs" / "referee", help="what `record` wrote")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="default: all")
    parser.add_argument("--after", nargs="+", type=int, choices=MEASURED, default=list(MEASURED), help="steps")
    parser.add_argument("--replays", type=int, default=300, help="epochs played of each (default: 300)")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    arguments = parser.parse_args()
    print("| after | row | bias | scale | cos | VR | generated | trained |\n|---|---|---|---|---|---|---|---|")
    found = {after: measure(arguments.world, arguments.rows, arguments.replays, after) for after in arguments.after}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
