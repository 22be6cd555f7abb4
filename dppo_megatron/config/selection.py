"""The settings of `Selector`: all that choosing a step's prompts and completions depends on.

Other trainers fill them in themselves (docs/adapters.md); here they are derived from a `Config`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dppo_megatron.config.data import OrderBy, OrderName
from dppo_megatron.config.objective import ObjectiveConfig
from dppo_megatron.config.pruning import PruningConfig, prompts_multiplier
from dppo_megatron.config.ranges import COUNT, Range, check_ranges, ranged
from dppo_megatron.config.resolved_sets import train_set_weights
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError

SIZE_FREE = ("rloo", "posterior_loo", "group_mean")
"""Advantages whose expected gradient does not depend on the group size."""
BY_REWARDS = ("dynamic_sampling", "greso")
"""Prompt methods that decide by the rewards of a round whether to roll out more."""
ONE_SIZE = ("greso", "cppo_verl")
"""Completion methods that count completions as multiples of one group size."""


def _needed(interval: str) -> Any:
    """A field for a number with a range and without a default."""
    return field(metadata={"range": Range.parse(interval)})


@dataclass(kw_only=True)
class SelectionSettings:
    """For a trainer whose steps have `prompts_per_step` x `completions_per_prompt` completions.

    Example: `SelectionSettings(prompts_per_step=64, completions_per_prompt=8, total_steps=1000,
    max_completion_tokens=4096)` is GRPO with both selections of DPPO at their default rates.
    """

    prompts_per_step: int = _needed("[1, 1000000]")
    """Nominal prompts of a step, N: those that a step without pruning would roll out."""
    completions_per_prompt: int = _needed("[2, 65536]")
    """G, the size of a group."""
    total_steps: int = _needed(COUNT)
    """Steps of the whole run, before a resume too. Nothing is pruned after `anneal_fraction` of them."""
    max_completion_tokens: int = _needed("[1, 100000000]")
    """Longest completion: a divisor (normalization=constant), the first estimate of the mean length (token_mean), and
    the length by which a truncated completion is recognized."""
    seed: int = ranged(0, "[0, 9223372036854775807]", why="it seeds 64-bit generators")
    """Seeds the order of prompts and every draw."""
    async_steps: int = ranged(0, "[0, 8]")
    """K: a step may begin while the K before it are unfinished, so feedback arrives K steps later."""
    quantized: bool = False
    """Completions are sampled with rounded weights, and so off policy even in the same step."""
    truncated: bool = False
    """Some tokens are never sampled (top_p, top_k), and no ratio can make up for their missing gradient."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Advantage, divisor (`normalization`), updates per step, overlong completions, and the coefficients of the loss
    terms that do not depend on the advantage. The policy loss itself is never computed here."""
    pruning: PruningConfig = field(default_factory=PruningConfig)
    """Prompts, completions and early stops."""
    set_weights: Mapping[str, float] | None = None
    """Each training set's share of a step, by name; None: all prompts are shuffled together."""
    order: OrderName = "shuffled"
    """Order of the prompts of an epoch; all but `shuffled` are a row of the ledger."""
    order_by: OrderBy = "level"
    """What easy_first and hard_first sort by: the level in `PromptFeatures`, or the mean reward so far."""

    @property
    def planned_prompts(self) -> int:
        """Nominal prompts of a step: `prompts_per_step`, with CPPO's allocation floor(prompts_per_step / (1 - rate)).

        Example: 16 prompts at rate 0.95 plan 16 / 0.05 = 320, where floating point would give 319.
        """
        return math.floor(self.prompts_per_step * prompts_multiplier(self.pruning.completion))

    @property
    def group_size_factor(self) -> float:
        """`pruning.prompt.group_size_factor`, or 1 with a method that does not use it."""
        prompt = self.pruning.prompt
        return prompt.group_size_factor if prompt.method in ("dppo", "dppo_auto") else 1.0

    @property
    def widest_group(self) -> int:
        """Most completions of a prompt: G, or more with `pruning.prompt.group_size_factor`."""
        return math.floor(self.completions_per_prompt * self.group_size_factor)

    @property
    def reads_pass_rates(self) -> bool:
        """Whether the order or the advantage needs each prompt's earlier rewards, even if the method does not."""
        sorts = self.order in ("easy_first", "hard_first") and self.order_by == "pass_rate"
        return sorts or self.reads_prior

    @property
    def reads_prior(self) -> bool:
        """Whether the baseline needs earlier rewards: that of posterior_loo, and any with completions stopped early."""
        return self.objective.advantage == "posterior_loo" or self.pruning.early_stop.after_tokens > 0

    @property
    def baseline_of_passes(self) -> str:
        """Why rewards must be in [0, 1]: a baseline uses the prompt's pass rate. Empty if none does. If rewards were -1
        and 1, one in ten of them 1, posterior_loo's squared advantages would be 2.1 times rloo's, and not 0.9 times."""
        if self.objective.advantage == "posterior_loo":
            return "objective.advantage = posterior_loo shrinks its baseline towards a pass rate; rloo takes any reward"
        if self.reads_prior:
            return "pruning.early_stop uses a pass rate in place of what it stops; after_tokens=0 takes any reward"
        return ""

    def check(self) -> None:
        """Raise `UserError` for a number out of its range, and where settings contradict each other."""
        check_ranges(self)
        if self.group_size_factor > 1:
            self._check_sizes(f"pruning.prompt.group_size_factor = {self.group_size_factor:g}")
        if self.pruning.early_stop.after_tokens:
            self._check_early_stop(f"pruning.early_stop.after_tokens = {self.pruning.early_stop.after_tokens}")
        planned, updates = self.planned_prompts, self.objective.updates_per_step
        by_allocation = " by pruning.completion.allocation" if planned != self.prompts_per_step else ""
        if planned % updates:
            raise UserError(
                f"objective.updates_per_step = {updates}: the {planned} nominal prompts of a step{by_allocation} do not"
                " divide by it, and mini-batches hold whole groups"
            )

    def _check_early_stop(self, key: str) -> None:
        if self.pruning.early_stop.after_tokens >= self.max_completion_tokens:
            raise UserError(
                f"{key}: no completion is longer than rollout.sampling.max_completion_tokens ="
                f" {self.max_completion_tokens}, and none would be stopped"
            )
        if self.pruning.prompt.method in BY_REWARDS:
            raise UserError(
                f"{key}: pruning.prompt.method = {self.pruning.prompt.method} needs the rewards of a whole group, and"
                " completions that are stopped early have none"
            )
        self._check_sizes(key)

    def _check_sizes(self, key: str) -> None:
        completion = self.pruning.completion.method
        if completion in ONE_SIZE:
            raise UserError(f"{key}: pruning.completion.method = {completion} is defined for groups of one size")
        if self.objective.advantage not in SIZE_FREE:
            raise UserError(
                f"{key}: with objective.advantage = {self.objective.advantage} the objective depends on the group size;"
                f" use {', '.join(SIZE_FREE)}"
            )

    def too_few_prompts(self, num_prompts: int, where: str = "the prompt set") -> str:
        """Why `num_prompts` are not enough; empty if they are.

        A step that planned N prompts but found only P would still divide by N: a bias that no ledger label shows.
        """
        planned, nominal = self.planned_prompts, self.prompts_per_step
        if num_prompts >= planned:
            return ""
        raised = "" if planned == nominal else f", which pruning.completion.allocation raises to {planned}"
        return (
            f"prompts_per_step = {nominal}{raised}, but {where} holds only {num_prompts} problems: a step needs as many"
            " different ones as it plans"
        )


def selection_settings(config: Config) -> SelectionSettings:
    """The settings of a job of this trainer. The sections are those of `config`, not copies."""
    return SelectionSettings(
        prompts_per_step=config.rollout.prompts_per_step,
        completions_per_prompt=config.rollout.completions_per_prompt,
        total_steps=config.steps,
        max_completion_tokens=config.rollout.sampling.max_completion_tokens,
        seed=config.seed,
        async_steps=config.rollout.async_steps,
        quantized=config.rollout.quantization != "off",
        truncated=config.rollout.sampling.truncates,
        objective=config.objective,
        pruning=config.pruning,
        set_weights=train_set_weights(config),
        order=config.data.order,
        order_by=config.data.order_by,
    )
