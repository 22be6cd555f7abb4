"""One update of this project's packed actor against one of TRL's GRPOTrainer, on the same model and samples.

    pip install -e '.[benchmarks]'
    python benchmarks/against_trl.py [--json FILE] [--trl-python PATH] [--rounds 4]
    python benchmarks/against_trl.py --end-to-end COMPARE_DIR     # a whole run: benchmarks/trl_end_to_end.py

TRL's side is its own training loop: `GRPOTrainer.train()` with loss_type "grpo", its buffering, splitting and padding,
its loss, gradient accumulation, clipping and default AdamW. Only generation is replaced, by the prepared batch that a
rollout would have returned, padded as TRL pads it (prompts on the left, completions on the right, to the longest of
the step). Activation checkpointing, on by default in TRL, is off, because it is off on our side. TRL gets the fastest
of several per-device batch sizes; ours gets one fixed token cap. Our side is timed from the samples on: planning,
layout of the micro-batches, update.

TRL runs in a process of its own (`--trl-python` may name an interpreter of another environment). The two processes take
turns on the same cores, each waiting while the other computes. Exit code 1 if they disagree on the loss or the gradient
norm of the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trl_end_to_end import end_to_end, run_worker

LEARNING_RATE = 1e-6
CLIP = 0.2
TOLERANCE = 1e-4
"""Relative difference of loss and gradient norm in float32 above which the comparison is void."""
CLOCKS = ("seconds", "cpu_seconds")
"""Wall time, and CPU time of the side's process, which with one thread hardly depends on other load."""
FIELDS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_per_token_logps")


class TrlSide:
    """A TRL worker process that takes one optimizer step on each request."""

    def __init__(self, python: str, folder: Path, batch_size: int) -> None:
        command = [python, __file__, "--trl-worker", str(folder), "--trl-batch-sizes", str(batch_size)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions: dict[str, str] = self._receive()

    def step(self) -> dict[str, float]:
        """`seconds`, `cpu_seconds`, `loss` and `grad_norm` of one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._receive()

    def close(self) -> None:
        """Kill the worker."""
        self._process.kill()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"TRL's side ended with exit code {self._process.wait()}; its message is above")
        message: dict[str, Any] = json.loads(line)
        return message


def run_trl_worker(folder: Path, batch_size: int) -> None:
    """In TRL's process: train on the prepared batch, one step for each line of standard input."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stderr instead, not between the replies
    import transformers
    import trl  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from tokenizers import Tokenizer, models

    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    arrays = np.load(folder / "batch.npz")
    batch = {name: torch.from_numpy(arrays[name]) for name in FIELDS}
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    count = len(batch["advantages"])
    losses: list[torch.Tensor] = []

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            return dict(batch)

        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    class TakeTurns(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not sys.stdin.readline():
                os._exit(0)  # the benchmark has ended
            losses.clear()
            self._started = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self._took = time.perf_counter() - self._started[0], time.process_time() - self._started[1]

        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            reply = dict(zip(("seconds", "cpu_seconds"), self._took, strict=True))
            reply |= {"loss": float(torch.stack(losses).double().sum()), "grad_norm": logs["grad_norm"]}
            replies.write(json.dumps(reply) + "\n")

    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=count // batch_size,
        num_generations=2,  # only has to divide the batch: advantages are already in it
        loss_type="grpo",
        epsilon=CLIP,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=10**6,
        logging_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    trainer = Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, trust_remote_code=False
        ),
        reward_funcs=lambda **_: [0.0],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""] * count}),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
        callbacks=[TakeTurns()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    replies.write(json.dumps({"trl": trl.__version__, "transformers": transformers.__version__}) + "\n")
    trainer.train()


def write_batch(folder: Path, samples: Sequence[Any], threads: int) -> None:
    """The samples as a TRL rollout would leave them: prompts padded on the left, completions on the right."""
    prompt = max(sample.num_prompt_tokens for sample in samples)
    completion = max(sample.num_completion_tokens for sample in samples)
    arrays: dict[str, np.ndarray] = {
        "advantages": np.array([sample.advantage for sample in samples], np.float32),
        "old_per_token_logps": np.zeros((len(samples), completion), np.float32),
    }
    for part, width in (("prompt", prompt), ("completion", completion)):
        arrays[f"{part}_ids"] = np.zeros((len(samples), width), np.int64)
        arrays[f"{part}_mask"] = np.zeros((len(samples), width), np.int64)
    for row, sample in enumerate(samples):
        split, tokens = sample.num_prompt_tokens, sample.num_completion_tokens
        arrays["prompt_ids"][row, prompt - split :] = sample.token_ids[:split]
        arrays["prompt_mask"][row, prompt - split :] = 1
        arrays["completion_ids"][row, :tokens] = sample.token_ids[split:]
        arrays["completion_mask"][row, :tokens] = 1
        arrays["old_per_token_logps"][row, :tokens] = sample.behaviour_logprobs
    np.savez(folder / "batch.npz", **arrays)  # type: ignore[arg-type, unused-ignore]
    (folder / "settings.json").write_text(json.dumps({"threads": threads}), encoding="utf-8")


def write_model(folder: Path) -> None:
    """Write the random weights of our actor as a checkpoint."""
    from transformers import Qwen3ForCausalLM

    from dppo_megatron.workbench.accept.workload import TEN_MILLION, RandomWeights, architecture_of, hf_config

    model = Qwen3ForCausalLM(hf_config(TEN_MILLION))
    weights = RandomWeights(architecture_of(TEN_MILLION))
    model.load_state_dict({name: weights(name) for name in model.state_dict()})
    model.save_pretrained(folder / "model")


def our_side(samples: Sequence[Any], max_tokens_per_microbatch: int) -> Callable[[], dict[str, float]]:
    """A function that plans, lays out and updates once; it returns the same figures as TRL's, and `useful_share`."""
    from dppo_megatron import platform

    platform.prepare()
    from dppo_megatron.actor.actor import Actor
    from dppo_megatron.actor.layout import build_layout, start_process_group
    from dppo_megatron.algorithms.objectives import clipped_surrogate
    from dppo_megatron.config.schema import ActorConfig, OptimizerConfig
    from dppo_megatron.packing.alignment import packing_layout
    from dppo_megatron.packing.planner import plan_microbatches
    from dppo_megatron.workbench.accept.workload import TEN_MILLION, RandomWeights, architecture_of

    start_process_group()
    config = ActorConfig(optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, max_grad_norm=1.0))
    layout = build_layout(config.layout, seed=0)
    architecture = architecture_of(TEN_MILLION)
    actor = Actor(config, layout, architecture, RandomWeights(architecture), dtype=torch.float32)
    actor.start_phase(config.optimizer, total_steps=10**6)
    objective = clipped_surrogate(CLIP, CLIP, 0.0)

    def step() -> dict[str, float]:
        started, cpu_started = time.perf_counter(), time.process_time()
        plan = plan_microbatches(
            samples, layout=packing_layout(config, 1), max_tokens_per_microbatch=max_tokens_per_microbatch
        )
        metrics = actor.update(samples, plan, objective).figures()
        took = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
        useful = plan.num_tokens / sum(pack.num_tokens for rank in plan.microbatches for pack in rank)
        return metrics | took | {"useful_share": useful}

    return step


def fastest_batch_size(
    python: str, samples: Sequence[Any], sizes: Sequence[int], threads: int
) -> tuple[int, dict[int, float]]:
    """TRL's best per-device batch size, and CPU seconds a sample at each.

    Part of the batch is enough: padded rows cost the same, so it takes the longest sample and some others.
    """
    longest = max(samples, key=lambda sample: sample.num_completion_tokens)
    part = [longest, *(sample for sample in samples if sample is not longest)][: 2 * max(sizes)]
    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_batch(folder, part, threads)
        write_model(folder)
        for size in sizes:
            side = TrlSide(python, folder, size)
            side.step()
            seconds[size] = min(side.step()["cpu_seconds"] for _ in range(2)) / len(part)
            side.close()
            print(f"TRL, per-device batch size {size}: {seconds[size]:.2f} CPU s a sample", file=sys.stderr, flush=True)
    return min(seconds, key=lambda size: seconds[size]), seconds


def take_turns(sides: dict[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """One step of each side per round, in alternating order; returns `seconds` and `cpu_seconds` by side."""
    taken: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in sides} for clock in CLOCKS}
    for round_ in range(rounds):
        for name in list(sides) if round_ % 2 == 0 else list(sides)[::-1]:
            figures = sides[name]()
            for clock in CLOCKS:
                taken[clock][name].append(figures[clock])
            line = f"round {round_ + 1}, {name}: {figures['seconds']:.1f} s, {figures['cpu_seconds']:.1f} CPU s"
            print(line, file=sys.stderr, flush=True)
    return taken


def compare(args: argparse.Namespace) -> int:
    """Tune TRL's batch size, check that the sides agree, let them take turns, print the table."""
    from workload import Spread, trained_tokens, write_json

    from dppo_megatron.workbench.accept.workload import TEN_MILLION
    from dppo_megatron.workbench.random_samples import SampleLengths, random_samples

    torch.set_num_threads(args.threads)
    lengths = SampleLengths(args.samples, args.median_tokens, args.sigma, args.max_tokens)
    samples = random_samples(lengths, TEN_MILLION["vocab_size"])
    tokens = trained_tokens(samples)
    best, tried = fastest_batch_size(args.trl_python, samples, args.trl_batch_sizes, args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_batch(folder, samples, args.threads)
        write_model(folder)
        trl_side = TrlSide(args.trl_python, folder, best)
        sides = {"trl": trl_side.step, "project": our_side(samples, args.max_tokens_per_microbatch)}
        first = {name: step() for name, step in sides.items()}
        taken = take_turns(sides, args.rounds)
        trl_side.close()
    difference = {
        key: abs(first["project"][key] - first["trl"][key]) / abs(first["trl"][key]) for key in ("loss", "grad_norm")
    }
    rates = {side: Spread.of([tokens / value for value in values]) for side, values in taken["seconds"].items()}
    ratios = {
        clock: Spread.of([theirs / ours for theirs, ours in zip(by_side["trl"], by_side["project"], strict=True)])
        for clock, by_side in taken.items()
    }
    longest = max(sample.num_completion_tokens for sample in samples)
    slots = len(samples) * (longest + max(sample.num_prompt_tokens for sample in samples))
    useful = {
        "trl": sum(len(sample.token_ids) for sample in samples) / slots,
        "project": first["project"]["useful_share"],
    }
    print(f"{len(samples)} samples, {tokens:,} trained tokens, longest completion {longest}, {args.threads} threads")
    print(f"{'':8s} {'trained tokens/s':>26s} {'tokens in slots':>16s}")
    print(f"{'TRL':8s} {rates['trl'].text(1):>26s} {useful['trl']:16.2f}   per-device batch size {best}")
    print(f"{'project':8s} {rates['project'].text(1):>26s} {useful['project']:16.2f}")
    print(f"project / TRL: {ratios['seconds'].text(2)} by the clock, {ratios['cpu_seconds'].text(2)} in CPU time")
    print("first steps differ by " + ", ".join(f"{key} {value:.1e}" for key, value in difference.items()))
    write_json(
        args.json,
        {
            "benchmark": "against_trl",
            "settings": {key: value for key, value in vars(args).items() if key not in ("json", "trl_worker")},
            "trained_tokens": tokens,
            "longest_completion": longest,
            "useful_share": useful,
            "trl_versions": trl_side.versions,
            "trl_cpu_seconds_per_sample_by_batch_size": tried,
            "trl_batch_size": best,
            "first_step": first,
            "relative_difference": difference,
            **taken,
            "trained_tokens_per_s": {side: rate.as_dict() for side, rate in rates.items()},
            "ratio": {clock: ratio.as_dict() for clock, ratio in ratios.items()},
        },
    )
    if not max(difference.values()) <= TOLERANCE:
        print(f"void: the first steps differ by more than {TOLERANCE:.0e}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """Compare, or run as TRL's process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write one JSON object with every figure here")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter that has trl; default: this one")
    parser.add_argument(
        "--trl-batch-sizes", type=int, nargs="+", help="the fastest is used; default: 1 2 4 8, 64 256 512"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--median-tokens", type=int, default=128, help="of the log-normal completion lengths")
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=2048)
    parser.add_argument("--end-to-end", type=Path, metavar="COMPARE_DIR", help="--out of a finished comparison")
    parser.add_argument("--pruned-steps-factor", type=float, default=1.0, help="of the arm trl_pruned (--end-to-end)")
    parser.add_argument("--trl-worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--end-to-end-worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.trl_batch_sizes = args.trl_batch_sizes or ([64, 256, 512] if args.end_to_end else [1, 2, 4, 8])
    if args.end_to_end_worker:
        run_worker(args.end_to_end_worker)
        return 0
    if args.trl_worker:
        run_trl_worker(args.trl_worker, args.trl_batch_sizes[0])
        return 0
    if args.end_to_end:
        _check_trl(parser, args.trl_python)
        return end_to_end(args)
    largest = max(args.trl_batch_sizes)
    if bad := [size for size in args.trl_batch_sizes if args.samples % size or 2 * largest % size]:
        parser.error(f"--trl-batch-sizes {bad[0]} must divide --samples {args.samples} and twice the largest size")
    if args.samples < 2 * largest:
        parser.error(f"--samples {args.samples} must be at least twice the largest of --trl-batch-sizes, {largest}")
    _check_trl(parser, args.trl_python)
    return compare(args)


def _check_trl(parser: argparse.ArgumentParser, python: str) -> None:
    has_trl = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"
    if subprocess.run([python, "-c", has_trl]).returncode:
        parser.error(f"{python} has no trl: pip install -e '.[benchmarks]', or pass another: --trl-python")


if __name__ == "__main__":
    sys.exit(main())
