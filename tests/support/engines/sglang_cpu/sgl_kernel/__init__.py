"""What SGLang 0.5.23 needs of its compiled kernels to serve a dense model on a CPU without AMX: one function.

The real package's CPU operators exist only in a build from source. For tests of the HTTP interface, never for use.
"""

from typing import Any

import torch

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    token_pool: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    locations: torch.Tensor,
    *_: Any,
) -> None:
    """Write each request's new cache locations, joined in `locations`, into its row of the pool."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        token_pool[request, start:end] = locations[taken : taken + end - start].to(token_pool.dtype)
        taken += end - start


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in here")

    return missing
