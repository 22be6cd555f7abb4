"""Settings of pruning: which prompts are skipped before rollout, which completions are dropped before the update.

Every method of the field reads the same two sections, so that comparing methods changes one word of a config.
The price is that some methods ignore some fields: each policy's class lists which it reads, docs/pruning.md has the
table, and a run names the changed settings that its methods ignore. Method names are defined by the policy classes,
so `pruning.policies.check_methods` checks them, and how the settings of a method fit together; not this file.
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
    """Fewest prompts asked for in a refill round."""
    largest_refill_prompts: int = ranged(384, "[1, 1000000]")
    """Most prompts asked for in a refill round; an estimate within it makes that round the last one."""


@dataclass
class RefillConfig:
    """Resampling until enough groups have reward variance."""

    enabled: bool = True
    """false: never ask for more prompts."""
    max_rounds: int = ranged(10, "[1, 1000000]")
    """Rollout rounds of one step, the first included; then the step trains on a short batch, and says so."""
    prompts_per_round: int = ranged(0, "[0, 1000000]")
    """Prompts of a refill round whose size follows from nothing else; 0: as many as the step's nominal prompts."""


@dataclass
class PromptPruningConfig:
    """Selection before rollout."""

    method: str = "dppo"
    """A name of docs/pruning.md, or `module:Class` for a policy of your own."""
    rate: float = ranged(0.3, "[0, 1)", why="1 would drop everything; 0 or method=none keeps all")
    """Share of the already visited prompts of a step that is skipped, in [0, 1). Under a rule of two classes the chance
    to skip a prompt of the lower one."""
    min_inclusion_prob: float = ranged(0.2, "(0, 1]", why="0 would leave prompts that can never be drawn")
    """Smallest inclusion probability; bounds the weights by 1 / min_inclusion_prob."""
    score: Literal["fit", "beta", "mean_abs", "rms"] = "fit"
    """What ranks prompts. fit: the expected second moment of the gradient, by a regression on the last two visits,
    their age and length, and the row's level, source and length, fitted as the run goes on. beta: posterior chance that
    a group has reward variance (rewards in [0, 1]). mean_abs: mean |advantage| of the last visit. rms: root of a
    discounted mean of squared rewards about the group's mean. Only fit knows what a KL or entropy term adds to groups
    without reward variance."""
    discount: float = ranged(0.7, "(0, 1]")
    """What is left of the evidence about a prompt after one more visit, or one more epoch without a visit."""
    prior: float = ranged(0.5, "(0, 1e9]")
    """Both parameters of the Beta prior of an unvisited prompt."""
    design: Literal["systematic", "poisson"] = "systematic"
    """How kept prompts are drawn: systematic (fixed size) or poisson (independent coins)."""
    estimator: Literal["ht", "fixed_size_ht", "hajek"] = "ht"
    """Weights of kept prompts: ht (1/pi, unbiased), fixed_size_ht (mean over kept times C/(1-P)) or hajek (ratio)."""
    max_weight: float = ranged(0.0, "0 or [1, 1e9]", why="1 is the value without pruning")
    """Cap of the weights, 0 for none. It trades bias for variance: biased wherever a draw from the step's
    probabilities can give a larger weight."""
    warmup_epochs: float = ranged(1.0, "[0, 1e9]")
    """Epochs at the start without any pruning."""
    anneal_fraction: float = ranged(0.875, "[0, 1]")
    """Nothing is pruned after this fraction of the run: 0.875 leaves the last 12.5 % full."""
    cost_aware: bool = True
    """Divide the score by the root of the prompt's mean completion length: the least variance for the tokens spent."""
    group_size_factor: float = ranged(1.0, "[1, 16]")
    """Above 1, a prompt gets from completions_per_prompt / this (2 at least) to completions_per_prompt x this
    completions, more where more gradient is expected of them for their tokens; a step has as many as without it. Needs
    score=fit and an advantage that means the same in groups of any size (rloo, posterior_loo, group_mean). Goes on in
    warm-up and after annealing. At rate 0 no outcome judges the score: see prune/size_realised_design_effect."""
    max_design_effect: float = ranged(0.0, "0 or [1, 1e9]", why="1 is the value without pruning")
    """Bound of the growth of the variance, as sum(s^2/pi)/sum(s^2) of the score predicts it and earlier steps have
    measured it; 0 for none. The rate backs off to hold it."""
    fixed_cost_ratio: float = ranged(0.0, "[0, 1e9]")
    """For method=dppo_auto: seconds of a step that skipping prompts does not save, over those it does at full batch.
    0: measured, which makes the draws depend on the clock and a resumed run differ from an uninterrupted one."""
    greso: GresoConfig = field(default_factory=GresoConfig)
    """How many prompts GRESO refills with. Its other figures are those of the authors' code."""
    refill: RefillConfig = field(default_factory=RefillConfig)
    """Settings of resampling."""


@dataclass
class CompletionPruningConfig:
    """Selection after rewards and before the update."""

    method: str = "dppo"
    """A name of docs/pruning.md, or `module:Class` for a policy of your own."""
    rate: float | None = ranged(None, "[0, 1)", why="1 would drop everything; 0 or method=none keeps all")
    """Share of completions that is dropped, in [0, 1), where max_design_effect does not keep more; with cost_aware,
    share of the tokens. Under a rule of two classes the chance to drop a completion of the lower one. null: 0.95 for
    the methods that hold a bound, 0.5 for the others."""
    min_inclusion_prob: float = ranged(0.05, "[0, 1]")
    """Smallest inclusion probability of a completion that can carry gradient."""
    score: Literal["free_norm", "abs_advantage"] = "free_norm"
    """free_norm: |A| times the root of the sum of (1 - p)^2 of its tokens, a gradient-norm proxy from rollout
    log-probabilities; abs_advantage: |A|. Both times the frozen per-sample coefficient and the prompt's weight."""
    design: Literal["systematic", "poisson"] = "systematic"
    """systematic (fixed size) or poisson (independent coins)."""
    estimator: Literal["ht", "fixed_size_ht", "hajek"] = "ht"
    """ht (1/pi, unbiased), fixed_size_ht or hajek."""
    max_weight: float = ranged(0.0, "0 or [1, 1e9]", why="1 is the value without pruning")
    """Cap of the weights, 0 for none. Biased where the settings admit a larger weight: 1 / min_inclusion_prob with ht,
    about any with hajek or a fixed_size_ht of random size."""
    warmup_steps: int = ranged(0, COUNT)
    """Steps at the start without any pruning."""
    anneal_fraction: float = ranged(1.0, "[0, 1]")
    """Nothing is pruned after this fraction of the run; 1: pruned to the end."""
    cost_aware: bool = False
    """Spend a token budget instead of a count, with probabilities proportional to score / sqrt(cost)."""
    max_design_effect: float = ranged(1.1, "0 or [1, 1e9]", why="1 is the value without pruning")
    """Bound of sum(s^2/pi)/sum(s^2); 0 for none. The rate backs off to hold it. On the quickstart's task 1.1 trains
    on 16 % of the tokens (docs/pruning.md)."""
    fill_slack: bool = True
    """Keep more than the rate asks for where a step's last round of micro-batches has room: less variance for no
    extra micro-batch, at the cost of the added tokens' time."""
    rollout_cost_ratio: float = ranged(0.0, "[0, 1e9]")
    """For method=dppo_auto: seconds of a step outside the update, over those of a full-batch update. 0: measured, which
    makes the draws depend on the clock and a resumed run differ from an uninterrupted one."""
    allocation: bool = False
    """Plan 1/(1-rate) times as many prompts: the kept completions then fill the update."""


@dataclass
class EarlyStopConfig:
    """Stopping completions early by chance, while they are sampled; those that come to their end count for them."""

    after_tokens: int = ranged(0, "[0, 100000000]")
    """Above 0, each completion gets a limit before it is sampled, so that one of n tokens comes to its end with
    probability min(1, after_tokens / n), and then weighs the inverse. The mean length is a good start; `simulate
    --roulette` says what it would gain. Needs an advantage that means the same in groups of any size (rloo,
    posterior_loo, group_mean). 0: off."""
    min_inclusion_prob: float = ranged(
        0.1, "(0, 1)", why="0 would leave lengths that are never trained on, and 1 stops nothing"
    )
    """Smallest probability of an end, however long; bounds the weights by its inverse."""


@dataclass
class PruningConfig:
    """All levels. The unpruned run: `pruning.prompt.method=none pruning.completion.method=none`, and no early_stop."""

    page = "pruning.md"
    prompt: PromptPruningConfig = field(default_factory=PromptPruningConfig)
    """Prompts, before rollout."""
    completion: CompletionPruningConfig = field(default_factory=CompletionPruningConfig)
    """Completions, before the update."""
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    """Completions, while they are sampled. Off."""


def exact_rate(rate: float) -> Fraction:
    """The shortest decimal that reads as `rate`: 0.95 is 19/20, not the binary number next to it."""
    return Fraction(str(float(rate)))


def prompts_multiplier(config: CompletionPruningConfig) -> Fraction:
    """Planned prompts of a step relative to the configured number: 1 / (1 - rate) with `allocation`, else 1."""
    rate = 0.5 if config.rate is None else config.rate  # what null means to the methods that allocate
    return 1 / (1 - exact_rate(rate)) if config.allocation else Fraction(1)


def check_sizes(prefix: str, config: PromptPruningConfig) -> None:
    """Raise `UserError` for sizes of groups by a score that does not know what a completion is worth."""
    if config.group_size_factor > 1 and config.score != "fit":
        raise UserError(
            f"{prefix}.group_size_factor = {config.group_size_factor:g}: sizes follow score=fit, and"
            f" {prefix}.score = {config.score}"
        )


def check_floor(prefix: str, min_inclusion_prob: float, rate: float) -> None:
    """Raise `UserError` for a floor that keeps more than the rate allows."""
    if min_inclusion_prob > 1 - rate + 1e-12:
        raise UserError(
            f"{prefix}.min_inclusion_prob = {min_inclusion_prob}: must be at most 1 - rate = {1 - rate:g},"
            " or the floor alone keeps more than"
            " the rate allows; lower min_inclusion_prob or rate"
        )
