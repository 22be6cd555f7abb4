"""The phases of a training step, one method each; `train.py` puts them in order.

Selecting, pruning and packing happen on rank 0 and are sent. Generation and grading are shared by all ranks.
Updating and syncing are collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dppo_megatron.actor.actor import Actor, warm_start_optimizer
from dppo_megatron.actor.layout import build_layout
from dppo_megatron.algorithms.objectives import clipped_surrogate, supervised
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.distributed import collect, from_rank_zero, share
from dppo_megatron.evaluate import evaluate
from dppo_megatron.job import Job
from dppo_megatron.observe.metrics import Timers
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.pruning import surprisal
from dppo_megatron.rewards.grading import grade_group
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import HFEngine
from dppo_megatron.selection import Chosen, Decision, Rollouts, Selector
from dppo_megatron.trace import trace_row
from dppo_megatron.types import FloatArray, Group, PackPlan, SelectedPrompt, TrainSample


@dataclass
class Loop:
    """The rooms of the house, wired for one job."""

    job: Job
    actor: Actor = field(init=False)
    timers: Timers = field(default_factory=Timers)
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the current step has measured so far."""
    trace_row: dict[str, Any] = field(default_factory=dict)
    """The current step's outcomes for trace.jsonl, on rank 0."""

    def __post_init__(self) -> None:
        config = self.job.config
        dtype = getattr(torch, config.model.dtype)
        layout = build_layout(config.actor.layout, config.seed)
        self.actor = Actor(config.actor, layout, self.job.architecture, self.job.checkpoint.get, dtype=dtype)
        self._engine = HFEngine(
            config.model.hf_path,
            self.job.tokenizer,
            dtype=dtype,
            device=layout.device,
            max_concurrent_sequences=config.rollout.max_concurrent_sequences,
        )
        self._group_size = config.rollout.completions_per_prompt
        self._selector = Selector(config, len(self.job.train_prompts))
        objective = config.objective
        self.objective = clipped_surrogate(objective.clip_low, objective.clip_high, objective.dual_clip)
        self._sampling = Sampling(config.rollout.max_completion_tokens, config.rollout.temperature, config.seed)

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
            self.actor.update(batch, self.pack(batch), supervised())
        self.take_metrics()

    def start_rl(self) -> None:
        """A fresh optimizer and schedule for the RL phase."""
        config = self.job.config
        self.actor.start_phase(config.actor.optimizer, config.steps)

    def select(self, step: int) -> list[SelectedPrompt]:
        """The prompts of this step that are worth a rollout, with what undoes their selection."""
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
            requests = [Request(item.prompt, index, step) for item in mine for index in range(size)]
            completions = self._engine.generate(requests, self._sampling)
        with self.timers.phase("reward"):
            groups = []
            for position, item in enumerate(mine):
                members = tuple(completions[position * size : (position + 1) * size])
                groups.append(Group(item, members, grade_group(self.job.grade, item.prompt, members)))
        with self.timers.phase("rollout"):
            return collect(groups)

    def prune(self, groups: Sequence[Group], step: int) -> list[TrainSample]:
        """Advantages on full groups, then the completions worth training on, each with its weight."""

        def decide() -> list[TrainSample]:
            completions = [completion for group in groups for completion in group.completions]
            shape = (len(groups), self._group_size)
            rollouts = Rollouts(
                rewards=self._rewards(groups),
                lengths=np.array([len(c.token_ids) for c in completions], dtype=np.int64).reshape(shape),
                surprisal=np.array([surprisal(c.logprobs) for c in completions]).reshape(shape),
            )
            decision = self._selector.finish(rollouts, step)
            self.metrics |= decision.metrics
            self.trace_row = trace_row(step, decision, rollouts)
            self.metrics["prune/ledger"] = [asdict(row) for row in decision.ledger]
            self.metrics["rollout/completion_tokens_mean"] = float(rollouts.lengths.sum() / max(1, len(completions)))
            self.metrics["rollout/truncated"] = sum(c.finish_reason == "length" for c in completions)
            return _samples(groups, decision, self._group_size)

        with self.timers.phase("prune"):
            return from_rank_zero(decide)

    def pack(self, samples: Sequence[TrainSample]) -> PackPlan:
        """Micro-batches for every data-parallel rank."""
        config = self.job.config.packing

        def decide() -> PackPlan:
            plan = plan_microbatches(
                samples,
                layout=packing_layout(self.job.config.actor, self.actor.layout.world_size),
                max_tokens_per_microbatch=config.max_tokens_per_microbatch,
                mode=config.mode,
            )
            self.metrics |= {f"pack/{name}": value for name, value in plan.metrics.items()}
            return plan

        with self.timers.phase("pack"):
            return from_rank_zero(decide)

    def update(self, samples: Sequence[TrainSample], plan: PackPlan) -> None:
        """One optimizer step on the weighted objective."""
        with self.timers.phase("update"):
            measured = self.actor.update(samples, plan, self.objective, temperature=self.job.config.rollout.temperature)
        self.metrics["mismatch/logprob_abs_diff_mean"] = measured.pop("logprob_abs_diff", 0.0)
        self.metrics |= {f"train/{name}": value for name, value in measured.items()}

    def sync(self) -> None:
        """Give the engine the actor's weights."""
        with self.timers.phase("sync"):
            self._engine.load_weights(self.actor.weights())

    def evaluate(self) -> dict[str, float]:
        """Greedy pass@1 of every evaluation set, as `eval/<set>/pass@1`."""
        return evaluate(self._engine, self.job)

    def take_metrics(self) -> dict[str, Any]:
        """What the phases since the last call measured."""
        taken = self.metrics | self.timers.drain()
        self.metrics = {}
        return taken

    def feedback(self, step: int, metrics: dict[str, Any]) -> list[str]:
        """Let the pruning policies learn what the step cost; lines for the log if a rate moved."""

        def learn() -> list[str]:
            rollout_s = metrics["time/rollout_s"] + metrics["time/reward_s"]
            update_s = metrics["time/update_s"]
            return self._selector.feedback(
                step,
                rollout_s=rollout_s,
                update_s=update_s,
                other_s=max(0.0, metrics["time/step_s"] - rollout_s - update_s),
                grad_norm=metrics["train/grad_norm"],
            )

        return from_rank_zero(learn)

    def state_dict(self) -> dict[str, Any]:
        """What the policies remember between steps."""
        return self._selector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved `state_dict`."""
        self._selector.load_state_dict(state)

    def _rewards(self, groups: Sequence[Group]) -> FloatArray:
        """[groups, G]; a biased method may have skipped every prompt of the step."""
        return np.array([group.rewards for group in groups]).reshape(len(groups), self._group_size)

    def _selected(self, chosen: Chosen) -> list[SelectedPrompt]:
        prompts = self.job.train_prompts
        rows = zip(chosen.prompt_index, chosen.inclusion_prob, chosen.weight, strict=True)
        return [SelectedPrompt(prompts[index], float(prob), float(weight)) for index, prob, weight in rows]


def _samples(groups: Sequence[Group], decision: Decision, size: int) -> list[TrainSample]:
    """The kept completions with their weights, advantages and frozen denominators."""
    samples = []
    for row in np.flatnonzero(decision.kept).tolist():
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
