"""How often the `math` grader and Math-Verify alone agree with a reference or a label:
`python benchmarks/grading.py accuracy [--data DIR] [--json FILE] [--skip-references]`.

Three kinds of rows: each reference of the public sets, boxed as an answer; hard pairs of a reference and an answer with
a label (`grader_cases`, without its ambiguous rows); and answers of models (`model_responses`). An answer that is not
marked is boxed for both graders; `(text)` grades the models' whole texts. Labels are used as their source gives them,
even where they are wrong; `(labels)` is the same with the corrections of `grading_labels.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grading_labels import put_right

from dppo_megatron.rewards.math.extract import extract
from dppo_megatron.rewards.math.grader import grade_math

SETS = "gsm8k_train gsm8k_test math_train math_test math500 aime24 aime25 amc23 minerva_math olympiadbench_math_en"
Row = dict[str, Any]
Judge = Callable[[str, str, Row], float]


@dataclass
class Score:
    """The score of one grader on one file."""

    file: str
    grader: str
    rows: int = 0
    right: int = 0
    false_accepts: list[str] = field(default_factory=list)
    false_rejects: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    default = os.environ.get("DPPO_DATA_DIR", str(Path(__file__).resolve().parents[2] / "shared" / "data"))
    parser = argparse.ArgumentParser(
        prog="grading.py accuracy", description="The math grader beside Math-Verify alone."
    )
    parser.add_argument("--data", type=Path, default=Path(default), help="directory of the files (DPPO_DATA_DIR)")
    parser.add_argument("--json", type=Path, help="write the scores, with the ids of wrong rows, to this file")
    parser.add_argument("--skip-references", action="store_true", help="the labelled files only")
    arguments = parser.parse_args(argv)
    if not (arguments.data / "grader_cases.jsonl").exists():
        print(
            f"no problem sets in {arguments.data}: name their directory with --data or DPPO_DATA_DIR", file=sys.stderr
        )
        return 2
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    files = labelled(arguments.data)
    if not arguments.skip_references:
        files = {**_references(arguments.data), **files}
    judges: dict[str, Judge] = {"math": _ours}
    if importlib.util.find_spec("math_verify"):
        judges["Math-Verify"] = _math_verify
    else:
        print("Math-Verify is not installed (pip install '.[benchmarks]'): only ours is measured", file=sys.stderr)
    _ours("\\boxed{\\mathrm{warm}^2 + 1}", "\\int x", {})  # so that imports are not measured
    scores = []
    print(f"{'file':24} {'grader':12} {'rows':>6} {'right':>8} {'accepts':>8} {'rejects':>8} {'failed':>7} {'s':>8}")
    for file, rows in files.items():
        for name, judge in judges.items():
            score = _score(file, name, judge, rows)
            scores.append(score)
            print(
                f"{file:24} {name:12} {score.rows:6} {score.right / score.rows:8.2%} {len(score.false_accepts):8}"
                f" {len(score.false_rejects):8} {len(score.failed):7} {score.seconds:8.2f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n", encoding="utf-8")
    return 0


def _score(file: str, name: str, judge: Judge, rows: list[Row]) -> Score:
    score = Score(file, name, rows=len(rows))
    started = time.perf_counter()
    for row in rows:
        try:
            reward = judge(row["text"], row["gold"], row)
        except Exception:  # counted: Math-Verify raises on some inputs
            score.failed.append(row["id"])
            continue
        if reward == row["label"]:
            score.right += 1
        else:
            (score.false_accepts if reward else score.false_rejects).append(row["id"])
    score.seconds = time.perf_counter() - started
    return score


def _ours(text: str, gold: str, row: Row) -> float:
    return grade_math(text, gold, row).reward


def _math_verify(text: str, gold: str, row: Row) -> float:
    """Math-Verify as its documentation calls it, with its timeouts of 5 s."""
    import math_verify

    reference = math_verify.parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$")
    return float(math_verify.verify(reference, math_verify.parse(text)))


def _references(data: Path) -> dict[str, list[Row]]:
    return {
        name: [
            {**row, "text": f"So the answer is $\\boxed{{{row['answer']}}}$.", "gold": row["answer"], "label": 1}
            for row in _read(data / f"{name}.jsonl")
        ]
        for name in SETS.split()
    }


def labelled(data: Path) -> dict[str, list[Row]]:
    """Rows of a text, a reference (`gold`) and a label, by file."""
    pairs = [row for row in _read(data / "grader_cases.jsonl") if not row.get("ambiguous")]
    responses = _read(data / "model_responses.jsonl")
    return {
        "grader_cases": [{**row, "text": _marked(row["prediction"])} for row in pairs],
        "model_responses": [{**row, "text": _marked(row["prediction"])} for row in responses],
        "model_responses (text)": [{**row, "text": row["response"]} for row in responses],
        "model_responses (labels)": [
            {**row, "text": row["response"], "label": put_right(row["id"], row["label"])} for row in responses
        ],
    }


def _marked(prediction: str) -> str:
    return prediction if extract(prediction).parts else f"$\\boxed{{ {prediction} }}$"


def _read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
