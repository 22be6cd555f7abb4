"""What rank 0 decides in a step: prompts, completions, micro-batches; and what it learns from the step's cost.

Every rank has a Coordinator, since its settings are enough to build one, but only rank 0's is used and has a valid
state. It sees scalars, not tokens.

    begin -> take (one or more rounds) -> refill ... -> decide -> learn
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from dppo_megatron.algorithms.noise_scale import NoiseScale
from dppo_megatron.config.data import DataConfig
from dppo_megatron.config.objective import is_exact_off_policy
from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.sets import set_sizes
from dppo_megatron.job import Job
from dppo_megatron.packing.alignment import PackingLayout
from dppo_megatron.packing.planner import Packable, TokenCapacity, plan_microbatches
from dppo_megatron.pruning import LedgerRow
from dppo_megatron.pruning.interface import StepCost
from dppo_megatron.rewards.measures import GradeTable, check_failures, grading_metrics, set_metrics
from dppo_megatron.rollout.engine import RolloutStats
from dppo_megatron.selection import PromptDraw, Selector, TrainSelection
from dppo_megatron.steps.rollout_cost import cost_model
from dppo_megatron.steps.step import RolloutTable, Step, UpdatePlan, sizes_of
from dppo_megatron.steps.trace import decided, trace_row
from dppo_megatron.types import IntArray, Label, PackPlan, RunAborted, UserError


class Coordinator:
    """The decisions of one job; each step calls its methods in the order above."""

    def __init__(self, job: Job, layout: PackingLayout) -> None:
        config = job.config
        self._job, self._layout = job, layout
        self._cost = cost_model(job.architecture)
        settings = selection_settings(config)
        self._width = settings.widest_group
        self._selector = Selector(
            settings,
            len(job.train_prompts),
            capacity=TokenCapacity.of(config.packing, layout),
            set_sizes=set_sizes(job.train_sets),
            features=job.prompt_features,
        )
        self._noise = NoiseScale()
        self._outcomes = [RolloutTable.of({}, self._width, 0)]
        """Outcomes of the current step's rollout rounds so far, after an empty table, since a step may have none."""

    def begin(self, number: int) -> PromptDraw:
        """The prompts of step `number`, while up to `rollout.async_steps` steps before it may not be finished."""
        with _ending_with_a_checkpoint(number):
            return self._selector.begin(number)

    def take(self, outcomes: Sequence[RolloutTable], number: int) -> None:
        """Add the outcomes of a round, one table per rank. Raises RunAborted if too many gradings failed."""
        self._outcomes += outcomes
        for key, table in RolloutTable.join(self._outcomes).grades.items():
            check_failures(table, self._job.grade.rewards[key], number, key)

    def refill(self, number: int) -> PromptDraw | None:
        """More prompts, for methods that continue until enough groups have variance; None: there are enough."""
        with _ending_with_a_checkpoint(number):
            return self._selector.refill(RolloutTable.join(self._outcomes).outcomes.rewards, number)

    def decide(self, step: Step, stats: RolloutStats) -> tuple[list[UpdatePlan], IntArray, dict[int, tuple[Any, ...]]]:
        """Decide what to train on, and write the step's metrics, ledger and trace row.

        Args:
            stats: the engine's, for this step's rollout.

        Returns:
            The plan of each update; [K] the rank that holds each group; what to record of each recorded group.
        """
        config = self._job.config
        outcomes = RolloutTable.join(self._outcomes)
        del self._outcomes[1:]
        rollouts = outcomes.rollouts(step.selected)
        with _ending_with_a_checkpoint(step.number):
            decision = self._selector.finish(rollouts, step.number)
        record = step.record
        record.counts = decision.counts
        record.metrics |= decision.metrics | stats.metrics()
        ids, factor = decision.prompts.prompt_index, decision.in_mean  # as in reward/mean
        tables = {key: one.reweighted(ids, factor) for key, one in outcomes.grades.items()}
        record.metrics |= self._grading_metrics(tables)
        record.metrics |= outcomes.metrics(decision.prompts.inclusion_prob * decision.prompts.size)
        rollout_rows = server_rows(config.rollout, stats, sizes=decision.prompts.size)
        config_rows = (*off_policy_rows(config), *overlong_row(self._job), *order_row(config.data))
        record.ledger = (*decision.recorded_ledger, *rollout_rows, *config_rows)
        if any(row.label in ("ratio", "biased") for row in (*rollout_rows, *config_rows)):
            record.metrics.pop("prune/bias_estimate", None)  # it covers only the selector's rows
        record.trace = trace_row(step.number, decision, rollouts)
        with record.timers.phase("pack"):
            updates = range(config.objective.updates_per_step)
            plans = [self._plan_update(step, decision, rollouts.lengths, index) for index in updates]
        return plans, outcomes.holder, decided(config, step.number, decision, rollouts)

    def plan(self, samples: Sequence[Packable]) -> PackPlan:
        config = self._job.config.packing
        return plan_microbatches(
            samples,
            layout=self._layout,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            mode=config.mode,
            cost=self._cost,
            window=config.window,
        )

    def learn(self, step: Step) -> tuple[list[str], str]:
        """Report a finished step's cost to the policies; returns log lines, and what a policy of the user raised, which
        is also a line, since a run may end for another reason. The step counts even so: the actor has its weights."""
        took, lines, failure = step.record.timing, list[str](), ""
        try:
            lines = self._selector.feedback(StepCost(step.number, took.rollout_s, took.update_s, took.other_s))
        except UserError as error:
            failure = str(error)
            lines = [f"warning: step {step.number}: {failure}"]
        if (scale := self._noise.prompts) is not None:
            # in the setting's prompts: CPPO's allocation plans more
            factor = self._job.config.rollout.prompts_per_step / self._selector.prompts_per_step
            step.record.metrics["batch/noise_scale_prompts"] = scale * factor
        return lines, failure

    def probe(self, grad_norm: float, half_norm: float) -> None:
        """The gradient norms of an update and of half of its prompts."""
        updates = self._job.config.objective.updates_per_step
        self._noise.add(grad_norm**2, half_norm**2, self._selector.prompts_per_step // updates)

    def state_dict(self) -> dict[str, Any]:
        return {"selector": self._selector.state_dict(), "noise": asdict(self._noise)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._selector.load_state_dict(state["selector"])
        self._noise = NoiseScale(**state["noise"])

    def _grading_metrics(self, tables: Mapping[str, GradeTable]) -> dict[str, float]:
        """Metrics of all gradings, and of each training set that has its own rewards, under the set's name."""
        metrics = grading_metrics(GradeTable.join(list(tables.values())), list(self._job.config.reward.functions))
        for name, one in self._job.train_sets.items():
            if (key := self._job.grade.key_of(one.key)) != "reward":
                parts = list(self._job.grade.rewards[key].functions)
                metrics |= set_metrics(tables.get(key) or GradeTable.of([]), parts, name)
        return metrics

    def _plan_update(self, step: Step, decision: TrainSelection, lengths: IntArray, index: int) -> UpdatePlan:
        rows = np.flatnonzero(decision.kept & (decision.minibatch == index))
        tokens = lengths.ravel()[rows]
        pack = self.plan(sizes_of(rows, tokens, step.selected, self._width))
        return UpdatePlan.of(decision, rows, tokens, pack)


@contextmanager
def _ending_with_a_checkpoint(step: int) -> Iterator[None]:
    """For a mistake of the user that shows only in a step: a policy that raises, a reward out of its range."""
    try:
        yield
    except UserError as error:
        raise RunAborted(f"step {step}: {error}") from error


def overlong_row(job: Job) -> tuple[LedgerRow, ...]:
    """The row for problems left out because their prompts are too long; empty if there are none."""
    filtered, kept = sum(one.filtered for one in job.train_sets.values()), len(job.train_prompts)
    if not filtered:
        return ()
    note = f"{filtered} problems have prompts above max_prompt_tokens and are left out of the training data"
    row = LedgerRow("data/overlong_prompts", kept / (kept + filtered), "biased", note)
    return (row.with_bias(None, "nothing is known of them"),)


def order_row(data: DataConfig) -> tuple[LedgerRow, ...]:
    """The row for a deterministic order of problems; none for `shuffled`."""
    if data.order == "shuffled":
        return ()
    by = "" if data.order == "file" else f" by {data.order_by}"
    note = f"data.order = {data.order}{by}: an epoch holds every problem once, but a step's are not drawn at random"
    return (LedgerRow("data/order", 1.0, "biased", note).with_bias(None, "the gradients of the others are not known"),)


OFF_POLICY = ("rollout/stale", "rollout/quantized")
"""Rows for completions that were sampled from another policy than the actor's."""


def off_policy_rows(config: Config) -> tuple[LedgerRow, ...]:
    """The rows for completions sampled under older weights, in every step of a run whose steps may overlap, and under
    quantized weights. That long completions tend to be older adds no bias: every step trains on all that it drew. The
    sizes of the biases are known once the actor has scored the kept completions (`off_policy_sized`)."""
    rollout, level = config.rollout, config.objective.correction.level
    # a ratio cannot weigh tokens that the older or quantized distribution cut off: no completion has them
    is_exact = is_exact_off_policy(config.objective) and not rollout.sampling.truncates
    label: Label = "unbiased" if is_exact else "biased"
    notes = (
        f"completions are of weights up to {rollout.async_steps} steps old" if rollout.async_steps else "",
        f"servers hold weights in {rollout.quantization}" if rollout.quantization != "off" else "",
    )
    rows = [
        LedgerRow(name, 1.0, label, f"{note}; objective.correction.level = {level}")
        for name, note in zip(OFF_POLICY, notes, strict=True)
        if note
    ]
    unknown = "the gradient under the newest weights is not known"
    return tuple(row.with_bias(None, unknown) if level == "none" else row for row in rows)


def off_policy_sized(ledger: tuple[LedgerRow, ...], bias: float | None) -> tuple[LedgerRow, ...]:
    """`ledger` with `bias`, left by the correction of all differences from the actor, in each row of `OFF_POLICY`."""
    return tuple(row.with_bias(bias) if bias is not None and row.name in OFF_POLICY else row for row in ledger)


def server_rows(config: RolloutConfig, stats: RolloutStats, *, sizes: IntArray) -> tuple[LedgerRow, ...]:
    """The rows for completions that servers aborted or lost, of a step with groups of these sizes [K]. A bias is the
    share of the step that was sampled again. The row of a setting is in every step that the setting may affect, since a
    label must not depend on the outcome. A server's failure is not a setting: a step without one has no row."""
    if config.engine == "hf":
        return ()
    rows = []
    again = "sampled again, so those that end early are more likely"
    if config.async_steps and config.sync.in_flight == "abort":
        note = f"completions that a weight sync interrupts are {again}"
        share = min(1.0, (stats.completions_aborted or 0) / max(int(sizes.sum()), 1))  # some more than once
        rows.append(LedgerRow("rollout/aborted", 1.0, "biased", note).with_bias(share))
    if resent := stats.groups_resent:
        note = f"{resent} groups of a server that failed were {again}: without seeds, or through a sync or save"
        rows.append(LedgerRow("rollout/resent", 1.0, "biased", note).with_bias(resent / max(len(sizes), 1)))
    return tuple(rows)
