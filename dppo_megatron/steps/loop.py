"""The phases of a training step, one method each; `train.py` calls them in order.

The only file that knows engine, graders, selection, packing and actor; it connects them.

    rank 0   begin ------------------------ decide, plan ---.
      |        | prompts                 ^ scalars          | rows, weights, micro-batches
    all      generate, grade a share ----'                  '--> exchange tokens -> log-probs -> update -> sync

Besides the current step, the loop holds the next `rollout.async_steps` steps, whose prompts are already generating.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from dppo_megatron.actor.actor import Actor, sft_optimizer
from dppo_megatron.actor.layout import build_layout, connect_groups
from dppo_megatron.actor.logprobs import LogprobStore
from dppo_megatron.algorithms.correction import Mismatch
from dppo_megatron.algorithms.noise_scale import half_of
from dppo_megatron.algorithms.objectives import make_objective, supervised
from dppo_megatron.config.objective import needs_old_logprobs
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.order import whole_epochs
from dppo_megatron.distributed import from_rank_zero, gather_all, on_every_rank, rank, to_rank_zero
from dppo_megatron.evaluation.eval_scores import EvalScores
from dppo_megatron.evaluation.evaluator import Evaluator
from dppo_megatron.job import Job
from dppo_megatron.observe.metrics import Timers
from dppo_megatron.observe.samples import RecordedGroup, add_actor_logprobs
from dppo_megatron.observe.timeline import StepRecorder
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import Packable
from dppo_megatron.progress import progress
from dppo_megatron.rewards.cross_check import CrossCheck
from dppo_megatron.rewards.grading import grade_groups
from dppo_megatron.rollout.engine import Request
from dppo_megatron.selection import PromptDraw
from dppo_megatron.steps.build import make_canary, make_engine, make_sampling, what_to_offload
from dppo_megatron.steps.coordinator import Coordinator, off_policy_sized
from dppo_megatron.steps.exchange import Replicas, exchange
from dppo_megatron.steps.performance import performance
from dppo_megatron.steps.step import RolloutTable, Step, Update, with_early_stop
from dppo_megatron.texts import log
from dppo_megatron.types import Completion, FloatArray, PackPlan, Prompt, RolloutPrompt, RunAborted, TrainSample

ShowPhases: TypeAlias = Callable[[int], AbstractContextManager[Callable[[str], None] | None]]
"""Step number -> a context for that step, whose value is called with the name of each phase and shows it."""


class Loop:
    """Engine, graders, selection and actor of one job.

    Args:
        phases: shows the current phase of a step, on rank 0.
        recorder: records the timelines of steps; None: records none.
    """

    def __init__(self, job: Job, phases: ShowPhases | None = None, recorder: StepRecorder | None = None) -> None:
        config = job.config
        self.job, self._phases, self._recorder = job, phases, recorder
        dtype = getattr(torch, config.model.dtype)
        layout = build_layout(config.actor.layout, config.seed)
        connect_groups(config.actor, job.architecture, config.guard.rendezvous_timeout_s)
        # before the actor, which takes long to build, so that a bad server is reported at once
        self._engine = make_engine(job, dtype, layout.device)
        with ExitStack() as undo:
            undo.callback(self._engine.close)  # if the model cannot be built, no servers stay behind
            self._engine.sleep()  # frees device memory for the actor
            self._offload = what_to_offload(config, layout.device.type)
            with progress("building the actor", len(job.checkpoint.names), "tensors read") as advance:
                read = set[str]()  # some are read twice: tied embeddings, and heads that several shards have

                def get(name: str) -> torch.Tensor:
                    tensor = job.checkpoint.get(name)
                    read.add(name)
                    advance(len(read))
                    return tensor

                self.actor = Actor(config.actor, layout, job.architecture, get, dtype=dtype, seed=config.seed)
            undo.pop_all()
        self.objective = make_objective(config.objective, job.policy_loss)
        self._replicas = Replicas.agree(layout.data_parallel_rank)
        self._replayed = job.architecture.expert_choices if config.actor.routing_replay == "engine" else None
        """Form of the routed experts that completions bring from the engine; None: they bring none."""
        self._records_routes = config.actor.routing_replay == "actor"
        self._evaluator = Evaluator(job)
        self._cross_check = CrossCheck(config.reward)
        self._coordinator = Coordinator(job, packing_layout(config.actor, layout.world_size))
        self._sampling = make_sampling(job)
        self._width = selection_settings(config).widest_group
        self._canary = make_canary(job)
        self._receipts: dict[str, float] = {}
        """Metrics of the canary since the last finished step."""
        self.current: Step | None = None
        """The step in progress, until it is finished."""
        self._ahead: deque[Step] = deque()
        """Steps after `current` whose rollouts have begun."""
        self._begun: dict[int, dict[str, Any]] = {}
        """What the checkpoint has of the rollouts of the next steps, by step; on rank 0."""
        self.last_complete_step: int | None = 0
        """The step whose weights the actor has; None during a step's updates, when they are between two steps."""
        self.skipped_in_a_row = 0
        """How many of the latest updates in a row were skipped because loss or gradient was not finite."""
        self.skipped_samples = ""
        """Ids of the samples in the last skipped update."""
        self.failed_policy = ""
        """What the user's policy raised when it learned from the last finished step; empty: nothing."""

    def sft(self, before_next: Callable[[int], None] = lambda done: None) -> None:
        """The supervised phase, with the same actor; none if `sft.steps` is 0. Raises RunAborted if it diverges.
        `before_next` is called after each step but the last, and may raise to end the phase."""
        config = self.job.config
        sft, examples = config.sft, self.job.sft_examples
        if not sft.steps:
            return
        optimizer = sft_optimizer(config.actor.optimizer, sft.learning_rate, sft.lr_warmup_steps)
        self.actor.start_phase(optimizer, sft.steps)
        order, position = whole_epochs(len(examples), config.seed, sft.examples_per_step), 0
        with progress("SFT", sft.steps, "steps") as advance:
            for done in range(1, sft.steps + 1):
                chosen, position = order.take(position, sft.examples_per_step)
                num_tokens = float(sum(examples[i].num_completion_tokens for i in chosen))
                batch = [replace(examples[i], denominator=num_tokens) for i in chosen]
                if self.actor.update(batch, self.pack(batch), supervised()).is_skipped:
                    raise on_every_rank(
                        RunAborted(
                            f"SFT, step {done}: loss or gradient is not finite; lower sft.learning_rate ="
                            f" {sft.learning_rate:g}, or correct the examples"
                        )
                    )
                advance(done)
                if done < sft.steps:
                    before_next(done)

    def start_rl(self) -> None:
        """Begin the RL phase: a new optimizer and schedule, and with a KL term the reference policy."""
        config = self.job.config
        self.job.sft_examples.clear()
        self.actor.start_phase(config.actor.optimizer, config.steps * config.objective.updates_per_step)
        if config.objective.kl.coef:
            reference = self.job.reference
            with progress("keeping the reference policy"):
                self.actor.freeze_reference(reference.get if reference is not None else None)

    def load_engine(self) -> None:
        """Give the engine the actor's weights. Raises RunAborted if they do not arrive."""
        if self._offload != "none":
            self.actor.offload()  # frees memory before the servers wake
        bucket_bytes = self.job.config.rollout.sync.bucket_mb << 20
        weights = partial(self.actor.weights, self._engine.receivers, bucket_bytes)
        has_new = self._engine.load_weights(weights, self._release_weights)
        if self._canary and (has_new or self._canary.is_overdue):
            self._canary.ask(self._engine, self.job.train_prompts[0])
            if self._offload != "all":  # otherwise in `to_training`, when the weights are on the device again
                self._judge_canary()
                if self._offload == "optimizer":
                    self.actor.offload()  # again, for the 8-bit copies that the canary's forward pass has made

    def final_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights on rank 0, under their Hugging Face names; the engine cannot generate after this. Collective.
        Raises RunAborted if the canary shows that servers had other weights."""
        if self._offload == "all":
            self._engine.sleep()
        self._judge_canary()
        return self.actor.weights(to=[0])

    @contextmanager
    def step(self, number: int) -> Iterator[Step]:
        """Step `number`: the one begun ahead, or a new one. `time/step_s` is the time spent in the block, and
        `time/step_cpu_s` this process's CPU time in it, which varies less if cores are shared."""
        step = self._ahead.popleft() if self._ahead else Step(number)
        assert step.number == number, f"step {step.number} was begun ahead, {number} is asked for"
        self.current = step
        recorded = self._recorder.step(number) if self._recorder else nullcontext()
        shown = self._phases(number) if self._phases else nullcontext()
        with shown as step.record.timers.on_phase, recorded, step.record.timers.phase("step", cpu=True):
            if step.reached == "new":
                self._select(step, step.record.timers)
            yield step

    def begin_ahead(self, step: Step, last: int) -> None:
        """Begin the rollouts of the next `rollout.async_steps` steps, up to step `last`. They fill the servers while
        the stragglers of `step` finish, and continue while it trains."""
        ahead_steps = self.job.config.rollout.async_steps
        for number in range(step.number + len(self._ahead) + 1, min(step.number + ahead_steps, last) + 1):
            if step.reached == "selected" and step.selected:
                self._start(step, step.selected)
            ahead = Step(number)
            self._ahead.append(ahead)
            self._select(ahead, step.record.timers)  # the time counts for the current step
            if ahead.selected:
                self._start(ahead, ahead.selected)

    def rollout(self, step: Step) -> None:
        """Generate and grade the step's groups; some methods then continue until enough groups have variance."""
        more: Sequence[RolloutPrompt] | None = step.selected
        first = 0
        while more is not None:  # an empty round is not the last one: its draw may have skipped all prompts
            if more:
                self.generate(step, more, first)
            first = len(step.selected)
            with step.record.timers.phase("select"):
                refill = from_rank_zero(lambda: self._coordinator.refill(step.number))
            more = None if refill is None else self._selected(refill)
            step.selected += more or ()
        if step.reached == "selected":
            step.reach("rolled_out")

    def generate(self, step: Step, selected: Sequence[RolloutPrompt], first: int) -> None:
        """One round: groups `first`, first + 1, ... of the step. Every rank grades and holds a share of them."""
        timers, sizes = step.record.timers, self._sizes(selected)
        with timers.phase("rollout"):
            if step.reached != "generating":
                self._start(step, selected)
            completions, grades = self._engine.finish(), self._engine.take_grades()
        ends = np.cumsum(sizes, dtype=np.int64)
        mine = np.unique(np.searchsorted(ends, sorted(completions), side="right")).tolist()
        with timers.phase("reward"):
            requests = [request for group in mine for request in range(ends[group] - sizes[group], ends[group])]
            flat = [completions[request] for request in requests]
            known = {index: grades[request] for index, request in enumerate(requests) if request in grades}
            prompts, my_sizes = [selected[group] for group in mine], [sizes[group] for group in mine]
            graded = grade_groups(self.job.grade, prompts, flat, my_sizes, known)
            config = self.job.config
            graded = with_early_stop(graded, config.pruning.early_stop, config.rollout.sampling.max_completion_tokens)
            groups = {first + group: one for group, one in zip(mine, graded, strict=True)}
            if self._replicas.rank == 0:
                self._cross_check.begin(one for one in graded if one.selected.prompt.graded_by == "reward")
        with timers.phase("rollout"):
            outcomes = to_rank_zero(RolloutTable.of(groups, self._width, self._replicas.rank))
        step.groups |= groups
        step.reach("rolled_out")
        from_rank_zero(lambda: self._coordinator.take(outcomes, step.number))

    def prune(self, step: Step) -> None:
        """Advantages on full groups, then the completions worth training on, each with its weight."""
        with step.record.timers.phase("prune"):
            plans, holders, recorded = from_rank_zero(lambda: self._coordinator.decide(step, self._engine.statistics()))
            step.record.metrics |= self._cross_check.metrics()
        tokens = self.job.token_values
        with step.record.timers.phase("exchange"):
            step.reach("pruned")
            step.updates = exchange(
                *(plans, step.groups, holders, step.selected, self._width, self._replicas, self._replayed),
                tokens and replace(tokens, step=step.number),
            )
            step.samples = [RecordedGroup(k, step.groups[k], *row) for k, row in recorded.items() if k in step.groups]
            step.groups.clear()  # frees the pruned completions
            step.reach("exchanged")
            if tokens is not None and tokens.given != ("advantages",):  # advantages alone select no tokens
                weights = [one.weight for update in step.updates for one in update.samples.values()]
                mine = sum(map(np.count_nonzero, weights)), sum(map(np.size, weights))
                per_replica = gather_all([mine] if self.actor.layout.reports else [])
                step.record.add_tokens(tokens, *np.sum(per_replica, axis=0).tolist())

    def to_training(self, step: Step) -> None:
        """Put the engine to sleep, then compute the log-probabilities that the objective needs: the actor's before the
        step's first update, and the reference policy's (docs/objectives.md)."""
        objective, timers = self.job.config.objective, step.record.timers
        self._engine.sleep()
        self._judge_canary()
        needs_old, needs_reference = needs_old_logprobs(objective), objective.kl.coef > 0
        if not (needs_old or needs_reference or self._records_routes):
            return
        temperature = self.job.config.rollout.sampling.temperature
        old: list[LogprobStore] = []
        with timers.phase("update"), timers.phase("logprobs"):  # the time also counts as the update's
            for update in step.updates if needs_old or self._records_routes else ():
                own = self.actor.own_logprobs(
                    update.samples, update.plan.pack, temperature=temperature, records=self._records_routes
                )
                update.routes = own.routes
                if needs_old:
                    old.append(own)
                    update.samples = own.as_old(update.samples)
            # swapped in once per step, as each swap copies all weights to the host and back
            with self.actor.reference_weights() if needs_reference else nullcontext():
                for update in step.updates if needs_reference else ():
                    # without replayed experts: the reference policy routes tokens itself
                    unrouted = {place: replace(one, experts=None) for place, one in update.samples.items()}
                    reference = self.actor.own_logprobs(unrouted, update.plan.pack, temperature=temperature)
                    update.samples = reference.as_reference(update.samples)
        if old:
            self._measure_mismatch(step, list(zip(step.updates, old, strict=True)))

    def update(self, step: Step, update: Update) -> None:
        step.reach("updating")
        self.last_complete_step = None
        is_first = not step.measured
        half_norm = self._half_norm(step, update) if is_first else None
        # only in the first update: after it the policy differs from the one that sampled, as intended
        own = LogprobStore() if is_first and not needs_old_logprobs(self.job.config.objective) else None
        with step.record.timers.phase("update"):
            measured = self.actor.update(
                update.samples,
                update.plan.pack,
                self.objective,
                temperature=self.job.config.rollout.sampling.temperature,
                logprobs_out=own,
                routes=update.routes,
            )
        update.routes = None
        metrics = step.record.metrics
        if own is not None:
            self._measure_mismatch(step, [(update, own)])
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if measured.is_skipped else 0
        if measured.is_skipped:
            self.skipped_samples = _non_finite_samples(update.samples.values())
        if half_norm is not None:
            self._coordinator.probe(measured.grad_norm, half_norm)
        step.measured.append(measured)
        update.samples = {}  # else the caller's last update keeps them through the next step's exchange
        metrics |= step.update_metrics()
        metrics |= {f"pack/{name}": value for name, value in update.plan.pack.metrics.items()}
        step.reach("updated")

    def sync(self, step: Step) -> None:
        with step.record.timers.phase("sync"):
            self.load_engine()
        step.reach("synced")

    def finish(self, step: Step) -> list[str]:
        """Close the step and report its cost to the pruning policies; returns log lines if a rate changed."""
        record = step.record
        record.timing = record.timers.timing()
        record.metrics |= self._receipts | self._engine.statistics().metrics() | record.timers.drain()
        rollout, device = self.job.config.rollout, self.actor.layout.device
        record.metrics |= performance(record.counts, record.timing, rollout, device)
        self._receipts = {}
        lines, self.failed_policy = from_rank_zero(lambda: self._coordinator.learn(step))
        step.reached = "finished"  # not by `reach`: if a failed sync ends the run, the step is only `updated`
        self.current, self.last_complete_step = None, step.number
        return lines

    def evaluate(self, names: Collection[str] | None = None) -> list[EvalScores]:
        """Scores of every evaluation set, or of those in `names`."""
        return self._evaluator.evaluate(self._engine, names)

    def pack(self, samples: Sequence[Packable]) -> PackPlan:
        """Micro-batches for every data-parallel rank, planned on rank 0."""
        return from_rank_zero(lambda: self._coordinator.plan(samples))

    def close(self) -> None:
        self._engine.close()
        self._cross_check.close()
        self.job.grade.close()

    def state_dict(self) -> dict[str, Any]:
        """The state, besides the actor's and `in_flight`, on which the step after `last_complete_step` depends;
        unfinished steps are left out. Save rank 0's: only rank 0 selects."""
        counts = {"skipped_in_a_row": self.skipped_in_a_row, "weights_version": self._engine.weights_version}
        return self._coordinator.state_dict() | counts

    def in_flight(self) -> dict[str, Any]:
        """What was sampled so far for steps to come, on rank 0; nothing within a step, whose own completions the engine
        no longer has. Collective."""
        return {"in_flight": {} if self.current is not None else self._engine.in_flight()}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        """Restore the `state_dict` of a checkpoint written after `step`."""
        self._coordinator.load_state_dict(state)
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self._begun = dict(state.get("in_flight", {})) if self._engine.has_servers and rank() == 0 else {}
        self._engine.weights_version = state.get("weights_version", 1) - 1  # the first sync brings the same weights
        self.last_complete_step = step

    def _release_weights(self) -> None:
        """Called when the engine has copies of the actor's weights."""
        if self._offload == "all":
            self.actor.offload(weights=True)

    def _judge_canary(self) -> None:
        if self._canary:
            self._receipts |= self._canary.judge(self._score)

    def _select(self, step: Step, timers: Timers) -> None:
        with timers.phase("select"):
            step.selected = self._selected(from_rank_zero(lambda: self._coordinator.begin(step.number)))
        step.reach("selected")

    def _start(self, step: Step, selected: Sequence[RolloutPrompt]) -> None:
        requests = [
            Request(item.prompt, index, step.number, limit=item.limits[index] if item.limits else 0)
            for item, size in zip(selected, self._sizes(selected), strict=True)
            for index in range(size)
        ]
        begun = self._begun.pop(step.number, None)
        self._engine.start(requests, self._sampling, *([] if begun is None else [begun]))  # an engine may take only two
        step.reach("generating")

    def _half_norm(self, step: Step, update: Update) -> float | None:
        """Gradient norm of a random half of an update's prompts, with doubled weights; None in steps without probe."""
        config = self.job.config
        if not is_probed(config, step.number):
            return None
        half = half_of(update.plan.rows // self._width, config.seed, step.number)
        # the same plan with weights of 0 for the rest: a plan of one half would put samples on ranks without them
        samples = {at: replace(one, weight=one.weight * (2.0 * half[at])) for at, one in update.samples.items()}
        temperature = config.rollout.sampling.temperature
        with step.record.timers.phase("probe"):
            return self.actor.grad_norm(samples, update.plan.pack, self.objective, temperature=temperature)

    def _measure_mismatch(self, step: Step, scored: Sequence[tuple[Update, LogprobStore]]) -> None:
        """Compare the engine's log-probabilities with the actor's; warn if they are far apart. Collective."""
        for update, store in scored:
            add_actor_logprobs(step.samples, update.plan.rows, self._width, store.values)
        mine, correction = Mismatch(), self.job.config.objective.correction
        if self.actor.layout.reports:  # one rank per replica, as all ranks of its last pipeline stage have the values
            for update, store in scored:
                for place, values in store.values.items():
                    sample = update.samples[place]
                    weight, gradient = float(np.mean(sample.weight)), sample.advantage / sample.denominator
                    mine.add(values, sample.behaviour_logprobs, sample.figure_weight, weight, correction, gradient)
        total = Mismatch.join(gather_all([mine]))
        step.record.metrics |= step.named(total.metrics()) | {"kept/product_ess": total.product_ess}
        step.record.ledger = off_policy_sized(step.record.ledger, total.bias)
        limit = self.job.config.rollout.limits.logprob_diff_warning
        if self._engine.has_servers and total.logprob_abs_diff > limit:
            log(f"warning: mean |log-probability difference| to the engine {total.logprob_abs_diff:.3g} > {limit:g}")

    def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[FloatArray]:
        """Log-probabilities of `completions` under the actor's current weights, on every rank. Collective."""
        samples = [_unweighted_sample(prompt, completion) for completion in completions]
        temperature = self.job.config.rollout.sampling.temperature
        own = self.actor.logprobs(samples, self.pack(samples), temperature=temperature)
        return from_rank_zero(lambda: own or [])

    def _selected(self, chosen: PromptDraw) -> list[RolloutPrompt]:
        prompts = self.job.train_prompts
        columns = chosen.inclusion_prob.tolist(), chosen.weight.tolist(), chosen.size.tolist(), chosen.limits.tolist()
        return [
            RolloutPrompt(prompts[index], prob, weight, size, tuple(limits[:size]))
            for index, prob, weight, size, limits in zip(chosen.prompt_index, *columns, strict=True)
        ]

    def _sizes(self, selected: Sequence[RolloutPrompt]) -> list[int]:
        return [item.completions or self.job.config.rollout.completions_per_prompt for item in selected]


def _unweighted_sample(prompt: Prompt, completion: Completion) -> TrainSample:
    return TrainSample(
        id=f"{prompt.index}:canary",
        token_ids=np.concatenate([np.array(prompt.token_ids, np.int64), completion.token_ids]),
        num_prompt_tokens=len(prompt.token_ids),
        behaviour_logprobs=completion.logprobs,
        experts=completion.experts,
        advantage=0.0,
        weight=1.0,
        denominator=1.0,
    )


def _non_finite_samples(samples: Collection[TrainSample]) -> str:
    """Ids of the samples with inputs that are not finite. If there are none, the model or the loss is at fault, and all
    ids are returned. Collective: each rank has a part of the samples."""

    def is_finite(sample: TrainSample) -> bool:
        return bool(np.isfinite(np.hstack([sample.advantage, sample.weight, sample.behaviour_logprobs])).all())

    broken = [sample.id for sample in samples if not is_finite(sample)]
    mine = [("broken", name) for name in broken] or [("other", s.id) for s in samples]
    of_all_ranks = sorted(set(gather_all(mine)))  # broken ones first, if any rank has some
    ids = [name for kind, name in of_all_ranks if kind == of_all_ranks[0][0]]
    return f"{', '.join(ids[:8])}{f' and {len(ids) - 8} more' if len(ids) > 8 else ''}"


def is_probed(config: Config, step: int) -> bool:
    """Whether the gradient's noise is measured in `step`. Never with `actor.fp8 = delayed`, whose scales follow the
    largest values of the last 1,024 backward passes: those of a probe, up to twice the true ones, would enter them."""
    every = config.observe.noise_scale_every_steps
    return every > 0 and step % every == 0 and config.actor.fp8 != "delayed"
