"""Random configurations of pruning and objective, whatever the schema admits, and random outcomes of a step.

A value that the schema admits and that never comes up here fails `test_every_setting_is_generated`: a new choice must
be generated before its label is believed. What contradicts itself the trainer's own checks refuse; it is drawn anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dppo_megatron.algorithms.tokens import TokenBatch, TokenLoss
from dppo_megatron.config.objective import (
    CorrectionConfig,
    DivergenceConfig,
    KLConfig,
    ObjectiveConfig,
    OverlongConfig,
    check_objective,
)
from dppo_megatron.config.pruning import EarlyStopConfig, GresoConfig
from dppo_megatron.config.ranges import check_ranges
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.pruning import (
    CompletionBatch,
    CustomCompletionPolicy,
    CustomPromptPolicy,
    interface,
    prompt_baselines,
)
from dppo_megatron.pruning.custom import Choice
from dppo_megatron.pruning.policies import COMPLETION_POLICIES, PROMPT_POLICIES
from dppo_megatron.selection import Rollouts
from dppo_megatron.types import IntArray, PromptFeatures

LIMIT = 12
GRESO: dict[str, tuple[float, ...]] = {
    "_START": (0.5, 0.3),
    "_FLOOR": (0.01, 0.2),
    "_FLAT": (0.25, 0.5),
    "_STEP": (0.0, 0.01, 0.3),
    "_LEAST": (0.05, 0.2),
    "_MOST": (0.95, 1.0),
    "_EASY": (0.98, 0.5),
    "_HARD": (0.11, 0.4),
}
"""No settings, but a label must not hang on them: values for the constants of `prompt_baselines`, the first its own.
Those of the latest configuration hold until the next one is made or the test ends (conftest.py)."""


def make_config(rng: np.random.Generator) -> Config:
    """Any settings that look reasonable one by one; together they may be refused."""

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    config = Config(steps=int(one(8, 400, 400)), seed=int(rng.integers(2**31)))
    pruning = config.pruning
    weighted = ("none", "dppo", "dppo", "dppo_auto", "infobatch", "greso_ht")  # half of the cases can be unbiased
    pruning.prompt.method = one(*(weighted if rng.random() < 0.7 else [*PROMPT_POLICIES, *OWN_PROMPTS]))
    pruning.completion.method = one(*(weighted if rng.random() < 0.7 else [*COMPLETION_POLICIES, *OWN_COMPLETIONS]))
    for level in (pruning.prompt, pruning.completion):
        level.rate = one(0.0, 0.25, 0.3, 0.5, 0.5, 0.6, 0.7, 0.9, float(rng.uniform(0, 0.95)))
        level.min_inclusion_prob = float(one(0.02, 0.05, 1 - level.rate, rng.uniform(0.01, 1 - level.rate)))
        level.design, level.estimator = (
            one("systematic", "systematic", "poisson"),
            one("ht", "ht", "ht", "fixed_size_ht", "hajek"),
        )
        capped = rng.random() < 0.3
        level.max_weight = float(one(1, 1.3, 2, 3, 5, 20, 1 / level.min_inclusion_prob, 100)) if capped else 0.0
        level.anneal_fraction = float(one(*[1] * 8, 0.5, 0.0))
        level.cost_aware = one(False, False, True)
        level.max_design_effect = float(one(0, 0, 0, 0, 1.1, 1.6))
        one(0, 1)  # was a setting's that is gone: all other settings of a case stay what they were
    if pruning.prompt.method == "label_configs:OwnCoins":  # whose probabilities may not be below the floor
        pruning.prompt.min_inclusion_prob = min(pruning.prompt.min_inclusion_prob, 0.7)
    if pruning.completion.method == "label_configs:OwnHalf":
        pruning.completion.min_inclusion_prob = min(pruning.completion.min_inclusion_prob, 0.5)
    pruning.prompt.score = one("fit", "fit", "beta", "mean_abs", "rms")
    pruning.completion.rate = one(pruning.completion.rate, pruning.completion.rate, pruning.completion.rate, None)
    pruning.prompt.discount, pruning.prompt.prior = one(0.7, 0.7, 0.3, 1.0), one(0.5, 0.5, 2.0)
    pruning.prompt.warmup_epochs = float(one(0, 0, 0, 0, 0.5, 1))
    pruning.prompt.fixed_cost_ratio = float(one(0, 0.01, 0.1, 1))
    one(0, 1)  # and another's
    pruning.prompt.group_size_factor = one(1.0, 1.0, 2.0)  # `accepted` keeps all sizes alike
    pruning.prompt.refill.enabled = one(True, True, False)
    pruning.prompt.refill.max_rounds = int(one(1, 3))
    pruning.prompt.refill.prompts_per_round = int(one(0, 1))
    for name, values in GRESO.items():
        setattr(prompt_baselines, name, one(*values))
    pruning.prompt.greso = GresoConfig(int(one(1, 2)), int(one(384, 3)))
    pruning.completion.score = one("free_norm", "abs_advantage")
    pruning.completion.warmup_steps = int(one(*[0] * 7, 2))
    pruning.completion.rollout_cost_ratio = float(one(0, 0.01, 0.1, 1))
    pruning.completion.fill_slack = one(True, False)
    pruning.completion.allocation = one(False, True)
    pruning.early_stop = EarlyStopConfig(int(one(0, 0, 0, 3, 8)), one(0.1, 0.5))
    loss = one("clip", "clip", "gspo", "cispo", "divergence_tv")
    own = ("function", "token_values")[config.seed % 2] if rng.random() < 0.1 else ""
    config.objective = ObjectiveConfig(
        loss=loss,
        function="label_configs:a_loss" if own == "function" else "",
        token_values="label_configs:a_loss" if own == "token_values" else "",  # selection reads that there is one
        clip_low=float(one(0.0, 0.2, 0.5)),
        clip_high=float(one(0.0, 0.28, 5.0)),
        dual_clip=float(one(0, 10)) if loss == "clip" else 0.0,
        divergence=DivergenceConfig(max_shift=one(0.15, 0.5), max_ratio=one(20.0, 3.0)),
        advantage=one("group_std", "group_mean", "rloo", "posterior_loo", "reinforce_baseline"),
        advantage_eps=one(0.0, 1e-6, 0.1),
        normalization=one("sequence_mean", "token_mean", "constant"),
        kl=KLConfig(coef=one(0.0, 0.0, 0.04), estimator=one("k1", "k2", "k3", "k3_unbiased")),
        entropy_coef=one(0.0, 0.0, 0.01),
        zero_advantage_slope=one(0.0, 0.5) if own else 0.0,
        correction=CorrectionConfig(
            level=one("none", "none", "token", "cumulative", "sequence"),
            mode=one("truncate", "mask"),
            max_ratio=one(2.0, 5.0),
            min_ratio=one(0.0, 0.5),
        ),
        overlong=OverlongConfig(
            buffer_tokens=int(one(0, 0, 6)), penalty=one(1.0, 0.0, 0.3), filter=bool(rng.random() < 0.08)
        ),
        updates_per_step=int(one(1, 1, 2, 3)),
        old_logprobs=one("auto", "recompute", "behaviour"),
    )
    config.rollout.async_steps = int(one(0, 0, 1, 3))
    # Small enough that every pattern of independent coins can be tried.
    designs = pruning.prompt.design, pruning.completion.design
    coins = "poisson" in designs or pruning.completion.method == "label_configs:OwnHalf"
    few, more = ((1, 2), (2, 2), (2, 3), (3, 2)), ((1, 5), (2, 2), (3, 2), (4, 2), (4, 3), (6, 2), (3, 4), (2, 8))
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = one(*(few if coins else more))
    config.rollout.sampling.max_completion_tokens = LIMIT
    return config


def make_outcomes(rng: np.random.Generator, num_prompts: int, size: int, *, binary: bool) -> Rollouts:
    """Ties, groups that are all right or all wrong, failed gradings, graded rewards, and what cannot be told apart."""
    shape = (num_prompts, size)
    kind = rng.integers(0, 4)
    rewards = (rng.random(shape) < rng.choice([0.0, 0.3, 0.5, 1.0], (num_prompts, 1))).astype(np.float64)
    if kind == 1:
        rewards = rng.choice([0.0, 0.1, 1.0], shape)
    elif kind == 2:
        rewards = rng.random(shape)
    elif kind == 3 and not binary:
        rewards = rng.normal(0, 10.0 ** rng.integers(-3, 4), shape)
    rewards = np.where(rng.random(shape) < rng.choice([0.0, 0.2]), np.nan, rewards)
    if rng.random() < 0.2:
        rewards[rng.integers(num_prompts)] = np.nan
    if rng.random() < 0.05:
        rewards[:] = rng.choice([0.0, 1.0, np.nan])
    lengths = rng.integers(1, LIMIT + 1, shape)
    truncated = (lengths == LIMIT) & (rng.random(shape) < 0.8) if rng.random() < 0.5 else None
    logit_grad_norm = rng.uniform(0.01, 1, shape) * np.sqrt(lengths)
    logit_grad_norm[rng.random(shape) < rng.choice([0.0, 0.1])] = 0.0
    tokens = rng.integers(1, 5, num_prompts) if rng.random() < 0.5 else None
    by_chance = np.isnan(rewards) & bool(lengths.sum() % 2)  # of all or of none: the label is that of the worst
    return Rollouts(rewards, lengths, logit_grad_norm, tokens, truncated, by_chance=by_chance)


def takes_unit_rewards(config: Config) -> bool:
    """The prompt score or the baseline counts a reward as a success."""
    scored = config.pruning.prompt.method.startswith("dppo") and config.pruning.prompt.score == "beta"
    return scored or bool(selection_settings(config).baseline_of_passes)


def few_long(rng: np.random.Generator, outcomes: Rollouts, after_tokens: int) -> Rollouts:
    """With at most three completions of more than so many tokens, which may be stopped early, and rewards of all: which
    of those that are stopped would have none is not known."""
    long = rng.permutation(np.flatnonzero(outcomes.lengths.ravel() > after_tokens))[3:]
    lengths = outcomes.lengths.copy()
    lengths.ravel()[long] = after_tokens
    return replace(outcomes, rewards=np.nan_to_num(outcomes.rewards), lengths=lengths, truncated=None, by_chance=None)


def make_features(rng: np.random.Generator, num_prompts: int) -> PromptFeatures | None:
    """Rows that say something about prompts, in half of the cases."""
    if rng.random() < 0.5:
        return None
    level = rng.choice([0.0, 1.0, 2.0, np.nan], num_prompts)
    return PromptFeatures(rng.integers(1, 9, num_prompts), level, rng.integers(0, 2, num_prompts), ("", "a"))


def check_sections(config: Config) -> None:
    """Raise `UserError` unless the configuration admits these settings, by its own checks."""
    check_ranges(config)
    check_objective(config.objective, max_completion_tokens=config.rollout.sampling.max_completion_tokens)


# ---------------------------------------------------------------------------- policies and a loss of a user's own


class OwnProbabilities(CustomPromptPolicy):
    """The more often a prompt was tried, the less likely."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        return 1.0 / (1.0 + self.history.arrays["visits"][prompt_index])


class OwnCoins(CustomPromptPolicy):
    """A design of its own."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        pi = np.where(prompt_index % 2 == 0, 0.7, 1.0)
        coins = interface.uniforms(self.seed, "prompt coin", prompt_index, step, minibatch)
        order = np.arange(len(pi))
        return interface.draw("poisson", pi, order=order, start=0.0, uniform=coins)


class OwnPick(CustomPromptPolicy):
    """Every second prompt."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        return np.asarray((prompt_index + step) % 2 == 0)


class OwnLengths(CustomCompletionPolicy):
    """The longer, the likelier."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return batch.lengths / LIMIT


class OwnShort(CustomCompletionPolicy):
    """A pick."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return np.asarray(batch.lengths < 0.7 * LIMIT)


class OwnHalf(CustomCompletionPolicy):
    """A design of its own, that keeps half of those with a reward."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        pi = np.where(np.isnan(batch.rewards), 1.0, 0.5)
        ids = np.stack([batch.prompt_index, batch.completion_index], axis=1)
        coins = interface.uniforms(self.seed, "completion coin", ids, step, minibatch)
        return interface.draw("poisson", pi, order=np.arange(len(pi)), start=0.0, uniform=coins)


OWN_PROMPTS = ("label_configs:OwnProbabilities", "label_configs:OwnCoins", "label_configs:OwnPick")
OWN_COMPLETIONS = ("label_configs:OwnLengths", "label_configs:OwnShort", "label_configs:OwnHalf")


def a_loss(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """Named by some configurations; nothing here computes a loss."""
    raise NotImplementedError
