"""Running the real, unmodified megatron-core on a CPU with gloo: for the quickstart, for tests and for CI.

megatron-core expects CUDA in some 400 expressions. `prepare` installs an import hook that rewrites those expressions,
in memory, while `megatron.core` is imported (hook.py). `torch` is not touched, nothing is vendored, and tracebacks
point at the true lines. On a machine with CUDA none of it is ever active.
"""

from __future__ import annotations

import sys
from typing import Literal

import torch

from dppo_megatron.platform import hook
from dppo_megatron.platform.capabilities import hide_what_cannot_run


def prepare() -> Literal["cpu", "cuda"]:
    """Make `import megatron.core` safe on this machine and return the type of the device it will use.

    With CUDA this changes nothing but to hide a Transformer Engine that does not work. Without, it installs the hook;
    calling it again changes nothing. Raises RuntimeError when `megatron.core` has been imported already.
    """
    has_cuda = torch.cuda.is_available()
    hide_what_cannot_run(has_cuda)
    if has_cuda:
        return "cuda"
    if not any(isinstance(finder, hook.Finder) for finder in sys.meta_path):
        if hook.PACKAGE in sys.modules:
            raise RuntimeError(
                f"{hook.PACKAGE} was imported before dppo_megatron.platform.prepare(), so its CUDA expressions can no"
                " longer be rewritten. Call it before anything, another library included, imports it."
            )
        sys.meta_path.insert(0, hook.Finder())
    return "cpu"
