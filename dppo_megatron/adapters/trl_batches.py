"""What TRL's batches are made of: completions that do not wait for the longest, and a step's rows from short to long.

transformers' `generate` reads a prompt once for each of its completions, and goes on with all rows until the longest
has ended: of the quickstart's 54 tokens the mean row needs 19. Here a prompt is read once, and rows leave at their end.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_Trainer: Any = object  # what the mixin is mixed into
_OF_ROWS = {"attention_mask", "position_ids"}
_KNOWN = _OF_ROWS | {"past_key_values", "use_cache", "logits_to_keep"}
_FULL = 7 / 8
"""Rows leave when fewer than this share still run: the cache is copied each time."""


class CompactGeneration(_Trainer):  # type: ignore[misc]
    """For a subclass of `trl.GRPOTrainer`. Tokens have the distribution that `generate` gives them."""

    compact_generation = True
    """False: transformers' own loop."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        generate, model = super()._generate_single_turn, self.accelerator.unwrap_model(self.model_wrapped)
        # such settings may ask for beams; models of images count positions apart, some bring a `generate` of their own
        is_other = self.args.generation_kwargs or self._is_vlm or "generate" in vars(model)
        if is_other or not self.compact_generation:
            return generate(*args, **kwargs)
        model.generate = partial(model.generate, custom_generate=sample_compactly)
        try:
            return generate(*args, **kwargs)
        finally:
            del model.generate


@torch.no_grad()
def sample_compactly(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **inputs: Any
) -> Tensor:
    """For `generate(custom_generate=...)`: its sampling loop, [B, prompt] to [B, prompt + completion].

    Where rows cannot leave, it is transformers' own: other caches, soft prompts, weights sharded while generating,
    transformers before 5.3.
    """
    is_sharded, cache = inputs.pop("synced_gpus", False), inputs.get("past_key_values")
    is_dynamic = isinstance(cache, DynamicCache) and all(isinstance(layer, DynamicLayer) for layer in cache.layers)
    slices = "next_sequence_length" in inspect.signature(model.prepare_inputs_for_generation).parameters
    if is_sharded or not (is_dynamic and slices and inputs.keys() <= _KNOWN):
        own_loop, how = model._sample, (logits_processor, stopping_criteria, generation_config, is_sharded)
        return own_loop(input_ids, *how, **inputs)
    pad = generation_config._pad_token_tensor
    written = F.pad(input_ids, (0, generation_config.max_length - input_ids.size(1)), value=int(pad))
    first, prompt_of = _distinct(input_ids, inputs["attention_mask"])
    inputs = _selected(inputs, first)
    outputs = model._prefill(input_ids[first], generation_config, inputs)
    inputs = _selected(model._update_model_kwargs_for_generation(outputs, inputs), prompt_of)
    logits, ids = outputs.logits[:, -1:][prompt_of], input_ids
    rows = torch.arange(len(ids), device=ids.device)
    running = torch.ones_like(rows, dtype=torch.bool)
    while True:
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
        outputs = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs), return_dict=True)
        inputs, logits = model._update_model_kwargs_for_generation(outputs, inputs), outputs.logits


def _distinct(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [P] that are all different, and which of them [B] each row is. Padding may be a token that prompts have."""
    found, own = torch.unique(torch.cat([ids, mask], 1), dim=0, return_inverse=True)
    return own.new_empty(len(found)).scatter_(0, own, torch.arange(len(own), device=own.device)), own


def _selected(inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Of the cache too, which is changed."""
    inputs["past_key_values"].batch_select_indices(rows)
    return inputs | {name: inputs[name][rows] for name in _OF_ROWS & inputs.keys()}


def by_length(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an optimizer step from the shortest to the longest, each micro-batch padded to its own longest."""
    rows = {name: value for name, value in batches[0].items() if isinstance(value, Tensor) and value.dim()}
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in rows}
    mask, found = rows["completion_mask"], []
    for places in mask.sum(1).argsort(stable=True).chunk(len(batches)):
        longest = int(mask[places].any(0).sum().clamp(min=1))
        by_token = {name for name, value in rows.items() if value.dim() > 1 and "prompt" not in name}
        short = {name: value[places, :longest] if name in by_token else value[places] for name, value in rows.items()}
        found.append(batches[0] | short)
    return found
