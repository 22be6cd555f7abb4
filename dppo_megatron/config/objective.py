"""Settings of the policy objective: advantages, the per-token loss, what is added to it, how often a rollout is used.

One section with choices instead of a class for each named algorithm: GRPO, DAPO, Dr.GRPO, GSPO, CISPO, RLOO and
REINFORCE++ differ in three or four words of it (docs/objectives.md lists them as `key=value` lines). The price is that
some combinations make no sense; `check_objective` names them, with the reason.
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
    """Factor of the term; 0 turns it off, and with it the reference's forward pass. DeepSeekMath has 0.04 (arXiv
    2402.03300), DAPO and Dr.GRPO none."""
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = "k3"
    """With d = log reference - log policy: `k1` -d, `k2` d^2/2, `k3` exp(d) - d - 1 (GRPO's), `k3_unbiased` k3 times
    policy / behaviour. All but k2 estimate the value of KL(policy || reference). As a loss, k3's expected gradient is
    that of KL(reference || policy) and k1's is 0; k2's is right on-policy, k3_unbiased's always (arXiv 2506.09477)."""
    reference_path: str = ""
    """Directory of the reference policy: a checkpoint of the same architecture and vocabulary as model.hf_path, read at
    every start. Empty: the policy at the start of RL, which checkpoints keep."""


@dataclass
class CorrectionConfig:
    """A factor on the policy loss for rollouts whose log-probabilities are not the trainer's."""

    level: Literal["none", "token", "cumulative", "sequence"] = "none"
    """What the ratio old / behaviour is taken of: each token, the completion up to it (`cumulative`, CTPO, arXiv
    2605.07331), or the whole completion (their product, which is exact and varies most). `none`: no factor and no extra
    forward pass."""
    mode: Literal["truncate", "mask"] = "truncate"
    """`truncate`: min(ratio, max_ratio), truncated importance sampling. `mask`: the ratio inside
    [min_ratio, max_ratio], 0 outside (IcePop, arXiv 2510.18855)."""
    max_ratio: float = ranged(2.0, "(0, 1e9]")
    """Largest ratio that counts in full. With level=cumulative both bounds are to the power of the root of the token's
    place, as the product's spread grows (CTPO has 1.05 and 0.975)."""
    min_ratio: float = ranged(0.0, "[0, 1e9]")
    """mode=mask: smallest ratio that counts; IcePop's range is [0.5, 5]."""


@dataclass
class OverlongConfig:
    """DAPO's treatment of completions near or at the length limit (arXiv 2503.14476, section 3.4)."""

    buffer_tokens: int = ranged(0, "[0, 100000000]")
    """Soft punishment: the reward falls linearly, by `penalty` in all, over the last so many tokens before
    max_completion_tokens. 0: off. Metrics, prompt scores and dynamic sampling see the reward without it."""
    penalty: float = ranged(
        1.0, "[0, 1e6]", why="rewards are squared, and a larger one would leave no digit to the others"
    )
    """Reward lost by a completion of max_completion_tokens."""
    filter: bool = False
    """Do not train on completions that ran into max_completion_tokens. They still count in their group's advantages.
    A selection by outcome that no weight corrects: a biased row of the ledger."""


@dataclass
class DivergenceConfig:
    """Trust region of loss=divergence_tv (Divergence PPO, arXiv 2602.04879, binary total variation)."""

    max_shift: float = ranged(0.15, "(0, 1e6]")
    """A token is masked when its probability has moved from the behaviour's by more than this, and the advantage
    would move it further."""
    max_ratio: float = ranged(20.0, "(0, 1e9]")
    """Cap of the ratio policy / behaviour that multiplies the gradient."""


@dataclass
class ObjectiveConfig:
    """Advantage, policy loss and what is added to it."""

    page = "objectives.md"
    loss: Literal["clip", "gspo", "cispo", "divergence_tv"] = "clip"
    """`clip`: PPO's surrogate, in GRPO (arXiv 2402.03300), DAPO (2503.14476) and Dr.GRPO (2503.20783). `gspo`: the same
    with one ratio a sequence (2507.18071). `cispo`: a clipped importance weight on the log-probability (2506.13585).
    `divergence_tv`: Divergence PPO's token mask (2602.04879)."""
    function: str = ""
    """A loss of your own as `module:function`, in place of `loss`, with the signature of the built-in ones:
    function(TokenBatch, ObjectiveConfig) -> TokenLoss. See docs/objectives.md."""
    token_values: str = ""
    """Advantages and weights of each token by a function of your own, `module:function`, with the signature
    function(Group, place, advantage) -> TokenValues. See docs/objectives.md."""
    clip_low: float = ranged(0.2, "[0, 1]")
    """The ratio is clipped at 1 - clip_low. loss=clip and gspo: where the advantage is negative. cispo: always; 1 turns
    its lower bound off, as in the paper."""
    clip_high: float = ranged(0.2, "[0, 1e9]")
    """The ratio is clipped at 1 + clip_high. loss=clip and gspo: where the advantage is positive. cispo: always."""
    dual_clip: float = ranged(0.0, "[0, 1e9]")
    """loss=clip: bound c > 1 of the dual clip for negative advantages (arXiv 1912.09729); 0 turns it off."""
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    """Trust region of loss=divergence_tv."""
    advantage: Literal["group_std", "group_mean", "rloo", "posterior_loo", "reinforce_baseline"] = "group_std"
    """`group_std`: (r - mean) / std of the group (GRPO). `group_mean`: r - mean (Dr.GRPO). `rloo`: r less the mean of
    the others (arXiv 2402.14740). `posterior_loo`: that mean drawn towards what earlier visits of the prompt have seen,
    for rewards in [0, 1]. `reinforce_baseline`: r - mean, divided by the step's standard deviation
    (REINFORCE++-baseline, 2501.03262)."""
    advantage_eps: float = ranged(1e-6, "[0, 1e6]")
    """Added to a standard deviation (population form)."""
    normalization: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """Frozen divisor of a sample's token sum, for a mini-batch of N nominal prompts with G completions.
    `sequence_mean`: N G len (GRPO). `token_mean`: the mini-batch's completion tokens (DAPO); while prompts are skipped
    N G mean length of earlier steps. `constant`: N G max_completion_tokens (Dr.GRPO). Never a survivors' count."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL to the reference policy."""
    entropy_coef: float = ranged(0.0, "[0, 1e6]")
    """Factor of an entropy bonus: entropy_coef x entropy is subtracted from each token's loss."""
    zero_advantage_slope: float = ranged(0.0, "[0, 1e6]")
    """Only for `function` and `token_values`: about how steep your loss is in the log-probability where a completion's
    advantage is 0. Above 0, such completions keep a chance to be trained on, as they do with a KL term."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Rollout/trainer mismatch."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Completions near the length limit."""
    updates_per_step: int = ranged(1, "[1, 1000000]")
    """Optimizer updates on each rollout. A step's nominal prompts are split into so many mini-batches before anything
    is selected; each has its own draws and denominators. Learning-rate settings count updates."""
    old_logprobs: Literal["auto", "recompute", "behaviour"] = "auto"
    """Where the policy ratio's denominator comes from. `behaviour`: the engine's log-probabilities. `recompute`: a
    forward pass of the actor over the kept samples before the step's first update. `auto`: recompute if
    updates_per_step > 1 and the loss reads them; with a correction and one update, from the update's own pass."""

    @property
    def has_own_code(self) -> bool:
        """Code of the user's own stands between advantage and loss, which then need not be linear in it."""
        return bool(self.function or self.token_values)


def needs_old_logprobs(config: ObjectiveConfig) -> bool:
    """Whether a step begins with a forward pass of the actor over its kept samples."""
    if config.old_logprobs != "auto":
        return config.old_logprobs == "recompute"
    return config.updates_per_step > 1 and (bool(config.function) or config.loss != "divergence_tv")


def old_is_current(config: ObjectiveConfig) -> bool:
    """Whether the actor that a correction compares with the engine is the one that is updated: a step's only update
    begins at the weights that a pass before it would see, and sees the same log-probabilities."""
    return config.old_logprobs == "auto" and config.updates_per_step == 1 and config.correction.level != "none"


def is_linear_off_policy(config: ObjectiveConfig) -> bool:
    """Whether the first update's loss is linear in the advantage whichever weights completions were sampled under: the
    whole completion's ratio multiplies it, without a bound that acts (ratios end at exp(20))."""
    correction = config.correction
    bounded = correction.max_ratio < 4.9e8 or (correction.mode == "mask" and correction.min_ratio > 0)
    return correction.level == "sequence" and not (bounded or config.has_own_code or config.dual_clip)


def is_linear_in_advantage(config: ObjectiveConfig) -> bool:
    """Whether the loss of a step's only update is, whatever completions were sampled from: where old is the actor
    itself, the ratio is 1 and no clip acts, and CISPO's goes by no sign. A correction multiplies, bounded or not."""
    by_no_sign = config.loss == "cispo" or (config.loss != "divergence_tv" and old_is_current(config))
    return config.updates_per_step == 1 and by_no_sign and not config.has_own_code


def is_exact_off_policy(config: ObjectiveConfig) -> bool:
    """Whether a step's expected gradient is the same whichever weights completions were sampled under. Mates' mean is
    the older weights'; it drops out as any baseline does, unless it is divided by its completion's length, or a second
    update clips by the advantage's sign, which it has a part in."""
    unmultiplied = config.kl.coef or config.entropy_coef
    of_others = config.advantage in ("rloo", "posterior_loo", "group_mean") and config.normalization == "constant"
    return is_linear_off_policy(config) and of_others and config.updates_per_step == 1 and not unmultiplied


def zero_advantage_slope(config: ObjectiveConfig) -> float:
    """About how steep the loss is in a log-probability at advantage 0, which completion pruning needs to know."""
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
            " your own, but objective.function is not set, nor token_values; the KL and entropy terms are known"
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
