"""The steps of `accept`, those most worth their time first, and the bar of each figure.

Each figure is listed once, with its bar and where the bar comes from. The page shows all of them, whatever has run: a
figure without a value has the reason. No torch here: the command's help reads this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Need: TypeAlias = Literal["cuda", "te", "te_on_cuda", "two_gpus", "no_single_gpu", "tests", "benchmark", "server"]
"""`no_single_gpu`: two ranks share a CPU over gloo, but NCCL refuses two on one GPU. `te`: Transformer Engine."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the page. Without `least` and `most` it is shown, not judged."""

    what: str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    of_prediction: bool = False
    """The bounds are factors of the prediction; without a prediction the figure is shown, not judged."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    what: str
    function: str
    """`module.function` of this package."""
    limit_s: float
    """It is stopped after this long, and not started with less time left."""
    figures: dict[str, Figure]
    needs: tuple[Need, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    ranks: int = 1


_FAR, _NORM = "mean |difference| of log-probabilities", "first grad_norm, relative difference"
_EXACT = "sums in another order: a CPU against itself at other layouts differs by 4e-7"
_HALF = "bfloat16 has 8 bits: a CPU's differs from its float32 by 2.6e-3, its third grad_norm by 2.2 %"
_FAMILY = "3 times what bfloat16 does on a CPU; a wrong window, base, scale or share: 0.09 to 0.6"
_STALE = "bfloat16 in the engine; receipts prove that the weights arrived"
_ROUNDING = "rounding of a few per cent a layer"
_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _most(what: str, bound: float, source: str) -> Figure:
    return Figure(what, most=bound, source=source)


def _far(case: str, far: float, norm: float, source: str) -> dict[str, Figure]:
    return {
        f"{case}_before": _most(f"{case}: {_FAR}", far, source),
        f"{case}_grad_norm": _most(f"{case}: {_NORM}", norm, source),
    }


def _parity(case: str, far: float, norm: float, source: str) -> dict[str, Figure]:
    after = _most(f"{case}: the same after 3 updates", 3 * far, source)
    return _far(case, far, norm, source) | {f"{case}_after": after}


FAMILIES = {"yarn": 0.03, "adapters": 0.03, "gemma3": 0.03, "glm4": 0.03, "qwen2_moe": 0.04, "adapters_moe": 0.03}
FAMILIES |= {"glm4_moe": 0.04, "deepseek_v3": 0.08, "adapters_latent": 0.08}
"""Models of `parity.MODELS`, and how far off their log-probabilities may be: on a CPU bfloat16 is 0.008 to 0.026."""


def _mfu(least: float) -> dict[str, Figure]:
    return {
        "mfu": Figure("useful FLOPs over the bfloat16 peak", "", least, source="the target for 4B at packs of 8,192"),
        "step_s": Figure("a step of 8 micro-batches", "s"),
        "peak_gib": Figure("peak of allocated memory", "GiB", most=130, source="an H200 has 140"),
    }


def _fp8(recipe: str, speed: float) -> dict[str, Figure]:
    return {
        f"{recipe}_gate": _most(f"{recipe}: largest share of a bound of the gate", 1, "doctor --fp8-gate"),
        f"{recipe}_speed": Figure(f"{recipe} over bfloat16", "x", speed, source="else it is not worth its rounding"),
        f"{recipe}_loss": _most(f"{recipe}: loss, relative difference", 0.02, _ROUNDING),
        f"{recipe}_grad_norm": _most(f"{recipe}: grad_norm, relative difference", 0.1, _ROUNDING),
    }


_IPC = {"right": Figure("round trips of 3 through another process", "", 3, source="a wrong byte is a wrong weight")}
_RUN = {
    "steps": Figure("steps of a training run", "", 3, source="it runs, and each sync has its receipts"),
    "mismatch": _most("its largest mismatch/logprob_abs_diff_mean", 0.05, _STALE),
    "sync_s": Figure("seconds of its last sync", "s"),
}
# fmt: off
STEPS: tuple[Step, ...] = (
    Step("environment", "What is installed, and a matrix product", "basics.environment", 50, {
        "matmul": Figure("8192 x 8192 bfloat16 product", "TFLOP/s", 0.75, None, True, "else throttled or shared"),
        "faults": _most("faults that `doctor` finds", 0, "each says what would be right"),
        "fp8_recipes": Figure("FP8 recipes that run here", "", 3, source="three from Hopper on"),
    }),
    Step("ipc", "Memory of one process mapped by another", "basics.ipc", 40, _IPC),
    Step("ipc-expandable", "The same from expandable segments", "basics.ipc", 40, _IPC, ("cuda",), _EXPANDABLE),
    Step("parity", "Against stored float32 references of a CPU, local layers", "parity.against_references", 90,
         _parity("float32 local", 1e-4, 1e-4, _EXACT) | _parity("bfloat16 local", 0.02, 0.03, _HALF),
         arguments=("local", "float32", "bfloat16")),
    Step("parity-te", "The same with Transformer Engine's layers", "parity.against_references", 60,
         _parity("bfloat16 te", 0.02, 0.03, _HALF), ("cuda", "te"), arguments=("te", "bfloat16")),
    Step("families", "The same of Gemma's windows, latent attention, YaRN, adapters, others", "parity.families", 90,
         {name: one for model, far in FAMILIES.items() for name, one in _parity(model, far, 0.03, _FAMILY).items()},
         ("te_on_cuda",)),
    Step("gpu-tests", "The repository's `-m gpu` tests of one process", "jobs.gpu_tests", 140, {
        "failed": _most("failed", 0, "each is a claim of the documentation"),
        "passed": Figure("passed", "", 1, source="a check that ran nothing has failed"),
        "skipped": Figure("skipped"),
    }, ("cuda", "tests")),
    Step("servers", "A colocated server that sleeps during updates: three steps", "jobs.three_steps", 240, _RUN | {
        "freed_share": Figure("memory of the card that sleep frees", "", 0.1, source="a server was given 0.3 of it"),
    }, ("server",), arguments=("colocate",)),
    Step("mfu-4b-te", "A step of 4B, Transformer Engine's layers", "speed.utilization", 80,
         _mfu(0.45), ("cuda", "te", "benchmark"), _EXPANDABLE, arguments=("te",)),
    Step("mfu-4b-local", "A step of 4B, local layers", "speed.utilization", 80,
         _mfu(0.38), ("cuda", "benchmark"), _EXPANDABLE, arguments=("local",)),
    Step("packed", "One batch of 0.6B packed, padded, and padded after sorting", "speed.packed", 70, {
        f"over_{other}": Figure(f"packed over {other}", "x", 0.9, None, True, "slots, less a tenth")
        for other in ("padded", "sorted")
    }, ("benchmark",), _EXPANDABLE),
    Step("memory", "Peak of each phase of 4B against `plan`", "speed.memory", 70, {
        phase: Figure(f"{phase}, device", "GiB", 0.9, 1.1, True, "`plan` decides by it whether a job fits")
        for phase in ("log-probs", "backward", "step")
    } | {
        "left": _most("share that stays while servers have the card", 0.1, "servers need the room"),
    }, ("cuda", "benchmark"), _EXPANDABLE),
    Step("job", "A job that is killed midway, and resumed", "jobs.killed_and_resumed", 140, {
        "steps": Figure("steps on record", "", 1, None, True, "all of them"),
        "repeated": Figure("steps done again after the kill", "", 1, source="else nothing was compared"),
        "kept": Figure("steps that the checkpoint kept", "", 1, None, True, "a resume, not a new start"),
        "loss": _most("first of them: |loss difference|", 1e-3, "the same draws"),
        "grad_norm": _most("first of them: grad_norm, relative difference", 0.03, _HALF),
        "mismatch": _most("largest mismatch/logprob_abs_diff_mean", 0.02, _HALF),
    }),
    Step("fp8", "FP8 on the gate, and its speed at 4B", "speed.fp8", 140,
         _fp8("tensorwise", 1.2) | _fp8("blockwise", 1.1), ("cuda", "te", "benchmark"), _EXPANDABLE),
    Step("mfu-0.6b", "A step of 0.6B at two lengths", "speed.lengths", 50, {
        f"mfu_{tokens}": Figure(f"useful FLOPs over the bfloat16 peak, {tokens} tokens") for tokens in (4096, 16384)
    }, ("cuda", "benchmark"), _EXPANDABLE),
    Step("servers-fp8", "A server with weights in FP8: three steps", "jobs.three_steps", 90,
         _RUN | {"mismatch": _most(_RUN["mismatch"].what, 0.05, "0.018 on a CPU, products in float32")},
         ("cuda", "server"), arguments=("fp8",)),
    Step("servers-experts", "Experts that an engine chose, replayed: three steps", "jobs.replayed", 100, _RUN | {
        "replay": Figure("mismatch/kl with routers 3 % off: without replay over with", "x", 5, source="58 on a CPU"),
    }, ("te_on_cuda",)),
    Step("layouts", "Two ranks against one: DP, TP, PP, CP, EP", "parity.layouts", 80,
         _far("dp2", 1e-4, 1e-4, _EXACT) | _far("tp2", 1e-4, 1e-4, _EXACT) | _far("pp2", 1e-4, 1e-4, _EXACT)
         | _far("cp2", 1e-4, 1e-4, _EXACT) | _far("ep2", 0.02, 0.05, "bfloat16 on CUDA, for Transformer Engine")
         | _far("latent_tp2", FAMILIES["deepseek_v3"], 0.05, "as deepseek_v3 on one rank"),
         ("no_single_gpu",), {"OMP_NUM_THREADS": "1"}, ranks=2),
    Step("servers-nccl", "A server on the second GPU, weights by NCCL: three steps", "jobs.three_steps", 75,
         _RUN, ("two_gpus", "server"), arguments=("nccl",)),
    Step("servers-dp", "One colocated server with a replica on each of two GPUs: three steps", "jobs.three_steps", 75,
         _RUN, ("two_gpus", "server"), arguments=("replicas",)),
)
