"""One interface to the flash-attention kernels for packed sequences on CUDA, from whichever package has one.

flash-attn's is used if installed: every version has grouped queries, causal masking and a scale. torch has its own
since 2.10, but its signature changed with each release, and a wrong keyword is a TypeError in the first layer of the
first step. So the arguments are chosen by the installed function's signature:

    torch 2.10    is_causal                                 no scale, no window, no grouped queries
    torch 2.11    scale, window_size                        no grouped queries
    torch 2.12+   scale, window_size, enable_gqa

Missing options are emulated outside: the scale is folded into the queries, key and value heads are repeated. If neither
package supports the head size or the chip, there is no kernel and attention falls back to padded batches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_LEAST_CAPABILITY = (8, 0)
"""Ampere: the oldest chip that flash attention runs on."""
_LARGEST_HEAD = 256


class VarlenKernel(Protocol):
    """Causal attention inside each sequence of a pack."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float
    ) -> Tensor:
        """query [T, H, D], key and value [T, K, D] with K dividing H, offsets [sequences + 1] int32 -> [T, H, D]."""


def find_kernel(head_dim: int) -> tuple[VarlenKernel | None, str]:
    """The kernel for this machine and head size, and one phrase for the log that says which, or why there is none."""
    if not torch.cuda.is_available():
        return None, "padded batches (no CUDA device)"
    if torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return None, "padded batches (flash attention needs sm_80 or newer)"
    if head_dim % 8 or head_dim > _LARGEST_HEAD:
        return None, f"padded batches (flash attention has no heads of {head_dim})"
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        pass
    else:
        return from_flash_attn(flash_attn_varlen_func), "flash-attn"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, f"padded batches (no flash-attn, and torch {torch.__version__} has no varlen_attn)"
    return from_torch(varlen_attn), "torch's varlen_attn"


def from_flash_attn(function: Callable[..., Tensor]) -> VarlenKernel:
    """flash-attn's `flash_attn_varlen_func` as a `VarlenKernel`."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
        """The same offsets and longest length for queries and keys."""
        return function(query, key, value, offsets, offsets, longest, longest, softmax_scale=scale, causal=True)

    return kernel


def from_torch(function: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> VarlenKernel:
    """torch's `varlen_attn` of any version from 2.10 on as a `VarlenKernel`."""
    takes = set(inspect.signature(function).parameters)

    def kernel(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
        """By the names that this version of torch has for its options."""
        options: dict[str, object] = {}
        if "window_size" in takes:
            options["window_size"] = (-1, 0)  # everything before, nothing behind: causal
        else:
            options["is_causal"] = True
        if "scale" in takes:
            options["scale"] = scale
        else:
            query = query * (scale * math.sqrt(query.size(-1)))  # the kernel itself divides by sqrt(D)
        groups = query.size(1) // key.size(1)
        if groups > 1 and "enable_gqa" in takes:
            options["enable_gqa"] = True
        elif groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = function(query, key, value, offsets, offsets, longest, longest, **options)
        assert isinstance(out, Tensor)  # a tuple only if the log-sum-exp is requested
        return out

    return kernel
