"""Reads the worked solutions of SFT. Each becomes a sample that the actor trains on like a completion."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.resolved_sets import example_set_config
from dppo_megatron.config.schema import Config
from dppo_megatron.data import fields
from dppo_megatron.data.contamination import Contamination
from dppo_megatron.data.sets import ProblemSet, held_out_of, problem_words, read_set, refuse, trained_on
from dppo_megatron.data.templates import check_template, render, sequence_start, shared_ids, tokenize
from dppo_megatron.progress import progress
from dppo_megatron.types import TrainSample, UserError


def load_examples(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    evaluated: Mapping[str, ProblemSet],
    *,
    max_tokens: int,
    fits_in: str = "",
    is_over: bool = False,
) -> tuple[list[TrainSample], list[str]]:
    """SFT's worked solutions as samples with weight and denominator 1, and lines for the log. Each sample ends with the
    end-of-sequence token.

    Args:
        max_tokens: of a whole example; `fits_in` says what has this room, for messages.
        evaluated: evaluation sets, whose problems are handled according to `data.contamination`.
        is_over: SFT is done: no samples, but lines about examples that are problems of (perhaps new) evaluation sets.

    Raises:
        UserError: a row has no problem or completion, an example has more than `max_tokens` tokens, there are fewer
            than a step needs, or evaluation problems are trained on.
    """
    settings = example_set_config(config)
    check_template(settings, tokenizer)
    looked_for = Contamination(held_out_of(evaluated), config.data.contamination == "drop")
    if is_over and not evaluated:
        return [], []
    samples: list[TrainSample] = []
    completion_field, is_chat = config.sft.completion_field, config.sft.completion_field == settings.problem_field
    shared, start = shared_ids(tokenizer), sequence_start(settings.template, tokenizer)
    with progress(f"reading {settings.path}", 0, "rows") as advance:
        for rows in read_set(settings, advance):
            if is_chat:
                rows, completion_field = [fields.solution_apart(row, settings) for row in rows], fields.LAST_TURN
            rows = looked_for.kept(rows, (problem_words(row, settings) for row in rows))
            if is_over:
                continue
            origins = [row.origin for row in rows]
            prompt_texts = render([fields.problem_of(row, settings) for row in rows], origins, settings, tokenizer)
            solutions = [fields.completion_of(row, completion_field, settings) for row in rows]
            prompts = tokenize(prompt_texts, tokenizer, shared, max_tokens, start)
            completions = tokenize(solutions, tokenizer, shared, max_tokens)
            for origin, prompt, completion in zip(origins, prompts, completions, strict=True):
                samples.append(_sample(origin, prompt, completion, tokenizer.eos_token_id))
                count = len(samples[-1].token_ids)
                if count > max_tokens:
                    raise UserError(
                        f"{origin}: the example has {count} tokens, more than the {max_tokens} that fit{fits_in}"
                        " (see docs/sft.md)"
                    )
    left_out = f"; {looked_for.dropped} more are of problems of evaluation sets" if looked_for.dropped else ""
    if not is_over and len(samples) < max(config.sft.examples_per_step, 1):
        raise UserError(
            f"sft.examples_per_step = {config.sft.examples_per_step}, but {settings.path} holds only"
            f" {len(samples)} examples{left_out}"
        )
    if looked_for.dropped and is_over:
        return [], [
            f"{settings.path}: {looked_for.dropped} examples are of problems of evaluation sets; SFT was done without"
            " those of sets that the run evaluated at that time, but with those of sets added later"
        ]
    if looked_for.dropped:
        return samples, [f"{settings.path}: {len(samples)} examples are trained on{left_out}"]
    found = trained_on(settings.key, looked_for.counts(), evaluated)
    refuse(config, found)
    return samples, found


def _sample(origin: str, prompt: tuple[int, ...], completion: tuple[int, ...], eos: int) -> TrainSample:
    token_ids = np.array([*prompt, *completion, eos], dtype=np.int64)
    return TrainSample(
        id=origin,
        token_ids=token_ids,
        num_prompt_tokens=len(prompt),
        behaviour_logprobs=np.broadcast_to(np.float32(0), len(token_ids) - len(prompt)),  # takes only 4 bytes
        advantage=1.0,
        weight=1.0,
        denominator=1.0,
    )
