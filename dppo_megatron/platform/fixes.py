"""What megatron-core needs on a CPU beyond naming the device: faults that show only without Transformer Engine.

They are kept apart from the rewrite rules because each is about one module and can be deleted when upstream mends it.
None of them changes a path that a GPU machine takes: the whole package is inactive there.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

# moe_utils imports this name from Transformer Engine inside try/except and then reads it whether or not that worked.
# (Mended in 0.19. On CUDA without Transformer Engine `capabilities.check_experts` refuses experts for the same reason.)
_DEFAULTS: dict[str, dict[str, object]] = {"megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None}}


def before(module: ModuleType) -> None:
    """What must be so before the module's own code runs."""
    _quiet()
    vars(module).update(_DEFAULTS.get(module.__name__, {}))


def after(module: ModuleType) -> None:
    """Repairs to a module that has just been imported."""
    if fix := _FIXES.get(module.__name__):
        fix(module)


def _no_jit_fuser(module: ModuleType) -> None:
    # torch.compile would want a C++ compiler, and on a small model spends minutes to save milliseconds.
    module.disable_jit_fuser()


def _forked_checkpoint_queue(module: ModuleType) -> None:
    """Checkpoint writers report through a manager process that is spawned, because forking would break CUDA.

    A spawned one imports `__main__` and torch again on every rank: the first save takes 4-10 s, forked 0.3 s. Without
    CUDA, forking is safe.
    """

    names = vars(module)

    def write_results_queue(*_: Any) -> Any:  # 0.17 and newer name a way to start processes
        if names["_results_queue"] is None:
            names["_results_queue"] = multiprocessing.get_context("fork").Manager().Queue()
        return names["_results_queue"]

    # Fails here, by name, should upstream rename it again: a replacement that nobody calls would go unnoticed.
    name = next(name for name in ("_get_write_results_queue", "get_write_results_queue") if name in names)
    assert callable(names[name])
    names[name] = write_results_queue


_FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _no_jit_fuser,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _forked_checkpoint_queue,
}


def _quiet() -> None:
    """Silence the messages that are true on every CPU run and ask for nothing to be done; no others.

    Done again for each module (adding a filter twice keeps one), because whoever imports megatron-core inside
    `warnings.catch_warnings`, as pytest does, has lost filters that were set earlier.
    """
    fallback = r"(Transformer Engine and Apex are|Apex is) not installed\. Falling back to "
    warnings.filterwarnings("ignore", message=fallback, category=UserWarning, module=r"megatron\.core\.")
    # megatron-core 0.16 imports two of its own deprecated modules and warns its users of it.
    for own in (
        r"The following imports from `dynamic_context\.py` will",
        r"The 'megatron\.core\.\S+'\s+module is deprecated",
    ):
        warnings.filterwarnings("ignore", message=own, category=DeprecationWarning)
    # One generator plays host and device here, so drawing from "the device's" always moves "the host's".
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_shared_generator)


def _not_about_shared_generator(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
