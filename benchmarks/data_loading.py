"""How long a large training set takes to load, and what it holds of memory.

  python benchmarks/data_loading.py --model DIR [--rows 100000] [--template qwen3_nothink]

DIR is any model's directory with a tokenizer. The problems are made up: words and numbers of 60 to 600 characters, one
JSON object a line. Prints seconds of CPU and megabytes of resident memory, which grow with the rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from dppo_megatron.config.data import TrainSetConfig
from dppo_megatron.config.resolved_sets import train_set_configs
from dppo_megatron.config.schema import Config
from dppo_megatron.data.sets import load_set

_WORDS = [
    "find",
    "the",
    "number",
    "of",
    "positive",
    "integers",
    "such",
    "that",
    "when",
    "a",
    "random",
    "triangle",
    "has",
    "angle",
    "of",
    "30",
    "degrees",
    "and",
    "$x^2+1$",
]


def write_problems(path: Path, rows: int) -> None:
    """Distinct problems of 12 to 120 words."""
    rng = np.random.default_rng(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(rows):
            words = rng.choice(_WORDS, int(rng.integers(12, 121)))
            row = {"problem": f"{number}: {' '.join(words)}", "answer": str(number), "source": "made_up", "level": 3}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--template", default="")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.jsonl"
        write_problems(path, arguments.rows)
        config = Config()
        one = TrainSetConfig(path=str(path), template=arguments.template or None, max_prompt_tokens=100_000)
        config.data.train_sets = {"made_up": one}
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        loaded = load_set("made_up", train_set_configs(config)["made_up"], tokenizer)
        seconds = time.process_time() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        tokens = sum(len(prompt.token_ids) for prompt in loaded.prompts) / arguments.rows
        print(f"{arguments.rows:,} problems of {tokens:.0f} tokens: {seconds:.1f} s of CPU, {grown:,.0f} MiB")


if __name__ == "__main__":
    main()
