"""Drops completions in NeMo-RL: `policy = PrunedPolicy(policy, ...)` between its `setup` and its `grpo_train`, in a
launch script of your own (docs/adapters.md). Its trainer, loss and workers are unchanged.

NeMo-RL divides by the tokens, or the sequences, that `train` gets. The full batch's are known when `train` is called,
so the weights correct the divisor. Prompts cannot be skipped: its loop needs `num_prompts_per_step` of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dppo_megatron.adapters.pruner import StepPruner
from dppo_megatron.adapters.settings import nemo_rl_refusals
from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig, PruningConfig
from dppo_megatron.pruning import LedgerRow
from dppo_megatron.types import UserError


class PrunedPolicy:
    """A NeMo-RL policy whose `train` first drops completions; everything else is passed on to the policy.

    Args:
        prompts_per_step: `grpo.num_prompts_per_step`.
        group_size: `grpo.num_generations_per_prompt`; the rows of a prompt must be adjacent.
        total_steps: of the run.
        first_step: steps done before a resume, `grpo_save_state.total_steps`.
        completion: the settings of `pruning.completion`; None: its defaults.
    """

    def __init__(
        self,
        policy: Any,
        *,
        prompts_per_step: int,
        group_size: int,
        total_steps: int,
        seed: int,
        first_step: int = 0,
        completion: CompletionPruningConfig | None = None,
    ) -> None:
        if hasattr(policy, "train_from_meta"):
            raise UserError("NeMo-RL: rows in its data plane cannot be dropped; set data_plane.enabled=false")
        self._policy, self._step = policy, first_step
        self._pruner = StepPruner(
            PruningConfig(PromptPruningConfig(method="none"), completion or CompletionPruningConfig()),
            num_prompts=prompts_per_step,
            prompts_per_step=prompts_per_step,
            group_size=group_size,
            total_steps=total_steps,
            seed=seed,
            divides_by_length=True,  # set in `train`, where the loss is known
            row_multiple=policy.data_parallel_size * policy.cfg["train_micro_batch_size"],
        )
        self.ledger: tuple[LedgerRow, ...] = ()  # of the last step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, **others: Any) -> dict[str, Any]:
        """The policy's `train` on the kept rows; `prune/*` and `ledger/*` are added to its `all_mb_metrics`."""
        if eval_mode:
            return dict(self._policy.train(data, loss_fn, eval_mode=True, **others))
        if refusals := nemo_rl_refusals(loss_fn, self._policy, len(data["sample_mask"]), self._pruner.num_nominal):
            raise UserError("settings of NeMo-RL with which pruning would be biased: " + "; ".join(refusals))
        by_token = loss_fn.loss_type.name == "TOKEN_LEVEL"
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        pruner = self._pruner
        pruner.divides_by_length = not by_token
        own, tokens = data["advantages"][:, 1:] * mask, mask.sum(1)
        # one advantage per row: the root mean square of its tokens', which may differ and may even add up to 0
        size = (own.square().sum(1) / tokens.clamp(min=1)).sqrt() * own.sum(1).sign().where(own.sum(1) != 0, 1.0)
        free = torch.expm1(data["generation_logprobs"][:, 1:].clamp(max=0)) * mask
        outcomes = torch.stack([tokens, free.square().sum(1).sqrt(), size]).double().numpy()
        lengths, norm, advantages = outcomes.reshape(3, pruner.num_prompts, pruner.group_size)
        prompts = np.arange(pruner.num_prompts)
        chosen = pruner.choose(prompts, self._step)
        kept = pruner.finish(prompts, chosen, advantages, lengths, norm, advantages, self._step)
        rows = torch.from_numpy(kept.rows)
        share = tokens if by_token else data["sample_mask"]  # each row's part of the divisor
        weight = kept.weight * float(share[rows].sum() / share.sum().clamp(min=1))
        rest = data.select_indices(rows)
        rest["advantages"] = rest["advantages"] * torch.from_numpy(weight).to(rest["advantages"])[:, None]
        results = self._policy.train(rest, loss_fn, **others | {"gbs": len(rows)})
        self._step, self.ledger = self._step + 1, kept.ledger
        results["all_mb_metrics"] |= {name: [value] for name, value in kept.metrics.items()}
        return dict(results)
