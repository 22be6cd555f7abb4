"""Evaluates the last checkpoints of a comparison on many more held-out problems: how much of their difference is noise?

    python benchmarks/compare_ends.py COMPARE_DIR [--problems 4096] [--seeds 0-9] [--json FILE]

COMPARE_DIR is what `dppo-megatron compare configs/quickstart.yaml` wrote. For each seed, the problems are taken from
held-out sets that the task's maker writes for other seeds, without those that the seed trained on. All arms answer the
same problems, at temperature 1 with the same random numbers, so they differ only by the noise of a run and the method.
Prints the difference to the first arm with its interval over seeds and problems, and the scores of each seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from dppo_megatron.evaluation.bootstrap import bootstrap_over_seeds
from dppo_megatron.rewards.functions import final_answer
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import HFEngine
from dppo_megatron.types import FloatArray, Prompt
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.workbench.quickstart.make import Recipe, write_task

_OTHER_SEEDS = 1000
_MAX_TOKENS = 56


def further_problems(trained_on: Path, seed: int, number: int) -> list[dict[str, str]]:
    """Rows that are not in the training set, from as many held-out sets as are needed."""
    known = {json.loads(line)["problem"] for line in trained_on.read_text(encoding="utf-8").splitlines()}
    rows: list[dict[str, str]] = []
    for further in count(1):
        with tempfile.TemporaryDirectory() as folder:
            write_task(folder, Recipe(_OTHER_SEEDS * (seed + 1) + further, num_train=1, num_sft=1))
            lines = (Path(folder) / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
        rows += [row for row in map(json.loads, lines) if row["problem"] not in known]
        if len(rows) >= number:
            break
    return rows[:number]


def solved(checkpoint: Path, rows: list[dict[str, str]], seed: int) -> FloatArray:
    """[len(rows)] 1 if the model's answer is right, else 0."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    device, architecture = torch.device("cpu"), read_architecture(checkpoint)
    engine = HFEngine(architecture, tokenizer, dtype=torch.float32, device=device, max_concurrent_sequences=512)
    weights = load_file(checkpoint / "model.safetensors")
    engine.load_weights(lambda: weights.items())
    texts = [row["problem"] for row in rows]
    ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    prompts = [Prompt(i, text, own, "", "") for i, (text, own) in enumerate(zip(texts, ids, strict=True))]
    answers = engine.generate([Request(prompt, 0, 1) for prompt in prompts], Sampling(_MAX_TOKENS, 1.0, seed))
    return np.array([final_answer(one.text, row["answer"]) for one, row in zip(answers, rows, strict=True)])


def main() -> int:
    """Evaluate all arms, compare them and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compare_dir", type=Path)
    parser.add_argument("--problems", type=int, default=4096)
    parser.add_argument("--seeds", metavar="FIRST-LAST", help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads((arguments.compare_dir / "results.json").read_text(encoding="utf-8"))["runs"]
    first, last = map(int, arguments.seeds.split("-")) if arguments.seeds else (0, sys.maxsize)
    seeds = sorted({run["seed"] for run in runs if first <= run["seed"] <= last})
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    right: dict[str, list[FloatArray]] = {arm: [] for arm in arms}
    for seed in seeds:
        home = arguments.compare_dir / f"seed{seed}"
        config = (home / arms[0].replace(":", ".") / "config.yaml").read_text(encoding="utf-8")
        train = next(line.split(":", 1)[1].strip() for line in config.splitlines() if "train_path:" in line)
        rows = further_problems(Path(train), seed, arguments.problems)
        for arm in arms:
            right[arm].append(solved(home / arm.replace(":", ".") / "hf", rows, seed))
        print(f"seed {seed}: " + ", ".join(f"{arm} {100 * right[arm][-1].mean():.1f} %" for arm in arms), flush=True)
    values: dict[str, Any] = {arm: [float(one.mean()) for one in right[arm]] for arm in arms}
    for arm in arms[1:]:
        row = bootstrap_over_seeds(list(zip(right[arms[0]], right[arm], strict=True)))
        values[f"{arm} - {arms[0]}"] = row.as_json()
        interval = "" if row.low is None else f" ({100 * row.low:+.1f} .. {100 * (row.high or 0):+.1f})"
        print(f"{arm} - {arms[0]}: {100 * row.difference:+.1f}{interval} points, {len(seeds)} seeds")
    if arguments.json:
        arguments.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
