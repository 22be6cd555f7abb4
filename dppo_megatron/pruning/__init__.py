"""Skipping prompts and dropping completions without changing the expected gradient, or saying so where it changes.

Pure: numpy, `dppo_megatron.types` and `dppo_megatron.config.pruning` only. Read `designs` and `weights` for the
mathematics, `prompt_*` and `completion_*` for the methods, whose interface is `prompt_base` and `completion_base`,
`custom` for one of your own, `interface` for what goes in and out.

For a trainer of another kind (`examples/pruning_library.py`):

- Steps count from 0 in `select`, `observe` and `prune` (from 1 in `selection.Selector`), and each is a key of its
  draws: the same step of the same seed draws the same again.
- `total_steps` is the length of the whole run, those before a resume too. A step beyond it prunes nothing; where the
  length is not known, any upper bound does while `anneal_fraction` is 1.
- `observe` wants the `inclusion_prob` and `planned` of the prompts kept: they let skipping stop where it does harm.
- Nothing may be kept, see `Selection.kept`. Code that takes a mean or a maximum of what is left has to know.
- Divisors are the planned batch's, N prompts x G completions, never the survivors'. `CompletionBatch.denominator` of a
  completion of `len` tokens, L the longest allowed: N G len for TRL's grpo and sapo, and verl's seq-mean-token-mean;
  N G L for TRL's dr_grpo; N G for verl's seq-mean-token-sum; the planned batch's token count for TRL's dapo and cispo,
  and verl's token-mean. That count is unknown once prompts are skipped; a guess made before the step changes the length
  of the expected gradient and not its direction. Where a trainer divides by the R rows that it is given, R / (N G) as
  one more factor of the weight makes that N G.
- The weight may ride in the advantage where the loss is homogeneous in it, loss(w A) = w loss(A) for w > 0, and nothing
  else of the batch is read: PPO's clip, dual clip, GSPO, CISPO, SAPO, plain policy gradient. Not with a KL or entropy
  term, which no advantage multiplies, nor where tokens are chosen by a statistic of the advantages (clip-cov, kl-cov).
  Advantages are computed from whole groups first; whoever normalises them afterwards undoes the weights.
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
