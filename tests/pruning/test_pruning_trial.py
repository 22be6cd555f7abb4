"""The trial of a user's own policies (pruning/trial.py): what it refuses, and that it refuses nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from label_cases import small_config
from support.job import job_config, write_warm_job_files

from dppo_megatron.job import prepare_job
from dppo_megatron.pruning.trial import try_prompt_policy
from dppo_megatron.types import PromptFeatures

OWN = "support.policies:"


def test_a_trial_is_within_the_settings_of_the_run(tmp_path: Path) -> None:
    """Its lengths, so that a table of all there can be is enough, and what its objective makes of an advantage of 0."""
    own = {"pruning__prompt__method": OWN + "ByLength", "pruning__completion__method": OWN + "TableOfLengths"}
    config = job_config(write_warm_job_files(tmp_path), tmp_path / "run", **own, objective__entropy_coef=0.01)
    prepare_job(config, 1).grade.close()


def test_a_trial_draws_nothing_from_what_the_run_draws_from() -> None:
    """It runs in the process that trains, whose generators numpy, Python and a user's grader share."""
    none = np.zeros(8, dtype=np.int64)
    features = PromptFeatures(none, np.zeros(8), none, ("",))
    random.seed(1)
    np.random.seed(1)
    expected = random.Random(1).random(), np.random.RandomState(1).rand()
    try_prompt_policy(small_config(OWN + "Tossing").pruning.prompt, features, 4, 3, 12)
    assert (random.random(), np.random.rand()) == expected
