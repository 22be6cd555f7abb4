"""A learning run of a selection that the package does not have, by the real engine and actor.

    PYTHONPATH=benchmarks python -m referee.learn --row "prompts, duet 50 %" --seed 0 --lr 1e-3 --out runs/learn

The quickstart's task, model and SFT of that seed, then steps of 64 prompts. Prints accuracy on the held-out problems
with the tokens generated and trained on so far, and writes them. Step sizes are tuned by repeating a row with several
`--lr` on seeds that are not reported. Rows of the package run by `dppo-megatron compare`.
"""

from __future__ import annotations

import argparse
import json
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


def main() -> None:
    """One row, one seed, one step size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--row", choices=LEARNED, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "learn")
    arguments = parser.parse_args()
    name = f"{arguments.row}_seed{arguments.seed}_lr{arguments.lr:g}".replace(" ", "_").replace(",", "")
    torch.set_num_threads(1)
    start_process_group()
    overrides = [f"actor.optimizer.learning_rate={arguments.lr}", f"steps={arguments.steps}"]
    learner = Learner(arguments.row, arguments.seed, arguments.out / name, overrides)
    points = []
    for number in range(arguments.steps + 1):
        if number:
            learner.step(number)
        if number % 4 == 0 or number == arguments.steps:
            accuracy = learner.loop.evaluate()[0].avg.value
            points.append({"step": number, "accuracy": accuracy, "generated": learner.generated})
            points[-1]["trained"] = learner.trained
            print(f"{number}: {accuracy:.3f}, {learner.generated:,} generated, {learner.trained:,} trained", flush=True)
    (arguments.out / f"{name}.json").write_text(
        json.dumps({"arguments": vars(arguments), "points": points}, default=str)
    )
    learner.loop.close()
    stop_process_group()


if __name__ == "__main__":
    main()
