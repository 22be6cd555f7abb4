"""Skips prompts and drops completions without changing the expected gradient; methods that do change it are labelled.

Pure: numpy, `dppo_megatron.types` and `dppo_megatron.config.pruning` only. Read `designs` and `weights` for the
mathematics, `prompt_*` and `completion_*` for the methods, `prompt_base` and `completion_base` for their interface,
`custom` for writing your own, and `interface` for the inputs and outputs.

To use it in another trainer (`examples/pruning_library.py`):

- Steps count from 0 in `select`, `observe` and `prune` (from 1 in `selection.Selector`). The step is part of the key
  of its random numbers: the same step and seed always give the same draw.
- `total_steps` is the length of the whole run, including steps before a resume. Steps beyond it prune nothing; if the
  length is unknown, any upper bound works as long as `anneal_fraction` is 1.
- Pass `observe` the `inclusion_prob` and `planned` of the kept prompts: skipping can then be stopped if it does harm.
- A selection may keep nothing, see `Selection.kept`. Code that takes a mean or a maximum of the kept must handle that.
- Divisors come from the planned batch, N prompts x G completions, never from the survivors. For a completion of `len`
  tokens, with L the longest allowed, `CompletionBatch.denominator` is N G len for TRL's grpo and sapo and verl's
  seq-mean-token-mean; N G L for TRL's dr_grpo; N G for verl's seq-mean-token-sum; and the planned batch's token count
  for TRL's dapo and cispo and verl's token-mean. That count is unknown once prompts are skipped; an estimate made
  before the step changes the length of the expected gradient but not its direction. If the trainer divides by the R
  rows it is given, multiply the weight by R / (N G) as well, which makes the divisor N G.
- The advantage may carry the weight if the loss is homogeneous in it, loss(w A) = w loss(A) for w > 0, and reads
  nothing else of the batch: PPO's clip, dual clip, GSPO, CISPO, SAPO, plain policy gradient. It may not if there is a
  KL or entropy term, which no advantage multiplies, or if tokens are chosen by a statistic of the advantages (clip-cov,
  kl-cov). Compute advantages from whole groups first; normalising them after weighting would undo the weights.
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
