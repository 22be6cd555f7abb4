"""What is known of a prompt before it is tried reaches the pruning policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.job import job_config, write_job_files

from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.cache import columns_of
from dppo_megatron.job import features_of
from dppo_megatron.pruning import StepCost
from dppo_megatron.selection import Rollouts, Selector
from dppo_megatron.types import Prompt, PromptFeatures


def _features(*sets: list[Prompt]) -> PromptFeatures:
    return features_of([columns_of(prompts) for prompts in sets])


def test_features_reach_the_policy(tmp_path: Path) -> None:
    """By prompt index: length, level (NaN where none is said) and source."""
    prompts = [
        Prompt(i, "x", tuple(range(i + 1)), "1", ("", "a", "b")[i % 3], level=None if i % 2 else float(i))
        for i in range(32)
    ]
    features = _features(prompts[:5], prompts[5:])  # of two sets
    assert features.prompt_tokens.tolist() == [i + 1 for i in range(32)]
    assert features.level[:4].tolist()[::2] == [0.0, 2.0] and np.isnan(features.level[1::2]).all()
    assert [features.sources[code] for code in features.source] == [prompt.source for prompt in prompts]
    config = job_config(write_job_files(tmp_path), tmp_path / "run", rollout__prompts_per_step=8)
    told = Selector(selection_settings(config), 32, features=features)
    assert told._prompt_policy.features is features


def test_rows_that_say_nothing_change_no_draw(tmp_path: Path) -> None:
    """The same length, source and no level everywhere: as if nothing had been told. Levels do change what is drawn."""
    config = job_config(write_job_files(tmp_path), tmp_path / "run", rollout__prompts_per_step=8)
    config.pruning.prompt.rate, config.pruning.prompt.min_inclusion_prob = 0.5, 0.2
    same = [Prompt(i, "x", (1, 2), "1", "a") for i in range(32)]
    levels = [Prompt(i, "x", (1, 2), "1", "a", level=float(i % 2)) for i in range(32)]
    selectors = [
        Selector(selection_settings(config), 32),
        Selector(selection_settings(config), 32, features=_features(same)),
        Selector(selection_settings(config), 32, features=_features(levels)),
    ]
    weights: list[list[np.ndarray]] = [[], [], []]
    for step in range(1, 13):
        for selector, mine in zip(selectors, weights, strict=True):
            chosen = selector.begin(step)
            mine.append(chosen.weight)
            rng = np.random.default_rng(step)
            chance = np.where(np.arange(32) % 2, 0.5, 0.02)[chosen.prompt_index, None]
            shape = (len(chosen.prompt_index), config.rollout.completions_per_prompt)
            rewards = (rng.random(shape) < chance).astype(float)
            selector.finish(Rollouts(rewards, rng.integers(1, 9, shape), rng.random(shape)), step)
            selector.feedback(StepCost(step, 1.0, 1.0, 0.0))
    untold, told_nothing, told_levels = (np.concatenate(mine) for mine in weights)
    np.testing.assert_array_equal(untold, told_nothing)
    assert len(told_levels) != len(untold) or (told_levels != untold).any()
