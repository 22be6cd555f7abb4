"""Pruning inside TRL's GRPOTrainer, by overriding methods that prepare a batch. The loss is TRL's own, unchanged.

A completion's advantage is multiplied by its weight; settings where that is not exact are refused (docs/adapters.md).

transformers' `generate` prefills a prompt once for each of its completions, and decodes all rows until the longest has
ended: of the quickstart's 54 tokens the mean row needs 19. Here each prompt is prefilled once, and ended rows leave.
"""

from __future__ import annotations

import inspect
import math
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.trainer import TRAINER_STATE_NAME, TrainerState
from trl import GRPOTrainer

from dppo_megatron.adapters.pruner import INDEX, StepPruner, load_state, save_state
from dppo_megatron.adapters.settings import TRL_DIVISORS, trl_refusals
from dppo_megatron.config.pruning import PruningConfig
from dppo_megatron.pruning import LedgerRow
from dppo_megatron.types import FloatArray, IntArray, UserError

_Trainer: Any = object  # what the mixin is mixed into
_OF_ROWS = {"attention_mask", "position_ids"}
_KNOWN = _OF_ROWS | {"past_key_values", "use_cache", "logits_to_keep"}
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Subclasses are not supported: they hold more than keys and values."""
_PROCESSORS = {f"{name}LogitsWarper" for name in ("Temperature", "TopK", "TopP", "MinP")} | {
    "RepetitionPenaltyLogitsProcessor"
}
"""Processors that depend only on a row's own tokens."""
_FULL = 7 / 8
"""Ended rows leave the batch when fewer than this share still run, since the cache is copied each time."""


class CompactGeneration(_Trainer):  # type: ignore[misc]
    """For a subclass of `trl.GRPOTrainer`. The tokens' distribution is that of `generate`."""

    compact_generation = True
    """False: use transformers' own loop."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        generate, parts = super()._generate_single_turn, self.model.modules()
        model: Any = next((one for one in parts if isinstance(one, GenerationMixin)), None)  # PEFT and compile wrap it
        # ranks that hold shards of a layer must make the same number of passes
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if is_sharded or self.args.generation_kwargs or not (self.compact_generation and _samples_plainly(model)):
            return generate(*args, **kwargs)
        model.generate = partial(model.generate, custom_generate=sample_compactly)
        try:
            return generate(*args, **kwargs)
        finally:
            del model.generate


def _samples_plainly(model: Any) -> bool:
    """Whether `generate` would run transformers' own sampling loop, on one device."""
    own, devices = ("generate", "_sample"), getattr(model, "hf_device_map", None) or {}
    is_own = all(getattr(type(model), name, None) is getattr(GenerationMixin, name) for name in own)
    if not is_own or "generate" in vars(model) or len({*devices.values()}) > 1:
        return False
    return model.generation_config.get_generation_mode() in ("sample", "greedy_search")  # no beams


def sample_compactly(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    generation_config: Any,
    **inputs: Any,
) -> Tensor:
    """A sampling loop for `generate(custom_generate=...)`: [B, prompt] to [B, prompt + completion].

    It falls back to transformers' own where rows cannot be removed: other caches, logits processors that count rows,
    soft prompts, several kinds of positions, models that prepare their inputs themselves, transformers before 5.3.
    """
    cache: Any = inputs.get("past_key_values")
    is_dynamic = type(cache) is DynamicCache and all(type(layer) in _LAYERS for layer in cache.layers)
    is_known = inputs.keys() <= _KNOWN and all(type(one).__name__ in _PROCESSORS for one in logits_processor)
    slices = "next_sequence_length" in inspect.signature(model.prepare_inputs_for_generation).parameters
    is_flat = getattr(inputs.get("position_ids"), "ndim", 0) == 2
    if not (is_dynamic and is_known and slices and is_flat) or cache.offloading:
        return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **inputs)
    pad = generation_config._pad_token_tensor
    written = F.pad(input_ids, (0, generation_config.max_length - input_ids.size(1)), value=int(pad))
    rows = torch.arange(len(input_ids), device=input_ids.device)
    first, prompt_of = (rows, rows) if _drops_out(model) else _distinct(input_ids, inputs["attention_mask"])
    inputs = _selected(inputs, first)
    outputs = model._prefill(input_ids[first], generation_config, inputs)
    inputs = _selected(model._update_model_kwargs_for_generation(outputs, inputs), prompt_of)
    logits, ids, running = outputs.logits[:, -1:][prompt_of], input_ids, torch.ones_like(rows, dtype=torch.bool)
    while True:
        del outputs  # frees the logits of all prompt tokens, which some models return
        scores = logits_processor(ids, logits[:, -1].float())
        sampled = scores.softmax(-1).multinomial(1)[:, 0] if generation_config.do_sample else scores.argmax(-1)
        ids = torch.cat([ids, torch.where(running, sampled, pad)[:, None]], 1)
        written[rows, ids.size(1) - 1] = ids[:, -1]
        running &= ~stopping_criteria(ids, scores)
        count = int(running.sum())
        if not count:
            return written[:, : ids.size(1)]
        if count < _FULL * len(ids):
            kept = running.nonzero()[:, 0]
            rows, ids, running, inputs = rows[kept], ids[kept], running[kept], _selected(inputs, kept)
        with model._optimize_model_for_decode():
            prepared = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs)
            outputs = model(**prepared, return_dict=True)
        inputs, logits = model._update_model_kwargs_for_generation(outputs, inputs), outputs.logits


def _drops_out(model: Any) -> bool:
    """Whether passes differ by dropout (TRL generates in training mode). Completions must then not share a prefill."""
    rates = [value for name, value in model.config.to_dict().items() if "dropout" in name or "pdrop" in name]
    rates += [part.p for part in model.modules() if isinstance(part, nn.Dropout)]
    return bool(model.training) and any(isinstance(rate, float) and rate > 0 for rate in rates)


def _distinct(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A row [P] of each distinct prompt, and each row's prompt [B]. By mask too: padding may be a token of prompts."""
    prompts, own = torch.unique(torch.cat([ids, mask], 1).cpu(), dim=0, return_inverse=True)  # MPS has no kernel for it
    first = own.new_empty(len(prompts)).scatter_(0, own, torch.arange(len(own)))
    return first.to(ids.device), own.to(ids.device)


def _selected(inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """`inputs` for `rows` only. The cache is changed in place."""
    inputs["past_key_values"].batch_select_indices(rows)
    return inputs | {name: inputs[name][rows] for name in _OF_ROWS}


def by_length(batches: list[dict[str, Any]], multiple: int) -> list[dict[str, Any]]:
    """A step's rows sorted by length, each micro-batch cut to its longest row, rounded up to `multiple`."""
    rows = {name: value for name, value in batches[0].items() if isinstance(value, Tensor) and value.dim()}
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in rows}
    mask, sorted_batches = rows["completion_mask"], []
    for index in mask.sum(1).argsort(stable=True).chunk(len(batches)):
        longest = int(mask[index].any(0).sum().clamp(min=1))
        width = -(-longest // multiple) * multiple
        by_token = {name for name, value in rows.items() if value.dim() > 1 and "prompt" not in name}
        short = {name: value[index, :width] if name in by_token else value[index] for name, value in rows.items()}
        sorted_batches.append(batches[0] | short)
    return sorted_batches


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
