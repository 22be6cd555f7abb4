"""What the prompt score is worth on recorded runs: the variance it predicts, and the variance that skipping causes.

A trace of an unpruned run (such as trace.jsonl of `configs/quickstart_grpo.yaml`) has the outcome of every nominal
prompt. So the growth of a step's variance by skipping with probabilities pi is sum(m / pi) / sum(m), m being a group's
second moment. A score must beat uniform skipping at the same cost; *gain* is (cost x variance) of no skipping over that
of skipping, with generated tokens as the cost: 1 for uniform skipping.

    python benchmarks/prompt_score.py TRACE [TRACE ...] [--problems FILE ...] [--json FILE] [--smoke]

Rows: `history` uses visits alone; `row` also the problem's row (source, level, length); `live` is the trainer's policy
itself, which learns only from what it keeps (mean over draws). Older traces do not hold the rows: --problems gives the
train.jsonl of each. --smoke makes up a trace instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dppo_megatron import __version__
from dppo_megatron.algorithms.advantages import group_advantages
from dppo_megatron.config.pruning import PromptPruningConfig
from dppo_megatron.pruning.policies import make_prompt_policy
from dppo_megatron.types import FloatArray, IntArray, PromptFeatures

RATES = (0.15, 0.3, 0.5)
Score = Literal["fit", "beta"]
SCORES: tuple[Score, ...] = ("fit", "beta")
DRAWS = 4
MOST_OFF, LEAST_GAIN_HISTORY, LEAST_GAIN_ROW = 0.05, 1.03, 1.10
"""The bars: predicted within 5 % of realised, and the gains in cost x variance."""


@dataclass(frozen=True)
class Recorded:
    """One trace: per step the nominal prompts [N], rewards and lengths [N, G] and second moments [N]."""

    name: str
    num_prompts: int
    features: PromptFeatures | None
    steps: list[tuple[IntArray, FloatArray, IntArray, FloatArray]]


@dataclass(frozen=True)
class Result:
    """One score at one rate: geometric means over the steps after the first epoch."""

    predicted: float
    realised: float
    uniform: float
    gain: float
    measured: float
    """Realised effect as the policy itself reports it at the end."""

    @property
    def off(self) -> float:
        """Predicted over realised, minus 1."""
        return self.predicted / self.realised - 1.0


def read(path: str, problems: str | None) -> Recorded:
    """A trace; `problems` is the file with source, level and length if the trace does not have them."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    head, steps = rows[0], []
    for row in rows[1:]:
        rewards, lengths = np.array(row["rewards"], dtype=np.float64), np.array(row["lengths"], dtype=np.int64)
        moment = second_moments(rewards, lengths, np.array(row["logit_grad_norm"], dtype=np.float64))
        steps.append((np.array(row["prompts"], dtype=np.int64), rewards, lengths, moment))
    features = None
    if problems is not None:
        with open(problems, encoding="utf-8") as file:
            features = features_of([json.loads(line) for line in file])
    elif isinstance(head.get("features"), dict):  # for a large set they are in a file beside the trace
        values = head["features"]
        features = PromptFeatures(
            np.array(values["prompt_tokens"], dtype=np.int64),
            np.array(values["level"], dtype=np.float64),
            np.array(values["source"], dtype=np.int64),
            tuple(values["sources"]),
        )
    return Recorded(f"{Path(path).parent.name}/{Path(path).name}", head["num_prompts"], features, steps)


def features_of(rows: list[dict[str, Any]]) -> PromptFeatures:
    """Features of a problem file's rows: `source`, `level`, and the length of `problem` in characters."""
    sources = tuple(dict.fromkeys(row.get("source", "") for row in rows))
    return PromptFeatures(
        prompt_tokens=np.array([len(row["problem"]) for row in rows], dtype=np.int64),
        level=np.array([row.get("level", np.nan) for row in rows], dtype=np.float64),
        source=np.array([sources.index(row.get("source", "")) for row in rows], dtype=np.int64),
        sources=sources,
    )


def second_moments(rewards: FloatArray, lengths: IntArray, logit_grad_norm: FloatArray) -> FloatArray:
    """[N], as the trainer's selector computes them with group_std and sequence_mean."""
    scores = group_advantages(rewards, divide_by_std=True, eps=1e-6) * logit_grad_norm / lengths
    return np.asarray(np.square(scores).sum(axis=1), dtype=np.float64)


def replay(
    recorded: Recorded,
    rate: float,
    score: Score,
    *,
    rows: bool,
    live: bool,
    seed: int = 0,
    first: int | None = None,
    **settings: Any,
) -> Result:
    """The trainer's policy over a trace. If not `live`, it stays in warm-up and only plans what it would skip.

    first: the first step that counts; None: after the first epoch.
    """
    per_step, size = len(recorded.steps[0][0]), recorded.steps[0][1].shape[1]
    epoch = int(np.ceil(recorded.num_prompts / per_step))
    policy = make_prompt_policy(
        PromptPruningConfig(
            score=score, rate=rate, warmup_epochs=1.0 if live else 1e9, anneal_fraction=1.0, **settings
        ),
        num_prompts=recorded.num_prompts,
        completions_per_prompt=size,
        prompts_per_step=per_step,
        total_steps=len(recorded.steps),
        seed=seed,
        features=recorded.features if rows else None,
    )
    steps, measured = [], 1.0
    for step, (prompts, rewards, lengths, moment) in enumerate(recorded.steps):
        selection = policy.select(prompts, step=step)
        if step >= (epoch if first is None else first) and moment.sum() > 0:
            pi, cost = selection.planned, lengths.sum(axis=1)
            realised, kept = float((moment / pi).sum() / moment.sum()), float((pi * cost).sum() / cost.sum())
            steps.append((selection.metrics["planned_effect"], realised, 1.0 / kept, 1.0 / (realised * kept)))
            measured = selection.effect.realised if selection.effect else 1.0
        kept_rows = selection.kept
        policy.observe(
            prompts[kept_rows],
            rewards[kept_rows],
            lengths[kept_rows],
            step=step,
            second_moment=moment[kept_rows],
            inclusion_prob=selection.inclusion_prob[kept_rows],
            planned_prob=selection.planned[kept_rows],
        )
    predicted, real, uniform, gain = np.exp(np.log(np.array(steps)).mean(axis=0)).tolist()
    return Result(predicted, real, uniform, gain, measured)


def averaged(results: list[Result]) -> Result:
    """Geometric means over draws."""
    values = np.log([[r.predicted, r.realised, r.uniform, r.gain, r.measured] for r in results])
    predicted, realised, uniform, gain, measured = np.exp(values.mean(axis=0)).tolist()
    return Result(predicted, realised, uniform, gain, measured)


def measure(recorded: Recorded, draws: int = DRAWS) -> dict[str, dict[float, Result]]:
    """Every row of the table."""
    found: dict[str, dict[float, Result]] = {}
    for rate in RATES:
        for score in SCORES:
            found.setdefault(f"{score}, history", {})[rate] = replay(recorded, rate, score, rows=False, live=False)
        if recorded.features is not None:
            found.setdefault("fit, row", {})[rate] = replay(recorded, rate, "fit", rows=True, live=False)
        live = [
            replay(recorded, rate, "fit", rows=recorded.features is not None, live=True, seed=seed)
            for seed in range(draws)
        ]
        found.setdefault("fit, live", {})[rate] = averaged(live)
    return found


def synthetic(seed: int, num_prompts: int = 512, per_step: int = 64, size: int = 8, steps: int = 64) -> Recorded:
    """A made-up run: each prompt has one of five levels and its own difficulty; the policy improves on all."""
    rng = np.random.default_rng(seed)
    level = rng.integers(0, 5, num_prompts)
    difficulty = 1.5 * (level - 2.0) + rng.normal(0, 1.5, num_prompts)
    recorded = []
    for step in range(steps):
        epoch, place = divmod(step * per_step, num_prompts)
        order = np.random.default_rng((seed, epoch)).permutation(num_prompts)
        prompts = order[place : place + per_step]
        ability = 4.0 * step / steps
        chance = 1.0 / (1.0 + np.exp(difficulty[prompts] - ability))
        rewards = (rng.random((per_step, size)) < chance[:, None]).astype(np.float64)
        lengths = rng.poisson(10 + 4 * level[prompts, None], (per_step, size)) + 1
        logit_grad_norm = np.sqrt(lengths * (0.05 + chance * (1 - chance))[:, None]) * rng.uniform(
            0.8, 1.2, lengths.shape
        )
        recorded.append((prompts, rewards, lengths, second_moments(rewards, lengths, logit_grad_norm)))
    features = PromptFeatures(np.full(num_prompts, 10), level.astype(np.float64), np.zeros(num_prompts, int), ("",))
    return Recorded(f"synthetic {seed}", num_prompts, features, recorded)


def main() -> None:
    """Replay every trace, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--problems", nargs="*", default=[], metavar="FILE", help="train.jsonl of each trace")
    parser.add_argument("--draws", type=int, default=DRAWS, help="draws of the live policy")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", help="write one JSON object with every figure here")
    args = parser.parse_args()
    problems = [*args.problems, *[None] * (len(args.traces) - len(args.problems))]
    runs = [read(path, file) for path, file in zip(args.traces, problems, strict=True)]
    if args.smoke:
        runs.append(synthetic(0, num_prompts=128, per_step=32, steps=24))
    figures = []
    print("| trace | score | rate | predicted | realised | uniform | gain | measured by the policy |")
    print("|---|---|---|---|---|---|---|---|")
    for run in runs:
        for name, by_rate in measure(run, args.draws).items():
            for rate, r in by_rate.items():
                print(
                    f"| {run.name} | {name} | {rate:g} | {r.predicted:.2f} | {r.realised:.2f} | {r.uniform:.2f} |"
                    f" {r.gain:.3f} | {r.measured:.2f} |"
                )
                figures.append({"trace": run.name, "score": name, "rate": rate, **vars(r), "off": r.off})
    if args.json:
        result = {
            "benchmark": "prompt_score",
            "rows": figures,
            "versions": {"dppo_megatron": __version__, "python": platform.python_version(), "numpy": np.__version__},
            "machine": {"platform": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()},
        }
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
