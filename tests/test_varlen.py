"""The arguments that each package's variable-length attention takes, without a GPU.

A wrong keyword is a TypeError in the first layer of the first step on a GPU, where no test of this suite runs. So each
signature that is called stands here as a function that computes what its arguments say, with SDPA, sequence by
sequence; the adapter must give the same through both.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dppo_megatron.actor.attention import (
    PackedSequences,
    UnrotatedAttention,
    find_kernel,
    from_flash_attn,
    from_torch,
)
from dppo_megatron.actor.layout import ContextShare
from dppo_megatron.types import PackedMicrobatch

OFFSETS = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
LONGEST = 8


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    *,
    causal: bool,
    scale: float | None,
    gqa: bool,
    before: int = -1,
) -> Tensor:
    """What the kernels compute: each sequence alone; different head counts only where grouped queries are known."""
    if query.size(1) != key.size(1) and not gqa:
        raise RuntimeError("the kernel was given fewer key heads than query heads")
    out = torch.empty_like(query)
    for start, end in pairwise(offsets.tolist()):
        q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
        ones = torch.ones(end - start, end - start, dtype=torch.bool)
        sees = ones.tril() if causal else ones
        sees = sees & ones.triu(-before) if before >= 0 else sees
        one = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=gqa)
        out[start:end] = one[0].transpose(0, 1)
    return out


def torch_2_12(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    before, behind = window_size
    return _attend(query, key, value, cu_seq_q, causal=behind == 0, scale=scale, gqa=enable_gqa, before=before)


def flash_attn_2(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    return _attend(q, k, v, cu_seqlens_q, causal=causal, scale=softmax_scale, gqa=True, before=window_size[0])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.1], ids=["default scale", "own scale"])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("function", [torch_2_12, flash_attn_2], ids=lambda f: f.__name__)
def test_every_signature_computes_causal_grouped_attention(
    function: Callable[..., Tensor], kv_heads: int, scale: float | None, window: int | None
) -> None:
    """Value and gradients through every signature equal SDPA over the repeated heads, to float64 rounding; with a
    window, of 3 tokens with a token's own."""
    generator = torch.Generator().manual_seed(0)

    def tensor(heads: int) -> Tensor:
        return torch.randn(14, heads, 16, generator=generator, dtype=torch.float64, requires_grad=True)

    query, key, value = tensor(6), tensor(kv_heads), tensor(kv_heads)
    wanted_scale = scale if scale is not None else 1 / math.sqrt(16)
    wrap = from_flash_attn if function is flash_attn_2 else from_torch
    got = wrap(function)(query, key, value, OFFSETS, LONGEST, wanted_scale, window)
    wanted = _attend(
        query,
        key.repeat_interleave(6 // kv_heads, 1),
        value.repeat_interleave(6 // kv_heads, 1),
        OFFSETS,
        causal=True,
        scale=wanted_scale,
        gqa=False,
        before=-1 if window is None else window - 1,
    )
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    mine = torch.autograd.grad((got * weights).sum(), (query, key, value), retain_graph=True)
    theirs = torch.autograd.grad((wanted * weights).sum(), (query, key, value))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_padded_batches_use_a_fused_kernel(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA torch 2.13 has three: flash takes no mask, the memory-efficient one no grouped queries ("It currently
    works only for Flash_attention and math kernel"), and cuDNN's, which takes both, comes before math on sm_90 and
    sm_10x only. Math would keep every score in float32, as it did with windows, and with context parallelism, which
    needs masks too."""
    calls: list[tuple[bool, bool]] = []
    real = F.scaled_dot_product_attention

    def spy(*args: Tensor, attn_mask: Tensor | None, enable_gqa: bool, **options: object) -> Tensor:
        calls.append((attn_mask is not None, enable_gqa))
        return real(*args, attn_mask=attn_mask, enable_gqa=enable_gqa, **options)  # type: ignore[arg-type]

    attention = UnrotatedAttention.__new__(UnrotatedAttention)
    torch.nn.Module.__init__(attention)
    attention._scale, attention._window = 0.25, window
    packed = PackedSequences.of(PackedMicrobatch((0, 1, 2), (0, 5, 6, 14)), ContextShare(), torch.device("cpu"))
    query, key, value = (torch.randn(14, heads, 16, dtype=torch.float64) for heads in (6, 2, 2))
    before = -1 if window is None else window - 1
    wanted = _attend(query, key, value, OFFSETS, causal=True, scale=0.25, gqa=True, before=before)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    torch.testing.assert_close(attention._bucketed(query, key, value, packed), wanted, rtol=1e-12, atol=1e-12)
    assert any(has_mask for has_mask, _ in calls) == (window is not None)
    assert not any(has_mask and grouped for has_mask, grouped in calls)


def test_the_installed_torch_takes_the_arguments() -> None:
    """Bound against the real signature: the fakes above cannot drift from the torch that is here unnoticed."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    real = inspect.signature(varlen.varlen_attn)
    bound: list[inspect.BoundArguments] = []

    def spy(*args: object, **kwargs: object) -> Tensor:
        bound.append(real.bind(*args, **kwargs))
        return torch.zeros(14, 6, 16)

    spy.__signature__ = real  # type: ignore[attr-defined]
    query, key = torch.zeros(14, 6, 16), torch.zeros(14, 3, 16)
    from_torch(spy)(query, key, key, OFFSETS, LONGEST, 0.25, None)
    [arguments] = bound
    assert arguments.arguments["max_q"] == arguments.arguments["max_k"] == LONGEST
    assert tuple(real.parameters) == tuple(inspect.signature(torch_2_12).parameters), (
        "torch has a new signature: add it above and look at its meaning"
    )


def test_torch_before_2_12_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function takes no grouped queries, 2.10's no scale either: the padded path serves there."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert find_kernel(128)[1] == "torch's varlen_attn"
    monkeypatch.setattr(varlen, "varlen_attn", torch_2_11)
    assert find_kernel(128) == (
        None,
        f"padded batches (no flash-attn; varlen_attn of torch {torch.__version__} has no grouped queries)",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has CUDA")
def test_without_cuda_there_is_no_kernel() -> None:
    """The padded path serves, and the reason is said."""
    assert find_kernel(128) == (None, "padded batches (no CUDA device)")
