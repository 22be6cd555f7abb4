"""From a method's name in the config to a policy object."""

from __future__ import annotations

from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig, check_completion, check_prompt
from dppo_megatron.pruning.completion_base import CompletionPolicyBase
from dppo_megatron.pruning.completion_dppo import DppoCompletionPolicy
from dppo_megatron.pruning.completion_field import (
    CppoPolicy,
    InfoBatchCompletionPolicy,
    MaxVariancePolicy,
    ZeroVariancePolicy,
)
from dppo_megatron.pruning.interface import CompletionPolicy, PromptFeatures, PromptPolicy
from dppo_megatron.pruning.prompt_base import PromptPolicyBase
from dppo_megatron.pruning.prompt_dppo import DppoPromptPolicy, PaperPromptPolicy
from dppo_megatron.pruning.prompt_infobatch import InfoBatchPolicy
from dppo_megatron.pruning.prompt_resampling import DynamicSamplingPolicy, GresoPolicy

_PROMPT: dict[str, type[PromptPolicyBase]] = {
    "none": PromptPolicyBase,
    "dppo": DppoPromptPolicy,
    "dppo_auto": DppoPromptPolicy,
    "dppo_paper": PaperPromptPolicy,
    "greso": GresoPolicy,
    "greso_ht": GresoPolicy,
    "infobatch": InfoBatchPolicy,
    "dynamic_sampling": DynamicSamplingPolicy,
}
_COMPLETION: dict[str, type[CompletionPolicyBase]] = {
    "none": CompletionPolicyBase,
    "dppo": DppoCompletionPolicy,
    "dppo_auto": DppoCompletionPolicy,
    "dppo_paper": CppoPolicy,
    "cppo": CppoPolicy,
    "cppo_trl": CppoPolicy,
    "cppo_verl": CppoPolicy,
    "greso": ZeroVariancePolicy,
    "greso_ht": ZeroVariancePolicy,
    "infobatch": InfoBatchCompletionPolicy,
    "max_variance": MaxVariancePolicy,
}


def make_prompt_policy(
    config: PromptPruningConfig,
    *,
    num_prompts: int,
    completions_per_prompt: int,
    prompts_per_step: int,
    total_steps: int,
    seed: int,
    rest_steps: int = 0,
    features: PromptFeatures | None = None,
) -> PromptPolicy:
    """The policy of `pruning.prompt.method`.

    Args:
        config: checked here.
        num_prompts: rows of the prompt set; history is kept for each.
        completions_per_prompt: group size G.
        prompts_per_step: nominal prompts of a step; with num_prompts it says how many steps an epoch has.
        total_steps: length of the run, for annealing.
        seed: the run's seed.
        rest_steps: steps at the start that are not pruned whatever `warmup_epochs` says.
        features: what is known of each prompt before it is tried; None: nothing.

    Raises:
        UserError: a setting is out of range; the message names its key.
    """
    for name, count in (("num_prompts", num_prompts), ("completions_per_prompt", completions_per_prompt)):
        if count < 1:
            raise ValueError(f"{name} = {count}: must be at least 1")
    if prompts_per_step < 1 or total_steps < 0:
        raise ValueError(f"prompts_per_step = {prompts_per_step}, total_steps = {total_steps}: must be positive")
    check_prompt(config)
    return _PROMPT[config.method](
        config,
        num_prompts=num_prompts,
        completions_per_prompt=completions_per_prompt,
        prompts_per_step=prompts_per_step,
        total_steps=total_steps,
        seed=seed,
        rest_steps=rest_steps,
        features=features,
    )


def make_completion_policy(
    config: CompletionPruningConfig,
    *,
    seed: int,
    total_steps: int,
    kl_coef: float = 0.0,
    group_size: int = 0,
    rest_steps: int = 0,
) -> CompletionPolicy:
    """The policy of `pruning.completion.method`.

    Args:
        config: checked here.
        seed: the run's seed.
        total_steps: length of the run, for annealing.
        kl_coef: coefficient of the KL (or entropy) term in the loss; must be the loss's, or the floor is wrong.
        group_size: completions of a whole group, for the methods that keep a count of each; 0: not known, and a rate
            that keeps none of a group is found out when it comes.
        rest_steps: steps at the start that are not pruned whatever `warmup_steps` says.

    Raises:
        UserError: a setting is out of range; the message names its key.
    """
    check_completion(config)
    return _COMPLETION[config.method](
        config, seed=seed, total_steps=total_steps, kl_coef=kl_coef, group_size=group_size, rest_steps=rest_steps
    )
