"""The import hook: loads the modules of `megatron.core` with CUDA expressions redirected to a facade (`Accelerator`).

megatron-core names its device in the source: `torch.cuda.current_device()`, `device="cuda"`, `x.cuda()`,
`x.type() == 'torch.cuda.FloatTensor'`. We rewrite those expressions because the alternatives are worse: patching
`torch` affects every other library in the process (a rollout engine, say), and a fork or vendored copy has to be merged
with every release. Every new node keeps the position of the node it replaces, so tracebacks still point at the true
line of the installed file. Each rule replaces one expression by one, so it does not depend on the version.

The facade defines a name only if it can give the true answer for a CPU, where work is synchronous and there are one
device and one random generator. Every other name falls through to the real `torch.cuda`, which raises its own error.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

PACKAGE = "megatron.core"
_RULES = f"dppo-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}"
"""Part of the name of rewritten byte code: a digest of this file, since one could forget to raise a version number."""
FACADE = "__dppo_accelerator__"
"""The global name of the facade in a rewritten module. It ends in `__` because class bodies mangle other `__` names."""

_METHODS = {"cuda": "to_device", "pin_memory": "to_device", "type": "type_of"}
CPU = torch.device("cpu")

# moe_utils imports this name from Transformer Engine inside try/except and then reads it even if the import failed.
# (Fixed in 0.19. On CUDA without Transformer Engine `capabilities.check_mixture` refuses experts for the same reason.)
_DEFAULTS: dict[str, dict[str, object]] = {"megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None}}
# Module -> optional imports of it that are never used here, and which we make fail: logging of timers and of Megatron's
# inference engine, and Megatron's FSDP. A rank then imports 2,640 modules instead of 3,286, in a fifth less CPU time.
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_UNUSED = {
    "megatron.core.timers": ("wandb", "torch.utils.tensorboard"),
    "megatron.core.inference.contexts.dynamic_context": ("wandb",),
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": (_FSDP,),
    "megatron.core.transformer.fsdp_dtensor_checkpoint": (_FSDP,),
}


class Loader(importlib.machinery.SourceFileLoader):
    """Loads one module with its CUDA expressions rewritten. The byte code is cached beside Python's own, with a digest
    of the rewrite rules in its name: without the cache every rank of a CPU job would parse some 300 files again."""

    def source_to_code(self, data: Any, path: Any) -> CodeType:  # type: ignore[override]
        """The code of the rewritten source."""
        code: CodeType = compile(rewrite(data, path), path, "exec", dont_inherit=True)
        return code

    def get_data(self, path: str) -> bytes:
        """Read a source file, or the rewritten byte code instead of Python's."""
        return super().get_data(_cache_path(path))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Write the rewritten byte code under its own name."""
        super().set_data(_cache_path(path), data, _mode=_mode)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with the facade in its globals, then apply the fixes it needs."""
        setattr(module, FACADE, ACCELERATOR)
        with _fixed(module):
            super().exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    """Makes `Loader` load the modules of `megatron.core`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The ordinary spec, with our loader if the ordinary one reads a source file."""
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Loader(spec.loader.name, str(spec.loader.path))
        return spec


def _cache_path(path: str) -> str:
    return f"{path.removesuffix('.pyc')}.{_RULES}.pyc" if path.endswith(".pyc") else path


@contextmanager
def _fixed(module: ModuleType) -> Iterator[None]:
    """Applies fixes around the execution of a module's code, which it needs on a CPU besides the rewriting. Each is for
    one bug that occurs only without Transformer Engine, and can be deleted when megatron-core fixes the bug."""
    _quiet()
    vars(module).update(_DEFAULTS.get(module.__name__, {}))
    hidden = [name for name in _UNUSED.get(module.__name__, ()) if name not in sys.modules]
    for name in hidden:  # None makes the import raise ImportError
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
    if module.__name__ == "megatron.core.jit":
        # torch.compile needs a C++ compiler, and on a small model takes minutes to save milliseconds.
        module.disable_jit_fuser()
    if module.__name__ == "megatron.core.transformer.multi_latent_attention":
        vars(module)["HAVE_TE"] = False  # it is True even if megatron-core only has classes derived from a mock of TE


def _quiet() -> None:
    """Silence only those warnings that appear in every CPU run and need no action. Repeated for each module, because an
    import of megatron-core inside `warnings.catch_warnings` loses filters that were set earlier."""
    fallback = r"(Transformer Engine and Apex are|Apex is) not installed\. Falling back to "
    warnings.filterwarnings("ignore", message=fallback, category=UserWarning, module=r"megatron\.core\.")
    # megatron-core 0.16 imports two of its own deprecated modules, which warn about it.
    for deprecated in (
        r"The following imports from `dynamic_context\.py` will",
        r"The 'megatron\.core\.\S+'\s+module is deprecated",
    ):
        warnings.filterwarnings("ignore", message=deprecated, category=DeprecationWarning)
    # Host and device share one generator here, so drawing from the device's always changes the host's.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_shared_generator)


def _not_about_shared_generator(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def rewrite(source: bytes | str, path: str) -> ast.Module:
    """The syntax tree of `source`, with its CUDA expressions redirected to the facade."""
    tree = _Redirect().visit(ast.parse(source, path))
    assert isinstance(tree, ast.Module)
    return ast.fix_missing_locations(tree)


def _facade(attribute: str = "") -> ast.expr:
    """The expression `FACADE`, or `FACADE.attribute`."""
    facade = ast.Name(FACADE, ast.Load())
    return ast.Attribute(facade, attribute, ast.Load()) if attribute else facade


def _is_cuda_name(value: object) -> bool:
    return isinstance(value, str) and (value == "cuda" or (value.startswith("cuda:") and value[5:].isdigit()))


class _Redirect(ast.NodeTransformer):
    """New nodes get the place of those that they replace; `ast.fix_missing_locations` passes it on to nodes inside."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`torch.cuda` -> the facade; `x.is_cuda` -> `facade.is_device(x)`."""
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(_facade(), node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Call(_facade("is_device"), [node.value], []), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """`"cuda"`, `"cuda:0"` -> `"cpu"`, in comparisons too, so that these stay consistent."""
        return ast.copy_location(ast.Constant("cpu"), node) if _is_cuda_name(node.value) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Rewrites only what is in braces: the "cuda" of `f"cuda{version}"` is text, not a device."""
        node.values = [v if isinstance(v, ast.Constant) else self.visit(v) for v in node.values]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`x.cuda()`, `x.pin_memory()`, `x.type()` and `pin_memory=...`."""
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":  # pinning needs a CUDA driver
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _METHODS:
            return node
        if node.func.attr == "type" and (node.args or node.keywords):  # x.type(dtype) is a cast
            return node
        call = ast.Call(_facade(_METHODS[node.func.attr]), [node.func.value, *node.args], node.keywords)
        return ast.copy_location(call, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        """`from torch.cuda.x import a` -> `a = facade.import_from("torch.cuda.x", "a")`."""
        module = node.module or ""
        if node.level or not (module == "torch.cuda" or module.startswith("torch.cuda.")):
            return node
        statements: list[ast.stmt] = []
        for alias in node.names:
            call = ast.Call(_facade("import_from"), [ast.Constant(module), ast.Constant(alias.name)], [])
            assign = ast.Assign([ast.Name(alias.asname or alias.name, ast.Store())], call)
            statements.append(ast.copy_location(assign, node))
        return statements


def _nothing(self: object, *args: Any, **kwargs: Any) -> None:
    """Does nothing: work is synchronous, on one device, so there is nothing to wait for, to switch or to free."""


def _no_context(self: object, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class CpuEvent:
    """A point in the program. Work is synchronous, so an event has been reached as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = _nothing


class CpuStream:
    """A queue of work. There is only one, the program's own order: waiting for it is free and all streams are equal."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """A recorded event, new unless one is given."""
        return event or CpuEvent()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return hash(CpuStream)


class Accelerator:
    """What `torch.cuda` means in a rewritten module."""

    Stream = CpuStream
    Event = CpuEvent
    default_generators: dict[Any, torch.Generator] = defaultdict(lambda: torch.default_generator)
    """Indexed by whatever `current_device` returns."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @property
    def random(self) -> Accelerator:
        """`torch.cuda.random`: its functions are those of `torch.cuda`."""
        return self

    # ---- the one device

    def current_device(self) -> torch.device:
        """A device, not an index: megatron-core passes the result to `device=`, where torch takes 0 for a GPU."""
        return CPU

    def device_count(self) -> int:
        return 1

    set_device = synchronize = empty_cache = _nothing
    device = _no_context

    def is_current_stream_capturing(self) -> bool:
        """False: there are no graphs. A CUDA build of torch raises here on a machine without a driver."""
        return False

    # ---- the one stream

    def current_stream(self, device: Any = None) -> CpuStream:
        """The program's own order of work."""
        return CpuStream()

    default_stream = current_stream
    stream = _no_context

    # ---- the one generator: the CPU's, which serves as both the host's and the device's

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator, which dropout draws from here."""
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    _lazy_init = _nothing

    def _lazy_call(self, callback: Any, **kwargs: Any) -> None:
        callback()

    # ---- called by rewritten expressions

    def to_device(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """For `x.cuda(...)` and `x.pin_memory(...)`: tensors and modules are returned unchanged."""
        if isinstance(target, (torch.Tensor, torch.nn.Module)):
            return target
        return target.cuda(*args, **kwargs)

    def is_device(self, target: Any) -> Any:
        """For `x.is_cuda`: whether a tensor is on the device of the computation, which is the CPU."""
        return target.device.type == "cpu" if isinstance(target, torch.Tensor) else target.is_cuda

    def type_of(self, target: Any) -> Any:
        """For `x.type()`: megatron-core compares the result with names such as 'torch.cuda.FloatTensor'."""
        name = target.type()
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(target, torch.Tensor) else name

    def import_from(self, module: str, name: str) -> Any:
        """For `from torch.cuda... import name`: the facade's attribute, else the real one, else ImportError."""
        if hasattr(type(self), name):
            return getattr(self, name)
        owner: ModuleType = importlib.import_module(module)
        try:
            return getattr(owner, name)
        except AttributeError:
            raise ImportError(f"cannot import name {name!r} from {module!r}") from None


ACCELERATOR = Accelerator()
