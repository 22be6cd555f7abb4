"""A run's record as a long run leaves it, made without one; and what a report holds."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dppo_megatron.config.load import config_values
from dppo_megatron.config.observe import SamplesConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.observe.samples import RecordedGroup, SampleWriter
from dppo_megatron.types import Completion, Grade, Group, Prompt, RolloutPrompt


def write_record(
    run_dir: Path,
    steps: int,
    *,
    prompts: int = 16,
    group: int = 8,
    text: str = "so it is",
    sampled: range = range(0),
    groups: int = 0,
    tokens: int = 0,
) -> Path:
    """Files of a run that has finished.

    Args:
        sampled: the steps with samples (default: the last three).
        groups: recorded groups of each (default: all).
        tokens: of each completion, drawn at random, as incompressible as texts can be; 0: six, with `text`.
    """
    rng = np.random.default_rng(0)
    run_dir.mkdir(parents=True)
    values = config_values(Config()) | {"steps": steps, "run_dir": str(run_dir)}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(values))
    metrics: list[dict[str, Any]] = [{"step": 0, "eval/math/pass@1": 0.2, "eval/math/pass@1_se": 0.02}]
    for step in range(1, steps + 1):
        rewards = (rng.random((prompts, group)) < step / steps).astype(float)
        lengths = rng.integers(10, 500, (prompts, group))
        phases = {f"time/{name}_s": float(rng.random()) for name in ("rollout", "reward", "select", "prune", "update")}
        others = {f"other/metric_{number}": float(rng.random()) for number in range(80)}
        row = {
            "step": step, "reward/mean": float(rewards.mean()), "reward/mean_se": 0.02, "reward/failed_count": 0.0,
            "rollout/completion_tokens_mean": float(lengths.mean()), "rollout/truncated_count": 2.0,
            "train/grad_norm": float(rng.random()), "train/entropy": 0.5, "train/skipped_updates": float(step == 2),
            "mismatch/logprob_abs_diff_mean": 0.01, "prune/completions_generated": prompts * group,
            "prune/completions_trained": prompts * group // 2, "prune/realised_design_effect": 1.3,
            "prune/design_effect": 1.32, "prune/weight_max": 2.5, "pack/fill": 0.9,
            "tokens/generated": float(lengths.sum()), "tokens/trained": float(lengths.sum() // 2),
            "prune/ledger": [{"name": "prompt/dppo", "kept_fraction": 0.7, "label": "unbiased", "note": ""},
                             {"name": "rollout/stragglers", "kept_fraction": 0.99, "label": "biased",
                              "note": f"cut {step}", "bias_estimate": 0.25}],
        } | phases | {"time/step_s": sum(phases.values()) + 0.1} | others  # fmt: skip
        metrics.append(row)
    metrics[-1] |= {"eval/math/pass@1": 0.6, "eval/math/pass@1_se": 0.03}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    writer = SampleWriter(run_dir / "samples", 0, 1, SamplesConfig())
    (run_dir / "samples").mkdir()
    for step in sampled or range(steps - 2, steps + 1):
        writer._write(step, [recorded_group(one, group, text, tokens) for one in range(groups or prompts)])
    (run_dir / "summary.json").write_text("{}")
    return run_dir


def recorded_group(position: int, size: int, text: str, tokens: int = 0) -> RecordedGroup:
    """A group whose first completion is right and kept, and whose last was not graded; the others were brief."""
    rng = np.random.default_rng(position)
    asked = f"problem {position}: what is 6 * 7?"
    prompt = Prompt(100 + position, asked, (1, 2), "42", "algebra", problem=asked)
    completions = [Completion(np.arange(6), np.linspace(-3, 0, 6).astype(np.float32), "stop", text)] * size
    actor = {}
    if tokens:
        ids, logprobs = rng.integers(0, 150_000, (size, tokens)), -rng.exponential(0.5, (size, tokens))
        texts = [rng.bytes(2 * tokens).hex() for _ in range(size)]
        rows = zip(ids, logprobs.astype(np.float32), texts, strict=True)
        completions = [Completion(*row[:2], "stop", row[2]) for row in rows]
        actor = dict(enumerate(logprobs + rng.normal(0, 0.02, (size, tokens))))
    rewards = np.array([1.0] + [0.06] * (size - 2) + [np.nan])
    parts = [{"right": float(reward == 1), "short": 0.6} for reward in rewards]
    grades = tuple(
        Grade(reward, "42" if reward == 1 else None, "exact", parts=part, failure="" if reward == reward else "raised")
        for reward, part in zip(rewards.tolist(), parts, strict=True)
    )
    return RecordedGroup(
        position,
        Group(RolloutPrompt(prompt, 0.5, 2.0), tuple(completions), rewards, grades),
        advantages=np.linspace(1, -1, size),
        completion_prob=np.linspace(1, 0.1, size),
        weights=np.array([2.0] + [0.0] * (size - 1)),
        kept=np.array([True] + [False] * (size - 1)),
        why=("certain",) + ("score",) * (size - 2) + ("failed",),
        actor_logprobs=actor,
    )


def unpacked(page: Path) -> dict[str, str]:
    """The code and data of a report, by the ids of their elements."""
    found = re.findall(r'<script type="application/gzip" id="([\w-]+)">([^<]*)</script>', page.read_text())
    return {name: gzip.decompress(b64decode(text)).decode() for name, text in found}
