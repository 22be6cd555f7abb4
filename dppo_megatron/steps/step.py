"""One RL step as a value: its prompts, completions and measurements, and how far it has progressed.

A phase of `loop.py` takes a step, does one thing and advances `reached`. This alone determines what may be saved:

    new -> selected -> generating -> rolled_out -> pruned -> exchanged -> updating -> updated -> synced -> finished
    '------ a checkpoint resumes before this step ------------------'    none       '- resumes after it once finished -'

While a step is `updating` the weights are between two steps, so no checkpoint can be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from dppo_megatron.actor.replay import Recorded
from dppo_megatron.algorithms.token_values import OwnTokens
from dppo_megatron.config.pruning import EarlyStopConfig
from dppo_megatron.observe.metrics import StepTiming, Timers
from dppo_megatron.observe.samples import RecordedGroup
from dppo_megatron.packing.planner import SampleSize
from dppo_megatron.pruning import LedgerRow, logit_grad_norm
from dppo_megatron.pruning.early_stop import end_probability
from dppo_megatron.rewards.measures import GradeTable
from dppo_megatron.selection import Rollouts, TrainSelection
from dppo_megatron.selection.coefficients import TOKENS
from dppo_megatron.types import (
    FloatArray,
    Group,
    IntArray,
    PackPlan,
    RolloutPrompt,
    StepCounts,
    TrainSample,
    UpdateResult,
    UserError,
    mean_of_sums,
)

Reached: TypeAlias = Literal[
    "new", "selected", "generating", "rolled_out", "pruned", "exchanged", "updating", "updated", "synced", "finished"
]
ORDER: tuple[Reached, ...] = get_args(Reached)
BACK: dict[Reached, Reached] = {"rolled_out": "generating", "updated": "updating"}
"""Transitions back: a refill generates again, and a step may have several optimizer updates."""


@dataclass
class StepRecord:
    """What a step writes to metrics.jsonl and trace.jsonl."""

    metrics: dict[str, float] = field(default_factory=dict)
    ledger: tuple[LedgerRow, ...] = ()
    """What each selection did to the expected gradient; on rank 0."""
    trace: dict[str, Any] = field(default_factory=dict)
    """The outcomes of its rollouts, on rank 0."""
    timers: Timers = field(default_factory=Timers)
    timing: StepTiming = field(default_factory=lambda: Timers().timing())
    """Empty until the step is finished."""
    counts: StepCounts | None = None
    """On rank 0, once it is pruned."""

    def add_tokens(self, tokens: OwnTokens, kept: int, offered: int) -> None:
        """Add the ledger's row for a selection of tokens: `kept` of the `offered` tokens have a nonzero weight."""
        row = LedgerRow(TOKENS, kept / offered if offered else 1.0, "unbiased", f"drawn by {tokens.path}")
        if "weights" in tokens.given:
            row = replace(row, label="biased", note=f"weights of {tokens.path}")
            row = row.with_bias(None, "what sums with these weights estimate is not known")
            self.metrics.pop("prune/bias_estimate", None)  # it covers only the other rows
        if "probabilities" in tokens.given:  # these cover the other draws; the parts of each stage stay
            for name in ("prune/design_effect", "prune/realised_design_effect"):
                self.metrics.pop(name, None)
        self.ledger += (row,)

    def line(self) -> dict[str, Any]:
        labels = [row.label for row in self.ledger]
        counts = {f"prune/{label}_selections": float(labels.count(label)) for label in ("biased", "ratio")}
        return self.metrics | counts | {"prune/ledger": [asdict(row) for row in self.ledger]}


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """The outcomes of k groups as arrays: what rank 0 needs to select completions, 43 bytes of each."""

    group_index: IntArray
    """[k] index of each group in the step."""
    holder: IntArray
    """[k] the rank that holds its completions."""
    outcomes: Rollouts
    """All fields except `prompt_tokens`."""
    surprisal: FloatArray
    """[k, G] -log of the probability with which the engine sampled each completion: the sum over its tokens."""
    grades: dict[str, GradeTable]
    """By reward settings, see `Prompt.graded_by`."""

    @staticmethod
    def of(groups: Mapping[int, Group], width: int, rank: int) -> RolloutTable:
        """Outcomes of the groups that `rank` holds: index in the step -> group of at most `width` completions."""
        held = list(groups.values())
        asked = np.arange(width) < np.array([len(group.completions) for group in held], dtype=np.int64)[:, None]
        completions = [completion for group in held for completion in group.completions]
        grades = [grade for group in held for grade in group.grades or (None,) * len(group.completions)]

        def table(values: Iterable[float], elsewhere: float, dtype: type) -> Any:
            """[k, width] with `values` where a completion was requested, in order, and `elsewhere` in other places."""
            filled: np.ndarray[Any, Any] = np.full(asked.shape, elsewhere, dtype=dtype)
            filled[asked] = np.fromiter(values, dtype=dtype)
            return filled

        return RolloutTable(
            group_index=np.array(list(groups), dtype=np.int64),
            holder=np.full(len(groups), rank, dtype=np.int64),
            outcomes=Rollouts(
                rewards=table((reward for group in held for reward in group.rewards), np.nan, np.float64),
                lengths=table((len(one.token_ids) for one in completions), 0, np.int64),
                logit_grad_norm=table((logit_grad_norm(one.logprobs) for one in completions), 0.0, np.float64),
                truncated=table((one.finish_reason == "length" for one in completions), False, np.bool_),
                unfinished=table((one.finish_reason in ("abort", "early") for one in completions), True, np.bool_),
                by_chance=table((one is not None and one.by_chance for one in grades), False, np.bool_),
                stands_for=table(
                    (
                        count
                        for one in held
                        for count in (np.ones(len(one.completions)) if one.stands_for is None else one.stands_for)
                    ),
                    1.0,
                    np.float64,
                ),
            ),
            surprisal=table((-one.logprobs.sum(dtype=np.float64) for one in completions), 0.0, np.float64),
            grades={
                key: GradeTable.of(one for one in held if one.selected.prompt.graded_by == key)
                for key in dict.fromkeys(one.selected.prompt.graded_by for one in held)
            },
        )

    @staticmethod
    def join(parts: Sequence[RolloutTable]) -> RolloutTable:
        """All groups of a step, sorted by index; `grades` stay in the order of `parts`."""
        order = np.argsort(np.concatenate([part.group_index for part in parts]))

        def columns(of: Sequence[Any], *names: str) -> dict[str, Any]:
            return {name: np.concatenate([getattr(one, name) for one in of])[order] for name in names}

        names = [one.name for one in fields(Rollouts) if one.name != "prompt_tokens"]
        outcomes = Rollouts(**columns([part.outcomes for part in parts], *names))
        keys = dict.fromkeys(key for part in parts for key in part.grades)
        tables = {key: GradeTable.join([part.grades[key] for part in parts if key in part.grades]) for key in keys}
        return RolloutTable(**columns(parts, "group_index", "holder", "surprisal"), outcomes=outcomes, grades=tables)

    def metrics(self, inclusion_prob: FloatArray) -> dict[str, float]:
        """Metrics of the rollout: Horvitz-Thompson estimates over all prompts that could have been drawn (entropy per
        token of the sampling distribution, mean length, share truncated), and counts.

        Args:
            inclusion_prob: [k] of each group's prompt, times the group's size if sizes differ.
        """
        one = self.outcomes
        assert one.truncated is not None and one.unfinished is not None and one.stands_for is not None
        weight = ~one.unfinished * one.stands_for / inclusion_prob[:, None]
        tokens = float((weight * one.lengths).sum())
        completions = float(weight.sum())
        return {
            "train/entropy": mean_of_sums(float((weight * self.surprisal).sum()), tokens),
            "rollout/completion_tokens_mean": mean_of_sums(tokens, completions),
            "rollout/truncated_share": mean_of_sums(float((weight * one.truncated).sum()), completions),
            "rollout/truncated_count": float(one.truncated.sum()),
            "rollout/stopped_early_count": float((one.stands_for == 0).sum()),
        }

    def rollouts(self, selected: Sequence[RolloutPrompt]) -> Rollouts:
        """The selector's input; `selected` [k] are the prompts of the groups."""
        may_stop = any(one.limits for one in selected)
        return replace(
            self.outcomes,
            prompt_tokens=np.array([len(item.prompt.token_ids) for item in selected], dtype=np.int64),
            stands_for=self.outcomes.stands_for if may_stop else None,
        )


def with_early_stop(groups: Sequence[Group], config: EarlyStopConfig, longest: int) -> list[Group]:
    """The groups with `stands_for`: a completion that ended counts for those that were stopped early, which count 0.

    Args:
        longest: `rollout.sampling.max_completion_tokens`.

    Raises:
        UserError: the engine, one of the user's own, did not keep to a limit, so the weights would be wrong.
    """
    if not config.after_tokens:
        return list(groups)
    weighted = []
    for group in groups:
        _check_limits(group, longest)
        lengths = np.array([len(one.token_ids) for one in group.completions], dtype=np.int64)
        ended = np.array([one.finish_reason in ("stop", "length") for one in group.completions])
        stopped = np.array([one.finish_reason == "early" for one in group.completions])
        counts = np.where(ended, 1.0 / end_probability(config, lengths), 1.0)  # missing ones are not counted anyway
        weighted.append(replace(group, stands_for=np.where(stopped, 0.0, counts)))
    return weighted


def _check_limits(group: Group, longest: int) -> None:
    for one, limit in zip(group.completions, group.selected.limits, strict=True):
        count, reason = len(one.token_ids), one.finish_reason
        if reason != "abort" and (count > limit or (reason == "length" and count < longest)):
            raise UserError(
                f"the engine returned a completion of {count} tokens that ended by `{reason}`, for a limit of {limit}:"
                " with pruning.early_stop it has to end each at its `Request.limit`, with the reason `early`"
            )


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Rank 0's decisions about one optimizer update, sent to every rank: scalars per kept completion.

    Example: with G = 4, `rows` [1, 6] are completion 1 of group 0 and completion 2 of group 1.
    """

    rows: IntArray
    """[n] kept completions: index of the group in the step times G, plus the completion's index."""
    lengths: IntArray
    """[n] completion tokens."""
    advantages: FloatArray
    weights: FloatArray
    denominators: FloatArray
    figure_weights: FloatArray
    pack: PackPlan
    """Its `members` are places in `rows`."""
    has_support: bool
    """Figures with these weights estimate the policy's; else they describe only kept samples. See `TrainSelection`."""

    @staticmethod
    def of(decision: TrainSelection, rows: IntArray, lengths: IntArray, pack: PackPlan) -> UpdatePlan:
        return UpdatePlan(
            rows=rows,
            lengths=lengths,
            advantages=decision.advantages[rows],
            weights=decision.weight[rows],
            denominators=decision.denominator[rows],
            figure_weights=decision.figure_weight[rows],
            pack=pack,
            has_support=decision.has_support,
        )


@dataclass
class Update:
    plan: UpdatePlan
    samples: Mapping[int, TrainSample]
    """Position in `plan.rows` -> sample, for the samples of this rank's data-parallel replica."""
    routes: Recorded | None = None
    """Routed experts of the actor's own forward pass, on this rank, if these are replayed."""


@dataclass
class Step:
    number: int
    """From 1."""
    selected: list[RolloutPrompt] = field(default_factory=list)
    """The prompts to roll out, the same on every rank; a refill adds to them. Group k belongs to selected[k]."""
    groups: dict[int, Group] = field(default_factory=dict)
    """k -> group, for the groups whose completions this rank holds."""
    updates: list[Update] = field(default_factory=list)
    samples: list[RecordedGroup] = field(default_factory=list)
    """This rank's groups that are written to samples/."""
    record: StepRecord = field(default_factory=StepRecord)
    measured: list[UpdateResult] = field(default_factory=list)
    reached: Reached = "new"

    def reach(self, state: Reached) -> None:
        """Advance to `state`. A phase out of order is a bug in the loop, hence an assertion."""
        is_next = ORDER.index(state) == ORDER.index(self.reached) + 1
        skips = (self.reached, state) == ("selected", "rolled_out")  # no prompt was selected
        assert is_next or skips or BACK.get(self.reached) == state, f"step {self.number}: {self.reached} -> {state}"
        self.reached = state

    def update_metrics(self) -> dict[str, float]:
        """`train/*` of the updates so far: mean loss and gradient norm, number of skipped updates, last learning rate;
        and diagnostics over all their tokens, as `kept/train/*` if they describe only the kept samples."""
        own = {
            "train/loss": float(np.mean([one.loss for one in self.measured])),
            "train/grad_norm": float(np.mean([one.grad_norm for one in self.measured])),
            "train/skipped_updates": float(sum(one.is_skipped for one in self.measured)),
            "train/learning_rate": self.measured[-1].learning_rate,
        }
        tokens = sum(one.tokens for one in self.measured)
        names = dict.fromkeys(name for one in self.measured for name in one.sums)  # a user's loss may vary them
        totals = {name: sum(one.sums.get(name, 0.0) for one in self.measured) for name in names}
        return own | self.named({f"train/{name}": mean_of_sums(total, tokens) for name, total in totals.items()})

    def named(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Figures measured on the kept samples, under `kept/` if these are not weighted to estimate the policy's."""
        prefix = "" if self.updates[0].plan.has_support else "kept/"
        return {f"{prefix}{name}": value for name, value in figures.items()}

    @property
    def is_updated(self) -> bool:
        """Whether the actor's weights have all its updates; they may not be synced to the engine or recorded yet."""
        return self.reached in ("updated", "synced") and len(self.measured) == len(self.updates)


def sizes_of(rows: IntArray, lengths: IntArray, selected: Sequence[RolloutPrompt], group_size: int) -> list[SampleSize]:
    """The planner's input for the kept completions `rows` [n] with `lengths` [n] completion tokens."""
    sizes = []
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        prompt = selected[row // group_size].prompt
        sizes.append(SampleSize(f"{prompt.index}:{row % group_size}", len(prompt.token_ids) + length - 1))
    return sizes


def sample_of(
    plan: UpdatePlan,
    place: int,
    selected: Sequence[RolloutPrompt],
    group_size: int,
    tokens: IntArray,
    logprobs: np.ndarray[Any, np.dtype[np.float32]],
) -> TrainSample:
    """Completion `plan.rows[place]` with its weight, advantage and frozen denominator."""
    row = int(plan.rows[place])
    prompt = selected[row // group_size].prompt
    return TrainSample(
        id=f"{prompt.index}:{row % group_size}",
        token_ids=np.concatenate([np.array(prompt.token_ids, np.int64), tokens]),
        num_prompt_tokens=len(prompt.token_ids),
        behaviour_logprobs=logprobs,
        advantage=float(plan.advantages[place]),
        weight=float(plan.weights[place]),
        denominator=float(plan.denominators[place]),
        figure_weight=float(plan.figure_weights[place]),
    )
