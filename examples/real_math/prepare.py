"""Writes the inputs of the real-math example: real rows in two formats, and a tiny chat model for them.

    prepare.py --gsm8k data/gsm8k/train.jsonl --math data/math/train.jsonl --out runs/real_math

GSM8K stays JSON Lines in this project's own layout. MATH becomes parquet as verl users have it: the prompt is a list of
messages, the reference is in reward_model.ground_truth. The model is a Qwen3 of 0.6 million random parameters, with a
BPE tokenizer trained on the problems. SFT teaches it only to answer with a box, and which numbers are common. It cannot
reason, and its scores mean nothing. The example shows that every part of a real job works on real rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tiny_chat_model import write_tiny_chat_model

EXAMPLES = 2048
"""Rows of SFT, half from each set."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("gsm8k", "math"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"training rows of {name}, JSON Lines")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    arguments = parser.parse_args()
    prepare(arguments.gsm8k, arguments.math, arguments.out)


def prepare(gsm8k: Path, math: Path, out: Path) -> None:
    """Write `out/{gsm8k.jsonl, math.parquet, sft.jsonl, model/}`; the same input gives the same files."""
    out.mkdir(parents=True, exist_ok=True)
    own, theirs = _rows(gsm8k), _rows(math)
    _write_lines(out / "gsm8k.jsonl", own)
    pq.write_table(
        pa.Table.from_pylist([_as_verl(row, index) for index, row in enumerate(theirs)]), out / "math.parquet"
    )
    half = EXAMPLES // 2
    examples = [
        {"problem": row["problem"], "completion": f"The answer is $\\boxed{{{row['answer']}}}$."}
        for row in [*own[:half], *theirs[:half]]
        if len(row["problem"]) < 400 and len(row["answer"]) < 12
    ]
    _write_lines(out / "sft.jsonl", examples)
    write_tiny_chat_model(out / "model", [row["problem"] for row in [*own, *theirs]], seed=0)


def _as_verl(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": row["problem"]}],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": index, "level": row.get("level", "")},
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    main()
