"""The embedded engine against the plainest possible sampler: no cache, no batch, no padding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.tiny import FAMILIES, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.randomness import generator, uniform_rows
from dppo_megatron.rollout.decoder import KeyValues, Moves
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import HFEngine, truncate_logits
from dppo_megatron.types import Grade, GradeTask, Prompt
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.workbench.quickstart.tiny_model import make_tokenizer

MAX_TOKENS = 70
"""Beyond the first room of the cache, and twice its growth."""


def _reference(model: torch.nn.Module, request: Request, sampling: Sampling, eos: int) -> list[int]:
    """Every token from a forward pass over the whole sequence, by inverting the distribution at its uniform."""
    draws = generator(sampling.seed, "sample", request.step, request.prompt.index, request.completion_index)
    uniforms = draws.random(sampling.max_completion_tokens)
    tokens: list[int] = []
    for uniform in uniforms:
        logits = model(torch.tensor([[*request.prompt.token_ids, *tokens]])).logits[:, -1].float()
        probabilities = (
            truncate_logits(logits / sampling.temperature, sampling.top_p, sampling.top_k).double().softmax(-1)[0]
        )
        cumulative = probabilities.cumsum(0).numpy()
        tokens.append(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")))
        if tokens[-1] in (eos, *sampling.stop_token_ids):
            break
    return tokens


def _engine(path: Path, grade: Callable[[Sequence[GradeTask]], list[Grade]] | None = None, batch: int = 64) -> HFEngine:
    engine = HFEngine(
        read_architecture(path),
        make_tokenizer(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_concurrent_sequences=batch,
        grade=grade and partial(ThreadPoolExecutor(1).submit, grade),
    )
    weights = load_file(path / "model.safetensors")
    engine.load_weights(lambda: weights.items())
    return engine


SHAPES: dict[str, dict[str, Any]] = {family: {"family": family} for family in FAMILIES} | {
    "heads_7_1": {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 10, "num_hidden_layers": 5},
    "vocabulary_1009": {"vocab_size": 1009, "head_dim": 24},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
        }
    },
    "top_6_of_6": {"family": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 6},
}
"""The families, and what is no power of two anywhere."""


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_sampling_one_sequence_without_a_cache(tmp_path: Path, shape: str) -> None:
    """Groups that share a prompt's prefill, prompts of other lengths beside them, rows that end early, a cache that
    grows twice: the same tokens and, to float32 rounding, the same log-probabilities."""
    path = write_model(tmp_path / shape, **SHAPES[shape])
    tokenizer = make_tokenizer()
    engine = _engine(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, "", tuple(rng.integers(3, 37, n).tolist()), "", "") for i, n in enumerate((2, 7, 7, 1))]
    requests = [Request(prompts[i], index, 1) for i, index in ((1, 0), (0, 0), (1, 1), (2, 0), (1, 2), (3, 0), (0, 5))]
    stops = tuple(range(9, SHAPES[shape].get("vocab_size", 37), 37))  # one token in 37
    sampling = Sampling(MAX_TOKENS, temperature=1.3, seed=4, top_p=0.98, stop_token_ids=stops)
    completions = engine.generate(requests, sampling)
    lengths = [len(completion.token_ids) for completion in completions]
    assert min(lengths) < MAX_TOKENS // 3, "no row ended early: nothing was taken out of the batch"
    with torch.inference_mode():
        for request, completion in zip(requests, completions, strict=True):
            assert completion.token_ids.tolist() == _reference(model, request, sampling, tokenizer.eos_token_id)
            ids = torch.tensor([[*request.prompt.token_ids, *completion.token_ids.tolist()]])
            logits = model(ids).logits[0, len(request.prompt.token_ids) - 1 : -1].float() / sampling.temperature
            scored = (
                truncate_logits(logits, sampling.top_p, 0)
                .log_softmax(-1)
                .gather(1, ids[0, len(request.prompt.token_ids) :, None])
            )
            np.testing.assert_allclose(completion.logprobs, scored[:, 0].numpy(), atol=1e-5)
            assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("limit", [1, 25])
def test_a_completion_does_not_depend_on_its_batch(tmp_path: Path, batch: int, limit: int) -> None:
    """Neither on who is beside it nor on how many prompts are padded; greedy ones and one token included."""
    path = write_model(tmp_path / "model", family="qwen2", tie_word_embeddings=True)
    prompts = [Prompt(i, "", tuple(range(3, 4 + i)), "", "") for i in range(4)]
    requests = [Request(prompt, index, 2) for prompt in prompts for index in range(3)]
    for temperature in (0.0, 1.4):
        sampling = Sampling(limit, temperature=temperature, seed=1, stop_token_ids=(9,))
        alone = [_engine(path).generate([request], sampling)[0] for request in requests]
        together = _engine(path, batch=batch).generate(requests, sampling)
        for one, other in zip(alone, together, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert (one.finish_reason, one.text) == (other.finish_reason, other.text)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_a_limit_ends_its_own_completion_and_changes_no_token(tmp_path: Path, batch: int) -> None:
    """Each is the beginning of what it is without; one that stops at its limit has come to its end."""
    path = write_model(tmp_path / "model", family="qwen2", tie_word_embeddings=True)
    prompts = [Prompt(i, "", tuple(range(3, 4 + i)), "", "") for i in range(4)]
    sampling = Sampling(MAX_TOKENS, temperature=1.4, seed=1, stop_token_ids=(9, 12, 30))
    free = [Request(prompt, index, 2) for prompt in prompts for index in range(6)]
    whole = _engine(path).generate(free, sampling)
    limits = np.random.default_rng(0).integers(1, MAX_TOKENS + 1, len(free)).tolist()
    limits[:4] = [0, len(whole[1].token_ids), MAX_TOKENS, 10 * MAX_TOKENS]
    found = _engine(path, batch=batch).generate(
        [replace(one, limit=limit) for one, limit in zip(free, limits, strict=True)], sampling
    )
    for one, other, limit in zip(found, whole, limits, strict=True):
        assert one.token_ids.tolist() == other.token_ids[: limit or None].tolist()
        is_whole = not limit or limit >= len(other.token_ids)
        assert one.finish_reason == (other.finish_reason if is_whole else "early")
    assert {one.finish_reason for one in found} >= {"stop", "early"} and whole[1].finish_reason == "stop"


def test_random_numbers_in_batches_are_those_of_each_generator() -> None:
    """Whatever was drawn before: also after a number of doubles that leaves a Philox block half used."""
    addresses = [(seed, purpose, (step, 3)) for seed in (0, 2**63) for purpose in ("sample", "b") for step in range(3)]
    for count in (1, 5, 48):
        rows = uniform_rows(addresses, count)
        for row, (seed, purpose, counters) in zip(rows, addresses, strict=True):
            assert row.tolist() == generator(seed, purpose, *counters).random(count).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_cache_holds_what_was_appended_to_each_row_that_still_runs(seed: int) -> None:
    """Against lists that are only ever appended to, while rows end in any pattern and the room grows."""
    rng = np.random.default_rng(seed)
    sizes = SimpleNamespace(num_layers=2, num_kv_heads=2, head_dim=4)
    cache = KeyValues(sizes, 3, 5, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    first = torch.rand(2, 2, 3, 2, 5, 4)  # layer, keys or values, row, head, token, size
    for layer in range(2):
        cache.append(layer, *first[layer])
    cache.filled = 5
    own = torch.tensor([2, 0, 0, 1, 2, 2, 1])
    cache.expand(own)
    expected = first[:, :, own]
    rows = torch.arange(len(own))
    for _ in range(60):
        new = torch.rand(2, 2, len(rows), 2, 1, 4)
        expected = torch.cat([expected, new], dim=4)
        cache.reserve(1)
        for layer in range(2):
            keys, values = cache.append(layer, *new[layer])
            assert torch.equal(keys, expected[layer, 0])
            assert torch.equal(values, expected[layer, 1])
        cache.filled += 1
        running = torch.from_numpy(rng.random(len(rows)) < 0.97)
        if not running.any():
            break
        moves = Moves.of(running, int(running.sum()))
        before = rows.clone()
        cache.move(moves)
        rows = moves.apply(rows)
        assert sorted(rows.tolist()) == sorted(before[running].tolist())
        expected = expected[:, :, [before.tolist().index(row) for row in rows.tolist()]]


def _length_of(tasks: Sequence[GradeTask]) -> list[Grade]:
    return [Grade(float(len(task.completion)), extracted=task.label) for task in tasks]


def test_what_has_ended_is_graded_while_the_rest_is_generated(tmp_path: Path) -> None:
    """The last token waits for the first grading: were it asked for afterwards only, it would wait in vain."""
    path = write_model(tmp_path / "model")
    graded, events = threading.Event(), list[str]()

    def grade(tasks: Sequence[GradeTask]) -> list[Grade]:
        events.append("grade")
        graded.set()
        return _length_of(tasks)

    engine = _engine(path, grade, batch=512)
    requests = [Request(Prompt(i, "", (3, 4 + i), "", ""), index, 1) for i in range(6) for index in range(24)]
    sampling = Sampling(40, temperature=1.0, seed=0, stop_token_ids=(5, 6, 7, 8, 9))
    longest = max(len(completion.token_ids) for completion in _engine(path).generate(requests, sampling))
    step, steps = engine._decoder.step, list[int]()

    def waits(*arguments: Any) -> torch.Tensor:
        steps.append(len(arguments[0]))
        if len(steps) == longest - 1:
            graded.wait(timeout=60)
            events.append("last token")
        return step(*arguments)

    engine._decoder.step = waits  # type: ignore[method-assign]
    engine.start(requests, sampling)
    completions = engine.finish()
    grades = engine.take_grades()
    engine.close()
    assert len(requests) - steps[-1] >= 32, "too few ended early for this test to mean anything"
    assert events.index("grade") < events.index("last token")
    assert set(grades) == set(completions)
    for position, completion in completions.items():
        asked = requests[position]
        label = f"prompt {asked.prompt.index}, completion {asked.completion_index}"
        assert grades[position] == Grade(float(len(completion.text)), extracted=label)
    assert engine.take_grades() == {}, "grades are taken once"


def test_a_grader_that_raises_is_heard_when_grades_are_taken(tmp_path: Path) -> None:
    """And what was begun before is no part of the next round."""

    def broken(tasks: Sequence[GradeTask]) -> list[Grade]:
        raise ValueError("no grader")

    engine = _engine(write_model(tmp_path / "model"), broken)
    engine.start([Request(Prompt(0, "", (3,), "", ""), 0, 1)], Sampling(2, 1.0, 0))
    engine.finish()
    with pytest.raises(ValueError, match="no grader"):
        engine.take_grades()
    assert engine.take_grades() == {}
    engine.close()
