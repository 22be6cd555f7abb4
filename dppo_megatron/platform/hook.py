"""The import hook: loads the modules of `megatron.core` with its CUDA expressions aimed at a facade (accelerator.py).

megatron-core names its device in the source: `torch.cuda.current_device()`, `device="cuda"`, `x.cuda()`,
`x.type() == 'torch.cuda.FloatTensor'`. The alternatives to rewriting those expressions were weighed: patching `torch`
reaches every other library in the process (a rollout engine, say) and lies to it; a fork or vendored copy has to be
merged with every release. A syntax-tree rewrite touches megatron-core's modules only, and as every new node keeps the
place of the one it replaces, tracebacks still point at the true line of the installed file.

Each rule is local (one expression in, one out), so that it does not depend on a version of megatron-core. A loader is
the least intrusive place for them: file, path and source for `inspect` stay those of the installed package, and other
importers are not slowed (one string comparison for each module).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from dppo_megatron.platform.accelerator import ACCELERATOR

PACKAGE = "megatron.core"
_RULES = f"dppo-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"
"""For the name of what is compiled by the rules of this file: a version number could be forgotten."""
FACADE = "__dppo_accelerator__"
"""The global name under which a rewritten module finds the facade. It ends in `__`, or class bodies would mangle it."""

_METHODS = {"cuda": "to_device", "pin_memory": "to_device", "type": "type_of"}
_Node = TypeVar("_Node", bound=ast.AST)

# moe_utils imports this name from Transformer Engine inside try/except and then reads it whether or not that worked.
# (Mended in 0.19. On CUDA without Transformer Engine `capabilities.check_experts` refuses experts for the same reason.)
_DEFAULTS: dict[str, dict[str, object]] = {"megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None}}
# What a module does without where it is missing, and which nothing here has it use: the logs of its timers and of its
# inference engine, and Megatron's FSDP. Without them a rank imports 2,640 modules instead of 3,286, in a fifth less
# CPU time.
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_UNUSED = {
    "megatron.core.timers": ("wandb", "torch.utils.tensorboard"),
    "megatron.core.inference.contexts.dynamic_context": ("wandb",),
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": (_FSDP,),
    "megatron.core.transformer.fsdp_dtensor_checkpoint": (_FSDP,),
}


class Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with its CUDA expressions rewritten.

    Its byte code lies beside Python's own and by the same rules, under a name that holds a digest of the rewrite rules:
    every rank of a CPU job imports megatron-core, and would else parse some 300 files again.
    """

    def source_to_code(self, data: Any, path: Any) -> CodeType:  # type: ignore[override]
        """Rewritten and compiled."""
        code: CodeType = compile(rewrite(data, path), path, "exec", dont_inherit=True)
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
    if module.__name__ == "megatron.core.transformer.multi_latent_attention":
        vars(module)["HAVE_TE"] = False  # it found the classes that megatron-core derives from a mock of it


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


def rewrite(source: bytes | str, path: str) -> ast.Module:
    """The syntax tree of `source`, re-aimed."""
    tree = _Retarget().visit(ast.parse(source, path))
    assert isinstance(tree, ast.Module)
    return ast.fix_missing_locations(tree)


def _facade(*attributes: str) -> ast.expr:
    """`FACADE.a.b`."""
    node: ast.expr = ast.Name(FACADE, ast.Load())
    for attribute in attributes:
        node = ast.Attribute(node, attribute, ast.Load())
    return node


def _at(place: ast.AST, node: _Node) -> _Node:
    """`node` where `place` is; so will be what is inside and has no place, by `ast.fix_missing_locations`."""
    return ast.copy_location(node, place)


def _import(place: ast.AST, bound_name: str, module: str, name: str) -> ast.stmt:
    """`bound_name = FACADE.import_from(module, name)`."""
    call = ast.Call(_facade("import_from"), [ast.Constant(module), ast.Constant(name)], [])
    return _at(place, ast.Assign([ast.Name(bound_name, ast.Store())], call))


def _is_cuda_name(value: object) -> bool:
    return isinstance(value, str) and (value == "cuda" or (value.startswith("cuda:") and value[5:].isdigit()))


class _Retarget(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`torch.cuda` -> the facade; `x.is_cuda` -> `facade.is_device(x)`."""
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return _at(node, _facade())
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return _at(node, ast.Call(_facade("is_device"), [node.value], []))
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """`"cuda"`, `"cuda:0"` -> `"cpu"`; also where they are compared with, so that comparisons stay consistent."""
        return _at(node, ast.Constant("cpu")) if _is_cuda_name(node.value) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Only what is in braces: a literal piece such as the "cuda" of `f"cuda{version}"` is text, not a device."""
        node.values = [v if isinstance(v, ast.Constant) else self.visit(v) for v in node.values]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`x.cuda()`, `x.pin_memory()`, `x.type()` and `pin_memory=...`."""
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":  # pinning needs a CUDA driver
                keyword.value = _at(keyword.value, ast.Constant(False))
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _METHODS:
            return node
        if node.func.attr == "type" and (node.args or node.keywords):  # a cast, not a question
            return node
        return _at(node, ast.Call(_facade(_METHODS[node.func.attr]), [node.func.value, *node.args], node.keywords))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        """`from torch.cuda.x import a` -> `a = facade.import_from("torch.cuda.x", "a")`."""
        module = node.module or ""
        if node.level or not (module == "torch.cuda" or module.startswith("torch.cuda.")):
            return node
        return [_import(node, alias.asname or alias.name, module, alias.name) for alias in node.names]
