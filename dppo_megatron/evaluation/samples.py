"""samples.jsonl: every sampled answer with its grade, in full, so that another program can grade it again.

One flat JSON object per sample. Files are written under a temporary name and renamed, so they are never incomplete.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dppo_megatron.config.paths import in_short, json_reason
from dppo_megatron.evaluation.statistics import EvalScores, Outcome, score
from dppo_megatron.types import Prompt, UserError

SAMPLES, RESULTS, COMPARISON = "samples.jsonl", "results.json", "comparison.json"


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One answer to one problem of one set."""

    set: str
    problem: str
    """Id of the problem in its set, from its row if it has one; the same in every evaluation of the set."""
    problem_index: int
    """Its place in the set, from 0."""
    sample: int
    """Which of the problem's samples, from 0."""
    prompt: str
    """As the model was given it, template included."""
    reference: str
    """The answer that the grader compares with."""
    text: str
    """The completion, without special tokens."""
    tokens: int
    finish_reason: str
    """stop, or length: it ran into max_completion_tokens."""
    reward: float | None
    """What the grader gave; null where it failed."""
    correct: bool | None
    """reward >= reward.correct_from; null where the grader failed."""
    extracted: str | None
    """The final answer that the grader found; null: none, or not reported."""
    vote: str | None
    """`extracted` in a plain form, equal for equal answers: what maj@k counts."""
    unparsed: bool | None
    """No final answer could be read; null: not reported, or grading failed."""
    why: str = ""
    failure: str = ""
    """Why grading failed; empty if it did not."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The problem's row, for graders that read it."""
    level: float | None = None
    """The difficulty that the row states; null: none."""

    @property
    def outcome(self) -> Outcome:
        """What scores are computed from."""
        truncated = self.finish_reason == "length"
        return Outcome(self.problem_index, self.correct, self.vote, truncated, self.unparsed, self.tokens)


def problem_ids(prompts: Sequence[Prompt]) -> list[str]:
    """An id for each problem of a set: the `id` of its row, made unique by its position; else its position.

    Example:
        rows with id "a", "b", "b"  ->  ["a", "b#1", "b#2"]; rows without  ->  ["0", "1", "2"]
    """
    given = [str(prompt.row.get("id", "")) for prompt in prompts]
    counts: dict[str, int] = {}
    for name in given:
        counts[name] = counts.get(name, 0) + 1
    return [
        name if name and counts[name] == 1 else f"{name}#{index}" if name else str(index)
        for index, name in enumerate(given)
    ]


def scores_of(samples: Sequence[EvalSample]) -> list[EvalScores]:
    """Scores of every set in a list of samples, in the order in which the sets appear."""
    by_set: dict[str, list[EvalSample]] = {}
    for sample in samples:
        by_set.setdefault(sample.set, []).append(sample)
    return [
        score(
            name,
            problems=len({one.problem_index for one in members}),
            samples=max(one.sample for one in members) + 1,
            outcomes=[one.outcome for one in members],
        )
        for name, members in by_set.items()
    ]


def check_out(out: Path, name: str) -> None:
    """Raise UserError if `name` cannot be written to `out` or exists there; called before anything is generated."""
    if (out / name).exists():
        what = "a comparison" if name == COMPARISON else "an evaluation"
        raise UserError(f"'{out}' already holds {what}; choose another --out, or remove it")
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"--out '{out}': '{nearest}' is no directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"--out '{out}': '{nearest}' cannot be written to")


def write_text(path: Path, pieces: Iterable[str]) -> None:
    """Write a file atomically. Raises UserError if it cannot be written."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.incomplete")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "w", encoding="utf-8") as file:
            file.writelines(pieces)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"'{path}' cannot be written: {error.strerror}") from None


def write_samples(path: Path, samples: Iterable[EvalSample]) -> None:
    """One JSON object a line, in ASCII: a model can write lone surrogates, which UTF-8 has no form for."""
    write_text(path, (json.dumps(asdict(sample), default=str) + "\n" for sample in samples))


def read_samples(path: Path) -> list[EvalSample]:
    """Read back what `write_samples` wrote, from the file or the directory that holds it.

    Raises:
        UserError: no such file, or a line that is not a sample, by number.
    """
    if path.is_dir():
        path = path / SAMPLES
    elif path.suffix == ".json":
        raise UserError(f"'{path}' is no {SAMPLES}: name the one beside it, or the directory of the evaluation")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"'{path}' cannot be read: {reason}; expected the {SAMPLES} of an evaluation") from None
    samples = [_sample(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not samples:
        raise UserError(f"'{path}' holds no samples")
    seen: set[tuple[str, int, int]] = set()
    for sample in samples:
        key = sample.set, sample.problem_index, sample.sample
        if key in seen:
            raise UserError(
                f"'{path}': sample {sample.sample} of problem {sample.problem[:60]} of {sample.set[:60]} is there twice"
            )
        seen.add(key)
    return samples


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float | None": (float, int, type(None)),
    "bool | None": (bool, type(None)),
    "str | None": (str, type(None)),
    "Mapping[str, Any]": (dict,),
}


def _sample(line: str, where: str) -> EvalSample:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {json_reason(error)}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(raw).__name__}")
    known = {item.name: item for item in fields(EvalSample)}
    needed = [name for name in known if name not in ("why", "failure", "row", "level")]
    missing = [name for name in needed if name not in raw]
    if missing:
        raise UserError(f"{where}: no sample of an evaluation: it lacks {', '.join(missing)}")
    values = {name: value for name, value in raw.items() if name in known}
    for name, value in values.items():
        kinds = _KINDS[str(known[name].type)]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UserError(f"{where}: {name} = {in_short(value)}: expected {known[name].type}")
    for name in ("problem_index", "sample", "tokens"):
        if values[name] < 0:
            raise UserError(f"{where}: {name} = {values[name]}: must not be negative")
    if values["reward"] is not None and not math.isfinite(values["reward"]):
        raise UserError(f"{where}: reward = {values['reward']}: must be finite, or null where grading failed")
    if (level := values.get("level")) is not None and not math.isfinite(level):
        raise UserError(f"{where}: level = {level}: must be finite, or null")
    return EvalSample(**values)
