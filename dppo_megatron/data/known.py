"""The sets that papers train and report on: where each is on the hub, and how its rows are converted.

A record describes a set completely; the code below contains no set's name. Most sets have several copies on the hub:
listed is its authors' own, if there is one, else the copy that evaluation harnesses use. All rows are converted to
`{id, problem, answer, source, level, subject}`, so that a config needs no field settings and problems contain no
other trainer's template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dppo_megatron.config.paths import writing
from dppo_megatron.config.ranges import check_choice
from dppo_megatron.data.fields import after_hashes, as_is, get_field, last_boxed
from dppo_megatron.data.rows import read_rows
from dppo_megatron.files import replacing
from dppo_megatron.progress import counted, progress
from dppo_megatron.types import UserError


@dataclass(frozen=True, slots=True)
class KnownSet:
    """One set of the hub and how to read it."""

    hub: str
    """owner/name."""
    splits: Mapping[str, str]
    """Name of the file to write (train, test) -> the hub's split."""
    problem: str
    """Field with the problem; dots and list indices reach into it (`prompt.0.content`)."""
    answer: str
    """Field with the answer, or with a solution that ends in it."""
    answer_rule: Callable[[Any], str] = as_is
    """Extracts the answer from that field."""
    source: str = ""
    """Value of `source`; empty: the set's name."""
    subset: str = ""
    """The hub's configuration; empty: the default one."""
    carried: Mapping[str, str] = field(default_factory=dict)
    """Our field name -> the hub's, copied if a row has it: level, subject, id."""
    strip: tuple[str, str] = ("", "")
    """Instruction before and after every problem. It is removed, as the run chooses the template."""
    deduplicate: bool = False
    """Keep only the first row of every problem, for a file that repeats its problems."""


_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
    " $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_BEHIND = '\n\nRemember to put your answer on its own line after "Answer:".'

KNOWN_SETS: dict[str, KnownSet] = {
    "gsm8k": KnownSet(
        "openai/gsm8k", {"train": "train", "test": "test"}, "question", "answer", after_hashes, subset="main"
    ),
    "math": KnownSet(
        "DigitalLearningGmbH/MATH-lighteval",
        {"train": "train", "test": "test"},
        "problem",
        "solution",
        last_boxed,
        carried={"level": "level", "subject": "type"},
    ),
    "math500": KnownSet(
        "HuggingFaceH4/MATH-500",
        {"test": "test"},
        "problem",
        "answer",
        carried={"level": "level", "subject": "subject", "id": "unique_id"},
    ),
    "aime24": KnownSet("HuggingFaceH4/aime_2024", {"test": "train"}, "problem", "answer", carried={"id": "id"}),
    "aime25": KnownSet("math-ai/aime25", {"test": "test"}, "problem", "answer", carried={"id": "id"}),
    "amc23": KnownSet("math-ai/amc23", {"test": "test"}, "question", "answer", carried={"id": "id"}),
    "minerva": KnownSet(  # "OCW" in the source: the math grader compares its references at the digits they state
        "math-ai/minervamath", {"test": "test"}, "question", "answer", source="minerva (OCWCourses)"
    ),
    "olympiadbench": KnownSet(
        "Hothan/OlympiadBench",
        {"test": "train"},
        "question",
        "final_answer",
        subset="OE_TO_maths_en_COMP",
        carried={"id": "id", "subject": "subfield", "answer_type": "answer_type", "unit": "unit", "tolerance": "error"},
    ),
    "dapo-math-17k": KnownSet(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        {"train": "train"},
        "prompt.0.content",
        "reward_model.ground_truth",
        carried={"id": "extra_info.index"},
        strip=(_DAPO_BEFORE, _DAPO_BEHIND),
        deduplicate=True,
    ),
    "deepscaler": KnownSet("agentica-org/DeepScaleR-Preview-Dataset", {"train": "train"}, "problem", "answer"),
}


def our_row(values: Mapping[str, Any], known: KnownSet, name: str) -> dict[str, Any]:
    """A row of the hub in our layout; `problem` or `answer` is empty if the row has none."""
    problem = get_field(values, known.problem)
    before, behind = known.strip
    text = problem.strip() if isinstance(problem, str) else ""
    text = text.removeprefix(before.strip()).removesuffix(behind.strip()).strip()
    row = {
        "problem": text,
        "answer": known.answer_rule(get_field(values, known.answer)),
        "source": known.source or name,
    }
    carried = {ours: get_field(values, theirs) for ours, theirs in known.carried.items()}
    return row | {ours: value for ours, value in carried.items() if value is not None and value != ""}


def write_known_set(name: str, out: Path, *, origin: str = "", overwrite: bool = False) -> Iterator[str]:
    """Write the set's files into `out`; yields a line for each, with what was left out.

    All splits are read before a file is written, each file appears complete or not at all, and an existing one stays
    unless `overwrite` is true.

    Raises:
        UserError: no such set, no network, another layout than expected, or a file exists.
    """
    check_choice("set", name, KNOWN_SETS)
    known = KNOWN_SETS[name]
    files = {part: out / f"{part}.jsonl" for part in known.splits}
    for path in files.values():
        if path.exists() and not overwrite:
            raise UserError(f"{path} already exists; give --overwrite to replace it, or another --out")
    if origin and not Path(origin).is_dir():
        raise UserError(f"--from {origin}: no such directory")
    parts: dict[str, tuple[list[dict[str, Any]], str]] = {}
    for part, split in known.splits.items():
        with progress(f"reading {origin or known.hub} ({split})", 0, "rows") as advance:
            rows = read_rows(origin or f"hub:{known.hub}", known.subset, split)
            parts[part] = _converted((row.values for row in counted(rows, advance)), known, name)
        if not parts[part][0]:
            raise UserError(f"{origin or known.hub} ({split}): no row has the fields of this set; nothing was written")
    for part, path in files.items():
        converted, left_out = parts[part]
        with progress(f"writing {path}", len(converted), "rows") as advance, writing(f"{path}:"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, durable=True) as file:
                lines = (json.dumps(row, ensure_ascii=False).encode() for row in counted(converted, advance))
                file.writelines(line + b"\n" for line in lines)
        yield f"{path}: {len(converted)} problems{left_out}"


def _converted(rows: Iterable[dict[str, Any]], known: KnownSet, name: str) -> tuple[list[dict[str, Any]], str]:
    """One split in our layout, and a note about the rows that are left out."""
    incomplete, repeated = "without a problem or an answer", "repetitions of a problem"
    contradicting = "of those with another answer than the first"
    left_out = {incomplete: 0, repeated: 0, contradicting: 0}
    converted: dict[str, dict[str, Any]] = {}
    for number, values in enumerate(rows):
        row = our_row(values, known, name)
        key = row["problem"] if known.deduplicate else str(number)
        if not row["problem"] or not row["answer"]:
            left_out[incomplete] += 1
        elif key in converted:
            left_out[repeated] += 1
            left_out[contradicting] += converted[key]["answer"] != row["answer"]
        else:
            converted[key] = row
    note = ", ".join(f"{count} {what}" for what, count in left_out.items() if count)
    return list(converted.values()), f" (left out: {note})" if note else ""
