"""What megatron-core needs on a CPU beyond naming the device: faults that show only without Transformer Engine.

They are kept apart from the rewrite rules because each is about one module and can be deleted when upstream mends it.
None of them changes a path that a GPU machine takes: the whole package is inactive there.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

# moe_utils imports this name from Transformer Engine inside try/except and then reads it whether or not that worked.
# (Mended in 0.19. On CUDA without Transformer Engine `capabilities.check_experts` refuses experts for the same reason.)
_DEFAULTS: dict[str, dict[str, object]] = {"megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None}}
# Libraries for which a module has a reserve, and which nothing here has it use: its timers' and its inference engine's
# logs. Without them a rank imports 2,761 modules instead of 3,286, in a sixth less CPU time.
_UNUSED = {
    "megatron.core.timers": ("wandb", "torch.utils.tensorboard"),
    "megatron.core.inference.contexts.dynamic_context": ("wandb",),
}


@contextmanager
def applied(module: ModuleType) -> Iterator[None]:
    """Around the execution of a module's own code."""
    _quiet()
    vars(module).update(_DEFAULTS.get(module.__name__, {}))
    hidden = [name for name in _UNUSED.get(module.__name__, ()) if name not in sys.modules]
    for name in hidden:  # importing one then raises ImportError
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
    if module.__name__ == "megatron.core.jit":
        # torch.compile would want a C++ compiler, and on a small model spends minutes to save milliseconds.
        module.disable_jit_fuser()


def _quiet() -> None:
    """Silence the messages that are true on every CPU run and ask for nothing to be done; no others.

    Done again for each module (adding a filter twice keeps one), because an import of megatron-core inside
    `warnings.catch_warnings`, as pytest does, loses filters that were set earlier.
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
