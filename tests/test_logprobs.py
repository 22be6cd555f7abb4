"""Chunked vocab-parallel log-probabilities against torch's log_softmax, and what they hold in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.job import REPOSITORY
from support.launch import run_ranks
from support.live_bytes import LiveBytes
from torch.utils._python_dispatch import TorchDispatchMode

from dppo_megatron.actor.logprobs import chunked_logprobs
from dppo_megatron.actor.softmax import Projection, Softmax, TorchSoftmax

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
    values = chunked_logprobs(hidden, mine, targets, Projection(VOCAB, 0.7, chunk_tokens, group, TorchSoftmax()))
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
    projection = Projection(vocab_size, 1.0, chunk_tokens, torch.distributed.group.WORLD, TorchSoftmax())
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


class _Float32OfShape(TorchDispatchMode):
    """Counts the float32 tensors of a shape that operations make."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken = {tensor.data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.data_ptr() not in taken:
            self.count += tuple(out.shape) == self.shape
        return out


def _accumulated(buffer: bool, tied: bool, microbatches: int) -> tuple[float, int]:
    """The weight's gradient over micro-batches of bfloat16, as Megatron's hook leaves it in the float32 buffer: its
    error against float64, relative to its norm; and the float32 tensors of its size that were made."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(PADDED, HIDDEN, generator=generator).bfloat16())
    main_grad = torch.zeros(PADDED, HIDDEN)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, tied
    exact = weight.detach().double().requires_grad_()
    if buffer:
        weight.main_grad = main_grad
    projection = Projection(VOCAB, 1.0, 8, torch.distributed.group.WORLD, TorchSoftmax())
    count = 0
    for _ in range(microbatches):
        hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
        targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
        lookup = 1.0 if tied else 0.0
        expected = (hidden.double() @ exact[:VOCAB].t()).log_softmax(-1).gather(1, targets[:, None]).sum()
        (expected + lookup * exact[3].sum()).backward()
        with _Float32OfShape((PADDED, HIDDEN)) as made:
            loss = chunked_logprobs(hidden, weight, targets, projection)[0].sum()
            (loss + lookup * weight[3].sum() if tied else loss).backward()
        count += made.count
        if not weight.grad_added_to_main_grad or weight.zero_out_wgrad:  # DistributedDataParallel's hook
            main_grad += weight.grad
        weight.grad = None
    return float((main_grad.double() - exact.grad).norm() / exact.grad.norm()), count


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_gradient_goes_into_megatrons_buffer(tied: bool) -> None:
    """In float32 from the first chunk to the last micro-batch: closer to float64 than when each micro-batch is rounded
    to bfloat16 on the way, and without a float32 tensor of the weight's size. A tied embedding's own is kept."""
    into, rounded = (run_ranks(_accumulated, 1, buffer, tied, 64)[0] for buffer in (True, False))
    assert into[1] == 0 and rounded[1] >= 64
    assert into[0] < 0.9 * rounded[0], (into, rounded)


# ------------------------------------------------------------------------------------------------- the fused kernels


@pytest.fixture
def triton_softmax() -> Callable[[int], Softmax]:
    """The fused kernels with blocks of so many columns: compiled on CUDA, interpreted elsewhere (conftest.py)."""
    pytest.importorskip("triton", reason="Triton is not installed (torch's CUDA builds bring it: make test-newest)")
    from dppo_megatron.actor.fused_softmax import TritonSoftmax

    return TritonSoftmax


def _both_passes(
    softmax: Softmax, dtype: torch.dtype, temperature: float, upstream: tuple[bool, bool], group: Any
) -> dict[str, torch.Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight, targets, grads = (tensor.to(device) for tensor in _inputs())
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    values = chunked_logprobs(hidden, weight, targets, Projection(VOCAB, temperature, 16, group, softmax))
    used = [(value, grad.float()) for value, grad, use in zip(values, grads, upstream, strict=True) if use]
    torch.autograd.backward([value for value, _ in used], [grad for _, grad in used])
    names = ("logprobs", "entropy", "grad_hidden", "grad_weight")
    found = (*values, hidden.grad, weight.grad)
    return {name: tensor.detach().float() for name, tensor in zip(names, found, strict=True)}  # type: ignore[union-attr]


class _OneRank:
    """A group of one, without processes."""

    @staticmethod
    def size() -> int:
        return 1

    @staticmethod
    def rank() -> int:
        return 0


@pytest.mark.parametrize("upstream", [(True, True), (True, False), (False, True)], ids=["both", "log-probs", "entropy"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("block", "temperature"), [(8, 0.7), (64, 1.0)])
def test_fused_kernels_compute_the_same(
    triton_softmax: Callable[[int], Softmax],
    block: int,
    temperature: float,
    dtype: torch.dtype,
    bound: float,
    upstream: tuple[bool, bool],
) -> None:
    """Values and gradients equal torch's: blocks that do not divide the columns, padding columns, one gradient alone.

    Sums over 37 columns in another order differ by a few float32 roundings of values around 4; in bfloat16 a gradient
    may round to the neighbouring number, 2 ** -8 of its size.
    """
    fused, plain = (
        _both_passes(softmax, dtype, temperature, upstream, _OneRank)
        for softmax in (triton_softmax(block), TorchSoftmax())
    )
    for name, tensor in plain.items():
        scale = 1.0 if name in ("logprobs", "entropy") else float(tensor.abs().max())
        limit = 1e-5 if name in ("logprobs", "entropy") else bound * scale
        assert (fused[name] - tensor).abs().max() <= limit, name


def test_fused_statistics_join_over_ranks(triton_softmax: Callable[[int], Softmax]) -> None:
    """Two ranks' columns, of which one has padding only: joined as the chunked head joins them."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)) * 5
    group = type("Second", (), {"rank": staticmethod(lambda: 1), "size": staticmethod(lambda: 2)})
    targets = torch.tensor([8, 3, 10, 9, 15])
    for vocab in (12, 8):
        found = []
        for softmax in (triton_softmax(4), TorchSoftmax()):
            out = torch.empty(4, 5)
            softmax.statistics(logits.clone(), targets, Projection(vocab, 0.9, 5, group, softmax), out)  # type: ignore[arg-type]
            found.append(out)
        # sums are relative to the largest logit, which is any very low number where there is no real column
        torch.testing.assert_close(found[0][1:], found[1][1:], rtol=1e-6, atol=1e-6)
        assert (found[0][0] < -1e38).all() if vocab == 8 else torch.equal(found[0][0], found[1][0])


COMPILE = """
from dppo_megatron import platform; platform.prepare()
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dppo_megatron.actor import fused_softmax as kernels

KINDS = {"targets": "*i64", "stride": "i32", "out_stride": "i32", "columns": "i32", "num_real": "i32",
         "first_column": "i32", "temperature": "fp32", "BLOCK": "constexpr", "HAS_LOGPROBS": "constexpr",
         "HAS_ENTROPY": "constexpr"}

def build(kernel, dtype, **constants):
    signature = {name: KINDS.get(name, "*fp32") for name in kernel.arg_names} | {"logits": f"*{dtype}"}
    source = ASTSource(kernel, signature, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert len(built.asm["cubin"]) > 1000

for dtype in ("bf16", "fp32"):
    build(kernels._statistics, dtype, BLOCK=4096)
    for logprobs, entropy in ((True, True), (True, False), (False, True)):
        build(kernels._gradient, dtype, BLOCK=4096, HAS_LOGPROBS=logprobs, HAS_ENTROPY=entropy)
"""


def test_fused_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """To machine code of sm_90, by Triton's own assembler: that needs no GPU. (In a process of its own: in this one
    Triton may be set to interpret.)"""
    pytest.importorskip("triton", reason="Triton is not installed (torch's CUDA builds bring it: make test-newest)")
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=variables, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
