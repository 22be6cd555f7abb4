"""A learning run of a selection that the package does not have, by the real engine and actor.

    PYTHONPATH=benchmarks python -m referee.learn --row "prompts, duet 50 %, no abort" [--out runs/learn]
    PYTHONPATH=benchmarks python -m referee.learn --row "prompts, duet 50 %, no abort" --seed 0 --lr 1e-3

The quickstart's task, model and SFT of a seed, then steps of 64 prompts. The second command is one run: accuracy on the
held-out problems with the tokens generated and trained on so far. The first is the row, by processes of that kind: the
step size that ends best on two seeds apart, then ten seeds at it, and the difference to the row `grpo` on the same
seeds where that has run. Finished runs are kept. Rows of the package run by `dppo-megatron compare`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from dppo_megatron.actor.layout import start_process_group, stop_process_group
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.steps.step import Step
from dppo_megatron.types import Completion, FloatArray, IntArray, RolloutPrompt, TrainSample
from referee import methods
from referee.record import PREFIX, REPOSITORY, make_loop
from referee.replay import CHOICES, GROUP, PROMPTS, Plan, Visit, duet, vip

PLANS: dict[str, Plan] = {
    "prompts, vip 100 %": vip(1.0),
    "prompts, vip 50 %": vip(0.5),
    "prompts, duet 100 %, no abort": duet(1.0),
    "prompts, duet 50 %, no abort": duet(0.5),
}
TOKENS = ("tokens, nat uniform 50 %", "tokens, nat prefix", "tokens, first half")
RATES, TUNED_ON, SEEDS = (3e-4, 5e-4, 7e-4, 1e-3, 1.4e-3), (100, 101), tuple(range(10))
LEARNED = ("grpo", "prompts, speed", *PLANS, *CHOICES, *TOKENS)


class Learner:
    """One run; `step` is a trainer's step with the row's selection in the place of the package's."""

    def __init__(self, row: str, seed: int, work: Path, overrides: list[str]) -> None:
        self.row, self.rng = row, np.random.default_rng(seed)
        self.loop = make_loop(work, 700, [f"seed={seed}", *overrides], seed=seed)
        self._order, self._position = PromptOrder(len(self.loop.job.train_prompts), seed), 0
        self._last: dict[int, Visit] = {}
        self.generated = self.trained = 0

    def step(self, number: int) -> None:
        """Roll out, select, update, give the engine the weights."""
        samples = list(self._samples(number))
        if samples:
            self.loop.actor.update(samples, self.loop.pack(samples), self.loop.objective)
            self.loop.load_engine()

    def _samples(self, number: int) -> Iterator[TrainSample]:
        rows, self._position = self._order.take(self._position, PROMPTS)
        count, weight = np.full(PROMPTS, GROUP), np.full(PROMPTS, 1.0 / (PROMPTS * GROUP))
        known = all(int(prompt) in self._last for prompt in rows)
        if self.row in PLANS and known:
            last = [self._last[int(prompt)] for prompt in rows]
            names = ("pass_rate", "spread", "length")
            count, weight = PLANS[self.row](Visit(*(np.concatenate([getattr(v, n) for v in last]) for n in names)))
        groups = self._rolled_out(number, rows, -(-int(count.max()) // GROUP))
        passing = np.ones(PROMPTS, dtype=np.bool_)
        if self.row == "prompts, speed":
            passing = methods.speed_screen(np.stack([rewards for _, rewards in groups]), GROUP // 2)
            weight = np.full(PROMPTS, 1.0 / (max(int(passing.sum()), 1) * GROUP))
        for place in range(PROMPTS):
            completions, rewards = groups[place][0][: count[place]], groups[place][1][None, : count[place]]
            lengths = np.array([[len(one.token_ids) for one in completions]])
            spared = GROUP // 2 if not passing[place] else len(completions)  # the screening alone was needed
            self.generated += int(lengths[:, :spared].sum())
            logprob = np.array([[float(np.sum(one.logprobs)) for one in completions]])
            self._last[int(rows[place])] = Visit.of(rewards, lengths, logprob)
            groups[place] = completions, rewards[0]
        if self.row in CHOICES:
            all_rewards = np.stack([rewards for _, rewards in groups])
            all_lengths = np.array([[len(one.token_ids) for one in completions] for completions, _ in groups])
            advantages = methods.advantages_of(all_rewards)
            chosen = CHOICES[self.row](all_rewards, advantages, all_lengths, self.rng)
        for place in np.flatnonzero(passing).tolist():
            completions, rewards = groups[place]
            for index, advantage in enumerate(methods.advantages_of(rewards[None])[0]):
                factor = weight[place] * (chosen[place, index] if self.row in CHOICES else 1.0)
                if factor * advantage != 0:
                    yield self._sample(int(rows[place]), completions[index], float(advantage), float(factor))

    def _rolled_out(self, number: int, rows: IntArray, rounds: int) -> list[tuple[list[Completion], FloatArray]]:
        chosen = [RolloutPrompt(self.loop.job.train_prompts[int(prompt)], 1.0, 1.0) for prompt in rows]
        found: list[tuple[list[Completion], FloatArray]] = [([], np.zeros(0)) for _ in rows]
        for turn in range(rounds):
            step = Step(1_000 * turn + number, chosen, reached="selected")
            self.loop.generate(step, chosen, 0)
            for place, group in step.groups.items():
                before = found[place]
                found[place] = [*before[0], *group.completions], np.concatenate([before[1], group.rewards])
        return found

    def _sample(self, prompt: int, one: Completion, advantage: float, factor: float) -> TrainSample:
        """Its token weights are what NAT's draw, or the first half, leaves of it."""
        ids, length = self.loop.job.train_prompts[prompt].token_ids, len(one.token_ids)
        weight: FloatArray = np.ones(length)
        until = length
        if self.row == "tokens, nat uniform 50 %":
            weight = np.where(self.rng.random(length) < 0.5, 2.0, 0.0)
        elif self.row == "tokens, nat prefix":
            cut, inclusion = methods.nat_prefix(length, max(int(PREFIX * length), 1))
            until = int(self.rng.choice(length, p=cut)) + 1
            weight = np.asarray(np.where(np.arange(length) < until, 1.0 / inclusion, 0.0))
        elif self.row == "tokens, first half":
            until = -(-length // 2)
            weight = (np.arange(length) < until).astype(np.float64)
        self.trained += int((weight > 0).sum())
        return TrainSample(
            id=f"{prompt}",
            token_ids=np.concatenate([np.array(ids, np.int64), one.token_ids[:until]]),
            num_prompt_tokens=len(ids),
            behaviour_logprobs=one.logprobs[:until],
            advantage=advantage,
            weight=weight[:until],
            denominator=length / factor,
        )


def file_of(arguments: argparse.Namespace, row: str, seed: int, rate: float) -> Path:
    """What a run writes."""
    name = f"{row}_seed{seed}_lr{rate:g}_steps{arguments.steps}".replace(" ", "_").replace(",", "").replace("%", "pct")
    return Path(arguments.out) / f"{name}.json"


def end_of(arguments: argparse.Namespace, row: str, seed: int, rate: float, *, run: bool = True) -> float | None:
    """Accuracy at the end of a run, the mean of its last two evaluations, as `compare` has it; None: it has not run."""
    path = file_of(arguments, row, seed, rate)
    if run and not path.exists():
        given = {"row": row, "seed": seed, "lr": rate, "steps": arguments.steps, "out": arguments.out}
        options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "-m", "referee.learn", *options, *arguments.overrides], check=True)
    if not path.exists():
        return None
    points = json.loads(path.read_text(encoding="utf-8"))["points"]
    return float(statistics.mean(point["accuracy"] for point in points[-2:]))


def tuned(arguments: argparse.Namespace, row: str, *, run: bool = True) -> tuple[float, list[float]] | None:
    """The best step size of a row and its ends on all seeds; None: not all of it has run."""
    found = {rate: [end_of(arguments, row, seed, rate, run=run) for seed in TUNED_ON] for rate in RATES}
    means = {
        rate: statistics.mean(one for one in ends if one is not None)
        for rate, ends in found.items()
        if None not in ends
    }
    if len(means) < len(RATES):
        return None
    best = max(means, key=lambda rate: means[rate])
    ends = [end_of(arguments, row, seed, best, run=run) for seed in SEEDS]
    return None if None in ends else (best, [one for one in ends if one is not None])


def report(arguments: argparse.Namespace) -> None:
    """Run all of a row and print its ends, and what they are above those of GRPO."""
    found, base = tuned(arguments, arguments.row), tuned(arguments, "grpo", run=False)
    assert found is not None
    shown = ", ".join(f"{100 * end:.1f}" for end in found[1])
    print(f"{arguments.row}: lr {found[0]:g}, ends at {100 * statistics.mean(found[1]):.1f} % ({shown})")
    if base is not None:
        above = [100 * (ours - theirs) for ours, theirs in zip(found[1], base[1], strict=True)]
        error = statistics.stdev(above) / len(above) ** 0.5
        print(f"minus grpo's (lr {base[0]:g}), same seeds: {statistics.mean(above):+.1f} +- {error:.1f} points")


def main() -> None:
    """One row, or one run of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--row", choices=LEARNED, required=True)
    parser.add_argument("--seed", type=int, help="default: tuned on two seeds, then ten")
    parser.add_argument("--lr", type=float, default=1e-3, help="with --seed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "learn")
    parser.add_argument("overrides", nargs="*", help="settings of the job, key=value")
    arguments = parser.parse_args()
    if arguments.seed is None:
        report(arguments)
        return
    path = file_of(arguments, arguments.row, arguments.seed, arguments.lr)
    torch.set_num_threads(1)
    start_process_group()
    overrides = [f"actor.optimizer.learning_rate={arguments.lr}", f"steps={arguments.steps}", *arguments.overrides]
    learner = Learner(arguments.row, arguments.seed, path.with_suffix(""), overrides)
    points = []
    for number in range(arguments.steps + 1):
        if number:
            learner.step(number)
        if number % 4 == 0 or number == arguments.steps:
            accuracy = learner.loop.evaluate()[0].avg.value
            points.append({"step": number, "accuracy": accuracy, "generated": learner.generated})
            points[-1]["trained"] = learner.trained
            print(f"{number}: {accuracy:.3f}, {learner.generated:,} generated, {learner.trained:,} trained", flush=True)
    path.write_text(json.dumps({"arguments": vars(arguments), "points": points}, default=str))
    learner.loop.close()
    stop_process_group()


if __name__ == "__main__":
    main()
