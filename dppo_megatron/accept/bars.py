"""What is measured, in order of worth for the time, and what must come out.

Each figure stands here once with its bar and where the bar comes from. The page shows all of them, whatever has run:
a figure without a value says why. Without torch: the command's help reads this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Need: TypeAlias = Literal["cuda", "transformer_engine", "two_gpus", "no_single_gpu", "tests", "server"]
"""`no_single_gpu`: two ranks share a CPU over gloo, but NCCL refuses two on one GPU."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the page. Without `least` and `most` it is shown, not judged."""

    what: str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    of_prediction: bool = False
    """The bounds are factors of the value that was predicted."""
    source: str = ""
    """Where the bound comes from."""
    on_cpu: Literal["judged", "shown", ""] = ""
    """Whether a machine without CUDA measures it; `shown`: tiny, so it says that it runs and nothing about speed."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one child process does."""

    name: str
    what: str
    limit_s: float
    """It is ended after this long, and not begun with less left."""
    figures: dict[str, Figure]
    needs: tuple[Need, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that its process is started with."""


_EXACT = "sums in another order only: a CPU against itself at other layouts differs by 3e-7"
_HALF = "8 bits of mantissa: a CPU's bfloat16 differs from its float32 by 2.5e-3, its third grad_norm by 3.5 %"
_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _parity(what: str, bound: float, grad_norm: float, source: str, on_cpu: Literal["judged", ""]) -> dict[str, Figure]:
    prefix, far = what.replace(" ", "_"), "mean |difference| of log-probabilities"
    return {
        f"{prefix}_before": Figure(f"{what}: {far}", most=bound, source=source, on_cpu=on_cpu),
        f"{prefix}_after": Figure(f"{what}: {far} after 3 updates", most=3 * bound, source=source, on_cpu=on_cpu),
        f"{prefix}_grad_norm": Figure(
            f"{what}: first grad_norm, relative", most=grad_norm, source=source, on_cpu=on_cpu
        ),
    }


def _ipc(how: str, on_cpu: Literal["judged", ""]) -> dict[str, Figure]:
    of = f"buffers of 512 MiB that another process read right{how}"
    return {
        "right": Figure(of, "of 3", least=3, source="a wrong byte is a wrong weight", on_cpu=on_cpu),
        "gb_per_s": Figure("mapping and copying one", "GB/s", on_cpu="shown" if on_cpu else ""),
        "missing_mib": Figure("memory of the device that did not come back", "MiB"),
    }


def _mfu(spec: str, least: float, source: str) -> dict[str, Figure]:
    return {
        "mfu": Figure(f"useful FLOPs over the bfloat16 peak, {spec}", least=least, source=source),
        "peak_gib": Figure("peak of allocated memory", "GiB", most=130, source="an H200 has 140"),
        "step_s": Figure("a step of 8 micro-batches", "s"),
    }


_SPLIT = "the target for 4B at packs of 8,192; below it: the head, rotary embeddings, host waits, in that order"
_SYNC_BAR = "bfloat16 in the engine; a sync that did not arrive is above 0.5"

STEPS: tuple[Step, ...] = (
    Step(
        "environment",
        "What is installed, and a matrix product",
        60,
        {
            "matmul": Figure(
                "8192 x 8192 bfloat16 product", "TFLOP/s", least=0.75, of_prediction=True,
                source="of the data sheet: less is a throttled, shared or wrongly clocked card",
            ),
            "fp8_recipes": Figure(
                "FP8 recipes that the chip and Transformer Engine have", "", least=1, of_prediction=True,
                source="tensorwise, delayed and blockwise from Hopper on",
            ),
        },
    ),
    Step("ipc", "Memory of one process mapped by another", 40, _ipc("", "judged")),
    Step(
        "ipc-expandable", "The same from expandable segments", 40, _ipc(", expandable segments", ""), ("cuda",), _EXPANDABLE
    ),
    Step(
        "parity",
        "Against stored float32 references of a CPU, local layers",
        90,
        _parity("float32 local", 1e-4, 1e-4, _EXACT, "judged") | _parity("bfloat16 local", 0.02, 0.03, _HALF, "judged"),
    ),
    Step(
        "parity-te",
        "The same with Transformer Engine's layers",
        60,
        _parity("bfloat16 te", 0.02, 0.03, _HALF, ""),
        ("cuda", "transformer_engine"),
    ),
    Step(
        "gpu-tests",
        "The repository's `-m gpu` tests of one process",
        180,
        {
            "failed": Figure("failed", most=0, source="each is a claim of the documentation"),
            "passed": Figure("passed", least=1, source="a check that ran nothing is red"),
            "skipped": Figure("skipped"),
        },
        ("cuda", "tests"),
    ),
    Step(
        "servers",
        "A colocated server: sleep, two syncs, three steps of training",
        300,
        {
            "freed_share": Figure("memory of the card that sleep frees", least=0.1, source="a server of 0.3 of the card"),
            "sync_s": Figure("seconds of the second sync, 0.6B", "s", on_cpu="shown"),
            "first_diff": Figure(
                "mean |difference| of log-probabilities, first sync", most=0.05, source=_SYNC_BAR, on_cpu="judged"
            ),
            "second_diff": Figure("the same, second sync", most=0.05, source=_SYNC_BAR, on_cpu="judged"),
            "steps": Figure("steps of a training run", least=3, source="it runs", on_cpu="judged"),
            "mismatch": Figure(
                "largest mismatch/logprob_abs_diff_mean", most=0.05, source="a stale sync is above 0.5", on_cpu="judged"
            ),
        },
        ("server",),
    ),
    Step("mfu-4b-te", "A step of 4B", 95, _mfu("Transformer Engine", 0.45, _SPLIT), ("cuda", "transformer_engine"), _EXPANDABLE),
    Step("mfu-4b-local", "A step of 4B", 95, _mfu("local layers", 0.38, _SPLIT), ("cuda",), _EXPANDABLE),
    Step(
        "packed",
        "One batch of 0.6B packed, padded, and padded after sorting",
        70,
        {
            "over_padded": Figure(
                "packed over padded, tokens/s", "x", least=0.9, of_prediction=True, on_cpu="shown",
                source="the ratio of slots, less a tenth for a step's fixed part",
            ),
            "over_sorted": Figure(
                "packed over sorted, tokens/s", "x", least=0.9, of_prediction=True, on_cpu="shown",
                source="likewise",
            ),
        },
        environment=_EXPANDABLE,
    ),
    Step(
        "memory",
        "Peak of each phase of 4B against `plan`",
        80,
        {
            phase: Figure(
                f"{phase}, device", "GiB", least=0.9, most=1.1, of_prediction=True,
                source="`plan` decides by it whether a job fits",
            )
            for phase in ("log-probs", "backward", "step")
        }
        | {"left": Figure("share that stays while servers have the card", most=0.1, source="servers need the room")},
        ("cuda",),
        _EXPANDABLE,
    ),
    Step(
        "job",
        "40 steps, killed at half, resumed",
        190,
        {
            "steps": Figure("steps on record", least=1, of_prediction=True, source="all", on_cpu="judged"),
            "repeated": Figure(
                "steps done again after the kill", least=1, source="or nothing was compared", on_cpu="judged"
            ),
            "loss": Figure(
                "first of them: |loss difference|", most=1e-3, source="the same draws; losses are of order 0.1",
                on_cpu="judged",
            ),
            "grad_norm": Figure("first of them: grad_norm, relative", most=0.03, source=_HALF, on_cpu="judged"),
            "mismatch": Figure(
                "largest mismatch/logprob_abs_diff_mean", most=0.02, source=_HALF, on_cpu="judged"
            ),
        },
    ),
    Step(
        "fp8",
        "FP8 on the gate, and its speed at 4B",
        180,
        {
            f"{recipe}_{name}": figure
            for recipe, least in (("tensorwise", 1.2), ("blockwise", 1.1))
            for name, figure in {
                "gate": Figure(f"{recipe}: largest share of a bound of the gate", most=1, source="doctor --fp8-gate"),
                "speed": Figure(f"{recipe} over bfloat16", "x", least=least, source="or it is not worth its rounding"),
                "loss": Figure(f"{recipe}: loss, relative", most=0.02, source="rounding of a few per cent a layer"),
                "grad_norm": Figure(f"{recipe}: grad_norm, relative", most=0.1, source="likewise"),
            }.items()
        },
        ("cuda", "transformer_engine"),
        _EXPANDABLE,
    ),
    Step(
        "mfu-0.6b",
        "A step of 0.6B",
        50,
        {
            "mfu_4k": Figure("useful FLOPs over the bfloat16 peak, 4,096 tokens"),
            "mfu_16k": Figure("the same, 16,384 tokens"),
        },
        ("cuda",),
        _EXPANDABLE,
    ),
    Step(
        "layouts",
        "Two ranks against one: DP, TP, PP, CP, EP",
        120,
        {
            f"{layout}_{name}": Figure(f"{layout}: {what}", most=bound, source=source, on_cpu="judged")
            for layout, source, bounds in (
                *((one, _EXACT, (1e-4, 1e-4)) for one in ("dp2", "tp2", "pp2", "cp2")),
                ("ep2", "bfloat16 on CUDA, where experts need Transformer Engine", (0.02, 0.05)),
            )
            for name, what, bound in (
                ("before", "mean |difference| of log-probabilities", bounds[0]),
                ("grad_norm", "first grad_norm, relative", bounds[1]),
            )
        },
        ("no_single_gpu",),
    ),
    Step(
        "servers-nccl",
        "A server on the second GPU, weights by NCCL: three steps",
        75,
        {
            "steps": Figure("steps of a training run", least=3, source="it runs"),
            "sync_s": Figure("seconds of the last sync", "s"),
            "mismatch": Figure("largest mismatch/logprob_abs_diff_mean", most=0.05, source="a stale sync is above 0.5"),
        },
        ("two_gpus", "server"),
    ),
    Step(
        "servers-dp",
        "One colocated server with a replica on each of two GPUs: three steps",
        75,
        {
            "steps": Figure("steps of a training run", least=3, source="it runs"),
            "sync_s": Figure("seconds of the last sync", "s"),
            "mismatch": Figure("largest mismatch/logprob_abs_diff_mean", most=0.05, source="a stale sync is above 0.5"),
        },
        ("two_gpus", "server"),
    ),
)  # fmt: skip
