"""The CPU platform rewrites: the rules and their limits, true lines, the byte code kept, and torch left alone.

What megatron-core then computes is in test_platform_megatron.py.

Whatever could leave a mark on this process (refusals, the order of imports) runs in a process of its own.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import py_compile
import subprocess
import sys
import textwrap
import traceback
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from dppo_megatron.platform import hook
from dppo_megatron.platform.hook import ACCELERATOR, CPU, FACADE, Loader, rewrite

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform is never active where CUDA is")


def run_python(script: str, **environment: str) -> Any:
    """Run `script` in a new interpreter and return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr
    return {"stderr": done.stderr, **json.loads(done.stdout.splitlines()[-1])}


# ---- the rules


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.empty(1, device=torch.cuda.current_device())", "torch.empty(1, device=F.current_device())"),
        ("torch.cuda.nvtx.range_push('a')", "F.nvtx.range_push('a')"),
        ("torch.empty(1, device='cuda')", "torch.empty(1, device='cpu')"),
        ("torch.empty(1, device='cuda:3')", "torch.empty(1, device='cpu')"),
        ("x.device.type == 'cuda'", "x.device.type == 'cpu'"),
        ("x.cuda(non_blocking=True)", "F.to_device(x, non_blocking=True)"),
        ("f(y).pin_memory().cuda()", "F.to_device(F.to_device(f(y)))"),
        ("if x.is_cuda: pass", "if F.is_device(x): pass"),
        ("x.type() == 'torch.cuda.FloatTensor'", "F.type_of(x) == 'torch.cuda.FloatTensor'"),
        ("torch.zeros(2, pin_memory=self.pin)", "torch.zeros(2, pin_memory=False)"),
        ("from torch.cuda import _lazy_call as c", "c = F.import_from('torch.cuda', '_lazy_call')"),
    ],
)
def test_each_rule_rewrites_its_expression(source: str, expected: str) -> None:
    rewritten = ast.unparse(rewrite(source, "x.py"))
    assert rewritten == ast.unparse(ast.parse(expected.replace("F.", FACADE + ".").replace("= F", "= " + FACADE)))


@pytest.mark.parametrize(
    "source",
    [
        "x.type(torch.float32)",  # a cast
        "other.cuda.stream()",  # not torch's
        "print('no cuda here', 'cuda graph', f'cuda graph {x}', f'cuda{v}')",  # text
        "import torch.cuda",  # binds torch
        "cuda = 1",
        "self.is_cuda = True",  # an assignment, not a question
        "from .torch.cuda import x",
    ],
)
def test_no_rule_reaches_further_than_it_should(source: str) -> None:
    assert ast.dump(rewrite(source, "x.py")) == ast.dump(ast.parse(source))


def test_facade_answers_only_what_it_knows() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert ACCELERATOR.to_device(x) is x
    assert ACCELERATOR.is_device(x) and not ACCELERATOR.is_device(x.to("meta"))
    assert ACCELERATOR.type_of(x) == "torch.cuda.BFloat16Tensor"
    assert torch.empty(1, device=ACCELERATOR.current_device()).device == CPU
    assert ACCELERATOR.is_available() is False
    with pytest.raises((RuntimeError, AssertionError)):
        ACCELERATOR.get_device_properties(0)
    with pytest.raises(ImportError, match="no_such_name"):
        ACCELERATOR.import_from("torch.cuda", "no_such_name")


def test_facade_seed_governs_the_cpu_generator() -> None:
    ACCELERATOR.manual_seed(5)
    state, first = ACCELERATOR.get_rng_state(), torch.rand(3)
    ACCELERATOR.random.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), first)


# ---- lines


def line_numbers(code: types.CodeType) -> dict[str, list[tuple[int, set[int]]]]:
    """For each function by qualified name: its first line and all lines that its code can be at."""
    found: dict[str, list[tuple[int, set[int]]]] = {}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            lines = {line for *_, line in constant.co_lines() if line is not None}
            found.setdefault(constant.co_qualname, []).append((constant.co_firstlineno, lines))
            for name, value in line_numbers(constant).items():
                found.setdefault(name, []).extend(value)
    return found


def test_lines_of_megatron_core_stay_true() -> None:
    """Every function of every fourth rewritten file keeps its lines; all files would take 5 s and find no more."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations is not None
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
    files = [file for file in files if b"cuda" in file.read_bytes()]
    assert len(files) > 60
    for file in files[::4]:
        plain = line_numbers(compile(file.read_bytes(), str(file), "exec", dont_inherit=True))
        ours = line_numbers(compile(rewrite(file.read_bytes(), str(file)), str(file), "exec", dont_inherit=True))
        assert ours == plain, file


SOURCE = '''\
import torch


def fail(x):
    """A rewritten expression above, beside and below the line that raises."""
    y = x.cuda().to(
        torch.cuda.current_device()
    )
    if y.is_cuda:
        raise ValueError("on purpose")  # line 10
    return torch.device("cuda")
'''


def load(folder: Path, source: str = SOURCE) -> types.ModuleType:
    """Import `source` as a module through the hook's loader."""
    path = folder / "sample.py"
    path.write_text(source)
    loader = Loader("sample", str(path))
    spec = importlib.util.spec_from_loader("sample", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("from_cache", [False, True])
def test_traceback_points_at_the_true_line(tmp_path: Path, from_cache: bool) -> None:
    for _ in range(1 + from_cache):
        module = load(tmp_path)
    with pytest.raises(ValueError, match="on purpose") as raised:
        module.fail(torch.zeros(1))
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno) == (str(tmp_path / "sample.py"), 10)
    assert frame.line == 'raise ValueError("on purpose")  # line 10'


# ---- the byte code


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of what is rewritten, in turn."""
    paths: list[str] = []

    def noting(source: bytes, path: str) -> ast.Module:
        paths.append(path)
        return rewrite(source, path)

    monkeypatch.setattr(hook, "rewrite", noting)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return paths


def test_changed_source_or_rules_are_rewritten(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else: byte code is made once, and the plain module's is never taken for it, nor replaced."""
    plain = Path(py_compile.compile(str(_written(tmp_path)), doraise=True) or "")
    before = plain.read_bytes()
    for count in (1, 1):
        assert load(tmp_path).fail and len(compiled) == count
    assert load(tmp_path, SOURCE + "\nnew = torch.device('cuda')\n").new == CPU and len(compiled) == 2
    monkeypatch.setattr(hook, "_RULES", "dppo-others")
    assert load(tmp_path, SOURCE + "\nnew = torch.device('cuda')\n").new == CPU and len(compiled) == 3
    assert plain.read_bytes() == before and len(list(plain.parent.iterdir())) == 3


def _written(folder: Path) -> Path:
    path = folder / "sample.py"
    path.write_text(SOURCE)
    return path


def test_directory_that_cannot_be_written_is_not_an_error(tmp_path: Path, compiled: list[str]) -> None:
    (tmp_path / "__pycache__").write_text("")
    for count in (1, 2):
        assert load(tmp_path).fail and len(compiled) == count


# ---- enabling, and torch left alone


IMPORT_AND_COMPARE = """
import json, sys
import torch, torch.cuda.nvtx, torch.cuda.memory, torch.cuda.random
import torch._dynamo  # whatever it changes in torch is not ours

OWNERS = [torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module, torch.distributed]
before = [dict(vars(owner)) for owner in OWNERS]
from dppo_megatron import platform
from dppo_megatron.platform import hook
rewritten = []
hook.rewrite = lambda source, path, plain=hook.rewrite: (rewritten.append(path), plain(source, path))[1]
platform.prepare(); platform.prepare()
import megatron.core.models.gpt.gpt_model, megatron.core.optimizer, megatron.core.dist_checkpointing
changed = [
    f"{owner.__name__}.{name}"
    for owner, names in zip(OWNERS, before)
    for name, value in names.items()
    if vars(owner).get(name) is not value and name != "__warningregistry__"
]
finders = [type(finder).__module__ for finder in sys.meta_path].count("dppo_megatron.platform.hook")
print(json.dumps({
    "changed": changed, "finders": finders, "rewritten": len(rewritten),
    "jit_fuser_off": megatron.core.jit.jit_fuser is megatron.core.jit.noop_decorator,
    "facade_in_torch": any("__dppo_accelerator__" in vars(owner) for owner in OWNERS),
}))
"""


@pytest.mark.long
@pytest.mark.slow
def test_torch_is_untouched_and_a_second_process_rewrites_nothing(tmp_path: Path) -> None:
    environment = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    first, second = run_python(IMPORT_AND_COMPARE, **environment), run_python(IMPORT_AND_COMPARE, **environment)
    for result in (first, second):
        assert result["changed"] == [] and not result["facade_in_torch"]
        assert result["finders"] == 1 and result["jit_fuser_off"]
        assert "Falling back to" not in result["stderr"]
    assert first["rewritten"] > 60 and second["rewritten"] == 0


@pytest.mark.slow
def test_nothing_is_done_where_cuda_is_available() -> None:
    result = run_python(
        """
        import importlib.util, json, sys
        import torch
        torch.cuda.is_available = lambda: True  # stands for a machine with a GPU
        from dppo_megatron import platform
        finders, filters = list(sys.meta_path), __import__("warnings").filters[:]
        device = platform.prepare()
        untouched = finders == sys.meta_path and filters == __import__("warnings").filters
        import megatron.core.jit, megatron.core.tensor_parallel.random as random
        loaders = {type(sys.modules[name].__loader__).__module__
                   for name in list(sys.modules) if name.startswith("megatron.core")}
        print(json.dumps({
            "device": device, "untouched": untouched,
            "loaders": sorted(loaders), "facade": "__dppo_accelerator__" in vars(random),
            "default": random._get_cuda_rng_state.__defaults__[0],
            "jit_fuser_off": megatron.core.jit.jit_fuser is megatron.core.jit.noop_decorator,
        }))
        """
    )
    assert result["device"] == "cuda" and result["untouched"]
    assert not any("dppo" in loader for loader in result["loaders"]) and not result["facade"]
    assert result["default"] == "cuda" and not result["jit_fuser_off"]


@pytest.mark.slow
def test_enabling_after_megatron_was_imported_is_an_error() -> None:
    result = run_python(
        """
        import json, sys
        import megatron.core
        from dppo_megatron import platform
        finders = list(sys.meta_path)
        try:
            platform.prepare()
        except RuntimeError as error:
            print(json.dumps({"message": str(error), "untouched": finders == sys.meta_path}))
        """
    )
    assert "imported before" in result["message"] and result["untouched"]


def test_harmless_warnings_are_silent_where_filters_were_reset_and_others_are_not(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """pytest resets the warning filters for each test, after conftest.py has called prepare()."""
    source = """
        import warnings
        warnings.warn("Apex is not installed. Falling back to Torch Norm")
        warnings.warn("Apex is not installed, and that is serious")
        """
    path = tmp_path / "noisy.py"
    path.write_text(textwrap.dedent(source))
    name = "megatron.core.noisy"
    loader = Loader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    loader.exec_module(importlib.util.module_from_spec(spec))
    assert [str(warning.message) for warning in recwarn] == ["Apex is not installed, and that is serious"]


IMPORTED = """
import sys
import dppo_megatron.run
never = ("aiohttp", "plotly", "rich", "argcomplete", "pandas", "pyarrow", "wandb", "dppo_megatron.rollout.servers")
never += ("dppo_megatron.rewards.math.grader", "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard")
print([name for name in never if name in sys.modules])
"""


def test_a_rank_imports_what_its_first_step_needs() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
