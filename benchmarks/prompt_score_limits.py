"""How much of the gain in cost x variance could be had on recorded runs: the trainer's score against two that cheat.

    python benchmarks/prompt_score_limits.py TRACE [TRACE ...] [--problems FILE ...]

`whole trace`: one regression fitted to all steps of the trace at once, what is later included, on the successes of the
last two visits and of the *next* one, source, source in each quarter of the run, and source with last outcome, some
hundred columns, for the same groups as it is judged by. `outcome`: every group's second moment and tokens are known.
All three divide by the square root of the cost (the trainer's prediction for the first two) and keep 0.2 at least.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from prompt_score import RATES, Recorded, read

from dppo_megatron.config.pruning import PromptPruningConfig
from dppo_megatron.pruning.designs import WaterFiller, count_kept
from dppo_megatron.pruning.policies import make_prompt_policy
from dppo_megatron.pruning.prompt_dppo import DppoPromptPolicy
from dppo_megatron.types import FloatArray, IntArray

_FLOOR, _NEVER = 0.2, 6
_CLASS = np.array([0, 1, 1, 2, 2, 3, 3, 4, 5])
"""Of the successes 0 to 8."""


@dataclass(frozen=True)
class Judged:
    """A step after the first epoch: what was predicted and what came, [n] each."""

    step: int
    predicted: FloatArray
    cost: FloatArray
    moment: FloatArray
    tokens: FloatArray


def trainers_own(recorded: Recorded) -> list[Judged]:
    """Predictions of the trainer's policy, which rests all the time."""
    per_step, size = recorded.steps[0][1].shape
    policy = make_prompt_policy(
        PromptPruningConfig(score="fit", rate=min(RATES), warmup_epochs=1e9, anneal_fraction=1.0),
        num_prompts=recorded.num_prompts,
        completions_per_prompt=size,
        prompts_per_step=per_step,
        total_steps=len(recorded.steps),
        seed=0,
        features=recorded.features,
    )
    assert isinstance(policy, DppoPromptPolicy) and policy.fitted is not None
    found = []
    for step, (prompts, rewards, lengths, moment) in enumerate(recorded.steps):
        if step >= int(np.ceil(recorded.num_prompts / per_step)) and moment.sum() > 0:
            expected = policy.fitted.expected(prompts, step), policy.fitted.expected_cost(prompts, step)
            found.append(Judged(step, *expected, moment, lengths.sum(axis=1).astype(np.float64)))
        one = np.ones(per_step)
        policy.observe(prompts, rewards, lengths, step=step, second_moment=moment, inclusion_prob=one, planned_prob=one)
    return found


def whole_trace(recorded: Recorded, own: list[Judged]) -> list[Judged]:
    """The same steps, the moments predicted by the regression on everything."""
    assert recorded.features is not None
    source, steps = recorded.features.source, recorded.steps
    outcome = [_CLASS[rewards.sum(axis=1).astype(np.int64) * 8 // rewards.shape[1]] for _, rewards, _, _ in steps]
    visits: dict[int, list[tuple[int, int]]] = {}
    for step, (prompts, *_) in enumerate(steps):
        for row, prompt in enumerate(prompts.tolist()):
            visits.setdefault(prompt, []).append((step, row))
    around = [np.full((3, len(prompts)), _NEVER) for prompts, *_ in steps]
    for places in visits.values():
        for k, (step, row) in enumerate(places):
            for column, other in enumerate((k - 1, k - 2, k + 1)):
                if 0 <= other < len(places):
                    at, place = places[other]
                    around[step][column, row] = outcome[at][place]
    blocks = []
    for step, (prompts, *_) in enumerate(steps):
        last, before, after = (_one_hot(values, _NEVER + 1) for values in around[step])
        own_source = _one_hot(source[prompts], int(source.max()) + 1)
        quarter = [own_source * (step * 4 // len(steps) == k) for k in range(4)]
        both = (own_source[:, :, None] * last[:, None, :]).reshape(len(prompts), -1)
        blocks.append(np.concatenate([np.ones((len(prompts), 1)), last, before, after, *quarter, both], axis=1))
    relative = [moment / (moment.mean() or 1.0) for *_, moment in steps]
    weights = _poisson(np.concatenate(blocks), np.concatenate(relative))
    return [Judged(j.step, np.exp(blocks[j.step] @ weights), j.cost, j.moment, j.tokens) for j in own]


def outcome_known(own: list[Judged]) -> list[Judged]:
    """Of groups without gradient, the longest are skipped first."""
    return [Judged(j.step, j.moment + 1e-9 * j.moment.max() / j.tokens, j.tokens, j.moment, j.tokens) for j in own]


def gain(judged: list[Judged], rate: float) -> float:
    """(cost x variance) of no skipping over that of skipping: geometric mean over the steps."""
    logs = []
    for j in judged:
        lower = np.full(len(j.moment), _FLOOR)
        pi = WaterFiller(np.sqrt(j.predicted / j.cost), lower).solve(float(count_kept(len(lower), rate)))
        logs.append(np.log((j.moment / pi).sum() / j.moment.sum() * (pi * j.tokens).sum() / j.tokens.sum()))
    return float(np.exp(-np.mean(logs)))


def _one_hot(codes: IntArray, count: int) -> FloatArray:
    hot: FloatArray = (codes[:, None] == np.arange(count)).astype(np.float64)
    return hot


def _poisson(x: FloatArray, y: FloatArray, ridge: float = 1.0) -> FloatArray:
    """Poisson regression by damped Newton steps."""
    weights = np.zeros(x.shape[1])
    held = np.diag(np.where(np.arange(x.shape[1]) > 0, ridge, 1e-9))
    for _ in range(30):
        mean = np.exp(np.clip(x @ weights, -20, 20))
        step = np.linalg.solve((x * mean[:, None]).T @ x + held, x.T @ (y - mean) - held @ weights)
        weights += step * min(1.0, 2.0 / float(np.abs(step).max()))
    return weights


def main() -> None:
    """Print a row for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--problems", nargs="*", default=[], metavar="FILE", help="train.jsonl of each trace")
    args = parser.parse_args()
    problems = [*args.problems, *[None] * (len(args.traces) - len(args.problems))]
    print(f"| trace | trainer's, at {', '.join(map(str, RATES))} | whole trace | outcome |\n|---|---|---|---|")
    for path, file in zip(args.traces, problems, strict=True):
        recorded = read(path, file)
        own = trainers_own(recorded)
        cells = [
            ", ".join(f"{gain(judged, rate):.3f}" for rate in RATES)
            for judged in (own, whole_trace(recorded, own), outcome_known(own))
        ]
        print(f"| {recorded.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
