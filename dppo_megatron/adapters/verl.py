"""Pruning inside verl's synchronous trainer (0.9), registered as `trainer.v1.trainer_mode=dppo`; its losses are verl's.

Prompts are dropped between the dataloader and the rollout, completions between the rewards and `old_log_prob`. A
completion's advantage is multiplied by its weight. verl pads the batch back to its nominal size, so means over
sequences keep their divisor (docs/adapters.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils import tensordict_utils
from verl.workers.utils.padding import response_to_nested

from dppo_megatron.adapters.pruner import INDEX, StepPruner, load_state, save_state
from dppo_megatron.adapters.settings import pruning_from, verl_refusals
from dppo_megatron.types import FloatArray, RunAborted, UserError


@register_trainer("dppo")
class PrunedPPOTrainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer; settings of both levels under `+pruning.prompt.*` and `+pruning.completion.*`.

    Raises:
        UserError: settings under which the expected gradient would change; all of them are named.
    """

    def __init__(self, config: Any) -> None:
        if refusals := verl_refusals(config):
            raise UserError("settings of verl with which pruning would be biased: " + "; ".join(refusals))
        config.trainer.v1.trainer_mode = "sync"  # "dppo" has served to select this class; the rest of verl knows "sync"
        self.pruning = pruning_from(config.get("pruning") or {}, "pruning")
        super().__init__(config)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if not hasattr(self.train_dataset, "dataframe"):
            raise UserError("data.custom_cls: pruning numbers the rows of verl's own dataset, its `dataframe`")
        frame, config = self.train_dataset.dataframe, self.config
        self.train_dataset.dataframe = frame.add_column(INDEX, list(range(len(frame))))
        self.mode = config.actor_rollout_ref.actor.loss_agg_mode
        self.pruner = StepPruner(
            self.pruning,
            num_prompts=len(frame),
            prompts_per_step=config.data.train_batch_size,
            group_size=config.actor_rollout_ref.rollout.n,
            total_steps=self.total_training_steps,
            seed=config.data.get("seed") or 0,
            divides_by_length=self.mode == "seq-mean-token-mean",
            max_tokens=config.data.max_response_length if self.mode == "token-mean" else None,
        )

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        self.nominal = np.array(tensordict_utils.get(batch, INDEX), dtype=np.int64)
        self.chosen = self.pruner.choose(self.nominal, self.global_steps - 1)
        rows = np.flatnonzero(self.chosen.kept).tolist()
        batch = tensordict_utils.index_select_tensor_dict(batch, rows or [0])
        self.uids = list(tensordict_utils.get(batch, "uid"))
        return batch.exclude(INDEX)

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
        return super()._step_once(metrics, timing_raw, len(self.uids))

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super()._balance_batch(self._drop(batch, metrics), metrics, *args, **kwargs)

    def _drop(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """The completions to train on, at least one. `_compute_advantage` writes their weighted advantages."""
        count, size = int(self.chosen.kept.sum()), self.config.actor_rollout_ref.rollout.n
        keys = {key.rpartition("_")[0]: key for key in batch.keys}  # a key is uid_session_output
        wanted = [f"{uid}_{session}" for uid in self.uids for session in range(size)]
        if len(batch) != len(wanted) or keys.keys() != {*wanted}:
            raise RunAborted(f"rollout: {len(batch)} completions; pruning needs {size} of each of {count} prompts")
        batch = batch.select_keys([keys[name] for name in wanted])
        outcomes = self._outcomes(batch)
        rewards, lengths, norm, advantages = outcomes[:, : count * size].reshape(4, count, size)
        kept = self.pruner.finish(self.nominal, self.chosen, rewards, lengths, norm, advantages, self.global_steps - 1)
        # If none is kept, the longest completion stands in with weight 0, since verl may divide by the tokens.
        rows = kept.rows if kept.weight.any() else outcomes[1].argmax(keepdims=True)
        weight = kept.weight * np.where(kept.weight > 0, outcomes[3, rows], 0.0)  # its advantage may be NaN
        if self.mode == "token-mean":  # verl divides by the tokens that are left
            weight = weight * outcomes[1, rows].sum() / kept.tokens
        metrics |= kept.metrics | {"rolled_out/score": rewards.mean(), "rolled_out/response_length": lengths.mean()}
        kept_keys = [batch.keys[row] for row in rows]
        self.coefficients = dict(zip(kept_keys, weight.tolist(), strict=True))
        if dropped := [key for key in batch.keys if key not in self.coefficients]:
            tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
        return batch.select_keys(kept_keys)

    def _outcomes(self, batch: Any) -> FloatArray:
        """[4, rows] rewards, lengths, norms and advantages, which verl's own estimator computes over whole groups."""
        fields = ["uid", "response_mask", "rm_scores", "rollout_log_probs"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        uid = np.array(list(tensordict_utils.get(data, "uid")), dtype=object)
        padded = data.exclude("uid").to_padded_tensor()
        mask, scores = padded["response_mask"].double(), padded["rm_scores"]
        by_std = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
        row_mask = mask.amax(1, keepdim=True)  # in place of the token mask: one advantage per row
        advantages, _ = compute_grpo_outcome_advantage(scores, row_mask, uid, norm_adv_by_std_in_grpo=by_std)
        free = torch.expm1(padded["rollout_log_probs"]) * mask if "rollout_log_probs" in padded else mask
        columns = scores.sum(1), mask.sum(1), free.square().sum(1).sqrt(), advantages[:, 0]
        return np.asarray(torch.stack([column.double() for column in columns]))

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)  # for its corrections; its advantages lack dropped rows
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        mask = tq.kv_batch_get(**where, select_fields=["response_mask"])["response_mask"]
        known = torch.tensor([self.coefficients.get(key, 0.0) for key in batch.keys], dtype=torch.float32)
        nested = response_to_nested(known[:, None] * mask.to_padded_tensor(0.0), mask)
        return tq.kv_batch_put(**where, fields=TensorDict({"advantages": nested}, batch_size=len(batch)))

    def _save_checkpoint(self) -> None:
        save_state(self.pruner, self._folder())  # before verl marks the checkpoint as complete
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps:
            path = self.config.trainer.resume_from_path if self.config.trainer.resume_mode == "resume_path" else None
            self.pruner.load_state_dict(load_state(Path(path) if path else self._folder()))

    def _folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
