"""Skipping prompts and dropping completions without changing the expected gradient, or saying so where it changes.

Pure: numpy, `dppo_megatron.types` and `dppo_megatron.config.pruning` only. Read `designs` and `weights` for the
mathematics, `prompt_*` and `completion_*` for the methods, whose interface is `prompt_base` and `completion_base`,
`custom` for one of your own, `interface` for what goes in and out.
"""

from dppo_megatron.pruning.completion_base import CompletionPolicy
from dppo_megatron.pruning.custom import CustomCompletionPolicy, CustomPromptPolicy
from dppo_megatron.pruning.designs import Draw
from dppo_megatron.pruning.interface import CompletionBatch, LedgerRow, Selection, StepCost
from dppo_megatron.pruning.monitors import biased_rows, step_metrics
from dppo_megatron.pruning.policies import make_completion_policy, make_prompt_policy
from dppo_megatron.pruning.prompt_base import PromptPolicy
from dppo_megatron.pruning.scores import logit_grad_norm

__all__ = [
    "CompletionBatch",
    "CompletionPolicy",
    "CustomCompletionPolicy",
    "CustomPromptPolicy",
    "Draw",
    "LedgerRow",
    "PromptPolicy",
    "Selection",
    "StepCost",
    "biased_rows",
    "logit_grad_norm",
    "make_completion_policy",
    "make_prompt_policy",
    "step_metrics",
]
