"""The softmax of the output layer as two Triton kernels: what `softmax.TorchSoftmax` computes, in one pass each.

torch makes some ten passes over float32 copies of a chunk's logits, these kernels read them once in the model's type:

    statistics   one program per token, over its columns in blocks: running maximum, sum of exponentials, and their
                 weighted sum, which are rescaled whenever a block raises the maximum
    gradient     one program per token and block of columns: reads a logit, writes its gradient in the same place

Results differ from torch's only by rounding. Importing this module needs Triton; with TRITON_INTERPRET=1 its kernels
run on a CPU, which is how they are tested first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dppo_megatron.actor.softmax import BackwardChunk, Projection

_COLUMNS = 4096
"""Columns of a block: 16 for each thread of 8 warps."""
_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)
"""Used for minus infinity, because -inf - (-inf) is NaN."""


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(  # type: ignore[no-untyped-def]
    logits, targets, out, stride, out_stride, num_real, first_column, temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    peak, exp_sum, weighted = tl.full((), _LOWEST, tl.float32), 0.0, 0.0
    for start in range(0, num_real, BLOCK):
        real = start + column < num_real
        scaled = tl.load(logits + row * stride + start + column, mask=real, other=0.0).to(tl.float32) / temperature
        scaled = tl.where(real, scaled, _LOWEST)
        higher = tl.maximum(peak, tl.max(scaled, 0))
        down = peak - higher
        shifted = tl.where(real, scaled - higher, 0.0)
        exp = tl.where(real, tl.exp(shifted), 0.0)
        weighted = (weighted + exp_sum * down) * tl.exp(down) + tl.sum(shifted * exp, 0)
        exp_sum = exp_sum * tl.exp(down) + tl.sum(exp, 0)
        peak = higher
    target = tl.load(targets + row) - first_column
    inside = (target >= 0) & (target < num_real)
    picked = tl.load(logits + row * stride + target, mask=inside, other=0.0).to(tl.float32) / temperature
    tl.store(out + row, peak)
    tl.store(out + out_stride + row, exp_sum)
    tl.store(out + 2 * out_stride + row, weighted)
    tl.store(out + 3 * out_stride + row, picked)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    targets,
    log_normalizer,
    entropy,
    grad_logprobs,
    grad_entropy,
    stride,
    columns,
    num_real,
    first_column,
    temperature,
    HAS_LOGPROBS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < num_real
    place = logits + row * stride + column
    scaled = tl.load(place, mask=real, other=0.0).to(tl.float32) / temperature
    log_prob = scaled - tl.load(log_normalizer + row)
    grad = tl.zeros((BLOCK,), tl.float32)
    if HAS_ENTROPY:
        grad += (log_prob + tl.load(entropy + row)) * tl.load(grad_entropy + row)
    if HAS_LOGPROBS:
        grad += tl.load(grad_logprobs + row)
    grad = -grad * tl.exp(log_prob)
    if HAS_LOGPROBS:
        target = tl.load(targets + row) - first_column
        grad += tl.where(column == target, tl.load(grad_logprobs + row), 0.0)
    grad = tl.where(real, grad / temperature, 0.0)
    tl.store(place, grad.to(logits.dtype.element_ty), mask=column < columns)


class TritonSoftmax:
    """A `Softmax` for float32 and half precision."""

    def __init__(self, block_columns: int = _COLUMNS) -> None:
        self._block_columns = block_columns

    def statistics(self, logits: Tensor, targets: Tensor, projection: Projection, out: Tensor) -> None:
        tokens, columns = logits.shape
        numbers = projection.num_real(columns), projection.first_column(columns), float(projection.temperature)
        strides = logits.stride(0), out.stride(0)
        _statistics[(tokens,)](logits, targets, out, *strides, *numbers, BLOCK=self._block_columns, num_warps=8)

    def gradient(self, logits: Tensor, chunk: BackwardChunk, projection: Projection) -> Tensor:
        """See `Softmax`; in place."""
        tokens, columns = logits.shape
        numbers = projection.num_real(columns), projection.first_column(columns), float(projection.temperature)
        unused = chunk.entropy  # stands for a missing gradient: a kernel's argument must be a tensor even if unread
        grads = [grad if grad is None else grad.contiguous() for grad in (chunk.grad_logprobs, chunk.grad_entropy)]
        _gradient[(tokens, triton.cdiv(columns, self._block_columns))](
            logits,
            chunk.targets,
            chunk.log_normalizer,
            chunk.entropy,
            *(unused if grad is None else grad for grad in grads),
            logits.stride(0),
            columns,
            *numbers,
            HAS_LOGPROBS=grads[0] is not None,
            HAS_ENTROPY=grads[1] is not None,
            BLOCK=self._block_columns,
            num_warps=8,
        )
        return logits
