"""JSON Lines files to prompts and worked solutions. A bad row is an error that names the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dppo_megatron.config.data import DataConfig
from dppo_megatron.types import Prompt, TrainSample, UserError


def load_prompts(path: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Read and tokenize a problem set.

    Raises:
        UserError: no rows, a row without the needed fields, or a prompt above `config.max_prompt_tokens`.
    """
    prompts: list[Prompt] = []
    for where, row in _rows(path):
        text = _prompt_text(str(_field(row, config.problem_field, where)), config, tokenizer)
        token_ids = _encode(tokenizer, text)
        if len(token_ids) > config.max_prompt_tokens:
            raise UserError(
                f"{where}: the prompt has {len(token_ids)} tokens, more than data.max_prompt_tokens ="
                f" {config.max_prompt_tokens}"
            )
        if not token_ids:
            raise UserError(f"{where}: the prompt is empty")
        answer = str(_field(row, config.answer_field, where))
        prompts.append(Prompt(len(prompts), text, tuple(token_ids), answer, str(row.get(config.source_field, ""))))
    if not prompts:
        raise UserError(f"{path}: holds no problems")
    return prompts


def load_examples(
    path: str, completion_field: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int
) -> list[TrainSample]:
    """Read worked solutions for the warm start, as samples of weight and denominator 1.

    Raises:
        UserError: as `load_prompts`, and for an example of more than `max_tokens` tokens.
    """
    samples = []
    for where, row in _rows(path):
        prompt = _encode(tokenizer, _prompt_text(str(_field(row, config.problem_field, where)), config, tokenizer))
        completion = _encode(tokenizer, str(_field(row, completion_field, where)))
        token_ids = np.array([*prompt, *completion, tokenizer.eos_token_id], dtype=np.int64)
        if len(token_ids) > max_tokens:
            raise UserError(f"{where}: the example has {len(token_ids)} tokens, more than the {max_tokens} that fit")
        samples.append(
            TrainSample(
                id=where,
                token_ids=token_ids,
                num_prompt_tokens=len(prompt),
                behaviour_logprobs=np.zeros(len(token_ids) - len(prompt), dtype=np.float32),
                advantage=1.0,
                weight=1.0,
                denominator=1.0,
            )
        )
    if not samples:
        raise UserError(f"{path}: holds no examples")
    return samples


def _rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
            yield where, row


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise UserError(f"{where}: the row lacks the field '{name}'; it has: {', '.join(row) or 'nothing'}")
    return row[name]


def _prompt_text(problem: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    text = config.prompt_template.replace("{problem}", problem)
    if not config.apply_chat_template:
        return text
    turn = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
