"""The train step on one GPU (written for an H100 or H200), at Qwen3's shapes with random weights.

    python benchmarks/gpu/train_step.py packed-vs-padded [--shapes 0.6b 1.7b 4b] [--json FILE]
    python benchmarks/gpu/train_step.py fp8              [--recipes tensorwise delayed blockwise]
    python benchmarks/gpu/train_step.py mfu
    python benchmarks/gpu/train_step.py memory

packed-vs-padded: the same samples and the same actor; only the plan differs. `packed` is the project's planner.
    `padded` gives every sample a slot as long as the step's longest, as padded trainers do. `sorted` sorts by length
    first and pads to the longest of each micro-batch: the best that padding can do.
fp8: bfloat16 against each FP8 recipe of Transformer Engine on the same samples, with utilization of both peaks.
mfu: useful FLOPs over the chip's dense bfloat16 peak, at several lengths of equal total.
memory: peak memory of the whole device in each phase, and the share that stays when all is moved to the host.

`--smoke` runs any of them at a tiny size, in bfloat16 on any device, a CPU included: it shows that the script works and
measures nothing. Without a CUDA device and without --smoke the exit code is 2. A configuration that runs out of memory
is reported as a row: with its optimizer a 4B model takes 18 bytes a parameter, 72 GB, before activations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from common import (
    built_actor,
    equal_samples,
    figures,
    matmul_parameters,
    padded_plan,
    peak_gib,
    require_cuda,
    time_steps,
)
from workload import trained_tokens, write_json

from dppo_megatron.actor.layout import Layout, build_layout, start_process_group, stop_process_group
from dppo_megatron.algorithms.objectives import clipped_surrogate
from dppo_megatron.config.schema import ActorConfig, LayoutConfig, OptimizerConfig
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.types import TrainSample, UserError
from dppo_megatron.workbench.accept.workload import SHAPES, architecture_of, shape_named
from dppo_megatron.workbench.random_samples import SampleLengths, random_samples

Row: TypeAlias = dict[str, Any]
Recipe: TypeAlias = Literal["off", "tensorwise", "delayed", "blockwise", "mxfp8"]


def packed_vs_padded(shape: str, args: argparse.Namespace, layout: Layout) -> Iterator[Row]:
    """One actor, three plans of the same samples."""
    config = actor_config(args)
    samples = step_samples(shape, args)
    placing = packing_layout(config, 1)
    cap = args.max_tokens_per_microbatch
    plans = {
        "padded": padded_plan(samples, placing, cap, by_length=False),
        "sorted": padded_plan(samples, placing, cap, by_length=True),
        "packed": plan_microbatches(samples, layout=placing, max_tokens_per_microbatch=cap),
    }
    with built_actor(shape_named(shape), config, layout, torch.bfloat16) as actor:
        for name, plan in plans.items():
            timing = time_steps(actor, samples, plan, warmup_steps=args.warmup_steps, timed_steps=args.timed_steps)
            slots = sum(pack.num_tokens for pack in plan.microbatches[0])
            row = figures(timing, architecture_of(shape_named(shape)), samples, fp8=False)
            yield {"what": name, "tokens_in_slots": plan.num_tokens / slots} | row


def fp8_step_time(shape: str, args: argparse.Namespace, layout: Layout) -> Iterator[Row]:
    """bfloat16, then each recipe, each on a fresh actor with the same weights and samples."""
    samples = step_samples(shape, args)
    recipes: list[Recipe] = ["off"] if args.smoke else ["off", *args.recipes]
    for recipe in recipes:
        config = actor_config(args)
        config.fp8 = recipe
        config.fp8_bf16_layers = 0 if recipe in ("off", "delayed") else args.fp8_bf16_layers
        plan = plan_microbatches(
            samples, layout=packing_layout(config, 1), max_tokens_per_microbatch=args.max_tokens_per_microbatch
        )
        with built_actor(shape_named(shape), config, layout, torch.bfloat16) as actor:
            timing = time_steps(actor, samples, plan, warmup_steps=args.warmup_steps, timed_steps=args.timed_steps)
        row = figures(timing, architecture_of(shape_named(shape)), samples, fp8=recipe != "off")
        yield {"what": "bf16" if recipe == "off" else f"fp8 {recipe}"} | row


def utilization(shape: str, args: argparse.Namespace, layout: Layout) -> Iterator[Row]:
    """Equal-length samples that fill their micro-batches, so that only the kernels and this project are measured."""
    config = actor_config(args)
    architecture = architecture_of(shape_named(shape))
    cap = args.max_tokens_per_microbatch
    with built_actor(shape_named(shape), config, layout, torch.bfloat16) as actor:
        for length in args.sequence_tokens:
            samples = equal_samples(architecture, length, args.microbatches, cap)
            plan = plan_microbatches(samples, layout=packing_layout(config, 1), max_tokens_per_microbatch=cap)
            timing = time_steps(actor, samples, plan, warmup_steps=args.warmup_steps, timed_steps=args.timed_steps)
            row = figures(timing, architecture, samples, fp8=False)
            yield {"what": f"{len(samples)} x {length}", "microbatches": plan.num_microbatches} | row


def memory(shape: str, args: argparse.Namespace, layout: Layout) -> Iterator[Row]:
    """Peak memory of each phase, with samples of the first length."""
    config, cap = actor_config(args), args.max_tokens_per_microbatch
    samples = equal_samples(architecture_of(shape_named(shape)), args.sequence_tokens[0], args.microbatches, cap)
    plan = plan_microbatches(samples, layout=packing_layout(config, 1), max_tokens_per_microbatch=cap)
    objective = clipped_surrogate(0.2, 0.2, 0.0)
    with built_actor(shape_named(shape), config, layout, torch.bfloat16) as actor:
        actor.update(samples, plan, objective)  # the optimizer's state exists after its first step
        yield {"what": "log-probs", "device_gib": peak_gib(lambda: actor.own_logprobs(samples, plan))}
        yield {"what": "backward", "device_gib": peak_gib(lambda: actor.accumulate(samples, plan, objective))}
        yield {"what": "step", "device_gib": peak_gib(lambda: actor.update(samples, plan, objective))}
        before = torch.cuda.memory_allocated()
        actor.offload(weights=True)
        yield {"what": "left", "share": torch.cuda.memory_allocated() / before if before else 0.0}


@dataclass(frozen=True, slots=True)
class Command:
    """What a subcommand runs, and the row with which the others are compared."""

    rows: Callable[[str, argparse.Namespace, Layout], Iterator[Row]]
    reference: str = ""


COMMANDS = {
    "packed-vs-padded": Command(packed_vs_padded, reference="padded"),
    "fp8": Command(fp8_step_time, reference="bf16"),
    "mfu": Command(utilization),
    "memory": Command(memory),
}


def run_command(command: Command, shape: str, args: argparse.Namespace, layout: Layout) -> list[Row]:
    """All rows, or those up to the one that ran out of memory."""
    rows: list[Row] = []
    try:
        for row in command.rows(shape, args, layout):
            rows.append(row)
            reference = next((other for other in rows if other["what"] == command.reference), None)
            if reference:
                row["speedup"] = reference["step_s"]["median"] / row["step_s"]["median"]
    except torch.cuda.OutOfMemoryError as error:
        rows.append({"what": "the next row", "failed": f"out of memory: {str(error).splitlines()[0]}"})
    return rows


def actor_config(args: argparse.Namespace) -> ActorConfig:
    """One GPU, no sharding; a learning rate that leaves the random weights as they are."""
    return ActorConfig(
        layout=LayoutConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-8, max_grad_norm=1.0),
        recompute=args.recompute,
        layer_spec=args.layer_spec,
        logprob_kernel=args.logprob_kernel,
        logprob_chunk_tokens=args.logprob_chunk_tokens,
    )


def step_samples(shape: str, args: argparse.Namespace) -> list[TrainSample]:
    """The step's samples, their completions log-normal in length."""
    shortest, longest = args.prompt_tokens
    lengths = SampleLengths(args.samples, args.median_tokens, args.sigma, args.max_tokens, (shortest, longest))
    return random_samples(lengths, shape_named(shape)["vocab_size"])


def print_rows(shape: str, rows: Sequence[Row]) -> None:
    """Print the table; the JSON has more figures."""
    head = (
        f"{'step, s (median, range)':>30s} {'tokens/s':>11s} {'trained/s':>11s} {'TFLOP/s':>8s} {'MFU':>7s} {'GiB':>6s}"
    )
    print(f"{shape:18s} {head}  speedup")
    for row in rows:
        if "failed" in row:
            print(f"{row['what']:18s} {row['failed']}")
            continue
        if "step_s" not in row:
            print("  ".join(f"{name} {value:.3g}" if name != "what" else f"{value:18s}" for name, value in row.items()))
            continue
        step = "{median:.3f} ({low:.3f} .. {high:.3f})".format(**row["step_s"])
        mfu = f"{row['mfu_of_bf16_peak']:7.1%}" if row["mfu_of_bf16_peak"] else f"{'-':>7s}"
        speedup = f"{row['speedup']:8.2f}" if "speedup" in row else ""
        print(
            f"{row['what']:18s} {step:>30s} {row['tokens_per_s']:11,.0f} {row['trained_tokens_per_s']:11,.0f}"
            f" {row['useful_tflops_per_s']:8.2f} {mfu} {row['peak_memory_gib']:6.1f} {speedup}"
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `--smoke` replaces every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--json", type=Path, help="write one JSON object with every figure here")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape and few steps, on a CPU too")
    names = ", ".join(name for name in SHAPES if name != "smoke")
    parser.add_argument("--shapes", nargs="+", default=["0.6b"], help=f"{names}, or directories with a config.json")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--median-tokens", type=int, default=1024, help="of the log-normal completion lengths")
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--max-tokens", type=int, default=8192, help="longest completion")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[64, 256], help="shortest and longest prompt")
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--recipes", nargs="+", default=["tensorwise", "delayed", "blockwise"], help="for fp8")
    parser.add_argument("--fp8-bf16-layers", type=int, default=0, help="first and last layers that stay bfloat16")
    parser.add_argument("--sequence-tokens", type=int, nargs="+", default=[1024, 4096, 16384], help="for mfu")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of a step, for mfu and memory")
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument("--layer-spec", choices=["auto", "te", "local"], default="auto")
    parser.add_argument("--logprob-kernel", choices=["auto", "triton", "torch"], default="auto")
    parser.add_argument("--logprob-chunk-tokens", type=int, default=ActorConfig().logprob_chunk_tokens)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--timed-steps", type=int, default=10)
    args = parser.parse_args(arguments)
    if args.smoke:
        args.shapes, args.samples, args.median_tokens, args.max_tokens = ["smoke"], 12, 32, 128
        args.prompt_tokens, args.max_tokens_per_microbatch, args.sequence_tokens = [4, 16], 256, [64, 256]
        args.microbatches, args.warmup_steps, args.timed_steps = 2, 1, 2
    return args


def main() -> int:
    """Run one benchmark at every shape, print its table, write its figures."""
    args = parse()
    require_cuda(args)
    start_process_group()
    layout = build_layout(LayoutConfig(), seed=0)
    result: dict[str, Any] = {
        "benchmark": f"gpu {args.command}",
        "settings": {key: value for key, value in vars(args).items() if key != "json"},
        "shapes": {},
    }
    for shape in args.shapes:
        architecture = architecture_of(shape_named(shape))
        entry: dict[str, Any] = {"matmul_parameters": matmul_parameters(architecture)}
        if args.command not in ("mfu", "memory"):
            samples = step_samples(shape, args)
            entry |= {"tokens": sum(s.num_tokens for s in samples), "trained_tokens": trained_tokens(samples)}
        entry["rows"] = run_command(COMMANDS[args.command], shape, args, layout)
        result["shapes"][shape] = entry
        print_rows(shape, entry["rows"])
        write_json(args.json, result)  # after each shape, so that a later failure loses nothing
    stop_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
