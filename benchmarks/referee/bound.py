"""Where "the variance stays bounded up to a pruning rate of 0.7" (arXiv 2603.04135) comes from, in numbers.

    PYTHONPATH=benchmarks python -m referee.bound [--json FILE]

With inclusion probabilities pi and weights 1 / pi, independent draws add E sum (1 / pi - 1) |y|^2 to the variance of
the sum of y, for prompts or completions alike. If no pi is below 1 - r, that is at most r / (1 - r) E sum |y|^2: the
bound.
This prints the growth of the variance for each way to read a rate r, on recorded policies; nothing is drawn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from dppo_megatron.pruning.designs import WaterFiller
from dppo_megatron.types import FloatArray
from referee import methods
from referee.measure import read_worlds
from referee.record import MEASURED, REPOSITORY
from referee.replay import GROUP, World

RATES = (0.3, 0.5, 0.7, 0.9)
_FLOOR = 0.2
"""`pruning.prompt.min_inclusion_prob`."""


def prompt_moments(world: World, last: World, groups: int = 64) -> tuple[FloatArray, FloatArray]:
    """For each prompt, E |its group's gradient|^2, and mean |A| of one earlier visit: the paper's score."""
    rng = np.random.default_rng(0)
    rows = np.arange(len(world.rewards))
    moments = np.zeros(len(rows))
    for _ in range(groups):
        group = world.groups(rows, GROUP, rng)
        factors = methods.advantages_of(world.rewards[rows[:, None], group]) / GROUP
        gradient = np.einsum("qg,qgs->qs", factors, world.gradients["unit"][rows[:, None], group])
        moments += np.square(gradient, dtype=np.float64).sum(1) / groups
    before = last.rewards[rows[:, None], last.groups(rows, GROUP, rng)]
    return moments, np.abs(methods.advantages_of(before)).mean(1)


def completion_moments(world: World) -> tuple[FloatArray, FloatArray]:
    """|A gradient|^2 and |A| of the completions of one epoch's groups, flat; what is known after the rollout."""
    rows = np.arange(len(world.rewards))
    group = world.groups(rows, GROUP, np.random.default_rng(1))
    advantages = methods.advantages_of(world.rewards[rows[:, None], group])
    squared = np.square(world.gradients["unit"][rows[:, None], group], dtype=np.float64).sum(-1)
    return (advantages**2 * squared).ravel(), np.abs(advantages).ravel()


def readings(moments: FloatArray, score: FloatArray, rate: float, floor: float) -> dict[str, float]:
    """Growth sum(m / pi) / sum(m) under each reading of a rate, and the share of candidates that it leaves out.

    all: every candidate is dropped with chance r. lower: only the lower half by score is, with chance r. score: a share
    r is dropped with pi in proportion to the score, at least the floor. best: the same with the root of the true
    moment. Ties in the score are broken at random.
    """
    rng, total = np.random.default_rng(2), moments.sum()
    order = np.lexsort((rng.random(len(score)), score))
    low = np.zeros(len(score), dtype=np.bool_)
    low[order[: len(score) // 2]] = True
    wanted = len(score) * (1 - rate)
    by_score, best = WaterFiller(score, floor).solve(wanted), WaterFiller(np.sqrt(moments), floor).solve(wanted)
    designs = {"all": np.full(len(score), 1 - rate), "lower": np.where(low, 1 - rate, 1.0)}
    designs |= {"score": by_score, "best": best}
    grown = {name: float((moments / np.maximum(pi, 1e-12)).sum() / total) for name, pi in designs.items()}
    grown["bound"] = 1 / (1 - rate)
    grown["lower_left_out"] = rate / 2
    grown["smallest_score_pi"] = float(by_score.min())
    return grown


def main() -> None:
    """Print a table for each level."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--world", type=Path, default=REPOSITORY / "runs" / "referee", help="what `record` wrote")
    parser.add_argument("--after", nargs="+", type=int, choices=MEASURED, default=list(MEASURED), help="steps")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    print("| after | level | r | 1 / (1 - r) | all | lower half | by score | by the true moment |")
    print("|---|---|---|---|---|---|---|---|")
    for after in arguments.after:
        world, earlier = read_worlds(arguments.world, after)
        levels = {"prompts": (*prompt_moments(world, earlier[-1]), _FLOOR)}
        levels["completions"] = (*completion_moments(world), 0.0)
        for level, (moments, score, floor) in levels.items():
            for rate in RATES:
                one = readings(moments, np.maximum(score, 1e-9), rate, floor)
                found[f"{after} {level} {rate}"] = one
                cells = " | ".join(f"{one[name]:.2f}" for name in ("bound", "all", "lower", "score", "best"))
                print(f"| {after} | {level} | {rate} | {cells} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
