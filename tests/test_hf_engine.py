"""The embedded engine against the plainest possible sampler: no cache, no batch, no padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.tiny import FAMILIES, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.data.tiny_model import make_tokenizer
from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import HFEngine, cut
from dppo_megatron.types import Prompt

MAX_TOKENS = 70
"""Beyond the first room of the cache, and twice its growth."""


def _reference(model: torch.nn.Module, request: Request, sampling: Sampling, eos: int) -> list[int]:
    """Every token from a forward pass over the whole sequence, by inverting the distribution at its uniform."""
    draws = generator(sampling.seed, "sample", request.step, request.prompt.index, request.completion_index)
    uniforms = draws.random(sampling.max_completion_tokens)
    tokens: list[int] = []
    for uniform in uniforms:
        logits = model(torch.tensor([[*request.prompt.token_ids, *tokens]])).logits[:, -1].float()
        probabilities = cut(logits / sampling.temperature, sampling.top_p, sampling.top_k).double().softmax(-1)[0]
        cumulative = probabilities.cumsum(0).numpy()
        tokens.append(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")))
        if tokens[-1] in (eos, *sampling.stop_token_ids):
            break
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_sampling_one_sequence_without_a_cache(tmp_path: Path, family: str) -> None:
    """Groups that share a prompt's prefill, prompts of other lengths beside them, rows that end early, a cache that
    grows twice: the same tokens and, to float32 rounding, the same log-probabilities."""
    path = write_model(tmp_path / family, family=family)
    tokenizer = make_tokenizer()
    engine = HFEngine(path, tokenizer, dtype=torch.float32, device=torch.device("cpu"), max_concurrent_sequences=64)
    weights = load_file(path / "model.safetensors")
    engine.load_weights(lambda: weights.items())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, "", tuple(rng.integers(3, 37, n).tolist()), "", "") for i, n in enumerate((2, 7, 7, 1))]
    requests = [Request(prompts[i], index, 1) for i, index in ((1, 0), (0, 0), (1, 1), (2, 0), (1, 2), (3, 0), (0, 5))]
    sampling = Sampling(MAX_TOKENS, temperature=1.3, seed=4, top_p=0.98, stop_token_ids=(9,))
    completions = engine.generate(requests, sampling)
    lengths = [len(completion.token_ids) for completion in completions]
    assert min(lengths) < MAX_TOKENS // 3, "no row ended early: nothing was taken out of the batch"
    with torch.inference_mode():
        for request, completion in zip(requests, completions, strict=True):
            assert completion.token_ids.tolist() == _reference(model, request, sampling, tokenizer.eos_token_id)
            ids = torch.tensor([[*request.prompt.token_ids, *completion.token_ids.tolist()]])
            logits = model(ids).logits[0, len(request.prompt.token_ids) - 1 : -1].float() / sampling.temperature
            scored = (
                cut(logits, sampling.top_p, 0).log_softmax(-1).gather(1, ids[0, len(request.prompt.token_ids) :, None])
            )
            np.testing.assert_allclose(completion.logprobs, scored[:, 0].numpy(), atol=2e-5)
            assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
