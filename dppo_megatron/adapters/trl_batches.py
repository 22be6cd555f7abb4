"""Shorter batches for TRL: generation drops rows that have ended, and micro-batches hold rows of similar length.

transformers' `generate` prefills a prompt once for each of its completions, and decodes all rows until the longest has
ended: of the quickstart's 54 tokens the mean row needs 19. Here each prompt is prefilled once, and ended rows leave.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessorList
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

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
