"""What this project's layer costs: one train step of `Actor` against a bare megatron-core loop on the same batch.

    python benchmarks/step_overhead.py [--json FILE] [--layouts tp1pp1dp1 tp2pp1dp1 ...] [--rounds 12]

Both sides run in the same processes, with the same weights, and take turns (the order flips each round), so a busy
machine slows both. The bare side is what one would write by hand with megatron-core: model, DDP wrapper, optimizer,
schedule, Megatron's vocab-parallel cross entropy and a clipped surrogate, with every tensor built beforehand. The
project's side starts at the samples and the plan: it lays out the micro-batches, computes log-probabilities in chunks
(which multiplies by the output projection once more in the backward pass, so as never to hold a pack's logits), the
entropy and the diagnostics of metrics.jsonl, and reduces them over the job. All of it counts as overhead.

Exit code 1 if the two sides disagree on loss or gradient norm: then they did not do the same work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from workload import Spread, trained_tokens, write_json

from dppo_megatron import platform

platform.prepare()

import torch.distributed as dist  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from torch import Tensor  # noqa: E402

from dppo_megatron.actor.actor import Actor  # noqa: E402
from dppo_megatron.actor.batch import Microbatch, build_microbatch  # noqa: E402
from dppo_megatron.actor.layout import Layout, build_layout, start_process_group, stop_process_group  # noqa: E402
from dppo_megatron.actor.model import build_model, overrides  # noqa: E402
from dppo_megatron.algorithms.objectives import clipped_surrogate  # noqa: E402
from dppo_megatron.config.schema import ActorConfig, LayoutConfig, OptimizerConfig  # noqa: E402
from dppo_megatron.packing.alignment import packing_layout  # noqa: E402
from dppo_megatron.packing.planner import plan_microbatches  # noqa: E402
from dppo_megatron.types import PackPlan, TrainSample  # noqa: E402
from dppo_megatron.weights.sharded import load_hf_weights  # noqa: E402
from dppo_megatron.workbench.accept.workload import TEN_MILLION, RandomWeights, architecture_of  # noqa: E402
from dppo_megatron.workbench.random_samples import SampleLengths, random_samples  # noqa: E402

LAYOUTS = ("tp1pp1dp1", "tp2pp1dp1", "tp1pp2dp1", "tp1pp1dp2")
CLIP = 0.2
TOLERANCE = 1e-4
"""Relative difference of loss and gradient norm in float32 above which the comparison is void."""


class BareLoop:
    """A training step written directly against megatron-core, on tensors that are built beforehand."""

    def __init__(
        self,
        config: ActorConfig,
        layout: Layout,
        samples: Sequence[TrainSample],
        plan: PackPlan,
        weights: RandomWeights,
    ) -> None:
        architecture = architecture_of(TEN_MILLION)
        megatron_config = overrides(architecture, torch.float32, config, "local")[0].build()
        megatron_config.finalize_model_grads_func = finalize_model_grads
        model = build_model(architecture, megatron_config, "local")[0].to(layout.device)
        if model.post_process:  # the actor's output layer returns hidden states, a plain one logits
            model.output_layer.__class__ = tensor_parallel.ColumnParallelLinear
        load_hf_weights([model], architecture, weights)
        self._model = DistributedDataParallel(
            megatron_config,
            DistributedDataParallelConfig(use_distributed_optimizer=config.optimizer.distributed),
            model,
        )
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.optimizer.learning_rate,
            adam_beta1=config.optimizer.adam_beta1,
            adam_beta2=config.optimizer.adam_beta2,
            adam_eps=config.optimizer.adam_eps,
            weight_decay=0.0,
            clip_grad=config.optimizer.max_grad_norm,
            params_dtype=torch.float32,
            use_distributed_optimizer=config.optimizer.distributed,
        )
        self._optimizer = get_megatron_optimizer(settings, [self._model], use_gloo_process_groups=False)
        self._plan = plan
        self._scale = plan.num_microbatches * layout.data_parallel
        mine = plan.microbatches[layout.data_parallel_rank]
        self._batches = [_in_float32(build_microbatch(samples, packed, device=layout.device)) for packed in mine]
        self._loss = torch.zeros((), device=layout.device)
        self._reports = layout.reports

    def step(self) -> dict[str, float]:
        """One optimizer step; `loss` over the job and `grad_norm`."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._model.train()
        self._loss.zero_()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(self._batches),
            model=self._model,
            num_microbatches=self._plan.num_microbatches,
            seq_length=self._plan.max_tokens_per_microbatch,
            micro_batch_size=1,
            forward_only=False,
        )
        loss = self._loss.clone() if self._reports else torch.zeros_like(self._loss)
        dist.all_reduce(loss)
        _, grad_norm, _ = self._optimizer.step()
        return {"loss": float(loss), "grad_norm": float(grad_norm)}

    def _forward(
        self, batches: Iterator[dict[str, Any]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
        batch = next(batches)
        logits = model(batch["tokens"], batch["position_ids"], None, packed_seq_params=batch["packed"])
        return logits, partial(self._surrogate, batch)

    def _surrogate(self, batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = -tensor_parallel.vocab_parallel_cross_entropy(logits[0], batch["targets"])
        ratio = (logprobs - batch["old"]).exp()
        advantages = batch["advantages"]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = (-torch.minimum(ratio * advantages, clipped * advantages)) @ batch["coefficient"]
        self._loss += loss.detach()
        return loss * self._scale, {}


def _in_float32(pack: Microbatch) -> dict[str, Any]:
    return {
        "tokens": pack.tokens,
        "position_ids": pack.packed.position_ids[None],
        "packed": pack.packed,
        "targets": pack.targets,
        "old": pack.behaviour_logprobs.float(),
        "advantages": pack.advantages.float(),
        "coefficient": pack.coefficient.float(),
    }


def measure(layout_name: str, args: argparse.Namespace) -> dict[str, Any]:
    """On every rank of one layout: warm up both sides, check that they agree, and let them take turns."""
    sizes = _sizes(layout_name)
    torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // math.prod(sizes)))
    start_process_group()
    config = ActorConfig(
        layout=LayoutConfig(tensor_parallel=sizes[0], pipeline_parallel=sizes[1]),
        optimizer=OptimizerConfig(learning_rate=1e-6, max_grad_norm=1.0),
    )
    layout = build_layout(config.layout, seed=0)
    lengths = SampleLengths(args.samples, args.median_tokens, args.sigma, args.max_tokens)
    samples = random_samples(lengths, TEN_MILLION["vocab_size"])
    plan = plan_microbatches(
        samples,
        layout=packing_layout(config, layout.world_size),
        max_tokens_per_microbatch=args.max_tokens_per_microbatch,
    )
    weights = RandomWeights(architecture_of(TEN_MILLION))
    actor = Actor(config, layout, architecture_of(TEN_MILLION), weights, dtype=torch.float32)
    actor.start_phase(config.optimizer, total_steps=10**6)
    bare = BareLoop(config, layout, samples, plan, weights)
    objective = clipped_surrogate(CLIP, CLIP, 0.0)
    sides: dict[str, Callable[[], dict[str, float]]] = {
        "bare": bare.step,
        "project": lambda: actor.update(samples, plan, objective).figures(),
    }
    first = {name: step() for name, step in sides.items()}
    difference = {
        key: abs(first["project"][key] - first["bare"][key]) / abs(first["bare"][key]) for key in ("loss", "grad_norm")
    }
    for step in sides.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(args.rounds):
        for name in list(sides) if round_ % 2 == 0 else list(sides)[::-1]:
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            sides[name]()
            cpu_seconds[name].append(time.process_time() - cpu_started)
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    result = {
        "layout": layout_name,
        "threads_per_rank": torch.get_num_threads(),
        "microbatches_per_rank": plan.num_microbatches,
        "fill": plan.fill,
        "trained_tokens": trained_tokens(samples),
        "first_step": first,
        "relative_difference": difference,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rank": dist.get_rank(),
    }
    dist.barrier()
    stop_process_group()
    return result


def _sizes(layout_name: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"tp(\d+)pp(\d+)dp(\d+)", layout_name)
    if not match:
        raise SystemExit(f"--layouts: '{layout_name}' is not of the form tp2pp1dp1")
    tp, pp, dp = map(int, match.groups())
    return tp, pp, dp


def launch(layout_name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run this file on the ranks of one layout, under torchrun, and return rank 0's result."""
    ranks = math.prod(_sizes(layout_name))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, *arguments, "--inside", layout_name, "--json", str(out)]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
        subprocess.run(command, check=True, env=os.environ | threads)
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Add the ratio project / bare, paired by round and of the fastest rounds, in wall time and in CPU time."""
    ratios, of_fastest = {}, {}
    for clock in ("seconds", "cpu_seconds"):
        mine, bare = result[clock]["project"], result[clock]["bare"]
        ratios[clock] = Spread.of([a / b for a, b in zip(mine, bare, strict=True)]).as_dict()
        of_fastest[clock] = min(mine) / min(bare)
    return result | {"ratio": ratios, "ratio_of_fastest": of_fastest}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line per layout."""
    print("median (lowest .. highest) over rounds; CPU time is rank 0's; `best` is the ratio of the lowest CPU times")
    print(f"{'layout':10s} {'bare, s':>22s} {'project, s':>22s} {'project / bare':>24s} {'in CPU time':>24s}   best")
    for row in rows:
        bare, mine = (Spread.of(row["seconds"][name]).text(2) for name in ("bare", "project"))
        ratio, cpu = (Spread(**row["ratio"][clock]).text(3) for clock in ("seconds", "cpu_seconds"))
        best = row["ratio_of_fastest"]["cpu_seconds"]
        print(f"{row['layout']:10s} {bare:>22s} {mine:>22s} {ratio:>24s} {cpu:>24s} {best:6.3f}")
    worst = max(value for row in rows for value in row["relative_difference"].values())
    print(f"loss and gradient norm agree to {worst:.1e} (relative)")


def main() -> int:
    """Launch every layout, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write one JSON object with every figure here")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help="such as tp2pp1dp1")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=0, help="threads of each rank; 0: cores / ranks")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--median-tokens", type=int, default=128, help="of the log-normal completion lengths")
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=2048)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        result = measure(args.inside, args)
        if result.pop("rank") == 0:
            args.json.write_text(json.dumps(result), encoding="utf-8")
        return 0
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "inside")}
    passed = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items() if key != "layouts"]
    rows = [summarize(launch(name, passed)) for name in args.layouts]
    print_table(rows)
    write_json(args.json, {"benchmark": "step_overhead", "settings": settings, "rows": rows})
    worst = max(value for row in rows for value in row["relative_difference"].values())
    if not worst <= TOLERANCE:
        print(f"void: the two sides differ by {worst:.1e}, more than {TOLERANCE:.0e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
