"""A run's files in pandas: curves, one prompt over time, and what pruning dropped.

python examples/reading_a_run.py runs/quickstart
"""

import sys

import pandas as pd


def main(run: str) -> int:
    """Print three tables."""
    metrics = pd.read_json(f"{run}/metrics.jsonl", lines=True).set_index("step")
    print(metrics[["reward/mean", "rollout/completion_tokens_mean", "time/step_s"]].tail(3))

    samples = pd.read_parquet(f"{run}/samples")
    print(samples.groupby("why")[["reward", "tokens"]].mean())  # what is dropped, and for which reason

    often = samples.groupby("prompt_index")["step"].nunique().idxmax()
    story = samples[samples.prompt_index == often].sort_values(["step", "completion"])
    print(story[["step", "reward", "kept", "weight", "text"]].tail(8).to_string(max_colwidth=60))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/reading_a_run.py RUN")
    sys.exit(main(sys.argv[1]))
