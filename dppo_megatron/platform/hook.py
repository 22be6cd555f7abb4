"""The import hook: loads the modules of `megatron.core` through the rewrite, everything else as ever.

It sits in `sys.meta_path` only after `dppo_megatron.platform.enable`, which refuses where CUDA is. A loader
is the least intrusive place: the file, its path, its source for `inspect` and its line numbers stay those of the
installed package, and other importers are not slowed (one string comparison for each module).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

from dppo_megatron.platform.accelerator import ACCELERATOR
from dppo_megatron.platform.rewrite import FACADE, rewrite, rules_version

PACKAGE = "megatron.core"
_RULES = f"dppo-{rules_version()}"

# moe_utils imports this name from Transformer Engine inside try/except and then reads it whether or not that worked.
# (Mended in 0.19. On CUDA without Transformer Engine `capabilities.check_experts` refuses experts for the same reason.)
_DEFAULTS: dict[str, dict[str, object]] = {"megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None}}
# Libraries for which a module has a reserve, and which nothing here has it use: its timers' and its inference engine's
# logs. Without them a rank imports 2,761 modules instead of 3,286, in a sixth less CPU time.
_UNUSED = {
    "megatron.core.timers": ("wandb", "torch.utils.tensorboard"),
    "megatron.core.inference.contexts.dynamic_context": ("wandb",),
}


class Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with its CUDA expressions rewritten.

    Its byte code lies beside Python's own and by the same rules, under a name that holds a digest of the rewrite rules:
    every rank of a CPU job imports megatron-core, and would else parse some 300 files again.
    """

    def source_to_code(self, data: Any, path: Any, *, _optimization: int = -1) -> CodeType:
        """Rewritten and compiled."""
        code: CodeType = compile(rewrite(data, path), path, "exec", dont_inherit=True, optimize=_optimization)
        return code

    def get_data(self, path: str) -> bytes:
        """Of a source file, or of the rewritten byte code in place of the plain one."""
        return super().get_data(_rewritten(path))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Likewise."""
        super().set_data(_rewritten(path), data, _mode=_mode)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with the facade in its globals, then apply the fixes it needs."""
        setattr(module, FACADE, ACCELERATOR)
        with _fixed(module):
            super().exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    """Gives the modules of `megatron.core` their loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary spec, with our loader where the ordinary one reads a source file."""
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Loader(spec.loader.name, str(spec.loader.path))
        return spec


def is_installed() -> bool:
    """Whether `enable` has put the finder into `sys.meta_path`."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def _rewritten(path: str) -> str:
    return f"{path.removesuffix('.pyc')}.{_RULES}.pyc" if path.endswith(".pyc") else path


@contextmanager
def _fixed(module: ModuleType) -> Iterator[None]:
    """Around the execution of a module's own code: what it needs on a CPU beyond naming the device. Each fix is of one
    fault that shows only without Transformer Engine, and can be deleted when upstream mends it."""
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
