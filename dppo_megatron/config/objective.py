"""Settings of the policy objective: advantages, the per-token loss, what is added to it, how often a rollout is used.

One section with choices instead of a class for each named algorithm: GRPO, DAPO, Dr.GRPO, GSPO, CISPO, RLOO and
REINFORCE++ differ in three or four of its settings (docs/objectives.md lists them as `key=value` lines). The price is
that some combinations make no sense; `check_objective` refuses them with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dppo_megatron.config.ranges import ranged
from dppo_megatron.types import UserError


@dataclass
class KLConfig:
    """KL to the reference policy, as a term of the loss."""

    coef: float = ranged(0.0, "[0, 1e6]")
    """Coefficient of the KL term; 0 turns it off and saves the reference's forward pass. DeepSeekMath uses 0.04 (arXiv
    2402.03300), DAPO and Dr.GRPO none."""
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = "k3"
    """With d = log reference - log policy: `k1` -d, `k2` d^2/2, `k3` exp(d) - d - 1 (GRPO's), `k3_unbiased` k3 times
    policy / behaviour. All but k2 estimate the value of KL(policy || reference). Used as a loss, k3 has the expected
    gradient of KL(reference || policy), and k1's is 0; k2's is right on-policy, k3_unbiased's always (2506.09477)."""
    reference_path: str = ""
    """Directory of the reference policy: a checkpoint of the same architecture and vocabulary as model.hf_path, read at
    every start. Empty: the policy at the start of RL, which is kept in checkpoints."""


@dataclass
class CorrectionConfig:
    """A factor on the policy loss that corrects for engine log-probabilities that differ from the trainer's."""

    level: Literal["none", "token", "cumulative", "sequence"] = "none"
    """What the importance ratio old / behaviour covers. `token`: that token alone. `cumulative`: the completion up to
    the token (CTPO, arXiv 2605.07331). `sequence`: the whole completion, which is exact and has the most variance.
    `none`: no factor and no extra forward pass."""
    mode: Literal["truncate", "mask"] = "truncate"
    """`truncate`: min(ratio, max_ratio), truncated importance sampling. `mask`: the ratio itself inside
    [min_ratio, max_ratio], 0 outside (IcePop, arXiv 2510.18855)."""
    max_ratio: float = ranged(2.0, "(0, 1e9]")
    """Upper bound of the ratio. With level=cumulative both bounds are raised to the power sqrt(position of the token),
    because the product spreads with length (CTPO uses 1.05 and 0.975)."""
    min_ratio: float = ranged(0.0, "[0, 1e9]")
    """mode=mask: lower bound of the ratio. IcePop's range is [0.5, 5]."""


@dataclass
class OverlongConfig:
    """DAPO's treatment of completions near or at the length limit (arXiv 2503.14476, section 3.4)."""

    buffer_tokens: int = ranged(0, "[0, 100000000]")
    """Soft punishment: the reward falls linearly, by `penalty` in all, over this many tokens before
    max_completion_tokens. 0: off. Metrics, prompt scores and dynamic sampling use the reward without it."""
    penalty: float = ranged(
        1.0, "[0, 1e6]", why="rewards are squared, and a larger penalty would leave no digits for the rewards"
    )
    """Reward that a completion of max_completion_tokens loses."""
    filter: bool = False
    """Do not train on completions that were truncated at max_completion_tokens. They still count in their group's
    advantages. No weight corrects this selection by outcome: a biased row of the ledger."""


@dataclass
class DivergenceConfig:
    """Trust region of loss=divergence_tv (Divergence PPO, arXiv 2602.04879, binary total variation)."""

    max_shift: float = ranged(0.15, "(0, 1e6]")
    """A token is masked if its probability is further than this from the behaviour's and the advantage would increase
    that."""
    max_ratio: float = ranged(20.0, "(0, 1e9]")
    """Cap of the ratio policy / behaviour, which multiplies the gradient."""


@dataclass
class ObjectiveConfig:
    """Advantage, policy loss and what is added to it."""

    page = "objectives.md"
    loss: Literal["clip", "gspo", "cispo", "divergence_tv"] = "clip"
    """`clip`: PPO's surrogate, in GRPO (arXiv 2402.03300), DAPO (2503.14476) and Dr.GRPO (2503.20783). `gspo`: the same
    with one ratio per sequence (2507.18071). `cispo`: a clipped importance weight on the log-probability (2506.13585).
    `divergence_tv`: Divergence PPO's token mask (2602.04879)."""
    function: str = ""
    """A loss of your own, `module:function`, that replaces `loss`. Signature: function(TokenBatch, ObjectiveConfig) ->
    TokenLoss. See docs/objectives.md."""
    token_values: str = ""
    """A function of your own, `module:function`, that gives each token its advantage and weight. Signature:
    function(Group, place, advantage) -> TokenValues. See docs/objectives.md."""
    clip_low: float = ranged(0.2, "[0, 1]")
    """The ratio is clipped below at 1 - clip_low. loss=clip and gspo: if the advantage is negative. cispo: always; 1
    turns its lower bound off, as in the paper."""
    clip_high: float = ranged(0.2, "[0, 1e9]")
    """The ratio is clipped above at 1 + clip_high. loss=clip and gspo: if the advantage is positive. cispo: always."""
    dual_clip: float = ranged(0.0, "[0, 1e9]")
    """loss=clip: bound c > 1 of the dual clip for negative advantages (arXiv 1912.09729); 0 turns it off."""
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    """Trust region of loss=divergence_tv."""
    advantage: Literal["group_std", "group_mean", "rloo", "posterior_loo", "reinforce_baseline"] = "group_std"
    """`group_std`: (r - mean) / std of the group (GRPO). `group_mean`: r - mean (Dr.GRPO). `rloo`: r - mean of the
    group's other completions (arXiv 2402.14740). `posterior_loo`: as `rloo`, with that mean shrunk towards the prompt's
    rewards on earlier visits; for rewards in [0, 1]. `reinforce_baseline`: r - mean, divided by the step's standard
    deviation (REINFORCE++-baseline, 2501.03262)."""
    advantage_eps: float = ranged(1e-6, "[0, 1e6]")
    """Added to the standard deviation (population form) before dividing by it."""
    normalization: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """Divisor of a completion's token sum, for a mini-batch of N nominal prompts with G completions each; pruning
    completions does not change it. `sequence_mean`: N G length (GRPO). `token_mean`: the mini-batch's completion tokens
    (DAPO), or, while prompts are skipped, N G times the mean length of earlier steps. `constant`: N G
    max_completion_tokens (Dr.GRPO)."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL to the reference policy."""
    entropy_coef: float = ranged(0.0, "[0, 1e6]")
    """Coefficient of an entropy bonus: entropy_coef x entropy is subtracted from each token's loss."""
    zero_advantage_slope: float = ranged(0.0, "[0, 1e6]")
    """Only with `function` or `token_values`: roughly the slope of your loss in the log-probability where a
    completion's advantage is 0. Above 0, some of these completions are still trained on, as with a KL term."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Importance correction for the mismatch between rollout and trainer."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Completions near the length limit."""
    updates_per_step: int = ranged(1, "[1, 1000000]")
    """Optimizer updates on each rollout. A step's nominal prompts are split into this many mini-batches before anything
    is selected; each has its own draws and denominators. Learning-rate settings count updates."""
    old_logprobs: Literal["auto", "recompute", "behaviour"] = "auto"
    """Where the denominator of the policy ratio comes from. `behaviour`: the engine's log-probabilities. `recompute`: a
    forward pass of the actor over the kept samples before the step's first update. `auto`: recompute with several
    updates whose loss reads them; the update's own pass with a correction and one update; else behaviour."""

    @property
    def has_own_code(self) -> bool:
        """The user's own code turns advantages into the loss, which then need not be linear in them."""
        return bool(self.function or self.token_values)


def needs_old_logprobs(config: ObjectiveConfig) -> bool:
    """Whether the actor runs a forward pass over a step's kept samples before the first update."""
    if config.old_logprobs != "auto":
        return config.old_logprobs == "recompute"
    return config.updates_per_step > 1 and (bool(config.function) or config.loss != "divergence_tv")


def old_is_current(config: ObjectiveConfig) -> bool:
    """Whether the old log-probabilities of a correction are taken from the update's own forward pass. A step's only
    update starts at the weights that an earlier pass would use, so both give the same log-probabilities."""
    return config.old_logprobs == "auto" and config.updates_per_step == 1 and config.correction.level != "none"


def is_linear_off_policy(config: ObjectiveConfig) -> bool:
    """Whether the first update's loss is linear in the advantage whichever weights completions were sampled under: it
    is multiplied by the whole completion's ratio, and no bound is active."""
    correction = config.correction  # ratios are capped at exp(20) = 4.85e8, so a larger max_ratio is no bound
    bounded = correction.max_ratio < 4.9e8 or (correction.mode == "mask" and correction.min_ratio > 0)
    return correction.level == "sequence" and not (bounded or config.has_own_code or config.dual_clip)


def is_linear_in_advantage(config: ObjectiveConfig) -> bool:
    """Whether the loss of a step's only update is linear in the advantage, whichever weights completions were sampled
    under. CISPO's clip ignores the advantage's sign; and if old is the actor itself, the ratio is 1 and no clip acts. A
    correction, bounded or not, only multiplies the loss."""
    ignores_sign = config.loss == "cispo" or (config.loss != "divergence_tv" and old_is_current(config))
    return config.updates_per_step == 1 and ignores_sign and not config.has_own_code


def is_exact_off_policy(config: ObjectiveConfig) -> bool:
    """Whether a step's expected gradient is the same whichever weights completions were sampled under. The baseline
    then is the older weights' mean. Like any baseline it drops out, unless it is divided by its completion's length, or
    a second update clips by the sign of the advantage, which depends on it."""
    uncorrected = config.kl.coef or config.entropy_coef  # the correction multiplies the policy loss only
    drops_out = config.advantage in ("rloo", "posterior_loo", "group_mean") and config.normalization == "constant"
    return is_linear_off_policy(config) and drops_out and config.updates_per_step == 1 and not uncorrected


def zero_advantage_slope(config: ObjectiveConfig) -> float:
    """Roughly the slope of the loss in a log-probability at advantage 0: not 0 if such completions have gradient."""
    return config.kl.coef + config.entropy_coef + config.zero_advantage_slope


def check_objective(config: ObjectiveConfig, *, max_completion_tokens: int) -> None:
    """Raise `UserError` for settings that contradict each other."""
    if config.clip_low == 1 and config.loss != "cispo":
        raise UserError("objective.clip_low = 1.0: must be below 1 (the ratio is positive); 1 is for loss=cispo only")
    if config.loss == "clip" and config.dual_clip and config.dual_clip <= 1 + config.clip_high:
        raise UserError(
            f"objective.dual_clip = {config.dual_clip}: must be 0 (off) or above 1 + clip_high = {1 + config.clip_high}"
        )
    if config.dual_clip and config.loss != "clip":
        raise UserError(f"objective.dual_clip = {config.dual_clip} is read by loss=clip only, not loss={config.loss}")
    if config.kl.reference_path and not config.kl.coef:
        raise UserError("objective.kl.reference_path has no effect while objective.kl.coef = 0; set both or neither")
    if config.zero_advantage_slope and not config.has_own_code:
        raise UserError(
            f"objective.zero_advantage_slope = {config.zero_advantage_slope} describes a loss or token values of"
            " your own, but objective.function is not set and neither is token_values; KL and entropy terms are"
            " counted without it"
        )
    correction = config.correction
    if correction.level != "none":
        if config.old_logprobs == "behaviour":
            raise UserError(
                f"objective.correction.level = {correction.level} compares the actor with the engine, but"
                " objective.old_logprobs = behaviour takes both from the engine; use auto"
            )
        if config.loss == "divergence_tv" and not config.function:
            raise UserError(
                f"objective.correction.level = {correction.level} with loss=divergence_tv would count the mismatch"
                " twice: its ratio is already the one to the behaviour; use correction.level=none"
            )
        if correction.min_ratio > correction.max_ratio:
            raise UserError(
                f"objective.correction.min_ratio = {correction.min_ratio} is above max_ratio = {correction.max_ratio}"
            )
    if config.overlong.buffer_tokens > max_completion_tokens:
        raise UserError(
            f"objective.overlong.buffer_tokens = {config.overlong.buffer_tokens}: must be at most"
            f" rollout.sampling.max_completion_tokens = {max_completion_tokens}"
        )
