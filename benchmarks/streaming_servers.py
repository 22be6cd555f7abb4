"""Seconds of a run whose answers have a long tail, on two real servers on this machine: K steps ahead against none.

    python benchmarks/streaming_servers.py --python .venv-vllm/bin/python [--engine vllm] [--ahead 0 2] [--rounds 3]
        [--steps 8] [--equal] [--json FILE]

The quickstart's model, with its end of sequence made rarer: lengths are about geometric, with a mean of 50 to 70 tokens
and several hundred at most. With `--equal` no answer ends before 64 tokens. A step has 16 prompts x 8 completions,
rewarded by the parity of their length. Runs take turns; the time of all steps of a run is compared, since steps ahead
are generated during others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from dppo_megatron.workbench.quickstart.make import Recipe, write_task
from dppo_megatron.workbench.quickstart.tiny_model import EOS, VOCABULARY, write_tiny_qwen3

_RARER = 2.0
"""Factor of the output row of the end of sequence: likelier in some states, almost impossible in others."""


def parity(completion: str, answer: str) -> float:
    """A reward that an untrained model earns half of the time."""
    return float(len(completion) % 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the engine's environment")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--equal", action="store_true", help="answers of one length")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seconds: dict[int, list[float]] = {ahead: [] for ahead in given.ahead}
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        write_files(files, equal=given.equal)
        for turn in range(given.rounds):
            for ahead in given.ahead:
                seconds[ahead].append(run_s(given, files, files / f"run_{turn}_{ahead}", ahead))
                print(f"round {turn + 1}: K={ahead} {seconds[ahead][-1]:.1f} s", flush=True)
    first = seconds[given.ahead[0]]
    for ahead in given.ahead[1:]:
        ratios = [one / base for one, base in zip(seconds[ahead], first, strict=True)]
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"K={ahead} over K={given.ahead[0]}: {middle:.2f} ({low:.2f} to {high:.2f})")
    if given.json:
        given.json.write_text(json.dumps(seconds))


def write_files(files: Path, *, equal: bool) -> None:
    """Problems and the model."""
    write_task(files, Recipe(0, num_train=512, num_heldout=16, num_sft=16))
    write_tiny_qwen3(files / "model", seed=0, max_position_embeddings=1024)
    weights = files / "model" / "model.safetensors"
    tensors = load_file(weights)
    table, end = tensors["lm_head.weight"], VOCABULARY.index(EOS)
    table[end] = 0.0 if equal else table[end] * _RARER
    save_file(tensors, weights, metadata={"format": "pt"})


def run_s(given: argparse.Namespace, files: Path, run: Path, ahead: int) -> float:
    """Seconds of all steps of one run."""
    settings = {
        "run_dir": run,
        "steps": given.steps,
        "threads_per_rank": 1,
        "model.hf_path": files / "model",
        "data.train_path": files / "train.jsonl",
        "data.eval_paths.heldout": files / "heldout.jsonl",
        "eval.every_steps": 0,
        "sft.steps": 0,
        "sft.examples_path": "",
        "reward.function": "streaming_servers:parity",
        "reward.min_self_consistency": 0,
        "rollout.engine": given.engine,
        "rollout.servers.launch": "local",
        "rollout.servers.count": 2,
        "rollout.servers.python": given.python,
        "rollout.prompts_per_step": 16,
        "rollout.completions_per_prompt": 8,
        "rollout.sampling.max_completion_tokens": 64 if given.equal else 512,
        "rollout.async_steps": ahead,
        "rollout.sync.in_flight": "continue",
        "packing.max_tokens_per_microbatch": 4096,
        "actor.optimizer.min_learning_rate": 0,
        "actor.optimizer.learning_rate": 1e-9,  # keeps the policy, and so the lengths, as they are
    }
    command = [sys.executable, "-m", "dppo_megatron", "train", "configs/quickstart.yaml"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run(
        [*command, *(f"{key}={value}" for key, value in settings.items())],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return float(sum(row["time/step_s"] for row in rows if row["step"]))


if __name__ == "__main__":
    main()
