"""What the machine can do, asked before a model is built: which layers, which FP8 recipe.

Megatron ignores `fp8=...` in silence where there is no Transformer Engine, so asking is not optional.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dppo_megatron.config.schema import OptimizerConfig
from dppo_megatron.types import UserError

LayerSpec: TypeAlias = Literal["te", "local"]

TRANSFORMER_ENGINE_RANGE = ">=2.9,<2.12"
"""What megatron-core 0.16.1 names; the extra `te` in pyproject.toml says the same."""
_LEAST_CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Compute capability from which Transformer Engine has the recipe: Ada and Hopper, Hopper, Blackwell."""
_ASKED = {
    "is_fp8_available": ("tensorwise", "delayed"),
    "is_fp8_block_scaling_available": ("blockwise",),
    "is_mxfp8_available": ("mxfp8",),
}
"""Transformer Engine's own answers, which also depend on the CUDA that it was built for."""

_CUDNN_PARTS = ("graph", "ops", "cnn", "adv", "heuristic", "engines_precompiled", "engines_runtime_compiled")
"""Of cuDNN 9, each after what it needs."""
_WITHOUT = " without flash-attn"
_FUSED_WEIGHT_GRADIENTS = "fused_weight_gradient_mlp_cuda"


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides between the layer specs."""

    cuda_capability: tuple[int, int] | None
    """Compute capability of the current device; None without CUDA."""
    lacks_transformer_engine: str
    """Why Transformer Engine cannot be used; empty if it can."""
    refused_recipes: Mapping[str, str] = field(default_factory=dict)
    """FP8 recipe -> why Transformer Engine refuses it here; nothing of a machine that is only planned for."""
    has_flash_attention: bool = False
    """Whether flash-attn is installed; not assumed of a machine that is only planned for."""

    def choose_layer_spec(self, wanted: str, fp8: str, *, has_experts: bool) -> tuple[LayerSpec, str]:
        """The layer spec for `actor.layer_spec` and `actor.fp8`, and why.

        Megatron's own layers run a mixture's experts one by one, so `auto` takes them for dense models alone where
        Transformer Engine's attention is not fused.

        Raises:
            UserError: the wanted spec or recipe cannot run here.
        """
        lacks = self._lacks()
        if fp8 != "off" and (refusal := self.lacks_for_fp8(fp8)):
            raise UserError(f"actor.fp8 = {fp8}: {refusal}; use fp8 = off")
        if wanted == "te" and lacks:
            raise UserError(f"actor.layer_spec = te: {lacks}; use layer_spec = auto or local")
        if wanted == "local":
            return "local", "as configured"
        if lacks:
            return "local", lacks
        unfused = self.lacks_fused_attention()
        if unfused and wanted == "auto" and fp8 == "off" and not has_experts:
            return "local", unfused
        return "te", f"slow attention: {unfused}" if unfused else "Transformer Engine is installed"

    def check_context_parallel(self, spec: LayerSpec, context_parallel: int) -> None:
        """Raise `UserError` for sequences that are shared where only unfused attention is left, which cannot."""
        if spec == "te" and context_parallel > 1 and (unfused := self.lacks_fused_attention()):
            advice = "set actor.layer_spec to local"
            if unfused.endswith(_WITHOUT):
                advice = f"install flash-attn, or {advice}"
            raise UserError(f"actor.layout.context_parallel = {context_parallel}: {unfused}; {advice}")

    def check_experts(self, expert_parallel: int, expert_tensor_parallel: int) -> None:
        """Raise `UserError` for an expert layout whose collectives gloo does not have."""
        if self.cuda_capability is None and expert_parallel > 1 and expert_tensor_parallel > 1:
            raise UserError(
                f"actor.layout: expert_parallel = {expert_parallel} with expert_tensor_parallel ="
                f" {expert_tensor_parallel} gathers shares of different sizes, which gloo cannot; on a CPU set one to 1"
            )

    def check_mixture(self) -> None:
        """Raise `UserError` where a mixture-of-experts model cannot run: without Transformer Engine megatron-core
        0.16's router reads, on CUDA, a name that only Transformer Engine defines."""
        if self.cuda_capability is not None and self.lacks_transformer_engine:
            raise UserError(f"a mixture-of-experts model on CUDA needs it: {self.lacks_transformer_engine}")

    def check_recompute(self, modules: Collection[str]) -> None:
        """Raise `UserError` for parts of a layer that megatron-core recomputes with Transformer Engine only, whatever
        the layers are: it reads names that Transformer Engine defines."""
        needing = [name for name in ("layernorm", "moe_act") if name in modules]
        if needing and self.lacks_transformer_engine:
            raise UserError(f"actor.recompute_modules = {', '.join(needing)}: {self.lacks_transformer_engine}")

    def check_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Raise `UserError` for savings of memory that only Transformer Engine's Adam knows."""
        saves = optimizer.cpu_offload or (optimizer.moments_dtype, optimizer.main_params_dtype) != (
            "float32",
            "float32",
        )
        if saves and self.lacks_transformer_engine:
            raise UserError(
                "actor.optimizer.moments_dtype and main_params_dtype below float32, and cpu_offload:"
                f" {self.lacks_transformer_engine}"
            )

    def check_logprob_kernel(self, wanted: str) -> None:
        """Raise `UserError` for kernels of `actor.logprob_kernel` that need another device."""
        if wanted == "triton" and self.cuda_capability is None:
            raise UserError("actor.logprob_kernel = triton: there is no CUDA device; use auto or torch")

    def adam(self) -> str:
        """Which Adam Megatron takes here, in its order of choice, and on CUDA what is missed."""
        if not self.lacks_transformer_engine:
            return "Transformer Engine's FusedAdam"
        if importlib.util.find_spec("apex") is not None:
            return "Apex's FusedAdam"
        missed = "" if self.cuda_capability is None else " (neither Transformer Engine nor Apex is installed)"
        return f"torch's fused AdamW{missed}"

    @property
    def fuses_weight_gradients(self) -> bool:
        """Whether matrix products can add weight gradients to the main gradients. Transformer Engine's layers could
        alone, but Megatron refuses the setting for its own output layer without Apex's extension."""
        return self.cuda_capability is not None and importlib.util.find_spec(_FUSED_WEIGHT_GRADIENTS) is not None

    def weight_gradients(self) -> str:
        """Whether weight gradients are added to the main gradients inside the matrix product, and what is missed."""
        if self.cuda_capability is None:
            return "added after the product (there is no CUDA device)"
        if not self.fuses_weight_gradients:
            return f"added after the product (Apex's {_FUSED_WEIGHT_GRADIENTS} is not installed)"
        return f"added inside the product (Apex's {_FUSED_WEIGHT_GRADIENTS})"

    def _lacks(self) -> str:
        if self.cuda_capability is None:
            return "there is no CUDA device"
        return self.lacks_transformer_engine

    def lacks_fused_attention(self) -> str:
        """Why Transformer Engine (2.11) would hold whole scores of a pack's sequences; empty where its attention over
        packs is fused: by cuDNN from sm_90 on, but not on sm_120, elsewhere by flash-attn from sm_80 on."""
        chip = self.cuda_capability
        if chip is None or (chip >= (9, 0) and chip != (12, 0)) or (chip >= (8, 0) and self.has_flash_attention):
            return ""
        without = _WITHOUT if chip >= (8, 0) else ""  # flash-attn has no kernels for older chips
        return "Transformer Engine has no fused attention over packs on sm_{}{}{}".format(*chip, without)

    def lacks_for_fp8(self, recipe: str) -> str:
        """Why an FP8 recipe cannot run here; empty if it can."""
        lacks = self._lacks()
        if lacks or self.cuda_capability is None:
            return lacks
        least = _LEAST_CAPABILITY[recipe]
        if self.cuda_capability >= least:
            return self.refused_recipes.get(recipe, "")
        return "it needs a chip of sm_{}{} or newer; this one is sm_{}{}".format(*least, *self.cuda_capability)


def why_gpus_are_unused() -> str:
    """What torch says against GPUs that this machine shows, an old driver for one; empty where there is nothing to say.
    It takes the CPU then, with no more than a warning."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    hidden = first in ("", "-1", "NoDevFiles", "void")  # the last two are Slurm's and Docker's
    if torch.cuda.is_available() or hidden or torch.version.cuda is None or not any(Path("/dev").glob("nvidia[0-9]*")):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        said = "it finds none"
    except Exception as error:  # torch's own kinds, by cause
        said = " ".join(str(error).split())
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use this machine's GPUs: {said}; install the"
        " driver or the torch that the other needs, or train on the CPU with CUDA_VISIBLE_DEVICES="
    )


def check_gpus() -> None:
    """Raise `UserError` where a job would be trained on the CPU beside GPUs."""
    if why := why_gpus_are_unused():
        raise UserError(why)


def this_machine() -> Machine:
    """The current process's device and installed packages."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    problem = _transformer_engine_problem(capability is not None)
    has_flash_attention = importlib.util.find_spec("flash_attn") is not None
    return Machine(capability, problem, {} if problem else _refused_recipes(), has_flash_attention)


@functools.cache
def _transformer_engine_problem(on_cuda: bool) -> str:
    """Why Transformer Engine's layers cannot be used; empty if they can.

    On CUDA it is imported and not only looked for: its core wheel installs without the torch extension, and then
    Megatron fails in the middle of building a model.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return f"Transformer Engine (transformer-engine[pytorch]{TRANSFORMER_ENGINE_RANGE}) is not installed"
    if not on_cuda:
        return "Transformer Engine is installed, but there is no CUDA device"
    try:
        with _cudnn_of_torch(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")):
            importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # whatever a broken binary raises
        return f"Transformer Engine is installed but cannot be imported: {type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _cudnn_of_torch(maps: str) -> Iterator[None]:
    """Have Transformer Engine use the cuDNN that torch has loaded, by the lines of /proc/self/maps, unless a variable
    names another. By itself it looks in the system first, and with two versions in a process its attention can end in
    SUBLIBRARY_LOADING_FAILED, by the order of loading: on an H200, torch's 9.19 from pip in an image with 9.14.

    Its library needs all parts of cuDNN, which it would open itself only where it has found no system's. The variable
    does not stay: servers may have another cuDNN.
    """
    loaded = next((Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if "/libcudnn.so." in line), None)
    named = os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH")
    if loaded is None or (named and not any(map(loaded.samefile, Path(named).rglob("libcudnn.so*")))):
        yield
        return
    for part in _CUDNN_PARTS:
        with contextlib.suppress(OSError):  # an older cuDNN has others
            ctypes.CDLL(str(loaded.with_name(loaded.name.replace("cudnn", f"cudnn_{part}"))), ctypes.RTLD_GLOBAL)
    if named:
        yield
        return
    before = os.environ.get("CUDNN_HOME")  # empty, if it is set
    os.environ["CUDNN_HOME"] = str(loaded.parent)
    try:
        yield
    finally:
        del os.environ["CUDNN_HOME"]
        os.environ |= {} if before is None else {"CUDNN_HOME": before}


@functools.cache
def _refused_recipes() -> dict[str, str]:
    """What an imported Transformer Engine says against recipes: blockwise on Hopper, for one, needs CUDA 12.9, and it
    says so only in the first forward pass."""
    engine, refused = importlib.import_module("transformer_engine.pytorch"), dict[str, str]()
    for name, recipes in _ASKED.items():
        ask = getattr(engine, name, None)  # none of releases before 2.9, of which the report warns
        is_available, reason = ask(return_reason=True) if ask else (True, "")
        refused |= {} if is_available else dict.fromkeys(recipes, f"Transformer Engine says: {reason.rstrip('.')}")
    return refused


def hide_what_cannot_run(on_cuda: bool) -> None:
    """Let Megatron find no Transformer Engine where it cannot be used: for it, installed is usable. Its own import of a
    core without the extension ends in FileNotFoundError, and on a CPU it would take FusedAdam. Before Megatron is
    imported."""
    problem = _transformer_engine_problem(on_cuda)
    if problem and importlib.util.find_spec("transformer_engine") is not None:
        for name in [name for name in sys.modules if name.startswith("transformer_engine.")]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # import then raises


def transformer_engine_warning() -> str:
    """A sentence where the installed Transformer Engine is outside what megatron-core was written for; else empty."""
    try:
        version = importlib.metadata.version("transformer-engine")
        megatron = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return outside_range(version, megatron)


def outside_range(transformer_engine: str, megatron: str) -> str:
    """A warning about these two versions; empty if they go together. Newer megatron-cores than 0.16 name no
    upper end."""
    wanted = TRANSFORMER_ENGINE_RANGE
    if Version(megatron) >= Version("0.17"):
        wanted = wanted.partition(",")[0]
    if SpecifierSet(wanted).contains(transformer_engine, prereleases=True):
        return ""
    return f"Transformer Engine {transformer_engine} is outside {wanted}, which megatron-core {megatron} supports"
