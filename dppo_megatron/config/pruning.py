"""Settings of pruning: which prompts are skipped before rollout, which completions are dropped before the update.

Every method reads the same two sections, so that comparing methods changes one word of a config. The price is that
some methods ignore some fields: each policy's class lists which it reads, docs/pruning.md has the table, and a run logs
the changed settings that its methods ignore. The policy classes define the method names, so these, and how a method's
settings fit together, are checked by `pruning.policies.check_methods` and not here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from dppo_megatron.config.ranges import COUNT, ranged
from dppo_megatron.config.ranges import check_choice as check_choice  # for `pruning/`, which reads this module only
from dppo_megatron.config.ranges import check_ranges as check_ranges
from dppo_megatron.types import UserError


@dataclass
class GresoConfig:
    """GRESO (arXiv 2506.02177)."""

    smallest_refill_prompts: int = ranged(64, "[1, 1000000]")
    """Fewest prompts of a refill round."""
    largest_refill_prompts: int = ranged(384, "[1, 1000000]")
    """Most prompts of a refill round. A round whose estimated need is within this is the last one."""


@dataclass
class RefillConfig:
    """Resampling until enough groups have reward variance."""

    enabled: bool = True
    """Roll out more prompts if too few groups have reward variance."""
    max_rounds: int = ranged(10, "[1, 1000000]")
    """Most rollout rounds of a step, including the first; then it trains on fewer groups (see the bias ledger)."""
    prompts_per_round: int = ranged(0, "[0, 1000000]")
    """Prompts of a refill round of dynamic_sampling; 0: as many as the step's nominal prompts."""


@dataclass
class PromptPruningConfig:
    """Selection before rollout."""

    method: str = "dppo"
    """A method of docs/pruning.md, or `module:Class` for a policy of your own."""
    rate: float = ranged(0.3, "[0, 1)", why="1 would drop everything; 0 or method=none keeps all")
    """Share of a step's already visited prompts to skip; for infobatch, the chance of each below the mean score."""
    min_inclusion_prob: float = ranged(0.2, "(0, 1]", why="0 would leave prompts that can never be drawn")
    """Smallest inclusion probability pi of a prompt; bounds the weights by 1 / min_inclusion_prob."""
    score: Literal["fit", "beta", "mean_abs", "rms"] = "fit"
    """What prompts are ranked by. fit: the expected second moment of the gradient, from a regression on the prompt's
    last two visits (outcome, age, length) and on its row (level, source, length), fitted during the run. beta: the
    posterior probability that a group has reward variance (rewards in [0, 1]). mean_abs: mean |advantage| of the last
    visit. rms: root of a discounted mean of the squared deviations of rewards from their group's mean. Only fit
    accounts for what a KL or entropy term adds to groups without reward variance."""
    discount: float = ranged(0.7, "(0, 1]")
    """Fraction of the evidence about a prompt that remains after another visit, or after an epoch without a visit."""
    prior: float = ranged(0.5, "(0, 1e9]")
    """Both parameters of the Beta prior of an unvisited prompt (score=beta)."""
    design: Literal["systematic", "poisson"] = "systematic"
    """How kept prompts are drawn: systematic (a fixed number) or poisson (independently of each other)."""
    estimator: Literal["ht", "fixed_size_ht", "hajek"] = "ht"
    """Weights of kept prompts: ht (1/pi, unbiased), fixed_size_ht (mean over kept times C/(1-P)) or hajek (ratio)."""
    max_weight: float = ranged(0.0, "0 or [1, 1e9]", why="1 is the value without pruning")
    """Largest weight; 0: no cap. Less variance, but biased in steps whose probabilities allow a larger weight."""
    warmup_epochs: float = ranged(1.0, "[0, 1e9]")
    """Epochs at the start in which no prompt is skipped."""
    anneal_fraction: float = ranged(0.875, "[0, 1]")
    """No prompt is skipped after this fraction of the run: 0.875 leaves the last 12.5% unpruned."""
    cost_aware: bool = True
    """Divide the score by the root of the prompt's mean completion length: least variance for the tokens spent."""
    group_size_factor: float = ranged(1.0, "[1, 16]")
    """Above 1, group sizes vary between completions_per_prompt / factor (at least 2) and completions_per_prompt x
    factor, larger where more gradient is expected per token; the step's total stays the same. Needs score=fit and an
    advantage whose expected gradient does not depend on the group size (rloo, posterior_loo, group_mean). Also active
    in warm-up and after annealing. At rate 0 nothing guards against a bad score: watch
    prune/size_realised_design_effect."""
    max_design_effect: float = ranged(0.0, "0 or [1, 1e9]", why="1 is the value without pruning")
    """Largest growth of the gradient variance: sum(s^2/pi)/sum(s^2) of the score, corrected by what earlier steps have
    measured. The rate backs off to stay below it. 0: no bound."""
    fixed_cost_ratio: float = ranged(0.0, "[0, 1e9]")
    """For method=dppo_auto: seconds of a step that skipping prompts cannot save, divided by those that it can, at full
    batch. 0: measured; draws then depend on the clock, and a resumed run differs from an uninterrupted one."""
    greso: GresoConfig = field(default_factory=GresoConfig)
    """Sizes of GRESO's refill rounds. Its other constants are those of the authors' code."""
    refill: RefillConfig = field(default_factory=RefillConfig)
    """Resampling of dynamic_sampling and greso."""


@dataclass
class CompletionPruningConfig:
    """Selection after rewards and before the update."""

    method: str = "dppo"
    """A method of docs/pruning.md, or `module:Class` for a policy of your own."""
    rate: float | None = ranged(None, "[0, 1)", why="1 would drop everything; 0 or method=none keeps all")
    """Share of completions that is dropped (with cost_aware, of tokens), unless max_design_effect keeps more. For
    infobatch: the chance of dropping one with |advantage| below the mean. null: 0.95 for dppo, 0.5 for the others."""
    min_inclusion_prob: float = ranged(0.05, "[0, 1]")
    """Smallest inclusion probability pi of a completion that can have a gradient."""
    score: Literal["free_norm", "abs_advantage"] = "free_norm"
    """free_norm: |A| times the root of the sum of (1 - p)^2 over the tokens, a gradient-norm proxy from rollout
    log-probabilities; abs_advantage: |A|. Both times the frozen per-sample coefficient and the prompt's weight."""
    design: Literal["systematic", "poisson"] = "systematic"
    """How kept completions are drawn: systematic (a fixed number) or poisson (independently of each other)."""
    estimator: Literal["ht", "fixed_size_ht", "hajek"] = "ht"
    """Weights of kept completions: ht (1/pi, unbiased), fixed_size_ht or hajek, as in pruning.prompt.estimator."""
    max_weight: float = ranged(0.0, "0 or [1, 1e9]", why="1 is the value without pruning")
    """Largest weight; 0: no cap. Biased if a larger weight is possible: up to 1 / min_inclusion_prob with ht, almost
    any with hajek or with a fixed_size_ht whose number of kept completions is random."""
    warmup_steps: int = ranged(0, COUNT)
    """Steps at the start in which no completion is dropped."""
    anneal_fraction: float = ranged(1.0, "[0, 1]")
    """No completion is dropped after this fraction of the run; 1: completions are dropped to the end."""
    cost_aware: bool = False
    """Keep a share of the tokens instead of the completions, with probabilities proportional to score / sqrt(cost)."""
    max_design_effect: float = ranged(1.1, "0 or [1, 1e9]", why="1 is the value without pruning")
    """Largest growth of the gradient variance, sum(s^2/pi)/sum(s^2) of the score; 0: no bound. The rate backs off to
    stay below it. With 1.1 the quickstart's task trains on 16% of the tokens of groups of 8 (docs/pruning.md)."""
    fill_slack: bool = True
    """Keep more completions than the rate asks for if the last round of micro-batches has room: less variance without
    another micro-batch, at the cost of the added tokens' time."""
    rollout_cost_ratio: float = ranged(0.0, "[0, 1e9]")
    """For method=dppo_auto: seconds of a step outside the update, divided by those of a full-batch update. 0: measured;
    draws then depend on the clock, and a resumed run differs from an uninterrupted one."""
    allocation: bool = False
    """Plan 1/(1-rate) times as many prompts, so that the kept completions fill the update (CPPO)."""


@dataclass
class EarlyStopConfig:
    """Stop some completions at random while they are sampled; those that finish are weighted up to stand for them."""

    after_tokens: int = ranged(0, "[0, 100000000]")
    """Above 0, each completion gets a random limit before it is sampled, such that one of n tokens is finished with
    probability min(1, after_tokens / n) and then has the inverse as its weight. The mean length is a good start;
    `simulate --roulette` predicts the gain. Needs an advantage whose expected gradient does not depend on the group
    size (rloo, posterior_loo, group_mean). 0: off."""
    min_inclusion_prob: float = ranged(
        0.1, "(0, 1)", why="0 would leave lengths that are never trained on, and 1 stops nothing"
    )
    """Smallest probability that a completion is finished, however long it is; bounds the weights by its inverse."""


@dataclass
class PruningConfig:
    """All levels. Without pruning: `pruning.prompt.method=none pruning.completion.method=none` and no early_stop."""

    page = "pruning.md"
    prompt: PromptPruningConfig = field(default_factory=PromptPruningConfig)
    """Prompts, before rollout."""
    completion: CompletionPruningConfig = field(default_factory=CompletionPruningConfig)
    """Completions, before the update."""
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    """Completions, while they are sampled. Off by default."""


def exact_rate(rate: float) -> Fraction:
    """The shortest decimal that reads as `rate`: 0.95 is 19/20, not the binary number next to it."""
    return Fraction(str(float(rate)))


def prompts_multiplier(config: CompletionPruningConfig) -> Fraction:
    """Planned prompts of a step relative to the configured number: 1 / (1 - rate) with `allocation`, else 1."""
    rate = 0.5 if config.rate is None else config.rate  # what null means to the methods that allocate
    return 1 / (1 - exact_rate(rate)) if config.allocation else Fraction(1)


def check_sizes(prefix: str, config: PromptPruningConfig) -> None:
    """Raise `UserError` if group sizes vary but the score does not predict what another completion is worth."""
    if config.group_size_factor > 1 and config.score != "fit":
        raise UserError(
            f"{prefix}.group_size_factor = {config.group_size_factor:g}: group sizes need score=fit, but"
            f" {prefix}.score = {config.score}"
        )


def check_floor(prefix: str, min_inclusion_prob: float, rate: float) -> None:
    """Raise `UserError` for a floor that keeps more than the rate allows."""
    if min_inclusion_prob > 1 - rate + 1e-12:
        raise UserError(
            f"{prefix}.min_inclusion_prob = {min_inclusion_prob}: must be at most 1 - rate = {1 - rate:g}, or the floor"
            " alone keeps more than the rate allows; lower min_inclusion_prob or rate"
        )
