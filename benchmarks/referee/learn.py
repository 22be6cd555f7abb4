"""Learning runs of published selections by the real engine and actor, each at its own tuned step size.

    PYTHONPATH=benchmarks python -m referee.learn --row "completions, pods 50 %" [--out runs/learn]
    PYTHONPATH=benchmarks python -m referee.learn --row "completions, pods 50 %" --seed 0 --lr 1e-3

A run starts from the quickstart's task and model of a seed after its SFT, and takes steps of 64 prompts. The second
command is one run: accuracy on the held-out problems with the tokens generated and trained on so far; the package's
methods run in its trainer, the others in a loop here. The first command is a whole row, each run in a process of its
own: five step sizes on one seed, the best three of them on a second, then ten other seeds at the best, and the
difference to the row `grpo` on the same seeds. A finished run is a line of learned.jsonl in `--out`, and not repeated.
Those behind docs/referee.md are beside this file: `--out benchmarks/referee` prints its rows, any other runs them anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from dppo_megatron.actor.layout import start_process_group, stop_process_group
from dppo_megatron.config import load_config
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.steps.step import Step
from dppo_megatron.types import Completion, FloatArray, IntArray, RolloutPrompt, TrainSample
from dppo_megatron.workbench.compare.arms import parse_arms, read_method_run
from dppo_megatron.workbench.quickstart.make import Recipe, make_quickstart
from referee import methods
from referee.record import PREFIX, PROMPTS, REPOSITORY, make_loop
from referee.replay import CHOICES, GROUP, Plan, Visit, duet, vip

PLANS: dict[str, Plan] = {
    "prompts, vip 100 %": vip(1.0),
    "prompts, vip 50 %": vip(0.5),
    "prompts, duet 100 %, no abort": duet(1.0),
    "prompts, duet 50 %, no abort": duet(0.5),
}
TOKENS = ("tokens, nat uniform 50 %", "tokens, nat prefix", "tokens, first half")
RATES, TUNED_ON, SEEDS = (3e-4, 5e-4, 7e-4, 1e-3, 1.4e-3), (100, 101), tuple(range(10))
OURS = ("grpo", "dppo", "dppo_paper", "cppo", "cppo_verl", "greso", "infobatch", "dynamic_sampling")
"""Rows that are methods of the package, run by its trainer."""
LEARNED = (*OURS, "prompts, speed", "completions, survivors", *PLANS, *CHOICES, *TOKENS)
CONFIG = str(REPOSITORY / "configs" / "quickstart_grpo.yaml")
RESULTS = "learned.jsonl"
EVERY = 4
"""Steps from one evaluation to the next."""


class Learner:
    """One run; `step` is a trainer's step with the row's selection instead of the package's."""

    def __init__(self, row: str, seed: int, work: Path, settings: list[str]) -> None:
        self.row, self.rng = row, np.random.default_rng(seed)
        self.loop = make_loop(work, 0, settings, seed=seed)
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
        if self.row == "completions, survivors":
            varied = sum(bool(np.ptp(rewards)) for _, rewards in groups)
            weight = np.full(PROMPTS, 1.0 / (max(varied, 1) * GROUP))
        for place in range(PROMPTS):
            completions, rewards = groups[place][0][: count[place]], groups[place][1][None, : count[place]]
            lengths = np.array([[len(one.token_ids) for one in completions]])
            needed = GROUP // 2 if not passing[place] else len(completions)  # without a pass, only the screening
            self.generated += int(lengths[:, :needed].sum())
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
        groups: list[tuple[list[Completion], FloatArray]] = [([], np.zeros(0)) for _ in rows]
        for turn in range(rounds):
            step = Step(1_000 * turn + number, chosen, reached="selected")
            self.loop.generate(step, chosen, 0)
            for place, group in step.groups.items():
                before = groups[place]
                groups[place] = [*before[0], *group.completions], np.concatenate([before[1], group.rewards])
        return groups

    def _sample(self, prompt: int, one: Completion, advantage: float, factor: float) -> TrainSample:
        """The sample of one completion, with token weights by NAT's draw or for the first half where the row has it."""
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
    """The file that a run writes."""
    name = f"{row}_seed{seed}_lr{rate:g}_steps{arguments.steps}".replace(" ", "_").replace(",", "").replace("%", "pct")
    return Path(arguments.out) / f"{name}.json"


def train(settings: list[str]) -> None:
    """One run of the package's trainer."""
    subprocess.run([sys.executable, "-m", "dppo_megatron", "train", CONFIG, *settings], check=True)


def started(out: Path, seed: int) -> list[str]:
    """Settings of a run that starts from the model after SFT, which all runs of a seed share; made if it is missing."""
    start = out / f"start_seed{seed}"
    sets = ("data.train_path=train.jsonl", "data.eval_paths.heldout=heldout.jsonl", "sft.examples_path=sft.jsonl")
    settings = [f"seed={seed}", *(one.replace("=", f"={start}/") for one in sets)]
    if not (start / "run" / "hf").is_dir():
        make_quickstart(start, Recipe(seed))
        train([*settings, f"model.hf_path={start / 'model'}", "steps=0", f"run_dir={start / 'run'}"])
    return [*settings, f"model.hf_path={start / 'run' / 'hf'}", "sft.steps=0"]


@dataclass(frozen=True)
class Learned:
    """A run: what it is a function of, and its curve, a point every `EVERY` steps."""

    row: str
    seed: int
    lr: float
    steps: int
    overrides: list[str]
    accuracy: list[float] = field(default_factory=list)
    generated: list[float] = field(default_factory=list)
    """Completion tokens so far."""
    trained: list[float] = field(default_factory=list)

    def add(self, accuracy: float, generated: float, trained: float) -> None:
        self.accuracy.append(round(accuracy, 5))
        self.generated.append(generated)
        self.trained.append(trained)

    @property
    def settings(self) -> list[str]:
        groups = f"rollout.prompts_per_step={PROMPTS}", f"rollout.completions_per_prompt={GROUP}"
        return [f"actor.optimizer.learning_rate={self.lr}", f"steps={self.steps}", *groups, *self.overrides]

    @property
    def end(self) -> float:
        """The mean of its last two evaluations, as `compare` has it."""
        return statistics.mean(self.accuracy[-2:])

    def same_job(self, other: Learned) -> bool:
        return replace(self, accuracy=[], generated=[], trained=[]) == replace(
            other, accuracy=[], generated=[], trained=[]
        )


def run_ours(run: Learned, settings: list[str], work: Path) -> None:
    """Run a method of the package."""
    (arm,) = parse_arms(run.row, load_config(CONFIG, settings, writes_run=False), 1.0)
    train([*settings, *arm.settings, f"eval.every_steps={EVERY}", f"run_dir={work}"])
    for at in read_method_run(run.row, run.seed, work).curve:
        run.add(at.accuracy, at.tokens_generated, at.tokens_trained)


def run_here(run: Learned, settings: list[str], work: Path) -> None:
    """Run a selection that the package does not have."""
    torch.set_num_threads(1)
    start_process_group()
    learner = Learner(run.row, run.seed, work, settings)
    for number in range(run.steps + 1):
        if number:
            learner.step(number)
        if number % EVERY == 0 or number == run.steps:
            accuracy = learner.loop.evaluate()[0].avg.value
            assert accuracy is not None  # None if every grading failed, and final_answer never fails
            run.add(accuracy, learner.generated, learner.trained)
            print(f"{number}: {run.accuracy[-1]:.3f}, {learner.generated:,} tokens generated", flush=True)
    learner.loop.close()
    stop_process_group()


def learned(arguments: argparse.Namespace, row: str, seed: int, rate: float, *, run: bool = True) -> Learned | None:
    """A finished run. If it has not run, it runs now in a process of its own, or None is returned if `run` is False."""
    wanted, path = Learned(row, seed, rate, arguments.steps, arguments.overrides), arguments.out / RESULTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for one in (Learned(**json.loads(line)) for line in lines):
        if one.same_job(wanted):
            return one
    if not run:
        return None
    options = ["--row", row, "--seed", seed, "--lr", rate, "--steps", arguments.steps, "--out", arguments.out]
    subprocess.run([sys.executable, "-m", "referee.learn", *map(str, options), *arguments.overrides], check=True)
    return learned(arguments, row, seed, rate, run=False)


def tuned(arguments: argparse.Namespace, row: str, *, run: bool = True) -> list[Learned] | None:
    """A row's runs on all seeds at its best step size; None if `run` is False and not all of them have run."""

    def runs(seeds: tuple[int, ...], rates: tuple[float, ...]) -> dict[float, list[Learned]] | None:
        found = {rate: [learned(arguments, row, seed, rate, run=run) for seed in seeds] for rate in rates}
        known = {rate: [one for one in each if one is not None] for rate, each in found.items()}
        return known if all(len(each) == len(seeds) for each in known.values()) else None

    def best_of(found: dict[float, list[Learned]], count: int) -> tuple[float, ...]:
        return tuple(sorted(found, key=lambda rate: -statistics.mean(one.end for one in found[rate]))[:count])

    first = runs(TUNED_ON[:1], RATES)
    both = runs(TUNED_ON, best_of(first, 3)) if first else None
    judged = runs(SEEDS, best_of(both, 1)) if both else None
    return next(iter(judged.values())) if judged else None


def report(arguments: argparse.Namespace) -> None:
    """Run all of a row and print its ends, and how far they are above those of GRPO."""
    found, base = tuned(arguments, arguments.row), tuned(arguments, "grpo", run=False)
    assert found is not None
    shown = ", ".join(f"{100 * one.end:.1f}" for one in found)
    print(f"{arguments.row}: lr {found[0].lr:g}, ends at {100 * statistics.mean(r.end for r in found):.1f} % ({shown})")
    if base is None or arguments.row == "grpo":
        return
    above = [100 * (ours.end - theirs.end) for ours, theirs in zip(found, base, strict=True)]
    error = statistics.stdev(above) / len(above) ** 0.5
    shares = [
        sum(getattr(one, name)[-1] for one in found) / sum(getattr(one, name)[-1] for one in base)
        for name in ("generated", "trained")
    ]
    print(
        f"minus grpo's (lr {base[0].lr:g}), same seeds: {statistics.mean(above):+.1f} +- {error:.1f} points;"
        f" tokens generated {shares[0]:.0%}, trained {shares[1]:.0%} of grpo's"
    )


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
    run = Learned(arguments.row, arguments.seed, arguments.lr, arguments.steps, arguments.overrides)
    settings = [*started(arguments.out, run.seed), *run.settings]
    with tempfile.TemporaryDirectory() as work:
        run_as = run_ours if run.row in OURS else run_here
        run_as(run, settings, Path(work) / "run")
    with (arguments.out / RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run)) + "\n")


if __name__ == "__main__":
    main()
