"""Running the real, unmodified megatron-core on a CPU with gloo: for the quickstart, for tests and for CI.

megatron-core expects CUDA in some 400 expressions. `enable` installs an import hook that rewrites those expressions,
in memory, while `megatron.core` is imported. `torch` is not touched, nothing is vendored, and tracebacks point at the
true lines. On a machine with CUDA none of it is ever active: `enable` refuses, `prepare` does nothing.

Call `prepare` before importing megatron-core. Reading order: rewrite.py (the rules), accelerator.py (what they
aim at), hook.py, cache.py, fixes.py.
"""

from __future__ import annotations

import sys
from typing import Literal, TypeAlias

import torch

from dppo_megatron.platform import hook, rewrite
from dppo_megatron.platform.cache import CodeCache, default_root
from dppo_megatron.platform.capabilities import hide_what_cannot_run
from dppo_megatron.platform.hook import Stats

__all__ = ["DeviceType", "Stats", "enable", "is_enabled", "prepare", "stats"]

DeviceType: TypeAlias = Literal["cpu", "cuda"]


def is_enabled() -> bool:
    """Whether megatron-core runs, or would run, on the CPU in this process."""
    return hook.installed() is not None


def stats() -> Stats:
    """How many megatron-core modules were rewritten, taken from the cache, or left plain in this process."""
    finder = hook.installed()
    return finder.stats if finder else Stats()


def enable(*, keep: bool = True) -> None:
    """Let `megatron.core`, when it is imported, run on the CPU. Calling it again changes nothing but `keep`.

    Args:
        keep: leave the rewritten code on disk for later processes; once False, it stays so.

    Raises RuntimeError where CUDA is available, and when `megatron.core` has been imported already.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "dppo_megatron.platform.enable() runs megatron-core on the CPU and must not be active where CUDA is "
            f"available ({torch.cuda.device_count()} device(s) here). Use the GPU: call prepare() instead. "
            "To use the CPU all the same, hide the GPUs before Python starts: CUDA_VISIBLE_DEVICES= python ..."
        )
    if (finder := hook.installed()) is not None:
        if not keep:
            finder.keep_nothing()
        return
    if hook.PACKAGE in sys.modules:
        raise RuntimeError(
            f"{hook.PACKAGE} was imported before dppo_megatron.platform.enable(), so its CUDA expressions can no "
            "longer be rewritten. Call enable() or prepare() before anything, another library included, imports it."
        )
    sys.meta_path.insert(0, hook.Finder(lambda: CodeCache(default_root() if keep else None, rewrite.rules_version())))


def prepare(device: Literal["auto", "cpu", "cuda"] = "auto", *, keep: bool = True) -> DeviceType:
    """Make `import megatron.core` safe on this machine and return the type of the device it will use; `keep` as for
    `enable`.

    With CUDA this changes nothing but to hide a Transformer Engine that does not work. Without, it calls `enable`,
    unless CUDA was asked for by name: then a job that lost its GPUs stops here rather than crawl on the CPU.
    """
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise RuntimeError("device 'cuda' was asked for, but torch.cuda.is_available() is False on this machine")
    hide_what_cannot_run(has_cuda)
    if device != "cpu" and has_cuda:
        return "cuda"
    enable(keep=keep)
    return "cpu"
