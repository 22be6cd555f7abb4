"""The quickstart's directory: a seeded arithmetic task, a tiny Qwen3 model, and in `task.json` how both were made.

They are made, not downloaded, so that the quickstart needs no network after installation and every seed is another
task and another model; `dppo-megatron compare` makes the same for its other seeds.

The problem set has to give reinforcement learning real work from its first step to its last. Chains of additions and
subtractions have a dial for that (one more operation, one more chance to slip), every worked step can be checked by a
reader, and a few characters are enough tokens. No model that a CPU trains in minutes can read a real data set.

The demonstrations of SFT are a mixture: some work the chain out line by line, most state the result outright, as text
found in the wild does, and the longer the chain the more of them do. A model trained on both mostly guesses;
reinforcement learning teaches it to work in steps, the short chains first, and reliably. So groups without reward
variance are spread as on real sets: a third at the start (always or never solved), six in ten at the end, while the
accuracy still climbs. Every problem can be learned: what was never demonstrated would only waste rollouts.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dppo_megatron.config.paths import check_writable, writing
from dppo_megatron.files import write_text
from dppo_megatron.randomness import generator
from dppo_megatron.types import UserError

_MAX_TOTAL = 30
"""Bound of every intermediate result: few enough facts to learn in a minute, enough that a guess is mostly wrong.
With 20 a guesser scored ten points more; with 99 SFT of this length had hardly learned to add."""
_MAX_OPERAND = 9
_DRAWS_WITHOUT_NEWS = 10_000
"""After this many repetitions in a row a level is taken to have no new problem left."""


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    """Value of `source` in the files."""
    operations: int
    problem_share: float
    """Share of this level in the train and held-out sets; the shares add up to 1."""
    example_share: float
    """Share of this level in SFT's examples; they add up to 1."""
    guess_share: float
    """Share of this level's examples that state the result without working it out."""


LEVELS: tuple[Level, ...] = (
    # A single operation has no steps to skip: it is always worked, and solved from the start.
    Level("level_1", 1, problem_share=0.22, example_share=0.22, guess_share=0.0),
    Level("level_2", 2, problem_share=0.14, example_share=0.18, guess_share=0.50),
    Level("level_3", 3, problem_share=0.14, example_share=0.15, guess_share=0.60),
    Level("level_4", 4, problem_share=0.17, example_share=0.15, guess_share=0.65),
    Level("level_5", 5, problem_share=0.17, example_share=0.15, guess_share=0.70),
    # With 0.8 and more this one was guessed to the end of the run; seven operations were hardly ever found.
    Level("level_6", 6, problem_share=0.16, example_share=0.15, guess_share=0.75),
)


@dataclass(frozen=True, slots=True)
class Exercise:
    """A problem with its result and the true equations that lead there."""

    problem: str
    answer: str
    source: str
    steps: tuple[str, ...]


class Recipe(NamedTuple):
    """What a quickstart's directory is a function of: its seed, and the rows of each file."""

    seed: int = 0
    num_train: int = 512
    num_heldout: int = 384
    num_sft: int = 16384


def write_task(directory: str | Path, recipe: Recipe) -> None:
    """Write `train.jsonl`, `heldout.jsonl` and `sft.jsonl` into `directory`, which is made if it is missing.

    No two rows of the train and held-out sets share a problem, and no example of SFT is one of those
    problems. Examples are drawn with replacement: the short levels have fewer problems than SFT has steps
    to show. The same recipe gives the same bytes.

    Raises:
        UserError: a count below 1, or more problems of a level than the level has.
    """
    seed, num_train, num_heldout, num_sft = recipe
    for name, count in recipe._asdict().items():
        if name != "seed" and count < 1:
            raise UserError(f"{name} = {count}: must be at least 1")
    used: set[str] = set()
    problem_shares = [level.problem_share for level in LEVELS]
    heldout = _exercises(seed, "heldout", num_heldout, problem_shares, used, repeat=False)
    train = _exercises(seed, "train", num_train, problem_shares, used, repeat=False)
    example_shares = [level.example_share for level in LEVELS]
    # the stream of random numbers keeps its old name: another would be another task for every seed
    examples = _exercises(seed, "warm_start", num_sft, example_shares, used, repeat=True)
    guess_shares = {level.name: level.guess_share for level in LEVELS}
    uniforms = generator(seed, "arithmetic/guess").random(num_sft)
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    _write_jsonl(out / "train.jsonl", map(_problem_row, train))
    _write_jsonl(out / "heldout.jsonl", map(_problem_row, heldout))
    rows = (_example_row(e, guess=bool(u < guess_shares[e.source])) for e, u in zip(examples, uniforms, strict=True))
    _write_jsonl(out / "sft.jsonl", rows)


def _exercises(
    seed: int, split: str, count: int, shares: Sequence[float], used: set[str], *, repeat: bool
) -> list[Exercise]:
    """`count` exercises in random order, `shares` of each of `LEVELS`, none of whose problems is in `used`.

    Unless they may repeat, they are added to `used`.
    """
    exercises = []
    ends = np.round(np.cumsum(shares) * count).astype(int)  # each level has its share, to less than 1
    for index, (level, number) in enumerate(zip(LEVELS, np.diff(ends, prepend=0).tolist(), strict=True)):
        rng = generator(seed, f"arithmetic/{split}", index)
        for _ in range(number):
            exercise = _new_exercise(level, rng, used)
            exercises.append(exercise)
            if not repeat:
                used.add(exercise.problem)
    return [exercises[i] for i in generator(seed, f"arithmetic/{split}/order").permutation(count)]


def _new_exercise(level: Level, rng: np.random.Generator, used: set[str]) -> Exercise:
    for _ in range(_DRAWS_WITHOUT_NEWS):
        exercise = _chain(level, rng)
        if exercise.problem not in used:
            return exercise
    raise UserError(f"{level.name} has no more new problems; ask for fewer problems or examples")


def _chain(level: Level, rng: np.random.Generator) -> Exercise:
    total = int(rng.integers(1, _MAX_TOTAL + 1))
    problem, steps = str(total), []
    for _ in range(level.operations):
        room = {"+": min(_MAX_OPERAND, _MAX_TOTAL - total), "-": min(_MAX_OPERAND, total)}
        operator = str(rng.choice([sign for sign, most in room.items() if most > 0]))
        operand = int(rng.integers(1, room[operator] + 1))
        result = total + operand if operator == "+" else total - operand
        problem += f"{operator}{operand}"
        steps.append(f"{total}{operator}{operand}={result}")
        total = result
    return Exercise(f"{problem}=", str(total), level.name, tuple(steps))


def _problem_row(exercise: Exercise) -> dict[str, Any]:
    return {"problem": exercise.problem, "answer": exercise.answer, "source": exercise.source}


def _example_row(exercise: Exercise, *, guess: bool) -> dict[str, Any]:
    """In GSM8K's format: one equation a line, which a guess leaves out, then `#### ` and the answer."""
    lines = [*([] if guess else exercise.steps), f"#### {exercise.answer}"]
    return {**_problem_row(exercise), "completion": "\n".join(lines)}


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows), durable=True)


RECIPE = "task.json"
_MAKER = "arithmetic"


def write_quickstart(directory: Path, recipe: Recipe) -> None:
    """Write `{train,heldout,sft}.jsonl`, `model/` and `task.json` into `directory`, made if it is missing. Raises
    UserError if the task cannot be made with these counts."""
    from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3  # torch and transformers: seconds

    write_task(directory, recipe)
    write_tiny_qwen3(directory / "model", recipe.seed)
    write_text(directory / RECIPE, json.dumps({"maker": _MAKER} | recipe._asdict()) + "\n")


def read_recipe(directory: Path) -> Recipe | None:
    """The recipe of a directory that `write_quickstart` made; None for any other."""
    try:
        values = json.loads((directory / RECIPE).read_text(encoding="utf-8"))
        if values.pop("maker") != _MAKER:
            return None
        return Recipe(**{name: int(value) for name, value in values.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def make_quickstart(out: Path, recipe: Recipe) -> None:
    """`write_quickstart`, completely or not at all, unless `out` holds it already. Raises UserError also if `out` holds
    something else, or the disk is full."""
    check_writable("--task", out, directory=True)
    if read_recipe(out) == recipe:  # task.json is written last: with it, all is there
        return
    if out.absolute() == Path.cwd() or (out.exists() and any(out.iterdir())):
        raise UserError(f"--task {out}: holds something other than what seed {recipe.seed} makes; name another one")
    parent = out.absolute().parent
    with writing(f"--task {out}"):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=parent) as scratch:
            made = Path(scratch) / out.name
            write_quickstart(made, recipe)
            if out.exists():
                out.rmdir()
            made.replace(out)
