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
_LOGS_TO_WANDB = "megatron.core.inference.contexts.dynamic_context"


@contextmanager
def applied(module: ModuleType) -> Iterator[None]:
    """Around the execution of a module's own code."""
    _quiet()
    vars(module).update(_DEFAULTS.get(module.__name__, {}))
    hides_wandb = module.__name__ == _LOGS_TO_WANDB and "wandb" not in sys.modules
    if hides_wandb:  # 0.5 of 5.3 CPU s of a rank's imports, for an inference engine that is not used here
        sys.modules["wandb"] = None  # type: ignore[assignment]  # import then raises, which this module expects
    try:
        yield
    finally:
        if hides_wandb:
            del sys.modules["wandb"]
    if module.__name__ == "megatron.core.jit":
        # torch.compile would want a C++ compiler, and on a small model spends minutes to save milliseconds.
        module.disable_jit_fuser()


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
