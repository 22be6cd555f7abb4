"""Files of an evaluation, made without one."""

from __future__ import annotations

import json
from pathlib import Path


def write_samples(path: Path, sets: dict[str, dict[str, list[bool | None]]]) -> Path:
    """A directory with samples.jsonl: by set and problem, whether each sample is right; None: its grading failed."""
    path.mkdir()
    lines = []
    for name, problems in sets.items():
        for index, (problem, grades) in enumerate(problems.items()):
            for sample, correct in enumerate(grades):
                row = {"set": name, "problem": problem, "problem_index": index, "sample": sample, "prompt": "?"}
                row |= {"reference": "1", "text": "", "tokens": 1, "finish_reason": "stop", "extracted": None}
                row |= {"reward": None if correct is None else float(correct), "correct": correct}
                lines.append(json.dumps(row | {"vote": None, "unparsed": None}) + "\n")
    (path / "samples.jsonl").write_text("".join(lines))
    return path
