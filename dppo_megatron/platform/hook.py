"""The import hook: loads the modules of `megatron.core` through the rewrite, everything else as ever.

It sits in `sys.meta_path` only after `dppo_megatron.platform.enable`, which refuses where CUDA is. A loader
is the least intrusive place: the file, its path, its source for `inspect` and its line numbers stay those of the
installed package, and other importers are not slowed (one string comparison for each module).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from dppo_megatron.platform import fixes
from dppo_megatron.platform.accelerator import ACCELERATOR
from dppo_megatron.platform.rewrite import FACADE, rewrite, rules_version

PACKAGE = "megatron.core"
_RULES = f"dppo-{rules_version()}"


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
        with fixes.applied(module):
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
