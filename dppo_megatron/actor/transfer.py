"""Small tensors on their way from the host to the device.

A plain `.to(device)` reads pageable memory, so the host waits until the device has done all that it was given before.
From pinned memory it does not wait, and runs ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host there, without waiting for what the device still does."""
    if device.type == "cpu":
        return tensor
    held = tensor.pin_memory() if device.type == "cuda" else tensor  # torch keeps it until the copy is done
    return held.to(device, non_blocking=True)
