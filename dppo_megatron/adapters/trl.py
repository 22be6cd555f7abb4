"""Pruning inside TRL's GRPOTrainer, by overriding methods that prepare a batch. The loss is TRL's own, unchanged.

A completion's advantage is multiplied by its weight; settings where that is not exact are refused (docs/adapters.md).
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME, TrainerState
from trl import GRPOTrainer

from dppo_megatron.adapters.pruner import INDEX, StepPruner, load_state, save_state
from dppo_megatron.adapters.settings import TRL_DIVISORS, trl_refusals
from dppo_megatron.adapters.trl_batches import CompactGeneration, by_length
from dppo_megatron.config.pruning import PruningConfig
from dppo_megatron.pruning import LedgerRow
from dppo_megatron.types import FloatArray, IntArray, UserError


class PrunedGRPOMixin(CompactGeneration):
    """For a subclass of `trl.GRPOTrainer` of your own: `class Mine(PrunedGRPOMixin, YourTrainer)`.

    Args:
        train_dataset: a `datasets.Dataset`, by keyword.
        pruning: both levels; None: the defaults.

    Raises:
        UserError: settings under which the expected gradient would change; all of them are named.
    """

    def __init__(self, *args: Any, train_dataset: Any, pruning: PruningConfig | None = None, **kwargs: Any) -> None:
        if not hasattr(train_dataset, "add_column") or not hasattr(train_dataset, "__len__"):
            raise UserError("train_dataset: must be a datasets.Dataset, whose rows can be numbered")
        numbered = train_dataset.add_column(INDEX, list(range(len(train_dataset))))
        super().__init__(*args, train_dataset=numbered, **kwargs)
        self.pruning = pruning or PruningConfig()
        if refusals := trl_refusals(self, self.pruning):
            raise UserError("settings of TRL with which pruning would be biased: " + "; ".join(refusals))
        self.ledger: tuple[LedgerRow, ...] = ()  # of the last step
        self._resume_from: str | None = None

    @cached_property
    def pruner(self) -> StepPruner:
        """Created at the first step, when the length of the run is known."""
        pruner = StepPruner(
            self.pruning,
            num_prompts=len(self.train_dataset),
            prompts_per_step=self.args.generation_batch_size // self.num_generations,
            group_size=self.num_generations,
            total_steps=self.state.max_steps,
            seed=self.args.seed,
            divides_by_length="lengths" in TRL_DIVISORS[self.loss_type],
            max_tokens=self.max_completion_length if TRL_DIVISORS[self.loss_type] == "tokens" else None,
            row_multiple=self.args.steps_per_generation * self.accelerator.num_processes,
        )
        if self._resume_from is not None:
            pruner.load_state_dict(load_state(Path(self._resume_from)))
        return pruner

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.pop("pruner", None)  # of an earlier call of `train`
        self._resume_from = None
        return super()._inner_training_loop(*args, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        offered, step, size = gather_object(inputs), self.state.global_step, self.num_generations
        nominal = np.array([row[INDEX] for row in offered[::size]])
        chosen = self.pruner.choose(nominal, step)
        # the kept groups, then as many of the others as it takes for all ranks to get equally many completions
        ranks = self.accelerator.num_processes
        unit = ranks // math.gcd(ranks, size)
        groups = np.argsort(~chosen.kept, kind="stable")[: max(1, math.ceil(chosen.kept.sum() / unit)) * unit]
        mine = np.split((groups[:, None] * size + np.arange(size)).ravel(), ranks)[self.accelerator.process_index]
        rows = [{name: value for name, value in offered[i].items() if name != INDEX} for i in mine]
        for logged in self._logs.values():  # TRL's deques would keep rows of earlier steps if prompts are skipped
            logged.clear()
        out = super()._generate_and_score_completions(rows)
        if any(gather_object(["num_images" in out])):  # in prompts or from tools, perhaps on one process only
            raise UserError("a rollout has images, and rows with images cannot be dropped")
        outcomes = self._outcomes(out, (int(chosen.kept.sum()), size))
        kept = self.pruner.finish(nominal, chosen, *outcomes, step)
        weight, self.ledger = kept.weight, kept.ledger
        if TRL_DIVISORS[self.loss_type] == "tokens":
            out["num_items_in_batch"] = torch.full_like(out["num_items_in_batch"], kept.tokens)
        else:  # TRL divides by the rows that are left
            weight = weight * len(kept.rows) / self.pruner.num_nominal
        for name, value in kept.metrics.items():
            self._metrics["train"][name].append(value)
        return self._dropped(out, kept.rows, weight)

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        before, inputs = self._buffered_inputs, super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not before and len(inputs["advantages"]) < self.args.per_device_train_batch_size:
            self._buffered_inputs: Any = by_length(self._buffered_inputs, self.pad_to_multiple_of or 1)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)  # those of all processes
        return self._rewards

    def _outcomes(self, out: dict[str, Any], shape: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
        """Rewards, lengths, norms and advantages [K, G] of the chosen prompts, from all processes."""
        mask = out["completion_mask"] * out.get("tool_mask", 1)
        logps = out.get("sampling_per_token_logps", out.get("old_per_token_logps"))
        # without log-probabilities every token counts the same, and completions differ only in length
        size = mask.float() if logps is None else torch.expm1(logps.nan_to_num()) * mask
        columns = torch.stack([mask.sum(1).float(), size.square().sum(1).sqrt(), out["advantages"].float()], 1)
        count = shape[0] * shape[1]
        gathered = self.accelerator.gather(columns)[:count].cpu().numpy().astype(np.float64)
        lengths, norm, advantages = gathered.T.reshape(3, *shape)
        by_function = self._rewards[:count].double()
        rewards = (by_function * self.reward_weights.to(by_function)).nansum(1)
        rewards[by_function.isnan().all(1)] = math.nan
        return rewards.cpu().numpy().reshape(shape), lengths, norm, advantages

    def _dropped(self, out: dict[str, Any], rows: IntArray, weight: FloatArray) -> dict[str, Any]:
        """`out` with only `rows`, shared evenly among the processes, and their advantages times `weight`."""
        local = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        mine = torch.from_numpy(rows[local]).to(out["advantages"].device)
        for name, value in out.items():
            if isinstance(value, torch.Tensor) and value.dim():
                # 1 in this column: vespo sums its logarithms over padding too, and TRL pads it with 1
                fill = int(name == "importance_sampling_ratio")
                of_prompt = name.startswith("prompt")
                value = self.accelerator.pad_across_processes(value, dim=1, pad_index=fill, pad_first=of_prompt)
                out[name] = self.accelerator.gather(value)[mine]
        out["advantages"] = out["advantages"] * torch.from_numpy(weight[local]).to(out["advantages"])
        return out

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            save_state(self.pruner, Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._resume_from = checkpoint
        if checkpoint and self._sampler.shuffle:  # its generator is in no checkpoint: draw earlier epochs again
            for _ in range(int(TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME)).epoch)):
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)


class PrunedGRPOTrainer(PrunedGRPOMixin, GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` with `pruning=`: skips prompts before rollout and completions before the update."""
