"""What `dppo-megatron compare` has found, said with its uncertainty.

    python examples/choosing.py compare/results.json

For each method: accuracy of the last evaluation, RL seconds and trained tokens, as means over the seeds; and the
difference in accuracy to GRPO on the same seed. All methods of a seed share the start and the order of the data, so
the difference of a pair varies less than either of the two.
"""

import json
import math
import statistics
import sys
from pathlib import Path


def main(path: str) -> int:
    """Print the table."""
    runs = json.loads(Path(path).read_text(encoding="utf-8"))["runs"]
    final = {(run["arm"], run["seed"]): run["curve"][-1] for run in runs}
    seeds = sorted({seed for _, seed in final})
    print(f"{'method':<20}{'accuracy':>10}{'seconds':>10}{'trained tokens':>16}   against grpo, points")
    for method in dict.fromkeys(run["arm"] for run in runs):
        ends = [final[method, seed] for seed in seeds]
        means = [statistics.mean(end[key] for end in ends) for key in ("accuracy", "train_s", "tokens_trained")]
        line = f"{method:<20}{100 * means[0]:>9.1f}%{means[1]:>10.1f}{means[2]:>16.0f}   "
        if method != "grpo" and ("grpo", seeds[0]) in final:
            line += difference([100 * (final[method, s]["accuracy"] - final["grpo", s]["accuracy"]) for s in seeds])
        print(line)
    return 0


def difference(points: list[float]) -> str:
    """Mean difference with its standard error over the seeds; one seed has none.

    Example: [1.0, 3.0] -> `+2.0 +- 1.0: no difference that 2 seeds show`.
    """
    mean = statistics.mean(points)
    if len(points) < 2:
        return f"{mean:+.1f}: one seed says nothing about chance"
    error = statistics.stdev(points) / math.sqrt(len(points))
    verdict = "more than chance would give" if abs(mean) > 3 * error else "no difference that"
    verdict += "" if abs(mean) > 3 * error else f" {len(points)} seeds show"
    return f"{mean:+.1f} +- {error:.1f}: {verdict}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
