"""Generation in rounds: the texts of `generate`, with the rows that have ended left out; every token from its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="`make test-adapters` runs it")
import torch
from scipy.stats import chi2
from tiny_trl import WORDS, problems, tokenizer, trainer

LENGTH, DRAWS = 12, 20_000


def _generated(made: Any, rounds: int, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The completions, and with how many rows and tokens each call of `generate` was made."""
    made.generation_rounds, calls = rounds, []
    inner = made.model.generate

    def counted(**given: Any) -> Any:
        calls.append((len(given["input_ids"]), given["generation_config"].max_new_tokens))
        return inner(**given)

    made.model.generate = counted
    ids, logprobs = made._generate_single_turn(prompts, None, {}, 4)
    made.model.generate = inner
    assert logprobs is None and made.generation_config.max_new_tokens == LENGTH
    return ids, calls


def test_greedy_texts_are_the_same_and_ended_rows_are_left_out(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_completion_length=LENGTH, top_k=1)
    torch.nn.init.normal_(made.model.lm_head.weight, std=0.3)  # texts of 1 to 12 tokens
    prompts = [tokenizer()(row["prompt"])["input_ids"] for row in problems(40)]
    prompts += [ids[1:] for ids in prompts]
    expected, calls = _generated(made, 1, prompts)
    assert calls == [(80, LENGTH)]
    lengths = np.array([len(ids) for ids in expected])
    assert len(set(lengths)) > 3
    for rounds, ends in ((0, [12]), (2, [6, 12]), (3, [3, 6, 12]), (9, [1, 2, 3, 6, 12])):
        found, calls = _generated(made, rounds, prompts)
        assert found == expected
        starts = [0, *ends[:-1]]
        unfinished = [sum(len(ids) > at or ids[-1] != 1 for ids in expected) for at in starts]
        assert calls == [(n, end - start) for n, start, end in zip(unfinished, starts, ends, strict=True)]
    assert unfinished[-1] < 80
    made.tools = [len]  # their calls are as many as a process has, and rounds wait for all processes
    assert _generated(made, 3, prompts)[1] == [(80, LENGTH)]


def test_a_sampled_token_has_the_models_probability(tmp_path: Path) -> None:
    """Of the first two tokens, drawn in two rounds: chi-square over their pairs; 1 in 1000 by chance, seed fixed."""
    made = trainer(tmp_path, max_completion_length=2)
    prompt = tokenizer()("3+4=")["input_ids"]
    torch.nn.init.normal_(made.model.lm_head.weight, std=0.5)
    torch.manual_seed(11)
    found = made._generate_single_turn([prompt] * DRAWS, None, {}, 4)[0]
    assert {len(ids) for ids in found} == {1, 2} and all((len(ids) == 1) == (ids[0] == 1) for ids in found)
    count = np.zeros((len(WORDS), len(WORDS)))
    for ids in found:
        count[ids[0], ids[-1]] += 1
    with torch.no_grad():
        first = made.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        second = made.model(torch.tensor([[*prompt, token] for token in range(len(WORDS))])).logits[:, -1].softmax(-1)
    expected = (first[:, None] * second).numpy().astype(float)
    expected[1] = np.eye(len(WORDS))[1] * float(first[1])  # an ended row has no second token
    expected, count = expected[expected > 0] * DRAWS, count[expected > 0]
    rare = expected < 5
    cells = [(expected[~rare], count[~rare]), (expected[rare].sum(keepdims=True), count[rare].sum(keepdims=True))]
    statistic = sum(float(((seen - wanted) ** 2 / wanted).sum()) for wanted, seen in cells if wanted.sum())
    assert statistic < chi2.ppf(0.999, int((~rare).sum()))


def test_settings_of_ones_own_are_left_to_trl(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_completion_length=LENGTH, generation_kwargs={"min_new_tokens": 8})
    _, calls = _generated(made, 3, [tokenizer()("3+4=")["input_ids"]] * 4)
    assert calls == [(4, LENGTH)]
