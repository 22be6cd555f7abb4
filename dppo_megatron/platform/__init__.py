"""Running the real, unmodified megatron-core on a CPU with gloo: for the quickstart, for tests and for CI.

megatron-core expects CUDA in some 400 expressions. `enable` installs an import hook that rewrites those expressions,
in memory, while `megatron.core` is imported. `torch` is not touched, nothing is vendored, and tracebacks point at the
true lines. On a machine with CUDA none of it is ever active: `enable` refuses, `prepare` does nothing.

Call `prepare` before importing megatron-core. Reading order: rewrite.py (the rules), accelerator.py (what they
aim at), hook.py.
"""

from __future__ import annotations

import sys
from typing import Literal

import torch

from dppo_megatron.platform import hook
from dppo_megatron.platform.capabilities import hide_what_cannot_run


def is_enabled() -> bool:
    """Whether megatron-core runs, or would run, on the CPU in this process."""
    return hook.is_installed()


def enable() -> None:
    """Let `megatron.core`, when it is imported, run on the CPU. Calling it again changes nothing.

    Raises RuntimeError where CUDA is available, and when `megatron.core` has been imported already.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "dppo_megatron.platform.enable() runs megatron-core on the CPU and must not be active where CUDA is "
            f"available ({torch.cuda.device_count()} device(s) here). Use the GPU: call prepare() instead. "
            "To use the CPU all the same, hide the GPUs before Python starts: CUDA_VISIBLE_DEVICES= python ..."
        )
    if hook.is_installed():
        return
    if hook.PACKAGE in sys.modules:
        raise RuntimeError(
            f"{hook.PACKAGE} was imported before dppo_megatron.platform.enable(), so its CUDA expressions can no "
            "longer be rewritten. Call enable() or prepare() before anything, another library included, imports it."
        )
    sys.meta_path.insert(0, hook.Finder())


def prepare(device: Literal["auto", "cpu", "cuda"] = "auto") -> Literal["cpu", "cuda"]:
    """Make `import megatron.core` safe on this machine and return the type of the device it will use.

    With CUDA this changes nothing but to hide a Transformer Engine that does not work. Without, it calls `enable`,
    unless CUDA was asked for by name: then a job that lost its GPUs stops here rather than crawl on the CPU.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise RuntimeError("device 'cuda' was asked for, but torch.cuda.is_available() is False on this machine")
    hide_what_cannot_run(has_cuda)
    if device != "cpu" and has_cuda:
        return "cuda"
    enable()
    return "cpu"
