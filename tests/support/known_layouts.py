"""The known sets as their repositories on the hub have them: rows of each split, and files of a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
    " $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
BEHIND = '\n\nRemember to put your answer on its own line after "Answer:".'


def _dapo(problem: str, answer: str, index: str) -> dict[str, Any]:
    prompt = [{"content": BEFORE + problem + BEHIND, "role": "user"}]
    return {
        "data_source": "math_dapo",
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


# name: (rows of each split as its repository has them, what must come out of the first split)
LAYOUTS: dict[str, tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "gsm8k": (
        {
            "train": [{"question": "How many?", "answer": "9 + 9 = <<9+9=18>>18\n#### 1,018"}],
            "test": [{"question": "And then?", "answer": "so\n#### -3"}],
        },
        [{"problem": "How many?", "answer": "1018", "source": "gsm8k"}],
    ),
    "math": (
        {
            "train": [
                {
                    "problem": "p",
                    "level": "Level 3",
                    "type": "Algebra",
                    "solution": r"a \boxed{1} b $\boxed{\frac{1}{2}}$.",
                },
                {"problem": "no answer", "level": "Level 1", "type": "Algebra", "solution": r"so \boxed{}"},
            ],
            "test": [{"problem": "q", "level": "Level ?", "type": "Geometry", "solution": r"$\boxed 5$"}],
        },
        [{"problem": "p", "answer": r"\frac{1}{2}", "source": "math", "level": "Level 3", "subject": "Algebra"}],
    ),
    "math500": (
        {"test": [{"problem": "p", "solution": "s", "answer": "2", "subject": "S", "level": 4, "unique_id": "u/1"}]},
        [{"problem": "p", "answer": "2", "source": "math500", "level": 4, "subject": "S", "id": "u/1"}],
    ),
    "aime24": (
        {"train": [{"id": 60, "problem": "p", "solution": "s", "answer": "033", "url": "u", "year": 2024}]},
        [{"problem": "p", "answer": "033", "source": "aime24", "id": 60}],
    ),
    "aime25": (
        {"test": [{"problem": "p", "answer": "70", "id": "0"}]},
        [{"problem": "p", "answer": "70", "source": "aime25", "id": "0"}],
    ),
    "amc23": (
        {"test": [{"id": 0, "question": "p", "answer": 27.0, "url": "u"}]},
        [{"problem": "p", "answer": "27", "source": "amc23", "id": 0}],
    ),
    "minerva": (
        {"test": [{"question": "p", "answer": "4.5e33"}]},
        [{"problem": "p", "answer": "4.5e33", "source": "minerva (OCWCourses)"}],
    ),
    "olympiadbench": (
        {
            "train": [
                {
                    "id": 7,
                    "question": "p",
                    "final_answer": ["$2$", "$3$"],
                    "subfield": "Algebra",
                    "unit": None,
                    "error": "1e-1",
                },
                {
                    "id": 8,
                    "question": "a proof",
                    "final_answer": None,
                    "subfield": "Algebra",
                    "unit": None,
                    "error": None,
                },
            ]
        },
        [
            {
                "problem": "p",
                "answer": "$2$, $3$",
                "source": "olympiadbench",
                "id": 7,
                "subject": "Algebra",
                "tolerance": "1e-1",
            }
        ],
    ),
    "dapo-math-17k": (
        {"train": [_dapo("p", "34", "a"), _dapo("q", "5", "b"), _dapo("p", "34", "a"), _dapo("q", "6", "c")]},
        [
            {"problem": "p", "answer": "34", "source": "dapo-math-17k", "id": "a"},
            {"problem": "q", "answer": "5", "source": "dapo-math-17k", "id": "b"},
        ],
    ),
    "deepscaler": (
        {"train": [{"problem": "p", "answer": "-\\frac{2}{3}", "solution": "s"}]},
        [{"problem": "p", "answer": "-\\frac{2}{3}", "source": "deepscaler"}],
    ),
}


def write_repository(directory: Path, splits: dict[str, list[dict[str, Any]]], subset: str) -> Path:
    """Parquet files by split, and the card that names subsets, as the hub has them."""
    folder = subset or "data"
    (directory / folder).mkdir(parents=True)
    for split, rows in splits.items():
        table, half = pa.Table.from_pylist(rows), (len(rows) + 1) // 2
        parts = [table.slice(0, half), table.slice(half)][: len(rows)]  # one row has one file, more have two
        for number, part in enumerate(parts):
            pq.write_table(part, directory / folder / f"{split}-{number:05}-of-{len(parts):05}.parquet")
    if subset:
        files = "".join(f"  - split: {split}\n    path: {subset}/{split}-*\n" for split in splits)
        (directory / "README.md").write_text(f"---\nconfigs:\n- config_name: {subset}\n  data_files:\n{files}---\n")
    return directory
