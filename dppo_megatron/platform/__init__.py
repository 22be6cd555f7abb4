"""Runs the real, unmodified megatron-core on a CPU with gloo: for the quickstart, for tests and for CI.

megatron-core expects CUDA in some 400 expressions. `prepare` installs an import hook that rewrites those expressions,
in memory, while `megatron.core` is imported (hook.py). On a machine with CUDA the hook is never installed.
"""

from __future__ import annotations

import sys
from typing import Literal

import torch

from dppo_megatron.platform import hook
from dppo_megatron.platform.capabilities import hide_unusable_transformer_engine


def prepare() -> Literal["cpu", "cuda"]:
    """Make `import megatron.core` safe on this machine and return the type of the device it will use. Raises
    RuntimeError if `megatron.core` has been imported before. Calling it again has no effect."""
    has_cuda = torch.cuda.is_available()
    hide_unusable_transformer_engine(has_cuda)
    if has_cuda:
        return "cuda"
    if not any(isinstance(finder, hook.Finder) for finder in sys.meta_path):
        if hook.PACKAGE in sys.modules:
            raise RuntimeError(
                f"{hook.PACKAGE} was imported before dppo_megatron.platform.prepare(), so its CUDA expressions can no"
                f" longer be rewritten. Call prepare() before anything, also a library, imports {hook.PACKAGE}."
            )
        sys.meta_path.insert(0, hook.Finder())
    return "cpu"
