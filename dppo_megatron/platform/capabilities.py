"""What the machine can do, checked before a model is built: Megatron silently ignores `fp8=...` without Transformer
Engine."""

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
"""What megatron-core 0.16.1 requires; the same as in the extra `te` of pyproject.toml."""
_LEAST_CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""The oldest compute capability for which Transformer Engine has the recipe: Ada, Ada, Hopper, Blackwell."""
_AVAILABILITY = {
    "is_fp8_available": ("tensorwise", "delayed"),
    "is_fp8_block_scaling_available": ("blockwise",),
    "is_mxfp8_available": ("mxfp8",),
}
"""Functions of Transformer Engine -> the recipes they are about; results also depend on the CUDA it was built for."""

_CUDNN_PARTS = ("graph", "ops", "cnn", "adv", "heuristic", "engines_precompiled", "engines_runtime_compiled")
"""The libraries of cuDNN 9, each after those that it needs."""
_WITHOUT = " without flash-attn"
_HEADS = (128, 128)
_FLASH_ATTN = (Version("2.1.1"), Version("2.7.3"), Version("2.8.3"))
"""The oldest flash-attn that Transformer Engine 2.11 uses, the oldest on Blackwell, and the newest (backends.py).
flash-attn-4 is another distribution."""
_FUSED_WEIGHT_GRADIENTS = "fused_weight_gradient_mlp_cuda"


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and packages of a machine, which decide what can run on it."""

    cuda_capability: tuple[int, int] | None
    """Compute capability of the current device; None without CUDA."""
    lacks_transformer_engine: str
    """Why Transformer Engine cannot be used; empty if it can."""
    refused_recipes: Mapping[str, str] = field(default_factory=dict)
    """FP8 recipe -> why Transformer Engine refuses it here; empty for a machine that is only being planned for."""
    has_flash_attention: bool = False
    """Whether a flash-attn is installed that Transformer Engine uses; False for a machine that is only planned for."""

    def choose_layer_spec(
        self, wanted: str, fp8: str, *, has_experts: bool, heads: tuple[int, int] = _HEADS
    ) -> tuple[LayerSpec, str]:
        """The layer spec for `actor.layer_spec` and `actor.fp8`, and the reason for it. If Transformer Engine's
        attention is not fused for `heads`, the sizes of a head's keys and values, `auto` takes Megatron's own layers
        for dense models; for a mixture of experts it does not, as these run the experts one by one. Raises UserError
        if the wanted spec or recipe cannot run here."""
        lacks = "there is no CUDA device" if self.cuda_capability is None else self.lacks_transformer_engine
        if fp8 != "off" and (refusal := self.lacks_for_fp8(fp8)):
            raise UserError(f"actor.fp8 = {fp8}: {refusal}; use fp8 = off")
        if wanted == "te" and lacks:
            raise UserError(f"actor.layer_spec = te: {lacks}; use layer_spec = auto or local")
        if wanted == "local":
            return "local", "as configured"
        if lacks:
            return "local", lacks
        unfused = self.lacks_fused_attention(heads)
        if unfused and wanted == "auto" and fp8 == "off" and not has_experts:
            return "local", unfused
        return "te", f"slow attention: {unfused}" if unfused else "Transformer Engine is installed"

    def check_context_parallel(self, spec: LayerSpec, context_parallel: int, heads: tuple[int, int] = _HEADS) -> None:
        """Raise `UserError` for context parallelism if Transformer Engine only has unfused attention: it lacks it."""
        if spec == "te" and context_parallel > 1 and (unfused := self.lacks_fused_attention(heads)):
            advice = "install flash-attn, or " if unfused.endswith(_WITHOUT) else ""
            where = f"actor.layout.context_parallel = {context_parallel}"
            raise UserError(f"{where}: {unfused}; {advice}set actor.layer_spec to local")

    def check_experts(self, expert_parallel: int, expert_tensor_parallel: int) -> None:
        """Raise `UserError` for an expert layout whose collectives gloo does not have."""
        if self.cuda_capability is None and expert_parallel > 1 and expert_tensor_parallel > 1:
            both = f"expert_parallel = {expert_parallel} with expert_tensor_parallel = {expert_tensor_parallel}"
            why = "gathers shards of unequal sizes, which gloo cannot; on a CPU set one to 1"
            raise UserError(f"actor.layout: {both} {why}")

    def check_mixture(self) -> None:
        """Raise `UserError` where a mixture-of-experts model cannot run: on CUDA, the router of megatron-core 0.16
        reads a name that only Transformer Engine defines."""
        if self.cuda_capability is not None and (lacks := self.lacks_transformer_engine):
            raise UserError(f"a mixture-of-experts model on CUDA needs Transformer Engine: {lacks}")

    def check_recompute(self, modules: Collection[str]) -> None:
        """Raise `UserError` for modules that megatron-core can recompute only where Transformer Engine is installed,
        with either layer spec: it reads names that Transformer Engine defines."""
        needing = [name for name in ("layernorm", "moe_act") if name in modules]
        if needing and self.lacks_transformer_engine:
            raise UserError(f"actor.recompute_modules = {', '.join(needing)}: {self.lacks_transformer_engine}")

    def check_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Raise `UserError` for memory savings that only Transformer Engine's Adam supports, if it is missing."""
        saves = optimizer.cpu_offload or {optimizer.moments_dtype, optimizer.main_params_dtype} != {"float32"}
        if saves and self.lacks_transformer_engine:
            what = "actor.optimizer.moments_dtype and main_params_dtype below float32, and cpu_offload"
            raise UserError(f"{what}: {self.lacks_transformer_engine}")

    def check_logprob_kernel(self, wanted: str) -> None:
        """Raise `UserError` if `actor.logprob_kernel` needs CUDA and there is none."""
        if wanted == "triton" and self.cuda_capability is None:
            raise UserError("actor.logprob_kernel = triton: there is no CUDA device; use auto or torch")

    def adam(self) -> str:
        """The Adam that Megatron uses here, in its order of preference; on CUDA also which better ones are missing."""
        if not self.lacks_transformer_engine:
            return "Transformer Engine's FusedAdam"
        if importlib.util.find_spec("apex") is not None:
            return "Apex's FusedAdam"
        missing = "" if self.cuda_capability is None else " (neither Transformer Engine nor Apex is installed)"
        return f"torch's fused AdamW{missing}"

    @property
    def fuses_weight_gradients(self) -> bool:
        """Whether matrix products can add weight gradients to the main gradients. Transformer Engine's layers can by
        themselves, but Megatron's output layer needs Apex's extension, so Megatron refuses the setting without it."""
        return self.cuda_capability is not None and importlib.util.find_spec(_FUSED_WEIGHT_GRADIENTS) is not None

    def weight_gradients(self) -> str:
        """Whether weight gradients are added to the main gradients inside the matrix product; if not, the reason."""
        if self.cuda_capability is None:
            return "added after the product (there is no CUDA device)"
        if not self.fuses_weight_gradients:
            return f"added after the product (Apex's {_FUSED_WEIGHT_GRADIENTS} is not installed)"
        return f"added inside the product (Apex's {_FUSED_WEIGHT_GRADIENTS})"

    def lacks_fused_attention(self, heads: tuple[int, int] = _HEADS) -> str:
        """Why Transformer Engine (2.11) has no fused attention over packs for these sizes of a head's keys and values,
        and would store all attention scores in training; empty if it has, from cuDNN or from flash-attn."""
        chip = self.cuda_capability
        can_flash = chip is not None and _flash_attn_has(chip, *heads)
        if chip is None or _cudnn_has(chip, *heads) or (can_flash and self.has_flash_attention):
            return ""
        sizes = "" if heads == _HEADS else " with heads of {} and values of {}".format(*heads)
        without = _WITHOUT if can_flash else ""
        return "Transformer Engine has no fused attention over packs{} on sm_{}{}{}".format(sizes, *chip, without)

    def lacks_for_fp8(self, recipe: str) -> str:
        """Why an FP8 recipe cannot run here; empty if it can."""
        if self.cuda_capability is None:
            return "there is no CUDA device"
        if self.lacks_transformer_engine:
            return self.lacks_transformer_engine
        least = _LEAST_CAPABILITY[recipe]
        if self.cuda_capability >= least:
            return self.refused_recipes.get(recipe, "")
        return "it needs a chip of sm_{}{} or newer; this one is sm_{}{}".format(*least, *self.cuda_capability)


def _cudnn_has(chip: tuple[int, int], key: int, value: int) -> bool:
    """Whether Transformer Engine trains heads of these sizes over packs with cuDNN (`nvte_get_fused_attn_backend`)."""
    if chip < (9, 0) or chip == (12, 0) or key % 8 or value % 8:
        return False
    if max(key, value) <= 128 or (key, value) == (192, 128):
        return True
    return chip == (9, 0) and max(key, value) <= 256 and (key == value or min(key, value) < 128)


def _flash_attn_has(chip: tuple[int, int], key: int, value: int) -> bool:
    """Whether Transformer Engine trains heads of these sizes with flash-attn 2 (`get_attention_backend`)."""
    most = 256 if chip in ((8, 0), (9, 0), (10, 0), (12, 0)) else 192
    return chip >= (8, 0) and key == value <= most and key % 8 == 0


def why_gpus_are_unused() -> str:
    """Why torch cannot use this machine's GPUs, for example an old driver; empty if it can or there are none. In that
    case torch only warns and uses the CPU."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    hidden = first in ("", "-1", "NoDevFiles", "void")  # the last two are Slurm's and Docker's
    if torch.cuda.is_available() or hidden or torch.version.cuda is None or not any(Path("/dev").glob("nvidia[0-9]*")):
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it finds none"
    except Exception as error:  # the class depends on the cause
        reason = " ".join(str(error).split())
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use this machine's GPUs: {reason}; install a"
        " driver and a torch that match, or train on the CPU with CUDA_VISIBLE_DEVICES="
    )


def check_gpus() -> None:
    """Raise `UserError` if the machine has GPUs, but the job would run on its CPU."""
    if why := why_gpus_are_unused():
        raise UserError(why)


def this_machine() -> Machine:
    """The current process's device and installed packages."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    problem = _transformer_engine_problem(capability is not None)
    return Machine(capability, problem, {} if problem else _refused_recipes(), _has_flash_attention(capability))


def _has_flash_attention(capability: tuple[int, int] | None) -> bool:
    oldest, oldest_on_blackwell, newest = _FLASH_ATTN
    if capability is not None and capability >= (10, 0):
        oldest = oldest_on_blackwell
    try:
        return oldest <= Version(importlib.metadata.version("flash-attn")) <= newest
    except importlib.metadata.PackageNotFoundError:
        return False


@functools.cache
def _transformer_engine_problem(on_cuda: bool) -> str:
    """Why Transformer Engine's layers cannot be used; empty if they can. On CUDA we import it instead of only searching
    for it: its core wheel can be installed without the torch extension."""
    if importlib.util.find_spec("transformer_engine") is None:
        return f"Transformer Engine (transformer-engine[pytorch]{TRANSFORMER_ENGINE_RANGE}) is not installed"
    if not on_cuda:
        return "Transformer Engine is installed, but there is no CUDA device"
    try:
        with _cudnn_of_torch(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")):
            importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken binary may raise anything
        return f"Transformer Engine is installed but cannot be imported: {type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _cudnn_of_torch(maps: str) -> Iterator[None]:
    """Make Transformer Engine use the cuDNN that torch has loaded, unless an environment variable names another.

    By itself it searches the system first. With two versions in a process its attention can fail with
    SUBLIBRARY_LOADING_FAILED, depending on the order of loading. Its library needs all parts of cuDNN, but loads them
    itself only if it finds none in the system. The variable is set only inside the block: servers may have another
    cuDNN. `maps`: the lines of /proc/self/maps.
    """
    loaded = next((Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if "/libcudnn.so." in line), None)
    named = os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH")
    if loaded is None or (named and not any(map(loaded.samefile, Path(named).rglob("libcudnn.so*")))):
        yield
        return
    for part in _CUDNN_PARTS:
        with contextlib.suppress(OSError):  # an older cuDNN has other parts
            ctypes.CDLL(str(loaded.with_name(loaded.name.replace("cudnn", f"cudnn_{part}"))), ctypes.RTLD_GLOBAL)
    if named:
        yield
        return
    before = os.environ.get("CUDNN_HOME")  # None or an empty string
    os.environ["CUDNN_HOME"] = str(loaded.parent)
    try:
        yield
    finally:
        del os.environ["CUDNN_HOME"]
        os.environ |= {} if before is None else {"CUDNN_HOME": before}


@functools.cache
def _refused_recipes() -> dict[str, str]:
    """FP8 recipe -> why the imported Transformer Engine refuses it. For example, blockwise on Hopper needs CUDA 12.9;
    without this check Transformer Engine would report that only in the first forward pass."""
    engine, refused = importlib.import_module("transformer_engine.pytorch"), dict[str, str]()
    for name, recipes in _AVAILABILITY.items():
        check = getattr(engine, name, None)  # missing before 2.9, and the doctor warns of those releases
        is_available, reason = check(return_reason=True) if check else (True, "")
        refused |= {} if is_available else dict.fromkeys(recipes, f"Transformer Engine reports: {reason.rstrip('.')}")
    return refused


def hide_unusable_transformer_engine(on_cuda: bool) -> None:
    """Hide an unusable Transformer Engine from Megatron, which takes an installed one to be usable: importing a core
    without the torch extension raises FileNotFoundError, and on a CPU Megatron would use FusedAdam. Call this before
    Megatron is imported."""
    problem = _transformer_engine_problem(on_cuda)
    if problem and importlib.util.find_spec("transformer_engine") is not None:
        for name in [name for name in sys.modules if name.startswith("transformer_engine.")]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # makes the import raise


def transformer_engine_warning() -> str:
    """A warning if megatron-core does not support the installed version of Transformer Engine; else empty."""
    try:
        return outside_range(*map(importlib.metadata.version, ("transformer-engine", "megatron-core")))
    except importlib.metadata.PackageNotFoundError:
        return ""


def outside_range(transformer_engine: str, megatron: str) -> str:
    """A warning if these two versions do not match; else empty. megatron-core 0.17 and newer have no upper bound."""
    wanted = TRANSFORMER_ENGINE_RANGE
    if Version(megatron) >= Version("0.17"):
        wanted = wanted.partition(",")[0]
    if SpecifierSet(wanted).contains(transformer_engine, prereleases=True):
        return ""
    return f"Transformer Engine {transformer_engine} is outside {wanted}, which megatron-core {megatron} supports"
