"""Chunked vocab-parallel log-probabilities against torch's log_softmax, and what they hold in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.launch import run_ranks
from support.live_bytes import LiveBytes

from dppo_megatron.actor.logprobs import Projection, chunked_logprobs

TOKENS, HIDDEN, VOCAB, PADDED = 50, 16, 37, 40


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)


def _sharded(chunk_tokens: int) -> dict[str, np.ndarray]:
    """Values and gradients with this rank's share of the vocabulary; the hidden states' gradient summed over ranks."""
    group = torch.distributed.group.WORLD
    hidden, weight, targets, upstream = _inputs()
    rows = PADDED // group.size()
    mine = weight[group.rank() * rows : (group.rank() + 1) * rows].clone().requires_grad_()
    hidden.requires_grad_()
    values = chunked_logprobs(hidden, mine, targets, Projection(VOCAB, 0.7, chunk_tokens, group))
    torch.autograd.backward(values, upstream.unbind())
    torch.distributed.all_reduce(hidden.grad)
    parts = {"logprobs": values[0], "entropy": values[1], "grad_hidden": hidden.grad, "grad_weight": mine.grad}
    return {name: tensor.detach().numpy() for name, tensor in parts.items()}


@pytest.mark.parametrize(("world_size", "chunk_tokens"), [(1, 1), (1, 4096), (2, 7), (4, 50)])
def test_values_and_gradients_equal_log_softmax(world_size: int, chunk_tokens: int) -> None:
    """In float64 to 1e-10, with a vocabulary padded from 37 to 40 columns, whatever the chunk and the split."""
    results = run_ranks(_sharded, world_size, chunk_tokens)
    hidden, weight, targets, upstream = _inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_probs = (hidden @ weight[:VOCAB].t() / 0.7).log_softmax(-1)
    logprobs = log_probs.gather(1, targets[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.autograd.backward((logprobs, entropy), upstream.unbind())
    expected = {"logprobs": logprobs, "entropy": entropy, "grad_hidden": hidden.grad}
    for result in results:
        for name, tensor in expected.items():
            np.testing.assert_allclose(result[name], tensor.detach().numpy(), rtol=0, atol=1e-10)
    whole = np.concatenate([result["grad_weight"] for result in results])
    np.testing.assert_allclose(whole, weight.grad.numpy(), rtol=0, atol=1e-10)


def _peak_bytes(num_tokens: int, chunk_tokens: int, vocab_size: int) -> int:
    hidden = torch.randn(num_tokens, 8, requires_grad=True)
    weight = torch.randn(vocab_size, 8, requires_grad=True)
    targets = torch.randint(0, vocab_size, (num_tokens,))
    projection = Projection(vocab_size, 1.0, chunk_tokens, torch.distributed.group.WORLD)
    with LiveBytes() as bytes_:
        logprobs, entropy = chunked_logprobs(hidden, weight, targets, projection)
        (logprobs.sum() + entropy.sum()).backward()
    return bytes_.peak


def test_peak_memory_is_that_of_a_chunk() -> None:
    """Forward and backward over 4,096 tokens hold a handful of [64, V] tensors, not one [4096, V].

    What is counted: five float32 tensors of a chunk at most, the weight's gradient twice, and the hidden states'. A
    second run with twice the tokens may only add what grows with the tokens and not with the vocabulary.
    """
    vocab, chunk = 4000, 64
    peak, twice = (run_ranks(_peak_bytes, 1, tokens, chunk, vocab)[0] for tokens in (4096, 8192))
    assert peak < 5.5 * 4 * chunk * vocab + 3 * 4 * 8 * vocab + 40 * 4 * 4096
    assert peak < 0.15 * 4 * 4096 * vocab, "more than 15 % of one whole float32 logits tensor"
    assert twice - peak < 40 * 4 * 4096
    whole = run_ranks(_peak_bytes, 1, 4096, 4096, vocab)[0]
    assert whole > 1.5 * 4 * 4096 * vocab, "the counter does not see what one chunk of everything holds"
