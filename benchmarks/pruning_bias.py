"""Bias and variance of every pruning method's gradient, by Monte Carlo on a real Megatron policy.

    python benchmarks/pruning_bias.py [--rates 0.5 0.7] [--json FILE]

A tiny Qwen3 is SFT-trained through the Megatron actor and then frozen. For every step of a recorded order, the engine
rolls out all nominal prompts, and the Megatron actor computes each completion's gradient of the clipped surrogate, one
completion at a time. It is kept as a sketch (CountSketch: a random projection that is unbiased for inner products). The
pruned gradient is linear in the weights, so the trainer's own `Selector` then replays each method many times on the
same rollouts, history included, with fresh draws.

    bias   |E g_pruned - g_full| / |g_full|, the expectation over draws and rollouts, by a U-statistic that has no bias
           of its own, with its jackknife standard error; 0.000 where the estimate of the square is negative
    cos    cosine between the expected pruned and the expected full gradient
    scale  projection of the expected pruned on the expected full gradient
    VR     total variance of the pruned over that of the full gradient, divided by scale^2
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dppo_megatron.actor.layout import start_process_group, stop_process_group
from dppo_megatron.algorithms.advantages import group_advantages
from dppo_megatron.config import Config, load_config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.job import prepare_job
from dppo_megatron.pruning import StepCost, logit_grad_norm
from dppo_megatron.pruning.policies import with_method
from dppo_megatron.randomness import generator
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.steps.loop import Loop
from dppo_megatron.steps.step import Step
from dppo_megatron.types import FloatArray, Group, IntArray, RolloutPrompt, TrainSample
from dppo_megatron.workbench.quickstart.make import Recipe, write_task
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

REPOSITORY = Path(__file__).parent.parent
SKETCH = 1024
LEVELS = {
    "completions": ("dppo", "dppo_auto", "dppo_paper", "cppo", "cppo_verl", "infobatch", "max_variance"),
    "prompts": ("dppo", "dppo_auto", "dppo_paper", "greso", "greso_ht", "infobatch"),
}


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that could happen at one step."""

    nominal: IntArray
    rollouts: Rollouts
    sketches: FloatArray
    """[K, G, SKETCH] gradient of denominator x loss of each completion: weight / denominator multiplies it."""


def make_loop(work: Path, sft_steps: int, prompts_per_step: int) -> Loop:
    """A loop on the quickstart's task with an SFT-trained policy, which stays frozen."""
    write_task(work, Recipe(0, num_train=4 * prompts_per_step, num_heldout=8, num_sft=4096))
    write_tiny_qwen3(work / "model", seed=0)
    settings = {
        "run_dir": work / "run",
        "steps": 1000,
        "model.hf_path": work / "model",
        "data.train_path": work / "train.jsonl",
        "data.eval_paths.heldout": work / "heldout.jsonl",
        "sft.examples_path": work / "sft.jsonl",
        "sft.steps": sft_steps,
        "rollout.prompts_per_step": prompts_per_step,
        "rollout.completions_per_prompt": 8,
        "pruning.prompt.warmup_epochs": 1,
        "pruning.prompt.anneal_fraction": 1.0,
        "actor.optimizer.distributed": "false",
    }
    config = load_config(str(REPOSITORY / "configs/quickstart.yaml"), [f"{k}={v}" for k, v in settings.items()])
    loop = Loop(prepare_job(config, 1))
    loop.sft()
    loop.load_engine()
    return loop


def record(loop: Loop, steps: int) -> list[Recording]:
    """Roll out every nominal prompt of each step and take every completion's gradient."""
    config = loop.job.config
    order, position = PromptOrder(len(loop.job.train_prompts), config.seed), 0
    recordings = []
    for number in range(1, steps + 1):
        nominal, position = order.take(position, config.rollout.prompts_per_step)
        step = Step(number, [RolloutPrompt(loop.job.train_prompts[i], 1.0, 1.0) for i in nominal], reached="selected")
        loop.generate(step, step.selected, 0)
        groups = [step.groups[place] for place in range(len(nominal))]
        rollouts = Rollouts(
            np.stack([group.rewards for group in groups]),
            np.array([[len(c.token_ids) for c in group.completions] for group in groups]),
            np.array([[logit_grad_norm(c.logprobs) for c in group.completions] for group in groups]),
        )
        advantages = group_advantages(rollouts.rewards, divide_by_std=True, eps=config.objective.advantage_eps)
        sketches = np.stack([_group_sketches(loop, g, a) for g, a in zip(groups, advantages, strict=True)])
        recordings.append(Recording(nominal, rollouts, sketches))
    return recordings


def _group_sketches(loop: Loop, group: Group, advantages: FloatArray) -> FloatArray:
    out = np.zeros((len(group.completions), SKETCH))
    for index, (completion, advantage) in enumerate(zip(group.completions, advantages, strict=True)):
        if advantage == 0:
            continue  # no KL term: the gradient is exactly 0
        prompt = np.array(group.selected.prompt.token_ids, dtype=np.int64)
        sample = TrainSample(
            id=f"{group.selected.prompt.index}:{index}",
            token_ids=np.concatenate([prompt, completion.token_ids]),
            num_prompt_tokens=len(prompt),
            behaviour_logprobs=completion.logprobs,
            advantage=float(advantage),
            weight=1.0,
            denominator=1.0,
        )
        loop.actor.accumulate([sample], loop.pack([sample]), loop.objective)
        out[index] = _sketch(torch.cat([gradient.flatten() for _, gradient in loop.actor.gradients()]))
    return out


def _sketch(vector: torch.Tensor) -> FloatArray:
    bucket, sign = _sketch_map(len(vector))
    sketched = torch.zeros(SKETCH, dtype=torch.float64).index_add_(0, bucket, vector.double() * sign)
    array: FloatArray = sketched.numpy()
    return array


@lru_cache(maxsize=1)
def _sketch_map(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(0, "sketch")
    return torch.from_numpy(rng.integers(0, SKETCH, size)), torch.from_numpy(rng.integers(0, 2, size) * 2 - 1)


def replay(config: Config, recordings: list[Recording], num_prompts: int, seed: int) -> tuple[FloatArray, FloatArray]:
    """One pass of a method over all steps: pruned gradients [steps, SKETCH] and shares of tokens trained [steps]."""
    changed = copy.deepcopy(config)
    changed.seed = 10_000 + seed
    selector = Selector(selection_settings(changed), num_prompts, order=PromptOrder(num_prompts, config.seed))
    gradients, shares = [], []
    for step, recording in enumerate(recordings, start=1):
        chosen = selector.begin(step)
        row_of = {prompt: row for row, prompt in enumerate(recording.nominal.tolist())}
        rows = [row_of[prompt] for prompt in chosen.prompt_index.tolist()]
        full = recording.rollouts
        decision = selector.finish(Rollouts(full.rewards[rows], full.lengths[rows], full.logit_grad_norm[rows]), step)
        coefficient = decision.weight / decision.denominator
        gradients.append(coefficient @ recording.sketches[rows].reshape(len(coefficient), SKETCH))
        kept = full.lengths[rows].ravel()[decision.kept].sum()
        shares.append(kept / full.lengths.sum())
        selector.feedback(StepCost(step, rollout_s=1.0, update_s=1.0, other_s=0.0))
    return np.stack(gradients), np.array(shares)


def measure(config: Config, recordings: list[Recording], num_prompts: int, draws: int, warmup: int) -> dict[str, float]:
    """Bias, variance and cost of one method."""
    passes = [replay(config, recordings, num_prompts, seed) for seed in range(draws)]
    pruned = np.stack([gradients for gradients, _ in passes])[:, warmup:]  # [draws, steps, SKETCH]
    full = replay(with_method(config, "grpo"), recordings, num_prompts, 0)[0][warmup:]
    expected, target = pruned.mean(axis=0), full
    squared = _squared_norm(target)
    difference, error = _with_jackknife(expected - target, squared)
    scale = _cross(expected, target) / squared
    cosine = scale * np.sqrt(squared / max(_squared_norm(expected), 1e-300))
    variance_full = float(np.sum(np.var(full, axis=0, ddof=1)))
    variance = float(np.mean([np.sum(np.var(one, axis=0, ddof=1)) for one in pruned]))
    return {
        "bias": difference,
        "bias_standard_error": error,
        "cos": float(min(cosine, 1.0)),
        "scale": float(scale),
        "variance_ratio": variance / variance_full / scale**2,
        "tokens_trained_share": float(np.mean([share[warmup:].mean() for _, share in passes])),
    }


def _squared_norm(rows: FloatArray) -> float:
    """|E row|^2 without bias: mean inner product of different rows."""
    return _cross(rows, rows)


def _cross(first: FloatArray, second: FloatArray) -> float:
    count = len(first)
    both = first.sum(0) @ second.sum(0) - np.sum(first * second)
    return float(both / (count * (count - 1)))


def _with_jackknife(differences: FloatArray, squared_target: float) -> tuple[float, float]:
    """sqrt(|E difference|^2 / target^2), 0 if the estimate is negative, and its jackknife standard error."""
    count = len(differences)
    left_out = np.array([_squared_norm(np.delete(differences, i, axis=0)) for i in range(count)])
    value = _squared_norm(differences) / squared_target
    spread = np.sqrt((count - 1) / count * np.sum(np.square(left_out - left_out.mean()))) / squared_target
    root = float(np.sqrt(max(value, 0.0)))
    # near 0 the delta method fails: use the root of the square's error
    return root, float(spread / (2 * root)) if root > np.sqrt(spread) else float(np.sqrt(spread))


def method_config(config: Config, level: str, method: str, rate: float) -> Config:
    """`config` with `method` at one level only, at this rate."""
    changed = with_method(config, method)
    pruning = changed.pruning
    if level == "completions":
        pruning.prompt = replace(pruning.prompt, method="none")
        pruning.completion = replace(pruning.completion, rate=rate, max_design_effect=0.0, rollout_cost_ratio=1.0)
    else:
        pruning.completion = replace(pruning.completion, method="none")
        refill = replace(pruning.prompt.refill, enabled=False)
        pruning.prompt = replace(pruning.prompt, rate=rate, refill=refill, fixed_cost_ratio=1.0)
    return changed


def main() -> None:
    """Record, replay, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--steps", type=int, default=64, help="steps after the warm-up epoch (default: 64)")
    parser.add_argument("--draws", type=int, default=32, help="replays of each method (default: 32)")
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="also write every figure here")
    arguments = parser.parse_args()
    warmup = 4  # steps of the first epoch, in which no prompt has a history
    start_process_group()
    with tempfile.TemporaryDirectory() as work:
        loop = make_loop(Path(work), arguments.sft_steps, arguments.prompts_per_step)
        recordings = record(loop, arguments.steps + warmup)
        config, num_prompts = loop.job.config, len(loop.job.train_prompts)
    rows: list[dict[str, Any]] = []
    print("| level | rate | method | bias | cos | scale | VR | tokens trained |\n|---|---|---|---|---|---|---|---|")
    for level, methods in LEVELS.items():
        for rate in arguments.rates:
            for method in methods:
                changed = method_config(config, level, method, rate)
                result = measure(changed, recordings, num_prompts, arguments.draws, warmup)
                rows.append({"level": level, "rate": rate, "method": method} | result)
                print(
                    f"| {level} | {rate:.0%} | {method} | {result['bias']:.3f} ± {result['bias_standard_error']:.3f}"
                    f" | {result['cos']:.4f} | {result['scale']:.2f} | {result['variance_ratio']:.2f}"
                    f" | {result['tokens_trained_share']:.0%} |",
                    flush=True,
                )
    stop_process_group()
    if arguments.json:
        packages = ("torch", "megatron-core", "transformers", "numpy")
        about = {
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            "versions": {name: version(name) for name in packages},
            "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        }
        arguments.json.write_text(json.dumps({"rows": rows} | about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
