"""The import hook: loads the modules of `megatron.core` through the rewrite, everything else as ever.

It sits in `sys.meta_path` only after `dppo_megatron.platform.enable`, which refuses where CUDA is. A loader
is the least intrusive place: the file, its path, its source for `inspect` and its line numbers stay those of the
installed package, and other importers are not slowed (one string comparison for each module).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType

from dppo_megatron.platform import fixes
from dppo_megatron.platform.accelerator import ACCELERATOR
from dppo_megatron.platform.cache import CodeCache
from dppo_megatron.platform.rewrite import FACADE, concerns, rewrite

PACKAGE = "megatron.core"


@dataclass(slots=True)
class Stats:
    """What the hook did in this process."""

    modules_rewritten: int = 0
    modules_from_cache: int = 0
    modules_plain: int = 0
    """No rule can apply to them; Python's own byte code is used."""


class Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with its CUDA expressions rewritten."""

    def __init__(self, fullname: str, path: str, cache: CodeCache, stats: Stats) -> None:
        super().__init__(fullname, path)
        self._cache, self._stats = cache, stats

    def get_code(self, fullname: str) -> CodeType | None:
        """Code of the module: from the cache, or rewritten and compiled now."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if not concerns(source):
            self._stats.modules_plain += 1
            return super().get_code(fullname)
        if (cached := self._cache.load(fullname, path, source)) is not None:
            self._stats.modules_from_cache += 1
            return cached
        code = compile(rewrite(source, path), path, "exec", dont_inherit=True)
        self._stats.modules_rewritten += 1
        self._cache.store(fullname, path, source, code)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with the facade in its globals, then apply the fixes it needs."""
        setattr(module, FACADE, ACCELERATOR)
        with fixes.applied(module):
            super().exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    """Gives the modules of `megatron.core` their loader."""

    def __init__(self, make_cache: Callable[[], CodeCache]) -> None:
        self.stats = Stats()
        # made with the first module, so that a program that imports no Megatron leaves no directory behind
        self._cache = functools.cache(make_cache)

    def keep_nothing(self) -> None:
        """From now on neither read nor write rewritten code on disk."""
        self._cache = functools.cache(lambda: CodeCache(None, None))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary spec, with our loader where the ordinary one reads a source file."""
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Loader(spec.loader.name, str(spec.loader.path), self._cache(), self.stats)
        return spec


def installed() -> Finder | None:
    """The finder in `sys.meta_path`, if `enable` has put one there."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)
