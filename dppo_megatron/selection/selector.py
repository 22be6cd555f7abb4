"""All selection of a step, on arrays: the training loop runs it on rank 0, and `simulate` on a recorded trace.

With several optimizer updates per step, nominal prompts are assigned to mini-batches by position before anything is
selected. Each mini-batch has its own independent draws and its own denominators: the draws of update 2 are then
independent of the policy that update 1 produced, which keeps update 2 unbiased (docs/objectives.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from dppo_megatron.config.objective import zero_advantage_slope
from dppo_megatron.config.selection import SelectionSettings
from dppo_megatron.data.order import Order, WeightedOrder, make_order, order_key
from dppo_megatron.pruning import CompletionBatch, Selection, make_completion_policy, make_prompt_policy
from dppo_megatron.pruning.early_stop import draw_limits
from dppo_megatron.pruning.interface import StepCapacity, StepCost, check_outcomes, check_state
from dppo_megatron.pruning.monitors import DeclaredTest, deviations, step_metrics
from dppo_megatron.pruning.policies import check_methods
from dppo_megatron.pruning.scores import group_sizes
from dppo_megatron.pruning.variance import EarlyStops, GroupSizes, StepVariance, step_variance
from dppo_megatron.selection.arrays import (
    PromptDraw,
    Rollouts,
    TrainSelection,
    completion_batch,
    counts_of,
    join,
    merge,
    part,
    reward_metrics,
    to_all_rows,
    was_requested,
    with_refills,
)
from dppo_megatron.selection.bias import BiasSource, with_estimates
from dppo_megatron.selection.coefficients import Coefficients
from dppo_megatron.selection.missing import Missing, PastLosses, as_foreseen, missing_of, with_lengths
from dppo_megatron.selection.open_steps import FinishedStep, OpenStep, Place
from dppo_megatron.types import FloatArray, IntArray, PromptFeatures, UserError


class Selector:
    """The pruning policies of a job and the state they need. Steps count from 1.

        chosen = selector.begin(step)                  # before rollout; up to `rollout.async_steps` others may be open
        while more := selector.refill(rewards, step):  # rewards of all groups so far
            ...                                        # roll those out too
        decision = selector.finish(rollouts, step)     # after grading
        lines = selector.feedback(cost)                # the step is done: `state_dict` now includes it

    A step counts only once it has had its feedback. Until then `state_dict` is the state before it, whatever has begun
    since, and a run that is killed or abandons the step begins it again. Selecting changes no policy. With
    `rollout.async_steps` = K, a step uses the outcomes of steps up to the one K + 1 before it, even if more are known,
    so that a resumed run selects the same. Each open step keeps a copy of the state it started from (5 MB for 100,000
    prompts).

    Args:
        order: replaces the order of prompts from the settings' seed; for experiments that vary only the draws.
        set_sizes: problems of each training set by name, in the order of their indices; None: one set.
        features: what is known of each prompt before its first visit; passed to the prompt policy.
        capacity: what a step's micro-batches hold, for completion policies that fill them; None: unknown.

    Example: 64 prompts of 8 completions, after an epoch of warm-up, with rates of 0.3 for prompts and 0.5 for
    completions. `begin` keeps 64 - floor(0.3 x 64) = 45 prompts with weights up to 1 / 0.2; the engine's output is
    graded to rewards [45, 8]. `finish` keeps 180 of these 360 completions, or fewer if fewer have an advantage, each
    with the product of both weights and with a divisor that counts all 64 x 8.

    Raises:
        UserError: the step's nominal prompts do not divide into its mini-batches, or are more than the data have.
    """

    def __init__(
        self,
        settings: SelectionSettings,
        num_prompts: int,
        order: Order | None = None,
        capacity: StepCapacity | None = None,
        set_sizes: Mapping[str, int] | None = None,
        features: PromptFeatures | None = None,
    ) -> None:
        settings.check()
        self._capacity = capacity
        self._updates = settings.objective.updates_per_step
        self.prompts_per_step = settings.planned_prompts
        """Nominal prompts of a step; more than in the settings only with CPPO's allocation."""
        self._group, self._size_factor = settings.completions_per_prompt, settings.group_size_factor
        per_minibatch = self.prompts_per_step // self._updates * self._group
        check_methods(settings.pruning, group_size=self._group, minibatch_size=per_minibatch)
        self._completion_policy = make_completion_policy(
            settings.pruning.completion,
            seed=settings.seed,
            total_steps=settings.total_steps,
            zero_advantage_slope=zero_advantage_slope(settings.objective),
            group_size=self._group,
        )
        self._coefficients = Coefficients(settings)
        if num_prompts < self.prompts_per_step:
            raise UserError(settings.too_few_prompts(num_prompts))
        self._prompt_policy = make_prompt_policy(
            settings.pruning.prompt,
            num_prompts=num_prompts,
            completions_per_prompt=self._group,
            prompts_per_step=self.prompts_per_step,
            total_steps=settings.total_steps,
            seed=settings.seed,
            features=features,
        )
        sizes = {"": num_prompts} if set_sizes is None else set_sizes
        self._sets, self._set_ends = [[*item] for item in sizes.items()], np.cumsum(list(sizes.values()))
        if order is None:
            level = None if features is None else features.level
            key = order_key(
                settings.order, settings.order_by, num_prompts, level, lambda: self._prompt_policy.history.pass_rate()
            )
            order = make_order(sizes, settings.set_weights, settings.seed, self.prompts_per_step, key)
        self._order = order
        self._epochs = order if isinstance(order, WeightedOrder) else None
        """The order, if its epochs may not follow from the position: by pass rates, or after steps of another size."""
        self._position = 0
        self._settled = self._place()
        """The place without the refills of open steps."""
        self._replayed: deque[Place] = deque()
        """Places at which the next steps begin: those steps were open in the state that was loaded."""
        self._reads_prior, self._early_stop = settings.reads_prior, settings.pruning.early_stop
        self.in_unit = self._prompt_policy.in_unit(settings.pruning.prompt) or settings.baseline_of_passes
        """Why rewards must be in [0, 1]; empty: they need not be."""
        self._seed, self._longest, self._width = settings.seed, settings.max_completion_tokens, settings.widest_group
        self._delay = settings.async_steps
        """Number of earlier steps that may be open when a step begins, so that it must not depend on them."""
        self._past: list[FinishedStep] = []
        """The last `_delay` finished steps, oldest first; the policy has yet to learn the last `_unlearned` of them."""
        self._unlearned = 0
        self._losses = PastLosses((0.0,) * len(sizes))
        self._declared = *(DeclaredTest(earlier=np.zeros(num_prompts)) for _ in range(2)), DeclaredTest()
        """Tests of the probabilities of prompts and of completions, and of what is missing by chance."""
        self._log_lines: list[str] = []
        self._open: list[OpenStep] = []
        """Steps that have begun and had no feedback yet, oldest first."""

    def skip(self, steps: int) -> None:
        """Leave out the prompts of the next `steps` steps, assuming no refills in them; nothing is learned of them."""
        for _ in range(steps):
            _, self._position = self._order.take(self._position, self.prompts_per_step)
        if steps:
            self._settled = self._place()

    def begin(self, step: int) -> PromptDraw:
        """The prompts of step `step` (from 1) that are worth a rollout.

        Raises:
            ValueError: a step more than `rollout.async_steps` before this one has had no feedback.
        """
        if len(self._open) > self._delay:
            raise ValueError(f"step {step} begins, but step {self._open[0].number} has had no feedback")
        self._learn(step)
        current = self._place()
        if replays := bool(self._replayed):
            self._go_to(self._replayed.popleft())
        open_step = OpenStep(step, self._place(), before=self._prompt_policy.state_dict() if self._delay else None)
        self._open.append(open_step)
        chosen = self._choose(self.prompts_per_step, open_step, self._updates)
        if replays:
            self._go_to(current)  # the process that first began this step has already advanced the place past it
        else:
            self._settled = self._place()
        return chosen

    def refill(self, rewards: FloatArray, step: int) -> PromptDraw | None:
        """More prompts, for methods that sample until enough groups have variance; None if there are enough.
        rewards [groups, G]: of all groups of the step so far."""
        state = self._open_step(step)
        missing = self._prompt_policy.missing_prompts(rewards, step=step - 1, rounds=state.rounds)
        return self._choose(min(missing, self._order.num_prompts), state, 1) if missing else None

    def finish(self, rollouts: Rollouts, step: int) -> TrainSelection:
        """Advantages on full groups, then the completions worth training on.

        Raises:
            RunAborted, UserError: an outcome that nothing can be selected by; see `check_outcomes`.
        """
        state, zero_based, width = self._open_step(step), step - 1, rollouts.rewards.shape[1]
        prompts, sampled = join(state.chosen), rollouts.lengths
        if self._early_stop.after_tokens and width and len(prompts.size) and rollouts.stands_for is None:
            raise ValueError("pruning.early_stop: rollouts that do not say what each completion stands for")
        requested = was_requested(rollouts, prompts.size)
        rollouts = with_lengths(rollouts.with_unrequested(requested), self._coefficients.mean_length)
        outcome = prompts.prompt_index, rollouts.rewards, rollouts.lengths, rollouts.logit_grad_norm
        check_outcomes(*outcome, in_unit=self.in_unit)
        groups = self._prompt_policy.keep_groups(rollouts.rewards, step=zero_based)
        minibatch = self._assign(prompts, groups)
        missing = self._missing(rollouts, prompts)
        prior, known = state.prior()
        advantages = self._coefficients.advantages(rollouts, prompts.weight * groups.weight, known)
        denominator, divided = self._denominator(rollouts, minibatch, groups, state, prompts)
        # without the prompt's weight, or the weight would feed back into the score that determines the next weight
        squared = missing.estimated(self._coefficients.squared_norms(rollouts, advantages, denominator))
        squared = rollouts.counted(np.where(requested, squared, 0.0)) * (self._group / prompts.size)[:, None]
        seen = replace(rollouts, rewards=np.where(missing.present, rollouts.rewards, math.nan))  # drops lone rewards
        moment = np.where(missing.present, squared, 0.0).sum(axis=1) * missing.in_group * self._usual_moment(prompts)
        state.outcome, state.missing = (prompts, seen, moment), missing
        trainable, filtered = self._coefficients.trainable(rollouts, missing.present & groups.kept[:, None])
        nominal, group_weight = self.prompts_per_step * self._group, groups.weight * missing.weight
        batch = completion_batch(prompts, rollouts, advantages, denominator, group_weight, trainable, nominal)
        rows = np.flatnonzero(trainable)
        completions = self._declared[1].judged(self._prune_minibatches(batch, minibatch[rows // width], state))
        kept = to_all_rows(completions.kept, rows, rollouts, fill=False)
        weight = to_all_rows(batch.prompt_weight * completions.weight, rows, rollouts, fill=0.0)
        first, later = state.selections[: self._updates], state.selections[self._updates :]
        planned = self._declared[0].judged(merge(first, np.arange(sum(len(selection.kept) for selection in first))))
        offered = with_refills(planned, later)
        expected = to_all_rows(completions.expected_weight, rows, rollouts, fill=1.0)
        whitened = self._coefficients.whitening(planned, state.selections, rollouts)
        others = (
            *(whitened, self._coefficients.baseline(), self._coefficients.sizes()),
            *(self._coefficients.early_stop(rollouts, requested), divided, filtered, missing.source),
        )
        sources = self._sources(planned, offered, groups, completions, expected.reshape(rollouts.rewards.shape), others)
        rows_of_all, bias = with_estimates(sources, squared, prompts.inclusion_prob)
        ledger, unforeseen = as_foreseen(rows_of_all, missing)
        variance = self._variance(planned, batch, completions, state, rows)
        inverse_end_prob = rollouts.counted(np.ones(rollouts.rewards.shape)).ravel()[rows]
        state.kept_costs = tuple(1.0 if one.kept_cost is None else one.kept_cost for one in (planned, completions))
        state.drawn = (np.concatenate(state.offered), offered), (batch.prompt_index, completions)
        state.deviations = self._deviations(state.drawn, batch)
        counts = counts_of(offered, prompts, int(sampled.sum()), batch.lengths[completions.kept])
        has_support = self._completion_policy.has_support and self._prompt_policy.has_support
        return TrainSelection(
            kept=kept,
            weight=weight,
            advantages=advantages.ravel(),
            denominator=denominator.ravel(),
            minibatch=np.repeat(minibatch, width),
            ledger=ledger,
            metrics=counts.metrics()
            | (variance.metrics() if has_support else {})  # without support the gradient's length changes too
            | reward_metrics(rollouts, prompts, missing.in_mean)
            | missing.metrics
            | step_metrics(offered, batch, completions)
            | self._prompt_policy.history.metrics(zero_based)
            | ({} if bias is None else {"prune/bias_estimate": bias}),
            counts=counts,
            variance=variance,
            effect=offered.effect,
            offered=np.concatenate(state.offered),
            offered_prob=offered.inclusion_prob,
            prompts=prompts,
            completion_prob=to_all_rows(completions.inclusion_prob / inverse_end_prob, rows, rollouts, fill=math.nan),
            has_support=has_support,
            zero_carries=self._completion_policy.zero_advantage_slope > 0,
            missing_weight=missing.weight,
            in_mean=missing.in_mean,
            unforeseen=unforeseen,
            prior=prior,
        )

    def _usual_moment(self, prompts: PromptDraw) -> FloatArray:
        """[K] second moment in a group of the usual size over that in its own: a mean over fewer others is noisier."""
        return np.asarray((1.0 - 1.0 / prompts.size) / (1.0 - 1.0 / self._group))

    def _variance(
        self, planned: Selection, batch: CompletionBatch, completions: Selection, state: OpenStep, rows: IntArray
    ) -> StepVariance:
        """Variance growths of a step; `rows` [n] are the trainable completions, in the batch."""
        assert state.outcome is not None and state.missing is not None
        prompts, rollouts, _ = state.outcome
        group, ended = rows // rollouts.rewards.shape[1], None
        shares = self._group / prompts.size[group], self._usual_moment(prompts)[group]
        sizes = GroupSizes(*shares, float(np.mean(state.size_growth)) if state.size_growth else 1.0)
        if rollouts.stands_for is not None:
            noise = self._coefficients.baseline_noise(rollouts, state.prior()[1])
            ended = EarlyStops(rollouts.stands_for.ravel()[rows], noise.ravel()[rows])
        stands_for = state.missing.weight[group]
        return step_variance(planned, batch, completions, self._coefficients.slope, stands_for, sizes, ended)

    def _missing(self, rollouts: Rollouts, prompts: PromptDraw) -> Missing:
        return missing_of(
            rollouts,
            prompts,
            self._sets_of(prompts),
            self._losses,
            self._group,
            same_at_any_size=self._coefficients.same_at_any_size,
            stands_for_lost=not self._prompt_policy.resamples,
            refuted=self._declared[2].refuted,
        )

    def _sets_of(self, prompts: PromptDraw) -> IntArray:
        return np.searchsorted(self._set_ends, prompts.prompt_index, side="right")

    def _sources(
        self,
        planned: Selection,
        offered: Selection,
        groups: Selection,
        completions: Selection,
        expected: FloatArray,
        others: tuple[BiasSource, ...],
    ) -> list[BiasSource]:
        """Sources of bias: the planned prompts (`offered` includes refills), the groups, `others`, and the completions
        with their `expected` weights [K, G]."""
        mean_weight, lost = offered.expected_weight[offered.kept, None], int((offered.inclusion_prob == 0).sum())
        sources = [BiasSource.of_draw(planned.ledger, mean_weight, self._declared[0].refuted, lost)]
        if self._prompt_policy.resamples or bool((groups.weight != 1).any()):
            sources.append(BiasSource(groups.ledger, groups.expected_weight[:, None]))
        return [*sources, *others, BiasSource.of_draw(completions.ledger, expected, self._declared[1].refuted)]

    def feedback(self, cost: StepCost) -> list[str]:
        """Learn what the step cost; returns log lines. Call it once per step, even if the update was skipped."""
        state = self._open_step(cost.step)
        if state is not self._open[0] or state.outcome is None or state.missing is None:
            raise ValueError(f"feedback of step {cost.step}, which is not the oldest step that is finished")
        prompts, rollouts, moment = state.outcome
        self._open.pop(0)
        self._settled = self._place()
        for test, deviation in zip(self._declared, (*state.deviations, state.missing.deviations), strict=True):
            test.observe(deviation)
        for test, (ids, drawn) in zip(self._declared, state.drawn, strict=False):
            test.remember(ids, drawn)
        prompt_cost, completion_cost = (replace(cost, kept_cost=kept) for kept in state.kept_costs)
        outcome = {
            "prompt_index": prompts.prompt_index,
            "rewards": rollouts.rewards,
            "lengths": rollouts.lengths,
            "second_moment": moment,
            "inclusion_prob": prompts.inclusion_prob,
            "planned_prob": prompts.planned_prob,
            "stands_for": rollouts.stands_for,
        }
        self._past.append(FinishedStep(outcome, asdict(prompt_cost)))
        self._unlearned += 1
        self._coefficients.learn_length(rollouts, prompts)
        self._losses = self._losses.after(state.missing, prompts.weight, self._sets_of(prompts))
        if not self._open:  # otherwise it is learned when the next step begins
            self._learn(cost.step + 1)
        self._past = self._past[max(0, len(self._past) - self._delay) :]
        lines, self._log_lines = [*self._log_lines, *self._completion_policy.feedback(completion_cost)], []
        return lines

    def full_scores(self, everything: Rollouts, prior: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
        """[N, G] gradient-norm proxy of all nominal prompts' completions, none skipped, and their divisors [N, G].
        `prior`: as in `TrainSelection`."""
        return self._coefficients.full_scores(with_lengths(everything, self._coefficients.mean_length), prior)

    def state_dict(self) -> dict[str, Any]:
        prompt_state = self._open[0].before if self._open else None
        places = [*(one.place for one in self._open), *self._replayed, self._settled]
        places = places if self._delay else places[:1]
        order_state: dict[str, Any] = {}
        if self._epochs is not None:  # for each set, so that other weights or numbers of prompts can continue from here
            order_state["taken"] = self._epochs.taken(places[0].position).tolist()
            order_state["epochs"] = [dict(place.epochs) for place in places]
        # The oldest open step was selected without the last `_delay` steps. After a lower delay more are unlearned.
        unlearned = self._past[max(0, len(self._past) - (self._delay if self._open else self._unlearned)) :]
        return order_state | {
            "prompt": self._prompt_policy.state_dict() if prompt_state is None else deepcopy(prompt_state),
            "completion": self._completion_policy.state_dict(),
            "positions": [place.position for place in places],
            "planned": self.prompts_per_step,
            "mean_length": self._coefficients.mean_length,
            "missing": asdict(self._losses),
            "past": deepcopy([one._asdict() for one in unlearned]),
            "sets": self._sets,
            "declared": [asdict(test) for test in self._declared],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved `state_dict`; steps that had begun are forgotten. ValueError: keys of another version."""
        optional = {"epochs", "taken"}  # present or not if the order was changed at the resume, which is permitted
        check_state(state, set(self.state_dict()) - optional | (optional & state.keys()), "the selection")
        self._prompt_policy.load_state_dict(state["prompt"])
        self._completion_policy.load_state_dict(state["completion"])
        positions, shares = state["positions"], tuple(state["missing"]["lost_share"])
        same = state["sets"] == self._sets and len(shares) == len(self._sets)
        epochs = state.get("epochs") if same else None  # indexed by set, as are the shares
        if same and self._epochs is not None:
            self._epochs.go_on(positions[0], np.array(state.get("taken", ()), dtype=np.int64))
        places = [Place(*each) for each in zip(positions, epochs or [{}] * len(positions), strict=True)]
        if state["planned"] != self.prompts_per_step:
            places = places[:1]  # the later places are for steps of another number of prompts
        self._replayed, self._settled = deque(places[:-1]), places[-1]
        self._go_to(self._settled)
        self._coefficients.mean_length = state["mean_length"]
        self._losses = PastLosses(shares if same else (0.0,) * len(self._sets), state["missing"]["known"])
        self._past = [FinishedStep(**one) for one in state["past"]]
        self._unlearned = len(self._past)
        for test, saved in zip(self._declared, state["declared"], strict=True):
            test.load_state_dict(saved)
        self._open, self._log_lines = [], []

    def _place(self) -> Place:
        return Place(self._position, {} if self._epochs is None else self._epochs.state_dict())

    def _go_to(self, place: Place) -> None:
        self._position = place.position
        if self._epochs is not None:
            self._epochs.load_state_dict(place.epochs)

    def _open_step(self, step: int) -> OpenStep:
        for one in self._open:
            if one.number == step:
                return one
        raise ValueError(f"step {step} has not begun, or is done")

    def _learn(self, step: int) -> None:
        """Let the prompt policy learn the finished steps that may be known when `step` is selected, each once."""
        while self._unlearned and (cost := StepCost(**self._past[-self._unlearned].cost)).step < step - self._delay:
            self._unlearned -= 1  # first, in case a user's policy raises: the history has the step then
            self._prompt_policy.observe(**self._past[-self._unlearned - 1].outcome, step=cost.step - 1)
            self._log_lines += self._prompt_policy.feedback(cost)

    def _deviations(
        self, drawn: tuple[tuple[IntArray, Selection], ...], batch: CompletionBatch
    ) -> tuple[dict[str, float], ...]:
        past = self._prompt_policy.history.arrays
        of_prompts = {name: past[name][drawn[0][0]] for name in ("variance", "tokens", "visits")}
        facts = of_prompts | {"index": drawn[0][0]}, batch.facts()
        return tuple(
            deviations(selection, known | {"its prompt's earlier draws": test.earlier[ids]})
            for test, (ids, selection), known in zip(self._declared, drawn, facts, strict=False)
        )

    def _choose(self, count: int, state: OpenStep, parts: int) -> PromptDraw:
        nominal, self._position = self._order.take(self._position, count)
        seen = np.concatenate([*state.offered, np.empty(0, np.int64)])
        nominal = nominal[~np.isin(nominal, seen)]  # a refill may run into the next epoch and repeat prompts
        state.offered.append(nominal)
        if self._reads_prior:
            state.priors.append(np.stack(self._prompt_policy.history.posterior(nominal, state.number - 1), axis=1))
        state.rounds += 1
        chosen = []
        for index, candidates in enumerate(np.array_split(nominal, parts)):
            selection = self._prompt_policy.select(candidates, step=state.number - 1, minibatch=len(state.selections))
            kept = selection.kept
            ids, minibatch = candidates[kept], np.full(int(kept.sum()), index, dtype=np.int64)
            columns = selection.inclusion_prob[kept], selection.weight[kept], minibatch, selection.planned[kept]
            sizes = self._sizes(ids, selection.weight[kept], state)
            limits = draw_limits(self._early_stop, self._seed, ids, state.number, self._width, self._longest)
            chosen.append(PromptDraw(ids, *columns, sizes, limits))
            state.selections.append(selection)
        state.chosen += chosen
        return join(chosen)

    def _sizes(self, ids: IntArray, weight: FloatArray, state: OpenStep) -> IntArray:
        """[n] completions to sample of the chosen prompts `ids` with weights `weight`."""
        expected = self._prompt_policy.expected(ids, state.number - 1) if self._size_factor > 1 and len(ids) else None
        if expected is None:
            return np.full(len(ids), self._group)
        moment, cost = expected
        sizes = group_sizes(weight * np.sqrt(moment / cost), self._group, self._size_factor)
        # the product of G / n, the weight of each completion, and (1 - 1/G) / (1 - 1/n), for the baseline
        noisier = (self._group - 1) / (sizes - 1)
        state.size_growth.append(float(weight @ (moment * noisier)) / float(weight @ moment))
        return sizes

    def _assign(self, prompts: PromptDraw, groups: Selection) -> IntArray:
        """[K] mini-batch of each group.

        If the rewards decide which groups are kept (dynamic sampling, GRESO), nominal positions no longer apply: the
        kept groups are distributed evenly over the mini-batches, in order.
        """
        if not self._prompt_policy.resamples:
            return prompts.minibatch
        kept_before = np.maximum(np.cumsum(groups.kept) - 1, 0)
        return np.asarray(kept_before * self._updates // max(int(groups.kept.sum()), 1))

    def _denominator(
        self, rollouts: Rollouts, minibatch: IntArray, groups: Selection, state: OpenStep, prompts: PromptDraw
    ) -> tuple[FloatArray, BiasSource]:
        skips = np.bincount(minibatch, prompts.size != self._group, minlength=self._updates) > 0
        skips |= self._early_stop.after_tokens > 0
        if not self._prompt_policy.resamples:  # otherwise the mean is over the kept groups, which are all known
            skips |= [bool((selection.inclusion_prob < 1).any()) for selection in state.selections]
        return self._coefficients.denominator(rollouts, minibatch, groups, skips, prompts)

    def _prune_minibatches(self, batch: CompletionBatch, minibatch: IntArray, state: OpenStep) -> Selection:
        """The completion policy's selection from each mini-batch [n], merged in the order of `batch`."""
        rows = [np.flatnonzero(minibatch == index) for index in range(self._updates)]
        parts = [part(batch, some, self._updates) for some in rows]
        step, prune = state.number - 1, self._completion_policy.prune
        pruned = [prune(one, step=step, minibatch=k, capacity=self._capacity) for k, one in enumerate(parts)]
        return merge(pruned, np.argsort(np.concatenate(rows), kind="stable"))
