"""Is the prompt score calibrated on runs unlike the quickstart? Made-up GRPO runs of many shapes.

    python benchmarks/prompt_score_shapes.py [SHAPE ...] [--seeds 3] [--rates 0.15 0.3 0.5]

Each prompt has a level (0 to 4) and a difficulty, the policy an ability that grows; each shape below changes one thing
that a real run might have. The columns and the replay are those of prompt_score.py: the trainer's own policy plans what
it would skip, and every nominal outcome is known. `history` uses visits alone, `row` the problem's row too.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from prompt_score import RATES, Recorded, averaged, replay, second_moments

from dppo_megatron.types import FloatArray, IntArray, PromptFeatures


@dataclass(frozen=True)
class Shape:
    """What is special about a run."""

    prompts: int = 512
    per_step: int = 64
    size: int = 8
    steps: int = 64
    harder: float = 0.0
    """Added to every difficulty."""
    ability: Callable[[float], float] = lambda done: 4.0 * done
    """Ability as a function of the share of the run that is done."""
    difficulty: str = "by level"
    """by level, bimodal (nearly all prompts trivial or impossible), all alike."""
    drift: float = 0.0
    """Standard deviation by which each difficulty moves in a step."""
    turn: str = ""
    """What happens to difficulties in the middle: shuffled, reversed."""
    says: str = "level"
    """What rows hold: level, lies (a random level), source (ten of them), number (a noisy difficulty), nothing."""
    reward: str = "right"
    """right (0 or 1), graded (-1 to 2.5 in tenths), continuous, failed (a fifth of the groups is not graded)."""
    lengths: str = "by level"
    """by level, long tail (log-normal), wrong is long (eight times), growing (sevenfold)."""


SHAPES = {
    "plain": Shape(),
    "saturates fast": Shape(ability=lambda done: 6.0 / (1.0 + math.exp(4.0 - 21.0 * done)) - 1.0),
    "bimodal": Shape(difficulty="bimodal"),
    "drifting difficulties": Shape(drift=0.25),
    "shuffled in the middle": Shape(turn="shuffled"),
    "reversed in the middle": Shape(turn="reversed"),
    "jumps in the middle": Shape(ability=lambda done: 4.0 * (done >= 0.5)),
    "forgets and learns": Shape(ability=lambda done: 2.0 + 2.0 * math.sin(16.0 * done)),
    "collapses in the middle": Shape(ability=lambda done: 4.0 * done if done < 0.5 else -9.0),
    "all hard": Shape(harder=4.0),
    "all easy": Shape(harder=-4.0),
    "all alike": Shape(difficulty="all alike", says="nothing"),
    "rows say nothing": Shape(says="nothing"),
    "a level that lies": Shape(says="lies"),
    "level is a number": Shape(says="number"),
    "ten sources": Shape(says="source"),
    "8 prompts a step": Shape(prompts=64, per_step=8),
    "200 prompts": Shape(prompts=200, per_step=50, steps=48),
    "groups of 4": Shape(size=4),
    "groups of 32": Shape(size=32),
    "graded rewards": Shape(reward="graded"),
    "continuous rewards": Shape(reward="continuous"),
    "failed gradings": Shape(reward="failed"),
    "long-tailed lengths": Shape(lengths="long tail"),
    "wrong answers are long": Shape(lengths="wrong is long"),
    "growing answers": Shape(lengths="growing"),
    "50,000 prompts, half an epoch": Shape(prompts=50_000, per_step=512, steps=48),
}


def made_up(name: str, seed: int) -> Recorded:
    """The run of a shape; it depends only on name and seed."""
    shape = SHAPES[name]
    rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
    level = rng.integers(0, 5, shape.prompts)
    difficulty = _difficulties(shape, level, rng)
    features = _features(shape, level, difficulty, rng)
    steps = []
    for step in range(shape.steps):
        if shape.turn and step == shape.steps // 2:
            difficulty = -difficulty if shape.turn == "reversed" else rng.permutation(difficulty)
        difficulty = difficulty + rng.normal(0.0, shape.drift, shape.prompts) if shape.drift else difficulty
        prompts = _nominal(shape, step, seed)
        chance = 1.0 / (1.0 + np.exp(difficulty[prompts] - shape.ability(step / shape.steps)))
        rewards = _rewards(shape, chance, rng)
        lengths = _lengths(shape, level[prompts], rewards, step / shape.steps, rng)
        # answers of uncertain outcome have larger gradients
        logit_grad_norm = np.sqrt(lengths * (0.05 + chance * (1 - chance))[:, None]) * rng.uniform(
            0.8, 1.2, lengths.shape
        )
        steps.append((prompts, rewards, lengths, second_moments(rewards, lengths, logit_grad_norm)))
    return Recorded(f"{name} {seed}", shape.prompts, features, steps)


def first_counted(name: str) -> int | None:
    """The first step that is judged: after the first epoch, or after 8 steps of a run shorter than an epoch."""
    shape = SHAPES[name]
    return 8 if shape.prompts > shape.per_step * shape.steps else None


def _nominal(shape: Shape, step: int, seed: int) -> IntArray:
    """Prompts of a step: each occurs once per epoch, and each epoch has its own order."""
    epoch, place = divmod(step * shape.per_step, shape.prompts)
    order = np.random.default_rng((seed, epoch)).permutation(shape.prompts)
    mine: IntArray = order[place : place + shape.per_step]
    return mine


def _difficulties(shape: Shape, level: IntArray, rng: np.random.Generator) -> FloatArray:
    count = len(level)
    if shape.difficulty == "all alike":
        return np.zeros(count)
    if shape.difficulty == "bimodal":
        extreme = np.where(rng.random(count) < 0.5, -6.0, 6.0) + rng.normal(0, 1, count)
        return np.where(rng.random(count) < 0.1, rng.normal(1, 1, count), extreme)
    return 1.5 * (level - 2.0) + rng.normal(0, 1.5, count) + shape.harder


def _features(shape: Shape, level: IntArray, difficulty: FloatArray, rng: np.random.Generator) -> PromptFeatures:
    count = len(level)
    names: tuple[str, ...] = ("",)
    says, source = np.full(count, np.nan), np.zeros(count, np.int64)
    if shape.says == "level":
        says = level.astype(np.float64)
    elif shape.says == "lies":
        says = rng.integers(0, 5, count).astype(np.float64)
    elif shape.says == "number":
        says = difficulty + rng.normal(0, 0.5, count)
    elif shape.says == "source":
        source, names = 2 * level + rng.integers(0, 2, count), tuple(map(str, range(10)))
    return PromptFeatures(np.full(count, 10), says, source, names)


def _rewards(shape: Shape, chance: FloatArray, rng: np.random.Generator) -> FloatArray:
    """[N, G] from the prompts' chances [N] of a right answer."""
    size, chance = (len(chance), shape.size), chance[:, None]
    if shape.reward == "graded":
        return np.asarray(np.round(np.clip(3 * chance - 1 + rng.normal(0, 0.4, size), -1, 2.5), 1))
    if shape.reward == "continuous":
        return np.asarray(5 * (chance - 0.5) + (0.05 + chance * (1 - chance)) * rng.normal(0, 1, size))
    right = (rng.random(size) < chance).astype(np.float64)
    if shape.reward == "failed":
        right[rng.random(size) < 0.05] = np.nan
        right[rng.random(len(right)) < 0.2] = np.nan
    return right


def _lengths(shape: Shape, level: IntArray, rewards: FloatArray, done: float, rng: np.random.Generator) -> IntArray:
    """[N, G] tokens."""
    usual = np.broadcast_to(10.0 + 4.0 * level[:, None], rewards.shape)
    if shape.lengths == "long tail":
        tailed: IntArray = np.maximum(1, rng.lognormal(np.log(3 * usual), 1.2)).astype(np.int64)
        return tailed
    factor = {"wrong is long": np.where(rewards > 0, 1.0, 8.0), "growing": 1 + 6 * done}.get(shape.lengths, 1.0)
    lengths: IntArray = rng.poisson(factor * usual) + 1
    return lengths


def main() -> None:
    """Print a row for each shape and rate, with `history` and with `row`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of: {', '.join(SHAPES)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    args = parser.parse_args()
    if unknown := sorted(set(args.shapes) - set(SHAPES)):
        parser.error(f"no shape {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    print("| run | score | rate | predicted | realised | uniform | gain |\n|---|---|---|---|---|---|---|")
    for name in args.shapes or SHAPES:
        runs = [made_up(name, seed) for seed in range(args.seeds)]
        for rows in (False, True):
            for rate in args.rates:
                r = averaged(
                    [replay(run, rate, "fit", rows=rows, live=False, first=first_counted(name)) for run in runs]
                )
                print(
                    f"| {name} | {'row' if rows else 'history'} | {rate:g} | {r.predicted:.3f} | {r.realised:.3f} |"
                    f" {r.uniform:.3f} | {r.gain:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
