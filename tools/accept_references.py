"""Writes the references of `dppo-megatron accept`: `python tools/accept_references.py FILE`, on a CPU (40 s)."""

from __future__ import annotations

import sys

import numpy as np
import torch

from dppo_megatron.config.schema import LayoutConfig
from dppo_megatron.workbench.accept.parity import MODELS, measure

if __name__ == "__main__":
    arrays = {
        f"{model}/{name}": values
        for model in MODELS
        for name, values in measure(model, LayoutConfig(), torch.float32, "local").items()
    }
    np.savez_compressed(sys.argv[1], **arrays)  # type: ignore[arg-type]
