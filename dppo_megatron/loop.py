"""The phases of a training step, one method each; `train.py` calls them in order.

The only file that knows all the rooms (engine, graders, selection, packing, actor) and connects them. A phase takes the
step (`step.py`), does one thing and moves `reached` on. Rank 0 selects, prunes and plans on scalars and broadcasts the
result. Ranks share generating and grading. Updating and syncing are collective.

    rank 0   begin ------------------------ decide, plan ---.
      |        | prompts                 ^ scalars          | rows, weights, micro-batches
    all      generate, grade a share ----'                  '--> exchange tokens -> log-probs -> update -> sync

Between two steps the loop holds at most one more: the next, whose generation has begun ahead (`rollout.async_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dppo_megatron.actor.actor import Actor, warm_start_optimizer
from dppo_megatron.actor.layout import build_layout
from dppo_megatron.actor.logprobs import LogprobStore
from dppo_megatron.algorithms.correction import Mismatch
from dppo_megatron.algorithms.objectives import make_objective, supervised
from dppo_megatron.build import cost_model, make_engine, make_sampling, token_capacity, what_to_offload
from dppo_megatron.config.objective import needs_old_logprobs
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.data.sets import set_sizes
from dppo_megatron.distributed import from_rank_zero, gather_all, to_rank_zero
from dppo_megatron.evaluation.evaluator import Evaluator
from dppo_megatron.evaluation.statistics import EvalScores
from dppo_megatron.exchange import Replicas, exchange
from dppo_megatron.job import Job
from dppo_megatron.ledger import overlong_row, straggler_row
from dppo_megatron.observe.metrics import Timers
from dppo_megatron.observe.samples import add_actor_logprobs
from dppo_megatron.outcomes import Outcomes
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import Packable, plan_microbatches
from dppo_megatron.pruning.interface import PromptFeatures, StepCost
from dppo_megatron.rewards.grading import grade_groups
from dppo_megatron.rewards.measures import FailureGuard, grading_metrics
from dppo_megatron.rollout.engine import Request
from dppo_megatron.rollout.sync.receipts import Canary
from dppo_megatron.selection import Chosen, Decision, Selector
from dppo_megatron.step import Step, Update, UpdatePlan, sizes_of
from dppo_megatron.trace import trace_row
from dppo_megatron.types import Completion, FloatArray, IntArray, PackPlan, Prompt, SelectedPrompt, TrainSample
from dppo_megatron.verdicts import Verdicts


class Loop:
    """The rooms of the house, wired for one job.

    Args:
        say: takes log lines, on rank 0.
    """

    def __init__(self, job: Job, say: Callable[[str], None] = print) -> None:
        config = job.config
        self.job, self.say = job, say
        dtype = getattr(torch, config.model.dtype)
        layout = build_layout(config.actor.layout, config.seed)
        self._engine = make_engine(job, dtype, layout.device, say)  # first: reports a bad server at once
        self._engine.rest()  # and gives the actor the device
        self._offload = what_to_offload(config, layout.device.type)
        self.actor = Actor(config.actor, layout, job.architecture, job.checkpoint.get, dtype=dtype)
        self.objective = make_objective(config.objective, job.policy_loss)
        self._replicas = Replicas.agree(layout.data_parallel_rank)
        self._evaluator = Evaluator(job)
        self._failures = FailureGuard(config.reward)
        self._packing_layout = packing_layout(config.actor, layout.world_size)
        self._cost = cost_model(job.architecture)
        self._sampling = make_sampling(job)
        self._group_size = config.rollout.completions_per_prompt
        self._selector = Selector(
            config,
            len(job.train_prompts),
            capacity=token_capacity(config.packing, self._packing_layout),
            set_sizes=set_sizes(job.train_sets),
            features=PromptFeatures.of(job.train_prompts),
        )
        self._outcomes: list[Outcomes] = []
        """Outcomes of the current step's rollout rounds so far, on rank 0."""
        self._canary = Canary(config.rollout, config.seed, job.stop_token_ids, say)
        self._receipts: dict[str, float] = {}
        """Figures from the weight syncs since the last finished step."""
        self.current: Step | None = None
        """The step in progress, until it is finished."""
        self._ahead: Step | None = None
        """The step whose generation was begun ahead, if any."""
        self.last_complete_step: int | None = 0
        """The step whose weights the actor has; None while a step is updating: they are then between two steps."""
        self.skipped_in_a_row = 0
        """Consecutive updates up to now that were skipped because loss or gradient was not finite."""
        self.skipped_samples = ""
        """Ids of the samples in the last skipped update."""

    # ---------------------------------------------------------------------------------------- before the first step

    def warm_start(self) -> None:
        """The supervised phase, through the same actor; nothing if `warm_start.steps` is 0."""
        config = self.job.config
        warm, examples = config.warm_start, self.job.warm_start_examples
        if warm.steps:
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

    def start_rl(self) -> None:
        """Begin the RL phase: fresh optimizer and schedule; with a KL term, freeze the policy as its reference."""
        config = self.job.config
        self.actor.start_phase(config.actor.optimizer, config.steps * config.objective.updates_per_step)
        if config.objective.kl.coef:
            self.actor.freeze_reference()

    def load_engine(self) -> None:
        """Give the engine the actor's weights. Raises GuardStop if they do not arrive."""
        if self._offload != "none":
            self.actor.offload()  # before servers wake
        if self._engine.load_weights(self._weights) or self._canary.is_overdue:
            self._canary.ask(self._engine, self.job.train_prompts[0])
            if self._offload != "all":  # else in `to_training`, when there is room for the weights again
                self._receipts |= self._canary.judge(self._score)

    def final_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights on rank 0, under their Hugging Face names. Nothing is generated after this. Collective; raises
        GuardStop if servers turn out to have had others."""
        if self._offload == "all":
            self._engine.rest()
        self._canary.judge(self._score)
        return self.actor.weights(to=[0])

    # ---------------------------------------------------------------------------------------- the phases of a step

    @contextmanager
    def step(self, number: int) -> Iterator[Step]:
        """Step `number`: the one begun ahead, or a new one. `time/step_s` is the time spent in the block,
        `time/step_cpu_s` the CPU time of this process in it: where cores are shared, the steadier of the two."""
        step, self._ahead = self._ahead or Step(number), None
        assert step.number == number, f"step {step.number} was begun ahead, {number} is asked for"
        self.current, self._outcomes = step, []
        with step.record.timers.phase("step", cpu=True):
            if step.reached == "new":
                self._select(step, step.record.timers)
            yield step

    def rollout(self, step: Step) -> None:
        """Generate and grade the step's groups; some methods then ask for more until enough groups have variance."""
        more: Sequence[SelectedPrompt] = step.selected
        first = 0
        while more:
            self.generate(step, more, first)
            first = len(step.selected)
            with step.record.timers.phase("select"):
                more = self._selected(from_rank_zero(lambda: self._refill(step)))
            step.selected += more
        if step.reached == "selected":
            step.reach("rolled_out")

    def generate(self, step: Step, selected: Sequence[SelectedPrompt], first: int) -> None:
        """One round: groups `first`, first + 1, ... of the step. Every rank holds a share of them."""
        size, timers = self._group_size, step.record.timers
        with timers.phase("rollout"):
            if step.reached != "generating":
                self._start(step, selected)
            completions, grades = self._engine.finish(), self._engine.take_grades()
        mine = sorted({position // size for position in completions})
        with timers.phase("reward"):
            positions = [position for group in mine for position in range(group * size, (group + 1) * size)]
            flat = [completions[position] for position in positions]
            known = {place: grades[position] for place, position in enumerate(positions) if position in grades}
            graded = grade_groups(self.job.grade, [selected[group] for group in mine], flat, size, known)
            groups = {first + group: one for group, one in zip(mine, graded, strict=True)}
        with timers.phase("rollout"):
            outcomes = to_rank_zero(Outcomes.of(groups, size, self._replicas.rank))
        step.groups |= groups
        step.reach("rolled_out")
        from_rank_zero(lambda: self._take(outcomes, step.number))

    def prune(self, step: Step) -> None:
        """Advantages on full groups, then the completions worth training on, each with its weight."""
        with step.record.timers.phase("prune"):
            plans, holders, verdicts = from_rank_zero(lambda: self._decide(step))
        with step.record.timers.phase("exchange"):
            step.reach("pruned")
            step.updates = exchange(plans, step.groups, holders, step.selected, self._group_size, self._replicas)
            step.samples = verdicts.join(step.groups)
            step.groups.clear()  # frees the pruned completions
            step.reach("exchanged")

    def begin_ahead(self, step: Step, number: int) -> None:
        """With `rollout.async_steps`, begin to generate for `number` while `step` trains; 0: nothing to begin."""
        if number and self.job.config.rollout.async_steps:
            self._ahead = Step(number)
            self._select(self._ahead, step.record.timers)  # the time belongs to the running step
            self._start(self._ahead, self._ahead.selected)

    def to_training(self, step: Step) -> None:
        """Put the engine to rest, then compute the log-probabilities that the objective compares with.

        Those are the actor's before the step's first update, and the reference's; neither is computed unless the
        settings need it (docs/objectives.md).
        """
        objective, timers = self.job.config.objective, step.record.timers
        if self._ahead is None:  # with a step begun ahead it is generating
            self._engine.rest()
        self._receipts |= self._canary.judge(self._score)
        needs_old, needs_reference = needs_old_logprobs(objective), objective.kl.coef > 0
        if not (needs_old or needs_reference):
            return
        temperature = self.job.config.rollout.sampling.temperature
        old: list[LogprobStore] = []
        with timers.phase("update"), timers.phase("logprobs"):  # counted in the update's time too
            for update in step.updates:
                samples = dict(update.samples)
                if needs_old:
                    old.append(self.actor.own_logprobs(samples, update.plan.pack, temperature=temperature))
                    samples = old[-1].as_old(samples)
                if needs_reference:
                    with self.actor.reference_weights():
                        reference = self.actor.own_logprobs(samples, update.plan.pack, temperature=temperature)
                    samples = reference.as_reference(samples)
                update.samples = samples
        if old:
            self._measure_mismatch(step, list(zip(step.updates, old, strict=True)))

    def update(self, step: Step, update: Update) -> None:
        """One optimizer update on the weighted objective. `train/*` are means over the step's updates so far."""
        step.reach("updating")
        self.last_complete_step = None
        first = not step.measured
        # first update only: after it the policy differs from the behaviour on purpose
        watch = LogprobStore() if first and not needs_old_logprobs(self.job.config.objective) else None
        with step.record.timers.phase("update"):
            measured = self.actor.update(
                update.samples,
                update.plan.pack,
                self.objective,
                temperature=self.job.config.rollout.sampling.temperature,
                watch=watch,
            )
        metrics = step.record.metrics
        metrics.setdefault("mismatch/logprob_abs_diff_mean", measured.pop("logprob_abs_diff", 0.0))
        if watch is not None:
            self._measure_mismatch(step, [(update, watch)])
        if measured["skipped_updates"]:
            self.skipped_in_a_row += 1
            self.skipped_samples = _name_the_broken(update.samples.values())
        else:
            self.skipped_in_a_row = 0
        step.measured.append(measured)
        for name in measured:
            metrics[f"train/{name}"] = float(np.mean([one[name] for one in step.measured if name in one]))
        metrics["train/skipped_updates"] = sum(one["skipped_updates"] for one in step.measured)
        metrics["train/learning_rate"] = measured["learning_rate"]
        metrics |= {f"pack/{name}": value for name, value in update.plan.pack.metrics.items()}
        step.reach("updated")

    def sync(self, step: Step) -> None:
        """Give the engine the actor's weights."""
        with step.record.timers.phase("sync"):
            self.load_engine()
        step.reach("synced")

    def finish(self, step: Step) -> list[str]:
        """Close the step and report its cost to the pruning policies; returns log lines if a rate changed."""
        record = step.record
        record.metrics |= self._receipts | self._engine.statistics() | record.timers.drain()
        self._receipts = {}
        said = from_rank_zero(lambda: self._learn(step))
        step.reached = "finished"  # also from `updated`, when a failed sync ends the run
        self.current, self.last_complete_step = None, step.number
        return said

    # ---------------------------------------------------------------------------------------- beside the steps

    def evaluate(self, names: Collection[str] | None = None) -> list[EvalScores]:
        """Scores of every evaluation set, or of those in `names`."""
        return self._evaluator.evaluate(self._engine, names)

    def pack(self, samples: Sequence[Packable]) -> PackPlan:
        """Micro-batches for every data-parallel rank, planned on rank 0."""
        return from_rank_zero(lambda: self._plan(samples))

    def close(self) -> None:
        """Release the engine's servers and the graders' processes."""
        self._engine.close()
        self._evaluator.close()
        self.job.grade.close()

    def state_dict(self) -> dict[str, Any]:
        """What the step after `last_complete_step` depends on besides the actor; nothing of an unfinished step.

        Save rank 0's: only rank 0 selects.
        """
        return {"selector": self._selector.state_dict(), "skipped_in_a_row": self.skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Restore the `state_dict` of a checkpoint written after `step`."""
        self._selector.load_state_dict(state["selector"])
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.last_complete_step = step

    # ---------------------------------------------------------------------------------------- inside

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass over the actor's weights for the engine. They leave the device with its end: servers have copies."""
        bucket_bytes = self.job.config.rollout.sync.bucket_mb << 20
        yield from self.actor.weights(self._engine.receivers, bucket_bytes)
        if self._offload == "all":
            self.actor.offload(weights=True)

    def _select(self, step: Step, timers: Timers) -> None:
        """Choose the prompts of a new step. Only rank 0 has the selector's state."""
        with timers.phase("select"):
            step.selected = self._selected(from_rank_zero(lambda: self._selector.begin(step.number)))
        step.reach("selected")

    def _start(self, step: Step, selected: Sequence[SelectedPrompt]) -> None:
        size = self._group_size
        requests = [Request(item.prompt, index, step.number) for item in selected for index in range(size)]
        self._engine.start(requests, self._sampling)
        step.reach("generating")

    def _take(self, outcomes: list[Outcomes], number: int) -> None:
        """Add the outcomes of a round; raises GuardStop if too many gradings failed. On rank 0."""
        self._outcomes += outcomes
        self._failures.check(Outcomes.join(self._outcomes).grades, number)

    def _refill(self, step: Step) -> Chosen | None:
        """On rank 0."""
        return self._selector.refill(Outcomes.join(self._outcomes).rewards, step.number)

    def _decide(self, step: Step) -> tuple[list[UpdatePlan], IntArray, Verdicts]:
        """What to train on, in which micro-batches; which rank holds each group; what is recorded. On rank 0."""
        size, config = self._group_size, self.job.config
        outcomes = Outcomes.join([*self._outcomes, Outcomes.of({}, size, 0)])
        self._outcomes = []
        rollouts = outcomes.rollouts(step.selected)
        decision = self._selector.finish(rollouts, step.number)
        count = rollouts.lengths.size
        statistics = self._engine.statistics()
        cut = statistics.get("rollout/cut_completions", 0.0)
        record = step.record
        record.metrics |= decision.metrics | statistics
        record.metrics |= grading_metrics(outcomes.grades, list(config.reward.functions))
        record.metrics["rollout/completion_tokens_mean"] = float(rollouts.lengths.mean()) if count else math.nan
        record.metrics["rollout/truncated"] = float(outcomes.truncated.sum())
        record.ledger = (*decision.ledger, *straggler_row(config.rollout, cut, count), *overlong_row(self.job))
        record.trace = trace_row(step.number, decision, rollouts)
        with record.timers.phase("pack"):
            updates = range(config.objective.updates_per_step)
            plans = [self._plan_update(step, decision, rollouts.lengths, index) for index in updates]
        return plans, outcomes.holder, Verdicts.of(config, step.number, decision, rollouts)

    def _plan_update(self, step: Step, decision: Decision, lengths: IntArray, index: int) -> UpdatePlan:
        rows = np.flatnonzero(decision.kept & (decision.minibatch == index))
        tokens = lengths.ravel()[rows]
        pack = self._plan(sizes_of(rows, tokens, step.selected, self._group_size))
        return UpdatePlan(
            rows, tokens, decision.advantages[rows], decision.weight[rows], decision.denominator[rows], pack
        )

    def _plan(self, samples: Sequence[Packable]) -> PackPlan:
        config = self.job.config.packing
        return plan_microbatches(
            samples,
            layout=self._packing_layout,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            mode=config.mode,
            cost=self._cost,
            window=config.window,
        )

    def _learn(self, step: Step) -> list[str]:
        """Report the step's cost to the policies. On rank 0. A step with a skipped update has no gradient norm."""
        measured = step.record.metrics
        rollout_s, update_s = measured["time/rollout_s"] + measured["time/reward_s"], measured["time/update_s"]
        other_s = max(0.0, measured["time/step_s"] - rollout_s - update_s)
        grad_norm = math.nan if measured["train/skipped_updates"] else measured["train/grad_norm"]
        return self._selector.feedback(StepCost(step.number, rollout_s, update_s, other_s, grad_norm))

    def _measure_mismatch(self, step: Step, scored: Sequence[tuple[Update, LogprobStore]]) -> None:
        """Compare the engine's log-probabilities with the actor's; warn if they are far apart. Collective."""
        for update, store in scored:
            add_actor_logprobs(step.samples, update.plan.rows, store.values)
        mine = Mismatch()
        if self.actor.layout.reports:  # one rank of each replica: others of its last stage have the same values
            for update, store in scored:
                for place, values in store.values.items():
                    sample = update.samples[place]
                    mine.add(values, sample.behaviour_logprobs, float(np.mean(sample.weight)))
        measured = Mismatch.join(gather_all([mine])).metrics()
        step.record.metrics |= measured
        alarm = self.job.config.rollout.limits.mismatch_alarm
        difference = measured.get("mismatch/logprob_abs_diff_mean", 0.0)
        if self._engine.has_servers and difference > alarm:
            self.say(f"warning: mean |log-probability difference| to the engine {difference:.3g} > {alarm:g}")

    def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[FloatArray]:
        """Log-probabilities of `completions` under the actor's present weights, on every rank. Collective."""
        samples = [_unweighted_sample(prompt, completion) for completion in completions]
        temperature = self.job.config.rollout.sampling.temperature
        own = self.actor.logprobs(samples, self.pack(samples), temperature=temperature)
        return from_rank_zero(lambda: own or [])

    def _selected(self, chosen: Chosen | None) -> list[SelectedPrompt]:
        if chosen is None:
            return []
        prompts = self.job.train_prompts
        rows = zip(chosen.prompt_index, chosen.inclusion_prob, chosen.weight, strict=True)
        return [SelectedPrompt(prompts[index], float(prob), float(weight)) for index, prob, weight in rows]


def _unweighted_sample(prompt: Prompt, completion: Completion) -> TrainSample:
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


def _name_the_broken(samples: Collection[TrainSample]) -> str:
    """Ids of the samples whose inputs are not finite; if all are, the model or the loss is at fault: ids of all.

    Collective: each rank has a part of the samples.
    """

    def is_finite(sample: TrainSample) -> bool:
        return bool(np.isfinite([sample.advantage, sample.weight, *sample.behaviour_logprobs]).all())

    broken = [sample.id for sample in samples if not is_finite(sample)]
    mine = [(0, name) for name in broken] or [(1, s.id) for s in samples]
    everywhere = sorted(set(gather_all(mine)))
    ids = [name for rank, name in everywhere if rank == everywhere[0][0]]
    return f"{', '.join(ids[:8])}{f' and {len(ids) - 8} more' if len(ids) > 8 else ''}"
