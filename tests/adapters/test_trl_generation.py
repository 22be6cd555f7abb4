"""Compact generation: the texts of `generate`, a prompt read once, ended rows left out; every token from its model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="`make test-adapters` runs it")
import torch
from scipy.stats import chi2
from tiny_trl import WORDS, problems, tokenizer, trainer

LENGTH, DRAWS = 12, 20_000


def _generated(made: Any, is_compact: bool, prompts: list[list[int]]) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """The completions, and the rows and tokens of each forward pass."""
    made.compact_generation, read = is_compact, []
    inner = made.model.forward

    @functools.wraps(inner)  # transformers reads its parameters
    def counted(*args: Any, **given: Any) -> Any:
        read.append(tuple(given["input_ids"].shape))
        return inner(*args, **given)

    made.model.forward = counted
    ids, logprobs = made._generate_single_turn(prompts, None, {}, 4)
    made.model.forward = inner
    assert logprobs is None and "generate" not in vars(made.model)
    return ids, read


def _greedy(folder: Path, **settings: Any) -> Any:
    made = trainer(folder, max_completion_length=LENGTH, top_k=1, **settings)
    torch.nn.init.normal_(made.model.lm_head.weight, std=0.3)  # texts of 1 to 12 tokens
    return made


def _prompts() -> list[list[int]]:
    """80 of two lengths, 20 different ones of each; padding is a token that two of them begin with."""
    prompts = [tokenizer()(row["prompt"])["input_ids"] for row in problems(20)] * 2
    return [*prompts, *(ids[1:] for ids in prompts), prompts[0], [0, *prompts[0][1:]]]


def test_greedy_texts_are_the_same_and_ended_rows_leave(tmp_path: Path) -> None:
    made, prompts = _greedy(tmp_path), _prompts()
    different = len(set(map(tuple, prompts)))
    expected, read = _generated(made, False, prompts)
    assert read[0] == (len(prompts), 4) and read[-1] == (len(prompts), 1)
    lengths = np.array([len(ids) for ids in expected])
    assert len(set(lengths)) > 3
    found, read = _generated(made, True, prompts)
    assert found == expected and read[0] == (different, 4) and len(read) == lengths.max()
    for position, (rows, tokens) in enumerate(read[1:], 1):
        running = sum(len(ids) > position for ids in expected)
        assert tokens == 1 and 7 / 8 * rows <= running <= rows
    assert read[-1][0] < len(prompts) / 2


def test_layers_with_a_window_keep_it(tmp_path: Path) -> None:
    made = _greedy(tmp_path)
    with torch.no_grad():
        made.model.lm_head.weight[1] *= 2  # or few texts end
    full, _ = _generated(made, False, _prompts())
    made.model.config.sliding_window = 3
    made.model.config.layer_types = ["sliding_attention"] * made.model.config.num_hidden_layers
    made.model.model.has_sliding_layers = True
    for layer in made.model.model.layers:
        layer.attention_type, layer.self_attn.sliding_window = "sliding_attention", 3
    expected, _ = _generated(made, False, _prompts())
    found, read = _generated(made, True, _prompts())
    assert found == expected != full and len(read) > 4
    assert read[-1][0] <= sum(len(ids) == len(read) for ids in expected) * 8 / 7 < len(expected)


def test_with_dropout_completions_do_not_share_a_pass_over_their_prompt(tmp_path: Path) -> None:
    made, prompts = _greedy(tmp_path), _prompts()
    made.model.config.attention_dropout = 0.1
    made.model.train()
    _, read = _generated(made, True, prompts)
    assert read[0] == (len(prompts), 4) and read[-1][0] < len(prompts)
    made.model.eval()
    assert _generated(made, True, prompts)[1][0][0] < len(prompts)


@pytest.mark.parametrize("settings", [{"generation_kwargs": {"min_new_tokens": 8}}, {"cache_implementation": "static"}])
def test_what_rows_cannot_leave_is_left_to_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    made = _greedy(tmp_path, **settings)
    assert _generated(made, True, _prompts()) == _generated(made, False, _prompts())


@pytest.mark.parametrize("of_model", [{"num_beams": 2, "do_sample": False}, {"encoder_repetition_penalty": 1.5}])
def test_settings_of_the_model_that_need_all_rows_are_left_too(tmp_path: Path, of_model: dict[str, Any]) -> None:
    """Beams, and a penalty by the prompt of each row."""
    made = _greedy(tmp_path)
    for name, value in of_model.items():
        setattr(made.model.generation_config, name, value)
        setattr(made.generation_config, name, value)
    assert _generated(made, True, _prompts()) == _generated(made, False, _prompts())


def test_models_in_parts_and_with_loops_of_their_own_are_left_too(tmp_path: Path) -> None:
    """Ranks that hold parts of a layer must make equally many passes; a class may have overridden what is replaced."""
    made = _greedy(tmp_path)
    expected = _generated(made, False, _prompts())
    for enabled in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        setattr(made, enabled, True)
        assert _generated(made, True, _prompts()) == expected
        setattr(made, enabled, False)
    made.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert _generated(made, True, _prompts()) == expected
    del made.model.hf_device_map
    plain = type(made.model)
    made.model.__class__ = type(
        "Own", (plain,), {"_sample": lambda self, *args, **given: plain._sample(self, *args, **given)}
    )
    assert _generated(made, True, _prompts()) == expected
    made.model.__class__ = plain
    assert _generated(made, True, _prompts())[1] != expected[1]


def test_a_sampled_token_has_the_models_probability(tmp_path: Path) -> None:
    """Of the first two tokens: chi-square over their pairs; 1 in 1000 by chance, seed fixed."""
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
