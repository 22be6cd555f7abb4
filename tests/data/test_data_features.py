"""What is known of a prompt before it is tried reaches the pruning policy, and changes no draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.job import job_config, write_job_files

from dppo_megatron.pruning import StepCost
from dppo_megatron.pruning.interface import PromptFeatures
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.types import Prompt


def test_features_reach_the_policy(tmp_path: Path) -> None:
    """By prompt index: length, level (NaN where none is said) and source."""
    prompts = [
        Prompt(i, "x", tuple(range(i + 1)), "1", ("", "a", "b")[i % 3], level=None if i % 2 else float(i))
        for i in range(32)
    ]
    features = PromptFeatures.of(prompts)
    assert features.prompt_tokens.tolist() == [i + 1 for i in range(32)]
    assert features.level[:4].tolist()[::2] == [0.0, 2.0] and np.isnan(features.level[1::2]).all()
    assert [features.sources[code] for code in features.source[:4]] == ["", "a", "b", ""]
    config = job_config(write_job_files(tmp_path), tmp_path / "run", rollout__prompts_per_step=8)
    told, untold = Selector(config, 32, features=features), Selector(config, 32)
    assert told._prompt_policy.features is features and untold._prompt_policy.features is None
    rng = np.random.default_rng(0)
    for step in range(1, 9):
        chosen = [selector.begin(step) for selector in (told, untold)]
        assert np.array_equal(chosen[0].prompt_index, chosen[1].prompt_index)
        assert np.array_equal(chosen[0].weight, chosen[1].weight)
        shape = (len(chosen[0].prompt_index), config.rollout.completions_per_prompt)
        rollouts = Rollouts(rng.integers(0, 2, shape).astype(float), rng.integers(1, 9, shape), rng.random(shape))
        for selector in (told, untold):
            selector.finish(rollouts, step)
            selector.feedback(StepCost(step, 1.0, 1.0, 0.0))
