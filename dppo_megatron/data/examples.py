"""Worked solutions for the warm start, as samples to train on."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.sets import ResolvedSet
from dppo_megatron.data.fields import check_text, get_field, kind, problem_of
from dppo_megatron.data.rows import listed
from dppo_megatron.data.sets import read_set
from dppo_megatron.data.templates import check_template, is_beyond, render, shared_ids, tokenize
from dppo_megatron.types import TrainSample, UserError, Watch, unwatched


def load_examples(
    settings: ResolvedSet,
    completion_field: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    watch: Watch = unwatched,
) -> list[TrainSample]:
    """Read worked solutions, as samples of weight and denominator 1. Each ends with the end-of-sequence token.

    Raises:
        UserError: a row without problem or completion, or an example of more than `max_tokens` tokens.
    """
    check_template(settings, tokenizer)
    samples: list[TrainSample] = []
    shared = shared_ids(tokenizer)
    with watch(f"reading {settings.path}", 0, "rows") as advance:
        for rows in read_set(settings, advance):
            origins = [row.origin for row in rows]
            asked = render([problem_of(row, settings) for row in rows], origins, settings, tokenizer)
            told = [_completion(row.values, completion_field, row.origin) for row in rows]
            for origin, text in zip(origins * 2, asked + told, strict=True):
                if is_beyond(text, max_tokens):
                    raise UserError(
                        f"{origin}: the example has {len(text):,} characters; at most {max_tokens} tokens fit"
                    )
            prompts, completions = tokenize(asked, tokenizer, shared), tokenize(told, tokenizer, shared)
            for origin, prompt, completion in zip(origins, prompts, completions, strict=True):
                samples.append(_sample(origin, prompt, completion, tokenizer.eos_token_id))
                count = len(samples[-1].token_ids)
                if count > max_tokens:
                    raise UserError(f"{origin}: the example has {count} tokens, more than the {max_tokens} that fit")
    if not samples:
        raise UserError(f"{settings.path}: holds no examples")
    return samples


def _completion(values: dict[str, object], name: str, origin: str) -> str:
    value = get_field(values, name)
    if value is None:
        raise UserError(f"{origin}: the row lacks the field '{name}'; it has: {listed(values) or 'nothing'}")
    if not isinstance(value, str):
        raise UserError(f"{origin}: '{name}' is {kind(value)}; a completion is text")
    return check_text(value, origin, name)


def _sample(origin: str, prompt: tuple[int, ...], completion: tuple[int, ...], eos: int) -> TrainSample:
    token_ids = np.array([*prompt, *completion, eos], dtype=np.int64)
    return TrainSample(
        id=origin,
        token_ids=token_ids,
        num_prompt_tokens=len(prompt),
        behaviour_logprobs=np.zeros(len(token_ids) - len(prompt), dtype=np.float32),
        advantage=1.0,
        weight=1.0,
        denominator=1.0,
    )
