"""A step of a random configuration, its full-batch coefficients by definition, and expectations over every draw.

Kept apart from the tests because three of them use it. Nothing here reads a label. The coefficients are computed one
completion at a time from the formulas of docs/objectives.md, for the configuration without pruning; the expectation is
a sum over all draws of the design, found by steering the uniform numbers that the selector asks for:

- a systematic draw is piecewise constant in its start, so one run in each piece and the piece's length integrate it;
- independent coins are enumerated, 2^k patterns of the k rows that chance decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
from label_configs import check_sections, few_long, make_config, make_features, make_outcomes, takes_unit_rewards

from dppo_megatron import randomness
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.planner import TokenCapacity
from dppo_megatron.pruning import StepCost, interface, prompt_baselines
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.types import UserError

SEED = 20261122
ALMOST_ONE = 1.0 - 2.0**-53


@dataclass
class Case:
    """A selector somewhere in a run, and what each prompt's rollout would come to in the next step."""

    config: Config
    selector: Selector
    step: int
    state: dict[str, Any]
    outcomes: Rollouts
    """[num_prompts, G], a row for each prompt."""
    stopped: tuple[int, ...] = ()
    """Positions in them of the completions that were stopped early."""

    def run(self, outcomes: Rollouts | None = None) -> TrainSelection:
        """The step from the same state, with whatever the uniform numbers are now."""
        table = self.as_stopped(outcomes or self.outcomes)
        self.selector.load_state_dict(self.state)
        rows = self.selector.begin(self.step).prompt_index
        while (more := self.selector.refill(table.rewards[rows], self.step)) is not None:
            rows = np.concatenate([rows, more.prompt_index])
        wide = selection_settings(self.config).widest_group
        return _as_asked(self.selector.finish(_rows_of(table, rows, wide), self.step), table.rewards.shape[1])

    def as_stopped(self, table: Rollouts) -> Rollouts:
        """As it comes from the engine, if completions may be stopped early and these were."""
        early = self.config.pruning.early_stop
        if not early.after_tokens:
            return table
        gone = np.isin(np.arange(table.rewards.size), self.stopped).reshape(table.rewards.shape)
        return replace(
            table,
            rewards=np.where(gone, np.nan, table.rewards),
            lengths=np.where(gone, early.after_tokens, table.lengths),
            unfinished=gone,
            stands_for=np.where(gone, 0.0, self.counts(table)),
        )

    def counts(self, table: Rollouts) -> np.ndarray:
        """[num_prompts, G] 1 over the probability that a completion comes to its end, by definition."""
        early = self.config.pruning.early_stop
        if not early.after_tokens:
            return np.ones(table.lengths.shape)
        share = [
            max(min(1.0, early.after_tokens / n), early.min_inclusion_prob) for n in table.lengths.ravel().tolist()
        ]
        return 1.0 / np.array(share).reshape(table.lengths.shape)

    def endings(self) -> Iterator[float]:
        """The chance of each pattern of those that are stopped early and those that are not; `stopped` is it."""
        ends = 1.0 / self.counts(self.outcomes).ravel()
        chance = np.flatnonzero(ends < 1).tolist()
        for pattern in itertools.product((False, True), repeat=len(chance)):
            self.stopped = tuple(itertools.compress(chance, pattern))
            yield math.prod(1 - ends[at] if gone else ends[at] for at, gone in zip(chance, pattern, strict=True))
        self.stopped = ()


def accepted(index: int) -> tuple[np.random.Generator, Selector, Config, int]:
    """The configuration of this number, its selector and its number of problems: refused settings are drawn anew."""
    rng = np.random.default_rng((SEED, index))
    while True:
        config = make_config(rng)
        num_prompts = config.rollout.prompts_per_step * int(rng.choice([1, 1, 2])) + int(rng.integers(0, 3))
        num_prompts *= 4 if config.pruning.completion.allocation else 1
        room = TokenCapacity(PackingLayout(data_parallel=int(rng.integers(1, 3))), 40) if rng.random() < 0.5 else None
        try:
            check_sections(config)
            selector = Selector(
                selection_settings(config), num_prompts, capacity=room, features=make_features(rng, num_prompts)
            )
        except UserError:
            continue
        if config.pruning.prompt.group_size_factor == 2:  # groups of G in wider arrays: a size's draws are answers
            selector._prompt_policy.expected = lambda ids, step: None  # type: ignore[method-assign]
        if selector.prompts_per_step <= 8:
            return rng, selector, config, num_prompts


def make_case(index: int) -> Case:
    """The case of this number: up to six steps of its configuration are played."""
    rng, selector, config, num_prompts = accepted(index)
    binary = takes_unit_rewards(config)
    size = config.rollout.completions_per_prompt
    early = config.pruning.early_stop.after_tokens

    def outcomes() -> Rollouts:
        made = make_outcomes(rng, num_prompts, size, binary=binary)
        return few_long(rng, made, early) if early else made

    case = Case(config, selector, 1, selector.state_dict(), outcomes())
    for step in range(1, int(rng.integers(2, 8))):
        case.outcomes = outcomes()
        case.run()
        for ahead in range(1, int(rng.integers(0, config.rollout.async_steps + 1)) + 1):
            selector.begin(step + ahead)
        selector.feedback(StepCost(step, 2.0, float(rng.uniform(0.1, 5)), 0.5))
        case.step, case.state = step + 1, selector.state_dict()
    if "monitor" in case.state["prompt"] and rng.random() < 0.1:
        case.state["prompt"]["monitor"]["believed"] = False  # what 48 groups of a bad score come to
    case.outcomes = outcomes()
    return case


def _rows_of(table: Rollouts, rows: np.ndarray, width: int) -> Rollouts:
    """In arrays of `width` columns, of which only those of the table were asked for."""

    def wide(values: np.ndarray, nothing: Any) -> np.ndarray:
        return np.pad(values[rows], ((0, 0), (0, width - values.shape[1])), constant_values=nothing)

    tokens, truncated, by_chance = table.prompt_tokens, table.truncated, table.by_chance
    unfinished, counts = table.unfinished, table.stands_for
    return Rollouts(
        wide(table.rewards, np.nan),
        wide(table.lengths, 0),
        wide(table.logit_grad_norm, 0.0),
        None if tokens is None else tokens[rows],
        None if truncated is None else wide(truncated, False),
        None if unfinished is None else wide(unfinished, True),
        None if by_chance is None else wide(by_chance, False),
        None if counts is None else wide(counts, 1.0),
    )


def _as_asked(decision: TrainSelection, size: int) -> TrainSelection:
    """Without the columns behind `size`, in which nothing is kept."""
    groups = len(decision.prompts.prompt_index)
    names = ("kept", "weight", "advantages", "denominator", "minibatch", "completion_prob")
    columns = {name: getattr(decision, name).reshape(groups, -1 if groups else size) for name in names}
    assert not columns["kept"][:, size:].any()
    return replace(decision, **{name: column[:, :size].ravel() for name, column in columns.items()})


# ---------------------------------------------------------------------- coefficients of the full batch


def planned_prompts(config: Config) -> int:
    """Nominal prompts of a step: with allocation so many more that what is kept of them fills the update."""
    pruning, nominal = config.pruning.completion, config.rollout.prompts_per_step
    rate = Fraction(1, 2) if pruning.rate is None else Fraction(str(pruning.rate))
    return math.floor(nominal / (1 - rate)) if pruning.allocation else nominal


def missing_weights(case: Case) -> np.ndarray:
    """[num_prompts, G] what each completion stands for, by definition: 0 of one without a reward or without a mate that
    has one; else G over those that are left, over the share of groups that earlier steps did not lose."""
    table, size = case.outcomes, case.outcomes.rewards.shape[1]
    kept = 1.0 if is_resampled(case) else 1.0 - min(case.state["missing"]["lost_share"][0], 0.5)
    weight = np.zeros(table.rewards.shape)
    for q, row in enumerate(table.rewards.tolist()):
        there = [i for i, reward in enumerate(row) if not math.isnan(reward)]
        weight[q, there] = size / len(there) / kept if len(there) > 1 else 0.0
    return weight


def full_coefficients(case: Case, nominal: np.ndarray) -> tuple[dict[tuple[int, int], float], dict[Any, float]]:
    """A / D and 1 / D of every completion of the nominal prompts, without any pruning, by definition; of those that are
    missing, what their group mates stand for."""
    objective, table = case.config.objective, case.outcomes
    size, updates = table.rewards.shape[1], objective.updates_per_step
    limit = case.config.rollout.sampling.max_completion_tokens
    share = planned_prompts(case.config) // updates
    centred: dict[tuple[int, int], float] = {}
    prior = prior_of(case) if objective.advantage == "posterior_loo" else {}
    for q in nominal.tolist():
        rewards, lost = {}, {}
        for i in range(size):
            length, buffer = int(table.lengths[q, i]), objective.overlong.buffer_tokens
            over = min(max(length - (limit - buffer), 0) / buffer, 1.0) if buffer else 0.0
            if not np.isnan(table.rewards[q, i]):
                lost[i] = objective.overlong.penalty * over
                rewards[i] = table.rewards[q, i] - lost[i]
        mean = sum(rewards.values()) / max(len(rewards), 1)
        varies = len(set(rewards.values())) > 1
        deviation = (sum((r - mean) ** 2 for r in rewards.values()) / max(len(rewards), 1)) ** 0.5
        for i in range(size):
            value = rewards[i] - mean if i in rewards and varies else 0.0
            if objective.advantage == "group_std" and varies:
                value /= deviation + objective.advantage_eps
            if objective.advantage == "rloo" and varies:
                value = rewards[i] - (sum(rewards.values()) - rewards[i]) / (len(rewards) - 1) if i in rewards else 0.0
            if objective.advantage == "posterior_loo":
                value = posterior_value(case, prior[q], lost, q, i) if i in rewards else 0.0
            centred[q, i] = value
    if objective.advantage == "reinforce_baseline":
        graded = sum(int((~np.isnan(table.rewards[q])).sum()) for q in nominal.tolist())
        deviation = (sum(value**2 for value in centred.values()) / max(graded, 1)) ** 0.5
        scale = deviation + objective.advantage_eps if deviation > 0 else 1.0
        centred = {key: value / scale for key, value in centred.items()}
    if objective.advantage in ("group_mean", "reinforce_baseline"):  # its own share of the mean is that of a full group
        left = np.maximum((~np.isnan(table.rewards)).sum(axis=1), 2)
        centred = {key: value * (1 - 1 / size) / (1 - 1 / left[key[0]]) for key, value in centred.items()}
    coefficient, inverse, weight = {}, {}, missing_weights(case)
    for position, q in enumerate(nominal.tolist()):
        mine = nominal[position // share * share : position // share * share + share]
        for i in range(size):
            divisor = {
                "sequence_mean": share * size * int(table.lengths[q, i]),
                "token_mean": int(table.lengths[mine].sum()),
                "constant": share * size * limit,
            }[objective.normalization]
            coefficient[q, i], inverse[q, i] = weight[q, i] * centred[q, i] / divisor, weight[q, i] / divisor
    return coefficient, inverse


def prior_of(case: Case) -> dict[int, tuple[float, float]]:
    """The Beta parameters of every prompt when the step begins: evidence fades with the epochs since its last visit
    beyond the first."""
    settings, state = case.config.pruning.prompt, case.state
    case.selector.load_state_dict(state)
    case.selector.begin(case.step)  # which learns of the steps that may be known by now
    past = case.selector._prompt_policy.history.arrays
    epoch, found = len(past["visits"]) / planned_prompts(case.config), {}
    for q in range(len(past["visits"])):
        age = max(case.step - 1 - int(past["last_step"][q]), 0) / epoch if past["visits"][q] else 0.0
        fade = settings.discount ** max(age - 1.0, 0.0)
        counts = past["successes"][q], past["failures"][q]
        found[q] = tuple(settings.prior + fade * (count - settings.prior) for count in counts)
    return found


def posterior_value(case: Case, prior: tuple[float, float], lost: dict[int, float], q: int, i: int) -> float:
    """A of completion i of prompt q, of whose group those in `lost` are there: less the posterior's mean given the
    others, whose difference from the others' mean is divided by their lengths and not by its own. What is lost by
    length is against the others' mean."""
    rewards = {j: float(case.outcomes.rewards[q, j]) for j in lost}
    others = {j: reward for j, reward in rewards.items() if j != i}
    if not others:
        return 0.0
    total, mean = sum(others.values()), sum(others.values()) / len(others)
    shift = (prior[0] + total) / (sum(prior) + len(others)) - mean
    if case.config.objective.normalization == "sequence_mean":
        shift *= case.outcomes.lengths[q, i] * sum(1 / case.outcomes.lengths[q, j] for j in others) / len(others)
    return float(rewards[i] - mean - shift - lost[i] + sum(lost[j] for j in others) / len(others))


def drawn_coefficients(decision: TrainSelection) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """W A / D and W / D of every completion that one draw trains on."""
    size = len(decision.kept) // max(len(decision.prompts.prompt_index), 1)
    coefficient, inverse = {}, {}
    for row in np.flatnonzero(decision.kept).tolist():
        key = (int(decision.prompts.prompt_index[row // size]), row % size)
        coefficient[key] = float(decision.weight[row] * decision.advantages[row] / decision.denominator[row])
        inverse[key] = float(decision.weight[row] / decision.denominator[row])
    return coefficient, inverse


# ---------------------------------------------------------------------------------- every draw of a step

Place = tuple[str, int]
"""`prompt` or `completion`, and the mini-batch."""


@dataclass
class Dice:
    """The uniform numbers of a step: given where `starts` or `coins` say so, the selector's own elsewhere."""

    starts: dict[Place, float] = field(default_factory=dict)
    coins: dict[Place, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    asked: dict[Place, tuple[str, np.ndarray, np.ndarray]] = field(default_factory=dict)
    """What was drawn in the latest run: design, probabilities, order or ids."""
    ties: int = 0
    """Which tie-breaks, of the methods that leave only those to chance; 0: the selector's own."""
    breaks: tuple[str, ...] = ()
    """`prompt tie` and `completion tie`, if it is so of that level."""
    _now: Place = ("", 0)

    def generator(self, seed: int, purpose: str, *counters: int) -> Any:
        """In the place of `randomness.generator`."""
        real = randomness.generator(seed, purpose, *counters)
        self._now = (purpose.split()[0], counters[-1])
        start = self.starts.get(self._now) if purpose.endswith("start") else None
        if start is None:
            return real
        return type("Start", (), {"random": lambda _: start})()

    def uniforms(self, seed: int, purpose: str, ids: np.ndarray, *counters: int) -> np.ndarray:
        """In the place of `randomness.uniforms`."""
        place = (purpose.split()[0], counters[-1])
        self._now = place
        seed += self.ties if purpose in self.breaks else 0
        if purpose.endswith("coin") and place in self.coins:
            return self.coins[place](ids)
        return randomness.uniforms(seed, purpose, ids, *counters)

    def draw(self, design: str, pi: np.ndarray, *, order: np.ndarray, start: float, uniform: np.ndarray) -> Any:
        """In the place of `designs.draw`: the real one, and a note of what it was asked."""
        self.asked[self._now] = (design, pi, order)
        return _REAL_DRAW(design, pi, order=order, start=start, uniform=uniform)

    def greso_coins(self, seed: int, purpose: str, ids: np.ndarray, *counters: int) -> np.ndarray:
        """In the place of GRESO's `uniforms`; its own comparison keeps where the number is large."""
        self.asked["prompt", counters[-1]] = ("greso", np.empty(0), ids)
        return self.uniforms(seed, purpose, ids, *counters)

    @contextmanager
    def rolled(self) -> Iterator[Dice]:
        """While the selector takes its numbers from here."""
        with (
            patch.object(interface, "generator", self.generator),
            patch.object(interface, "uniforms", self.uniforms),
            patch.object(prompt_baselines, "uniforms", self.greso_coins),
            patch.object(interface, "draw", self.draw),
        ):
            yield self


_REAL_DRAW = interface.draw


def every_draw(case: Case, dice: Dice, place: Place) -> Iterator[tuple[float, TrainSelection]]:
    """(probability, decision) of every draw at one place, everything else as `dice` has it. Run within `rolled`."""
    dice.asked.pop(place, None)
    decision = case.run()
    if place not in dice.asked:  # nothing is left to chance there
        yield 1.0, decision
        return
    design, pi, rows = dice.asked[place]
    if design == "systematic":
        inside = pi[rows][(pi[rows] > 0) & (pi[rows] < 1)]
        edges = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(inside) % 1.0]))
        for low, high in itertools.pairwise(edges.tolist()):
            if high - low > 1e-11:  # a shorter piece is rounding between two equal edges
                dice.starts[place] = 0.5 * (low + high)
                yield high - low, case.run()
        dice.starts.pop(place, None)
        return
    greso = design == "greso"
    if greso:  # all coins high keep whatever can be kept, and the decision tells its probabilities
        dice.coins[place] = lambda ids: np.full(len(ids), ALMOST_ONE)
        prompts = case.run().prompts
        known = dict(zip(prompts.prompt_index.tolist(), prompts.inclusion_prob.tolist(), strict=True))
        pi = np.array([known[q] for q in rows.tolist()])
    chance = np.flatnonzero((pi > 0) & (pi < 1))
    assert len(chance) <= 9, "too many coins to enumerate"
    for pattern in itertools.product((False, True), repeat=len(chance)):
        keep = np.ones(len(pi), dtype=bool)
        keep[chance] = pattern
        # as near to the edge as there is a number: a coin that is compared with another probability comes out wrong
        edge = 1.0 - pi if greso else pi
        coins = np.where(keep == greso, edge, np.nextafter(edge, 0.0))
        coins[pi == 1.0] = 0.5  # a certain row is kept whatever its coin
        coins[pi == 0.0] = 0.5
        dice.coins[place] = lambda ids, coins=coins: coins
        yield float(np.prod(np.where(pattern, pi[chance], 1 - pi[chance]))), case.run()
    dice.coins.pop(place, None)


@dataclass
class Expected:
    """Over every draw of a step."""

    coefficient: dict[tuple[int, int], float]
    inverse: dict[tuple[int, int], float]
    frequency: dict[tuple[int, int], float]
    """P(kept) over the product of the probabilities that the decisions tell: 1 where those are true."""
    counted: dict[tuple[int, int], float]
    """E[figure weight]."""
    labels: set[tuple[tuple[str, str], ...]]
    """Every ledger that came up, as (name, label) pairs."""
    decisions: list[TrainSelection]
    chances: list[float]
    """Of each decision; they add up to the number of mini-batches."""
    total: float
    """Sum of the probabilities over mini-batches, to be their number."""

    def add(self, case: Case, minibatch: int, chance: float, decision: TrainSelection) -> None:
        """One draw of a mini-batch."""
        self.labels.add(tuple((row.name, row.label) for row in decision.ledger))
        self.decisions.append(decision)
        self.chances.append(chance)
        self.total += chance
        share = planned_prompts(case.config) // case.config.objective.updates_per_step
        mine = set(decision.offered[minibatch * share : (minibatch + 1) * share].tolist())
        mine = mine if not is_resampled(case) else set(range(len(case.outcomes.rewards)))
        drawn = *drawn_coefficients(decision), _inverse_probabilities(decision), _counted(decision)
        means = self.coefficient, self.inverse, self.frequency, self.counted
        for totals, values in zip(means, drawn, strict=True):
            for key, value in values.items():
                if key[0] in mine:
                    totals[key] = totals.get(key, 0.0) + chance * value


def expectation(case: Case, *, ties: int = 0) -> Expected:
    """E[W A / D] and E[W / D], mini-batch by mini-batch: their draws are independent of each other."""
    found = Expected({}, {}, {}, {}, set(), [], [], 0.0)
    updates = case.config.objective.updates_per_step
    for minibatch in range(updates):
        for chance in case.endings():
            dice = Dice(ties=ties, breaks=deterministic_levels(case.config))
            with dice.rolled():
                for outer, _ in every_draw(case, dice, ("prompt", minibatch)):
                    for inner, decision in every_draw(case, dice, ("completion", minibatch)):
                        found.add(case, minibatch, chance * outer * inner, decision)
    return found


def _inverse_probabilities(decision: TrainSelection) -> dict[tuple[int, int], float]:
    size = max(len(decision.kept) // max(len(decision.prompts.prompt_index), 1), 1)
    rows = np.flatnonzero(decision.kept)
    both = decision.prompts.inclusion_prob[rows // size] * decision.completion_prob[rows]
    keys = zip(decision.prompts.prompt_index[rows // size].tolist(), (rows % size).tolist(), strict=True)
    return dict(zip(keys, (1.0 / both).tolist(), strict=True))


def deterministic_levels(config: Config) -> tuple[str, ...]:
    """The tie-breaks of methods that keep what looks best: `prompt tie`, `completion tie`."""
    prompt, completion = config.pruning.prompt.method, config.pruning.completion.method
    best = ("cppo", "cppo_trl", "cppo_verl", "dppo_paper", "max_variance")
    return ("prompt tie",) * (prompt in best) + ("completion tie",) * (completion in best)


def _counted(decision: TrainSelection) -> dict[tuple[int, int], float]:
    """Figure weight of every completion that was rolled out."""
    size = len(decision.kept) // max(len(decision.prompts.prompt_index), 1)
    keys = ((q, i) for q in decision.prompts.prompt_index.tolist() for i in range(size))
    return dict(zip(keys, decision.figure_weight.tolist(), strict=True))


def is_resampled(case: Case) -> bool:
    """Rewards decide which groups go on; such a method is never compared with the full batch."""
    return case.config.pruning.prompt.method in ("greso", "dynamic_sampling")


def small_config(prompt: str = "none", completion: str = "none") -> Config:
    """Of four prompts with three completions of at most twelve tokens, with these pruning methods."""
    config = Config(steps=400)
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 4, 3
    config.rollout.sampling.max_completion_tokens = 12
    config.pruning.prompt.method, config.pruning.completion.method = prompt, completion
    config.pruning.prompt.warmup_epochs = 0.0
    return config
