"""Drops completions in slime, through its own hook: `--custom-reward-post-process-path
dppo_megatron.adapters.slime.post_process_rewards` (docs/adapters.md).

slime divides by the rollouts of a step, so their number must stay the same: a dropped one is truncated to one masked
token, which costs next to nothing. Prompts cannot be skipped: slime waits for `rollout_batch_size` groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dppo_megatron.adapters.pruner import StepPruner
from dppo_megatron.adapters.settings import pruning_from, slime_refusals
from dppo_megatron.pruning import logit_grad_norm
from dppo_megatron.pruning.custom import CustomPolicy
from dppo_megatron.pruning.policies import completion_policy_class
from dppo_megatron.types import UserError


def post_process_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Raw rewards, and weighted advantages that slime broadcasts over tokens. Truncates dropped samples to one token.

    Settings are read from `args.dppo_completion` (slime's `--custom-config-path`), a dict of `pruning.completion`.
    The step is computed from the first group's number: slime numbers the groups of the whole run.

    Raises:
        UserError: an estimator or a term of the loss that this would bias; a policy of your own that learns.
    """
    if refusals := slime_refusals(args, samples):
        raise UserError("settings of slime with which pruning would be biased: " + "; ".join(refusals))
    shape = args.rollout_batch_size, args.n_samples_per_prompt
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    rewards = np.array(raw).reshape(shape)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if args.grpo_std_normalization:
        advantages = advantages / (rewards.std(axis=1, keepdims=True, ddof=1) + 1e-6)
    pruning = pruning_from({"completion": getattr(args, "dppo_completion", None) or {}}, "dppo")
    pruning.prompt.method = "none"
    own = getattr(completion_policy_class(pruning.completion.method), "own_class", CustomPolicy)
    if own.feedback is not CustomPolicy.feedback or own.own_state is not CustomPolicy.own_state:
        raise UserError(f"dppo_completion: {pruning.completion.method} learns, and slime's hook cannot keep that")
    sizes = {"num_prompts": shape[0], "prompts_per_step": shape[0], "group_size": shape[1]}
    step = int(samples[0].group_index) // shape[0]
    # with --num-epoch, slime's driver computes a number of steps but does not pass it on; nothing is annealed then
    total = args.num_rollout or step + 1
    pruner = StepPruner(pruning, **sizes, total_steps=total, seed=args.seed, divides_by_length=True)
    lengths = np.array([sample.response_length for sample in samples]).reshape(shape)
    logps = [sample.rollout_log_probs for sample in samples]
    norm = [
        np.sqrt(size) if one is None else logit_grad_norm(one) for one, size in zip(logps, lengths.flat, strict=True)
    ]
    prompts = np.arange(shape[0])
    chosen = pruner.choose(prompts, step)
    kept = pruner.finish(prompts, chosen, rewards, lengths, np.array(norm).reshape(shape), advantages, step)
    weight = np.zeros(len(samples))
    weight[kept.rows] = kept.weight
    for row in np.flatnonzero((weight == 0) & (lengths.ravel() > 0)):
        sample = samples[row]
        sample.tokens = sample.tokens[: len(sample.tokens) - sample.response_length + 1]
        sample.response_length, sample.loss_mask, sample.remove_sample = 1, [0], True
        per_token = {"rollout_log_probs": 1, "teacher_log_probs": 1, "rollout_routed_experts": len(sample.tokens) - 1}
        for name, length in per_token.items():
            if getattr(sample, name, None) is not None:
                setattr(sample, name, getattr(sample, name)[:length])
    return raw, (weight * advantages.ravel()).tolist()
