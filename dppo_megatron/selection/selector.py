"""All the choosing of a step: order, prompt policy, advantages, completion policy, weights, ledger.

Only arrays: the training loop runs it on rank 0 with what the engine made, and `simulate` on a recorded trace.

With several optimizer updates a step, nominal prompts are assigned to mini-batches by their position before anything is
selected. Each mini-batch has its own draws, made independently, and its own denominators: the draws of update 2 are
then independent of the policy that update 1 produced, which keeps update 2 unbiased (docs/objectives.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from dppo_megatron.config.checks import check_selection, planned_prompts, too_few_prompts
from dppo_megatron.config.objective import zero_advantage_slope
from dppo_megatron.config.resolved_sets import train_set_weights
from dppo_megatron.config.schema import Config
from dppo_megatron.data.order import Order, make_order
from dppo_megatron.pruning import (
    CompletionBatch,
    Selection,
    make_completion_policy,
    make_prompt_policy,
)
from dppo_megatron.pruning.interface import PromptFeatures, StepCapacity, StepCost, check_outcomes, check_state
from dppo_megatron.pruning.monitors import DeclaredTest, deviations, step_metrics
from dppo_megatron.pruning.policies import check_methods
from dppo_megatron.pruning.variance import step_variance
from dppo_megatron.selection.arrays import (
    PromptDraw,
    Rollouts,
    TrainSelection,
    completion_batch,
    join,
    merge,
    part,
    with_refills,
)
from dppo_megatron.selection.bias import BiasSource, sized
from dppo_megatron.selection.coefficients import Coefficients
from dppo_megatron.types import FloatArray, IntArray, StepCounts, UserError, mean_of_sums


@dataclass
class _OpenStep:
    """A step that has begun and has had no feedback yet."""

    number: int
    position: int
    """Of the order, before its first prompt."""
    rounds: int = 0
    offered: list[IntArray] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    """Those of the first round's mini-batches, then one for each refill."""
    chosen: list[PromptDraw] = field(default_factory=list)
    kept_costs: tuple[float, ...] = (1.0, 1.0)
    """Of prompts and completions; see `StepCost.kept_cost`."""
    deviations: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))
    """Of what was kept of prompts and of completions from the probabilities."""
    outcome: tuple[PromptDraw, Rollouts, FloatArray] | None = None
    """What was finished and not learned yet, with second moments [K]."""
    before: dict[str, Any] | None = None
    """The state before it, copied when its outcome is learned for a step that begins ahead of its feedback."""


class Selector:
    """The pruning policies of a job and the state they need.

        chosen = selector.begin(step)                  # before rollout; may begin while the step before trains
        while more := selector.refill(rewards, step):  # of all groups so far
            ...                                        # roll those out too
        decision = selector.finish(rollouts, step)     # after grading
        lines = selector.feedback(cost)                # the step is done: `state_dict` then holds it

    A step counts once it has had its feedback: until then `state_dict` is the state before it, whatever has begun
    since, and a run that is killed or gives the step up begins it again. Choosing changes no policy, and what `finish`
    saw is learned when the feedback comes; only a next step that begins ahead learns it earlier, and keeps a copy of
    the state as it was (5 MB for 100,000 prompts).

    Args:
        order: another order of prompts than the config's seed gives; for experiments that vary the draws alone.
        set_sizes: problems of each training set by name, in the order of their indices; None: they are one set.
        features: what is known of each prompt before it is tried; handed to the prompt policy.
        capacity: what a step's micro-batches hold, for the completion policies that fill them; None: not known.

    Example: 64 prompts of 8 completions, after an epoch of warm-up, at the default rates (0.3 of the prompts, 0.5 of
    the completions). `begin` keeps 64 - floor(0.3 x 64) = 45 prompts with weights up to 1 / 0.2; the engine's answer is
    graded to rewards [45, 8]. `finish` keeps 180 of these 360 completions, or fewer if fewer have an advantage, each
    with the product of both weights and with a divisor that counts all 64 x 8.

    Raises:
        UserError: the step's nominal prompts do not divide into its mini-batches, or are more than there are.
    """

    def __init__(
        self,
        config: Config,
        num_prompts: int,
        order: Order | None = None,
        capacity: StepCapacity | None = None,
        set_sizes: Mapping[str, int] | None = None,
        features: PromptFeatures | None = None,
    ) -> None:
        check_selection(config)
        self._capacity = capacity
        self._updates = config.objective.updates_per_step
        self.prompts_per_step = planned_prompts(config)
        """Nominal prompts of a step; above the config's number only with CPPO's allocation."""
        group = config.rollout.completions_per_prompt
        per_minibatch = self.prompts_per_step // self._updates * group
        check_methods(config.pruning, group_size=group, minibatch_size=per_minibatch)
        self._completion_policy = make_completion_policy(
            config.pruning.completion,
            seed=config.seed,
            total_steps=config.steps,
            zero_advantage_slope=zero_advantage_slope(config.objective),
            group_size=group,
        )
        self._coefficients = Coefficients(config, self.prompts_per_step)
        if num_prompts < self.prompts_per_step:
            raise UserError(too_few_prompts(config, num_prompts))
        self._prompt_policy = make_prompt_policy(
            config.pruning.prompt,
            num_prompts=num_prompts,
            completions_per_prompt=group,
            prompts_per_step=self.prompts_per_step,
            total_steps=config.steps,
            seed=config.seed,
            features=features,
        )
        sizes = {"": num_prompts} if set_sizes is None else set_sizes
        self._order = order or make_order(sizes, train_set_weights(config), config.seed, self.prompts_per_step)
        self._position = 0
        self._delay = min(config.rollout.async_steps, 1)
        """Steps that a prompt policy's feedback comes late: a step that begins ahead cannot know what the one before it
        cost, and one that does not, because a checkpoint is due, must choose the same."""
        self._costs: list[StepCost] = []
        """Feedback that has not been passed to the prompt policy yet."""
        self._declared = DeclaredTest(), DeclaredTest()
        """Of the probabilities of prompts and of completions."""
        self._said: list[str] = []
        self._open: list[_OpenStep] = []
        """Steps that have begun and have had no feedback, oldest first; at most two."""

    def skip_to(self, step: int) -> None:
        """Begin with the prompts of step `step`, if none before it was filled up; nothing is learned of those."""
        for _ in range(step - 1):
            _, self._position = self._order.take(self._position, self.prompts_per_step)

    def begin(self, step: int) -> PromptDraw:
        """The prompts of step `step` (from 1) that are worth a rollout.

        Raises:
            ValueError: a step two before this one has had no feedback.
        """
        if len(self._open) > 1:
            raise ValueError(f"step {step} begins, but step {self._open[0].number} has had no feedback")
        for finished in self._open:
            if finished.outcome is None:
                raise ValueError(f"step {step} begins, but step {finished.number} is not finished")
            finished.before = self._state(finished.position)
        self._learn()
        while self._costs and self._costs[0].step < step - self._delay:
            self._said += self._prompt_policy.feedback(self._costs.pop(0))
        self._open.append(_OpenStep(step, self._position))
        return self._choose(self.prompts_per_step, self._open[-1], self._updates)

    def refill(self, rewards: FloatArray, step: int) -> PromptDraw | None:
        """More prompts, for the methods that sample until enough groups have variance; None when it is enough.
        rewards [groups, G]: of all groups of the step so far."""
        of = self._of(step)
        missing = self._prompt_policy.missing_prompts(rewards, step=step - 1, rounds=of.rounds)
        return self._choose(min(missing, self._order.num_prompts), of, 1) if missing else None

    def finish(self, rollouts: Rollouts, step: int) -> TrainSelection:
        """Advantages on full groups, then the completions worth training on.

        Raises:
            RunAborted, UserError: an outcome that nothing can be chosen by; see `check_outcomes`.
        """
        of, zero_based, size = self._of(step), step - 1, rollouts.rewards.shape[1]
        prompts = join(of.chosen)
        check_outcomes(prompts.prompt_index, rollouts.rewards, rollouts.lengths, rollouts.logit_grad_norm)
        groups = self._prompt_policy.keep_groups(rollouts.rewards, step=zero_based)
        minibatch = self._assign(prompts, groups)
        advantages = self._coefficients.advantages(rollouts, prompts.weight * groups.weight)
        denominator, divided = self._denominator(rollouts.lengths, minibatch, groups, of, prompts)
        # without the prompt's weight, or the weight would feed back into the score that makes the next weight
        squared = self._coefficients.squared_norms(rollouts, advantages, denominator)
        of.outcome = prompts, rollouts, squared.sum(axis=1)
        trainable, filtered = self._coefficients.trainable(rollouts, groups)
        nominal = self.prompts_per_step * size
        batch = completion_batch(prompts, rollouts, advantages, denominator, groups, trainable, nominal)
        rows = np.flatnonzero(trainable)
        completions = self._declared[1].judged(self._prune_minibatches(batch, minibatch[rows // size], of))
        kept = np.zeros(rollouts.rewards.size, dtype=np.bool_)
        weight = np.zeros(rollouts.rewards.size)
        kept[rows] = completions.kept
        weight[rows] = batch.prompt_weight * completions.weight
        completion_prob = np.full(rollouts.rewards.size, math.nan)
        completion_prob[rows] = completions.inclusion_prob
        first, later = of.selections[: self._updates], of.selections[self._updates :]
        planned = self._declared[0].judged(merge(first, np.arange(sum(len(selection.kept) for selection in first))))
        offered = with_refills(planned, later)
        expected = np.ones(rollouts.rewards.size)
        expected[rows] = completions.expected_weight
        others = self._coefficients.whitening(planned, of.selections, rollouts), divided, filtered
        sources = self._sources(planned, offered, groups, completions, expected.reshape(rollouts.rewards.shape), others)
        ledger, bias = sized(sources, squared, prompts.inclusion_prob)
        variance = step_variance(planned, batch, completions, self._coefficients.slope)
        of.kept_costs = tuple(1.0 if one.kept_cost is None else one.kept_cost for one in (planned, completions))
        of.deviations = self._deviations(offered, np.concatenate(of.offered)), deviations(completions, batch.facts())
        counts = StepCounts(
            prompts_considered=len(offered.kept),
            prompts_generated=int(offered.kept.sum()),
            completions_generated=rollouts.rewards.size,
            completions_trained=int(completions.kept.sum()),
            tokens_generated=int(rollouts.lengths.sum()),
            tokens_trained=int(batch.lengths[completions.kept].sum()),
        )
        has_support = self._completion_policy.has_support and not self._prompt_policy.resamples
        return TrainSelection(
            kept=kept,
            weight=weight,
            advantages=advantages.ravel(),
            denominator=denominator.ravel(),
            minibatch=np.repeat(minibatch, size),
            ledger=ledger,
            metrics=counts.metrics()
            | (variance.metrics() if has_support else {})  # else the gradient's length changes with it
            | _reward_figures(rollouts.rewards, prompts.inclusion_prob)
            | step_metrics(offered, batch, completions)
            | self._prompt_policy.history.metrics(zero_based)
            | ({} if bias is None else {"prune/bias_estimate": bias}),
            counts=counts,
            variance=variance,
            effect=offered.effect,
            offered=np.concatenate(of.offered),
            prompts=prompts,
            completion_prob=completion_prob,
            has_support=has_support,
            zero_carries=self._completion_policy.zero_advantage_slope > 0,
        )

    def _sources(
        self,
        planned: Selection,
        offered: Selection,
        groups: Selection,
        completions: Selection,
        expected: FloatArray,
        others: tuple[BiasSource, ...],
    ) -> list[BiasSource]:
        """Of the prompts as planned (`offered`: refills too), groups, `others`, and completions, whose expected weights
        are [K, G]. Of a refuted draw E[weight] is not known."""
        of_prompts = None if self._declared[0].refuted else offered.expected_weight[offered.kept, None]
        sources = [BiasSource(planned.ledger, of_prompts, lost=int((offered.inclusion_prob == 0).sum()))]
        if self._prompt_policy.resamples or bool((groups.weight != 1).any()):
            sources.append(BiasSource(groups.ledger, groups.expected_weight[:, None]))
        last = BiasSource(completions.ledger, None if self._declared[1].refuted else expected)
        return [*sources, *others, last]

    def feedback(self, cost: StepCost) -> list[str]:
        """What the step cost; lines for the log if a rate moved. Called once each step, also where an update was
        skipped."""
        of = self._of(cost.step)
        if of is not self._open[0] or (of.outcome is None and of.before is None):
            raise ValueError(f"feedback of step {cost.step}, which is not the oldest step that is finished")
        if of.before is None:  # else the next step, which has begun, has made it learn
            self._learn()
        self._open.pop(0)
        for test, found in zip(self._declared, of.deviations, strict=True):
            test.observe(found)
        of_prompts, of_completions = (replace(cost, kept_cost=kept) for kept in of.kept_costs)
        self._costs.append(of_prompts)
        if not self._delay:
            self._said += self._prompt_policy.feedback(self._costs.pop(0))
        said, self._said = [*self._said, *self._completion_policy.feedback(of_completions)], []
        return said

    def full_scores(self, everything: Rollouts) -> FloatArray:
        """[N, G] gradient-norm proxy of the completions of all nominal prompts of a step, none skipped."""
        return self._coefficients.full_scores(everything)

    def state_dict(self) -> dict[str, Any]:
        """What the step after the last one with feedback depends on."""
        if not self._open:
            return self._state(self._position)
        return deepcopy(self._open[0].before) or self._state(self._open[0].position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved `state_dict`; steps that had begun are forgotten. ValueError: of another version."""
        check_state(state, set(self._state(0)), "the selection")
        self._prompt_policy.load_state_dict(state["prompt"])
        self._completion_policy.load_state_dict(state["completion"])
        self._position = state["position"]
        self._coefficients.mean_length = state["mean_length"]
        self._costs = [StepCost(**cost) for cost in state["costs"]]
        for test, saved in zip(self._declared, state["declared"], strict=True):
            test.load_state_dict(saved)
        self._open, self._said = [], []

    def _state(self, position: int) -> dict[str, Any]:
        """The state now, copied, with another position of the order."""
        return {
            "prompt": self._prompt_policy.state_dict(),
            "completion": self._completion_policy.state_dict(),
            "position": position,
            "mean_length": self._coefficients.mean_length,
            "costs": [asdict(cost) for cost in self._costs],
            "declared": [asdict(test) for test in self._declared],
        }

    def _of(self, step: int) -> _OpenStep:
        for one in self._open:
            if one.number == step:
                return one
        raise ValueError(f"step {step} has not begun, or is done")

    def _learn(self) -> None:
        """Let the prompt policy see the outcome of the step that was finished last, once."""
        finished = self._open[-1] if self._open else None
        if finished is None or finished.outcome is None:
            return
        (prompts, rollouts, moment), finished.outcome = finished.outcome, None
        self._prompt_policy.observe(
            prompts.prompt_index,
            rollouts.rewards,
            rollouts.lengths,
            step=finished.number - 1,
            second_moment=moment,
            inclusion_prob=prompts.inclusion_prob,
            planned_prob=prompts.planned_prob,
        )
        self._coefficients.learn_length(rollouts.lengths, prompts.weight)

    def _deviations(self, offered: Selection, prompt_index: IntArray) -> dict[str, float]:
        past = self._prompt_policy.history.arrays
        facts = {name: past[name][prompt_index] for name in ("variance", "tokens", "visits")}
        return deviations(offered, facts | {"index": prompt_index})

    def _choose(self, count: int, of: _OpenStep, parts: int) -> PromptDraw:
        nominal, self._position = self._order.take(self._position, count)
        seen = np.concatenate([*of.offered, np.empty(0, np.int64)])
        nominal = nominal[~np.isin(nominal, seen)]  # a refill may run into the next epoch, where they come again
        of.offered.append(nominal)
        of.rounds += 1
        chosen = []
        for index, mine in enumerate(np.array_split(nominal, parts)):
            place = len(of.selections)
            selection = self._prompt_policy.select(mine, step=of.number - 1, minibatch=place)
            kept = selection.kept
            minibatch = np.full(int(kept.sum()), index, dtype=np.int64)
            columns = selection.inclusion_prob[kept], selection.weight[kept], minibatch, selection.planned[kept]
            chosen.append(PromptDraw(mine[kept], *columns))
            of.selections.append(selection)
        of.chosen += chosen
        return join(chosen)

    def _assign(self, prompts: PromptDraw, groups: Selection) -> IntArray:
        """[K] mini-batch of each group.

        Where the rewards decide which groups go on (dynamic sampling, GRESO), the nominal positions mean nothing any
        more: those that go on are shared out evenly, in their order.
        """
        if not self._prompt_policy.resamples:
            return prompts.minibatch
        position = np.maximum(np.cumsum(groups.kept) - 1, 0)
        shared: IntArray = position * self._updates // max(int(groups.kept.sum()), 1)
        return shared

    def _denominator(
        self, lengths: IntArray, minibatch: IntArray, groups: Selection, of: _OpenStep, prompts: PromptDraw
    ) -> tuple[FloatArray, BiasSource]:
        by_draw = [bool((selection.inclusion_prob < 1).any()) for selection in of.selections]
        # resampled: the mean over the groups that go on, which are all known
        skips = np.array([False] if self._prompt_policy.resamples else by_draw)
        return self._coefficients.denominator(lengths, minibatch, groups, skips, prompts.inclusion_prob)

    def _prune_minibatches(self, batch: CompletionBatch, minibatch: IntArray, of: _OpenStep) -> Selection:
        """The completion policy on each mini-batch [n], put together in the order of `batch`."""
        rows = [np.flatnonzero(minibatch == index) for index in range(self._updates)]
        parts = [part(batch, mine, self._updates) for mine in rows]
        step, prune = of.number - 1, self._completion_policy.prune
        pruned = [prune(one, step=step, minibatch=k, capacity=self._capacity) for k, one in enumerate(parts)]
        return merge(pruned, np.argsort(np.concatenate(rows), kind="stable"))


def _reward_figures(rewards: FloatArray, prompt_prob: FloatArray) -> dict[str, float]:
    graded = ~np.isnan(rewards)
    weight = np.where(graded, 1.0 / prompt_prob[:, None], 0.0)  # no estimator's weights, and no cap
    return {
        # weighted, because the generated prompts are a sample of the considered ones
        "reward/mean": mean_of_sums(float((weight * np.where(graded, rewards, 0.0)).sum()), float(weight.sum())),
        "reward/failed_count": float((~graded).sum()),
    }
