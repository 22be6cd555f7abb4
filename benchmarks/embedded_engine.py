"""The embedded engine against itself at an earlier commit: whether tokens are the same, and tokens per CPU second.

    python benchmarks/embedded_engine.py --model runs/quickstart/hf --data runs/task_seed0/train.jsonl
        [--before COMMIT] [--rounds 15] [--prompts 64] [--completions 8] [--max-tokens 48] [--json FILE]

Both sides are single-threaded processes that stay alive and take turns, so that other load on the machine affects both.
Each round samples with another seed; tokens and texts are compared every time, and a difference is an error. Prints
medians of the rounds, with the lowest and highest ratio. The model should be one that has learned to stop: with random
weights every completion runs to its limit, which is not what trained models do.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_BEFORE = "8f54b6b"
"""The last commit with transformers' own modules in the embedded engine."""


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines with `problem`")
    parser.add_argument("--before", default=_BEFORE, metavar="COMMIT")
    for name, default in (("rounds", 15), ("prompts", 64), ("completions", 8), ("max-tokens", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="before-") as folder:
        archive = subprocess.run(
            ["git", "-C", str(_ROOT), "archive", arguments.before, "dppo_megatron"], check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        sides = {"before": _start(Path(folder)), "now": _start(_ROOT)}
        rounds = [{name: _ask(side, seed) for name, side in sides.items()} for seed in range(arguments.rounds + 1)][1:]
        for side in sides.values():
            assert side.stdin is not None
            side.stdin.close()
            side.wait()
    if any(one["before"]["tokens_sha"] != one["now"]["tokens_sha"] for one in rounds):
        raise SystemExit("the tokens differ")
    figures: dict[str, Any] = {
        "rounds": len(rounds),
        "tokens of a round": median(one["now"]["tokens"] for one in rounds),
    }
    for unit in ("cpu_s", "wall_s"):
        ratios = sorted(one["before"][unit] / one["now"][unit] for one in rounds)
        for name in sides:
            figures[f"{name}: tokens / {unit}"] = median(one[name]["tokens"] / one[name][unit] for one in rounds)
        figures |= {f"ratio by {unit}": median(ratios), f"lowest, highest by {unit}": (ratios[0], ratios[-1])}
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _start(package: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", __file__, *sys.argv[1:], "--worker"]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(side: subprocess.Popen[str], seed: int) -> dict[str, Any]:
    assert side.stdin is not None
    assert side.stdout is not None
    side.stdin.write(f"{seed}\n")
    side.stdin.flush()
    answer: dict[str, Any] = json.loads(side.stdout.readline())
    return answer


def _work(arguments: argparse.Namespace) -> None:
    """Run one side: each line of stdin is a seed, each line of stdout the figures of its round."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from dppo_megatron.rollout.engine import Request, Sampling
    from dppo_megatron.rollout.hf import HFEngine
    from dppo_megatron.types import Prompt
    from dppo_megatron.weights.architecture import read_architecture

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False)
    engine = HFEngine(
        read_architecture(arguments.model),
        tokenizer,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_concurrent_sequences=arguments.prompts * arguments.completions,
    )
    weights = {name: t for path in arguments.model.glob("*.safetensors") for name, t in load_file(path).items()}
    engine.load_weights(lambda: weights.items())
    rows = [json.loads(line) for line in arguments.data.read_text(encoding="utf-8").splitlines()[: arguments.prompts]]
    texts = [row["problem"] for row in rows]
    ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    prompts = [Prompt(i, text, own, "", "") for i, (text, own) in enumerate(zip(texts, ids, strict=True))]
    requests = [Request(prompt, index, 1) for prompt in prompts for index in range(arguments.completions)]
    for line in sys.stdin:
        sampling = Sampling(arguments.max_tokens, 1.0, int(line))
        cpu, wall = time.process_time(), time.perf_counter()
        completions = engine.generate(requests, sampling)
        figures = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
        whole = b"".join(one.token_ids.tobytes() + b"|" + one.text.encode() for one in completions)
        tokens = sum(len(one.token_ids) for one in completions)
        print(json.dumps(figures | {"tokens": tokens, "tokens_sha": hashlib.sha256(whole).hexdigest()}), flush=True)


if __name__ == "__main__":
    main()
