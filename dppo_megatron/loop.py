"""The phases of a training step, one method each; `train.py` puts them in order.

Selecting, pruning and packing happen on rank 0 and are sent. Generation and grading are shared by all ranks.
Updating and syncing are collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dppo_megatron.actor.actor import Actor, warm_start_optimizer
from dppo_megatron.actor.layout import build_layout
from dppo_megatron.algorithms.correction import mismatch_metrics
from dppo_megatron.algorithms.objectives import make_objective, supervised
from dppo_megatron.config.objective import needs_old_logprobs
from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.data.sets import set_sizes
from dppo_megatron.distributed import collect, from_rank_zero, share
from dppo_megatron.evaluation.evaluator import Evaluator
from dppo_megatron.evaluation.statistics import EvalScores
from dppo_megatron.job import Job
from dppo_megatron.observe.metrics import Timers
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.cost import CostModel
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.packing.slack import TokenCapacity
from dppo_megatron.pruning import LedgerRow, surprisal
from dppo_megatron.pruning.interface import PromptFeatures, StepCost
from dppo_megatron.rewards.grading import grade_groups
from dppo_megatron.rewards.measures import FailureGuard, grading_metrics
from dppo_megatron.rollout.engine import Engine, Request, Sampling
from dppo_megatron.rollout.hf import HFEngine
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.sync.receipts import canary_difference
from dppo_megatron.selection import Chosen, Decision, Rollouts, Selector
from dppo_megatron.trace import trace_row
from dppo_megatron.types import Completion, FloatArray, Group, PackPlan, Prompt, SelectedPrompt, TrainSample
from dppo_megatron.weights.architecture import Architecture


@dataclass
class Loop:
    """The rooms of the house, wired for one job."""

    job: Job
    say: Callable[[str], None] = print
    """Takes a line for the person who watches, on rank 0."""
    actor: Actor = field(init=False)
    timers: Timers = field(default_factory=Timers)
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the current step has measured so far."""
    trace_row: dict[str, Any] = field(default_factory=dict)
    """The current step's outcomes for trace.jsonl, on rank 0."""
    skipped_in_a_row: int = 0
    """Updates without one that was applied, up to now: their loss or gradient was not finite."""
    skipped_samples: str = ""
    """What was in the last of them, for the person who must find out why."""

    def __post_init__(self) -> None:
        config = self.job.config
        dtype = getattr(torch, config.model.dtype)
        layout = build_layout(config.actor.layout, config.seed)
        self._engine = self._make_engine(dtype, layout.device)  # first: what is wrong with a server is said at once
        self.actor = Actor(config.actor, layout, self.job.architecture, self.job.checkpoint.get, dtype=dtype)
        self._evaluator = Evaluator(self.job)
        self._ahead: dict[int, list[SelectedPrompt]] = {}
        """The step whose generation was begun ahead, if any, and its prompts."""
        self._num_syncs = 0
        self._step = 0
        self.rests_after: int | None = 0
        """The step whose weights actor and engine both have; None from the first update of a step to its sync."""
        self.unsynced_step: int | None = None
        """The step whose updates are all done, until the engine has their weights."""
        self._group_size = config.rollout.completions_per_prompt
        self._failures = FailureGuard(config.reward)
        self._packing_layout = packing_layout(config.actor, layout.world_size)
        self._cost = cost_model(self.job.architecture)
        self._selector = Selector(
            config,
            len(self.job.train_prompts),
            capacity=self._capacity(),
            set_sizes=set_sizes(self.job.train_sets),
            features=PromptFeatures.of(self.job.train_prompts),
        )
        self.objective = make_objective(config.objective, self.job.policy_loss)
        self._measured: list[dict[str, float]] = []
        rollout = config.rollout
        self._sampling = Sampling(
            rollout.sampling.max_completion_tokens,
            rollout.sampling.temperature,
            config.seed,
            rollout.sampling.top_p,
            rollout.sampling.top_k,
            self.job.stop_token_ids,
        )

    def warm_start(self) -> None:
        """The supervised phase, through the same actor; nothing if `warm_start.steps` is 0."""
        config = self.job.config
        warm, examples = config.warm_start, self.job.warm_start_examples
        if warm.steps:
            self._engine.rest()
            self.actor.start_phase(
                warm_start_optimizer(config.actor.optimizer, warm.learning_rate, warm.lr_warmup_steps), warm.steps
            )
        order, position = PromptOrder(len(examples), config.seed), 0
        for _ in range(warm.steps):
            chosen, position = order.take(position, warm.examples_per_step)
            num_tokens = float(sum(examples[i].num_completion_tokens for i in chosen))
            batch = [replace(examples[i], denominator=num_tokens) for i in chosen]
            if self.actor.update(batch, self.pack(batch), supervised())["skipped_updates"]:
                raise FloatingPointError("warm start: the loss or its gradient is not finite; lower its learning rate")
        self.take_metrics()

    def start_rl(self) -> None:
        """A fresh optimizer and schedule for the RL phase; with a KL term, its reference is the policy of now."""
        config = self.job.config
        self.actor.start_phase(config.actor.optimizer, config.steps * config.objective.updates_per_step)
        if config.objective.kl.coef:
            self.actor.freeze_reference()

    def select(self, step: int) -> list[SelectedPrompt]:
        """The prompts of this step that are worth a rollout, with what undoes their selection."""
        if step in self._ahead:
            return self._ahead[step]
        with self.timers.phase("select"):
            return self._selected(from_rank_zero(lambda: self._selector.begin(step)))

    def refill(self, groups: Sequence[Group], step: int) -> list[SelectedPrompt]:
        """More prompts, for the methods that sample until enough groups have reward variance; else nothing."""
        with self.timers.phase("select"):
            more = from_rank_zero(lambda: self._selector.refill(self._rewards(groups), step))
            return self._selected(more) if more is not None else []

    def generate(self, selected: Sequence[SelectedPrompt], step: int) -> list[Group]:
        """Sample and grade a group of completions for every selected prompt; every rank generates a share."""
        size = self._group_size
        mine = share(selected)
        with self.timers.phase("rollout"):
            if self._ahead.pop(step, None) is None:
                self._engine.start(self._requests(mine, step), self._sampling)
            completions = self._engine.finish()
        with self.timers.phase("reward"):
            groups = grade_groups(self.job.grade, mine, completions, size)
        with self.timers.phase("rollout"):
            groups = collect(groups)
        self._failures.check(groups, step)
        return groups

    def look_ahead(self, step: int) -> None:
        """With `rollout.async_steps`, begin to generate for `step` while this step trains; 0: nothing to begin."""
        if step and self.job.config.rollout.async_steps:
            selected = self.select(step)
            self._engine.start(self._requests(share(selected), step), self._sampling)
            self._ahead[step] = selected

    def prune(self, groups: Sequence[Group], step: int) -> list[list[TrainSample]]:
        """Advantages on full groups, then the completions worth training on, each with its weight.

        Returns:
            The samples of each optimizer update of the step.
        """

        def decide() -> list[list[TrainSample]]:
            """On rank 0, which alone knows the selector's state."""
            completions = [completion for group in groups for completion in group.completions]
            shape = (len(groups), self._group_size)
            rollouts = Rollouts(
                rewards=self._rewards(groups),
                lengths=np.array([len(c.token_ids) for c in completions], dtype=np.int64).reshape(shape),
                surprisal=np.array([surprisal(c.logprobs) for c in completions]).reshape(shape),
                prompt_tokens=np.array([len(group.selected.prompt.token_ids) for group in groups], dtype=np.int64),
                truncated=np.array([c.finish_reason == "length" for c in completions], dtype=np.bool_).reshape(shape),
            )
            decision = self._selector.finish(rollouts, step)
            self.metrics |= decision.metrics
            self.metrics |= grading_metrics(groups, list(self.job.config.reward.functions))
            self.trace_row = trace_row(step, decision, rollouts)
            measured = self._engine.statistics()
            self.metrics |= measured
            cut = measured.get("rollout/cut_completions", 0.0)
            stragglers = straggler_rows(self.job.config.rollout, cut, len(completions))
            ledger = [*decision.ledger, *stragglers, *self._overlong_row()]
            self.metrics["prune/ledger"] = [asdict(row) for row in ledger]
            self.metrics["rollout/completion_tokens_mean"] = float(rollouts.lengths.mean()) if completions else math.nan
            self.metrics["rollout/truncated"] = sum(c.finish_reason == "length" for c in completions)
            updates = self.job.config.objective.updates_per_step
            return [_samples(groups, decision, self._group_size, index) for index in range(updates)]

        self._step = step
        with self.timers.phase("prune"):
            return from_rank_zero(decide)

    def recompute_logprobs(self, minibatches: list[list[TrainSample]]) -> list[list[TrainSample]]:
        """The samples with the log-probabilities that the objective compares with: the actor's before the first update
        of the step, and the reference's. Without a need for either (docs/objectives.md) nothing is run."""
        objective = self.job.config.objective
        needs_old, needs_reference = needs_old_logprobs(objective), objective.kl.coef > 0
        measures = self.job.config.rollout.engine != "hf"  # another program's kernels: say each step how far apart
        samples = [sample for minibatch in minibatches for sample in minibatch]
        self._engine.rest()
        if not samples or not (needs_old or needs_reference or measures):
            return minibatches
        plan = self.pack(samples)
        with self.timers.phase("update"), self.timers.phase("logprobs"):  # a part of what the update costs
            old = self._logprobs(samples, plan) if needs_old or measures else None
            reference = None
            if needs_reference:
                with self.actor.reference_weights():
                    reference = self._logprobs(samples, plan)
        if old is not None:
            self._measure_mismatch(samples, old)
        filled = iter(
            [
                replace(
                    sample,
                    old_logprobs=old[index] if old is not None and needs_old else None,
                    reference_logprobs=None if reference is None else reference[index],
                )
                for index, sample in enumerate(samples)
            ]
        )
        return [[next(filled) for _ in minibatch] for minibatch in minibatches]

    def pack(self, samples: Sequence[TrainSample]) -> PackPlan:
        """Micro-batches for every data-parallel rank."""
        with self.timers.phase("pack"):
            plan = self._plan(samples)
        self.metrics |= {f"pack/{name}": value for name, value in plan.metrics.items()}
        return plan

    def update(self, samples: Sequence[TrainSample], plan: PackPlan) -> None:
        """One optimizer update on the weighted objective. `train/*` are means over the step's updates so far."""
        self.rests_after = None
        with self.timers.phase("update"):
            measured = self.actor.update(
                samples, plan, self.objective, temperature=self.job.config.rollout.sampling.temperature
            )
        # after the first update the policy has moved on purpose, and this would no longer be a mismatch
        self.metrics.setdefault("mismatch/logprob_abs_diff_mean", measured.pop("logprob_abs_diff", 0.0))
        if measured["skipped_updates"]:
            self.skipped_in_a_row += 1
            self.skipped_samples = _name_the_broken(samples)
        else:
            self.skipped_in_a_row = 0
        self._measured.append(measured)
        for name in measured:
            values = [update[name] for update in self._measured if name in update]
            self.metrics[f"train/{name}"] = float(np.mean(values))
        self.metrics["train/skipped_updates"] = sum(update["skipped_updates"] for update in self._measured)
        self.metrics["train/learning_rate"] = measured["learning_rate"]

    def sync(self) -> None:
        """Give the engine the actor's weights."""
        rollout = self.job.config.rollout
        self.unsynced_step = self._step
        with self.timers.phase("sync"):
            self._engine.load_weights(self.actor.weights)
            every = rollout.sync.verify_every
            if rollout.engine != "hf" and every and self._num_syncs % every == 0:
                self._check_canary()
            self._num_syncs += 1
        self.rests_after, self.unsynced_step = self._step, None

    def close(self) -> None:
        """Release the engine's servers and the graders' processes."""
        self._engine.close()
        self._evaluator.close()
        self.job.grade.close()

    def evaluate(self, names: Collection[str] | None = None) -> list[EvalScores]:
        """Scores of every evaluation set, or of those in `names`."""
        return self._evaluator.evaluate(self._engine, names)

    def take_metrics(self) -> dict[str, Any]:
        """What the phases since the last call measured."""
        taken = self.metrics | self._engine.statistics() | self.timers.drain()
        self.metrics = {}
        self._measured = []
        return taken

    def feedback(self, step: int, metrics: dict[str, Any]) -> list[str]:
        """Let the pruning policies learn what the step cost; lines for the log if a rate moved.

        Of a step with a skipped update they learn the seconds alone: its gradient norm is no number.
        """

        def learn() -> list[str]:
            """On rank 0, as `decide` in `prune`."""
            rollout_s = metrics["time/rollout_s"] + metrics["time/reward_s"]
            update_s = metrics["time/update_s"]
            other_s = max(0.0, metrics["time/step_s"] - rollout_s - update_s)
            grad_norm = math.nan if metrics["train/skipped_updates"] else metrics["train/grad_norm"]
            return self._selector.feedback(StepCost(step, rollout_s, update_s, other_s, grad_norm))

        return from_rank_zero(learn)

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on beside the actor; a step without feedback is not part of it.

        Rank 0's is the one to save: the others have never selected.
        """
        return {"selector": self._selector.state_dict(), "skipped_in_a_row": self.skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved `state_dict`."""
        self._selector.load_state_dict(state["selector"])
        self.skipped_in_a_row = state["skipped_in_a_row"]

    def _make_engine(self, dtype: torch.dtype, device: torch.device) -> Engine:
        config = self.job.config
        if config.rollout.engine == "hf":
            return HFEngine(
                config.model.hf_path,
                self.job.tokenizer,
                dtype=dtype,
                device=device,
                max_concurrent_sequences=config.rollout.limits.max_concurrent_sequences,
            )
        engine = ServerEngine(config, self.job.architecture, self.job.tokenizer, self.say)
        self.say(engine.description)
        return engine

    def _requests(self, mine: Sequence[SelectedPrompt], step: int) -> list[Request]:
        return [Request(item.prompt, index, step) for item in mine for index in range(self._group_size)]

    def _check_canary(self) -> None:
        """One prompt's completions from every server, scored by the actor. Raises GuardStop if they differ."""
        prompt = self.job.train_prompts[0]
        answers = self._engine.probe([Request(prompt, i, 0) for i in range(self._group_size)], self._sampling)
        samples = [unweighted_sample(prompt, completion) for _, completion in answers]
        scored = self._logprobs(samples, self._plan(samples)) if samples else []
        bound = self.job.config.rollout.sync.max_canary_logprob_diff
        servers = [server for server, _ in answers]
        behaviour = [sample.behaviour_logprobs for sample in samples]
        self.metrics["rollout/canary_logprob_diff"] = canary_difference(servers, behaviour, scored, bound)

    def _measure_mismatch(self, samples: Sequence[TrainSample], old: Sequence[FloatArray]) -> None:
        """How far the engine's log-probabilities are from the actor's, with a warning where that is far."""
        behaviour, weights = [s.behaviour_logprobs for s in samples], [s.weight for s in samples]
        self.metrics |= mismatch_metrics(old, behaviour, weights)
        difference, alarm = (
            self.metrics["mismatch/logprob_abs_diff_mean"],
            self.job.config.rollout.limits.mismatch_alarm,
        )
        if difference > alarm:
            self.say(f"warning: mean |log-probability difference| to the engine {difference:.3g} > {alarm:g}")

    def _plan(self, samples: Sequence[TrainSample]) -> PackPlan:
        config = self.job.config.packing
        return from_rank_zero(
            lambda: plan_microbatches(
                samples,
                layout=self._packing_layout,
                max_tokens_per_microbatch=config.max_tokens_per_microbatch,
                mode=config.mode,
                cost=self._cost,
                window=config.window,
            )
        )

    def _capacity(self) -> TokenCapacity | None:
        """What a step's micro-batches hold; nothing that could be filled where each holds one sequence."""
        config = self.job.config.packing
        if config.mode == "none":
            return None
        return TokenCapacity(self._packing_layout, config.max_tokens_per_microbatch)

    def _logprobs(self, samples: Sequence[TrainSample], plan: PackPlan) -> list[FloatArray]:
        """Of every sample under the actor's present weights, on every rank."""
        values = self.actor.logprobs(samples, plan, temperature=self.job.config.rollout.sampling.temperature)
        return from_rank_zero(lambda: values or [])

    def _rewards(self, groups: Sequence[Group]) -> FloatArray:
        """[groups, G]; a biased method may have skipped every prompt of the step."""
        return np.array([group.rewards for group in groups]).reshape(len(groups), self._group_size)

    def _overlong_row(self) -> list[LedgerRow]:
        """Problems that are never trained on because their prompts are too long; nothing if there are none."""
        filtered, kept = sum(one.filtered for one in self.job.train_sets.values()), len(self.job.train_prompts)
        if not filtered:
            return []
        note = f"{filtered} problems have prompts above max_prompt_tokens and are left out of the training data"
        return [LedgerRow("data/overlong_prompts", kept / (kept + filtered), "biased", note)]

    def _selected(self, chosen: Chosen) -> list[SelectedPrompt]:
        prompts = self.job.train_prompts
        rows = zip(chosen.prompt_index, chosen.inclusion_prob, chosen.weight, strict=True)
        return [SelectedPrompt(prompts[index], float(prob), float(weight)) for index, prob, weight in rows]


def unweighted_sample(prompt: Prompt, completion: Completion) -> TrainSample:
    """A completion to be scored, not trained on."""
    return TrainSample(
        id=f"{prompt.index}:canary",
        token_ids=np.concatenate([np.array(prompt.token_ids, np.int64), completion.token_ids]),
        num_prompt_tokens=len(prompt.token_ids),
        behaviour_logprobs=completion.logprobs,
        advantage=0.0,
        weight=1.0,
        denominator=1.0,
    )


def straggler_rows(config: RolloutConfig, cut: float, total: int) -> tuple[LedgerRow, ...]:
    """The ledger row of `limits.straggler_share`, wherever servers may cut: that none was cut so far is an outcome."""
    if config.engine == "hf" or config.limits.straggler_share >= 1:
        return ()
    note = f"{cut:.0f} completions were cut off by rollout.limits.straggler_share and count as truncated"
    return (LedgerRow("rollout/stragglers", 1.0 - cut / max(total, 1), "biased", note),)


def _name_the_broken(samples: Sequence[TrainSample]) -> str:
    """The samples that hold something not finite, else all of them: then it came out of the model or the loss."""
    broken = [
        sample.id
        for sample in samples
        if not np.isfinite([sample.advantage, sample.weight, *sample.behaviour_logprobs]).all()
    ]
    ids = broken or [sample.id for sample in samples]
    return f"{', '.join(ids[:8])}{f' and {len(ids) - 8} more' if len(ids) > 8 else ''}"


def _samples(groups: Sequence[Group], decision: Decision, size: int, minibatch: int) -> list[TrainSample]:
    """The kept completions of one optimizer update with their weights, advantages and frozen denominators."""
    samples = []
    for row in np.flatnonzero(decision.kept & (decision.minibatch == minibatch)).tolist():
        group = groups[row // size]
        prompt, completion = group.selected.prompt, group.completions[row % size]
        samples.append(
            TrainSample(
                id=f"{prompt.index}:{row % size}",
                token_ids=np.concatenate([np.array(prompt.token_ids, np.int64), completion.token_ids]),
                num_prompt_tokens=len(prompt.token_ids),
                behaviour_logprobs=completion.logprobs,
                advantage=float(decision.advantages[row]),
                weight=float(decision.weight[row]),
                denominator=float(decision.denominator[row]),
            )
        )
    return samples


def cost_model(architecture: Architecture) -> CostModel:
    """What a sequence of this model costs to train, by its length: what the planner balances."""
    experts = architecture.experts
    return CostModel.of_transformer(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_size=experts.ffn_size if experts else architecture.ffn_size,
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        vocab_size=architecture.vocab_size,
        active_experts=experts.per_token if experts else 1,
        num_experts=experts.count if experts else 0,
    )
