"""The trial of a user's own policies (pruning/trial.py): what it refuses, and that it refuses nothing else."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_cases import small_config
from support import policies
from support.job import job_config, write_warm_job_files

from dppo_megatron.job import prepare_job
from dppo_megatron.pruning import CustomPromptPolicy, Draw
from dppo_megatron.pruning.trial import try_policies, try_prompt_policy
from dppo_megatron.randomness import uniforms
from dppo_megatron.types import PromptFeatures, UserError

OWN = "support.policies:"


def _try(name: str, size: int = 3, *, offered: int = 4, prompts: int = 16, updates: int = 2, steps: int = 400) -> None:
    own = getattr(policies, name)
    if issubclass(own, CustomPromptPolicy):
        none = np.zeros(prompts, np.int64)
        features = PromptFeatures(none, np.zeros(prompts), none, ("",))
        config = small_config(OWN + name).pruning.prompt
        try_prompt_policy(config, features, offered, size, 12, updates=updates, steps=steps)
    else:
        try_policies(small_config("none", OWN + name).pruning, 4, size, 12, 0.0, updates, steps)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Roving", "answers equal arguments differently and has no own_state to resume from"),
        ("Shared", r"answers equal .*: draw from np\.random\.default_rng\(\[self\.seed, step, minibatch\]\)"),
        ("OncePerStep", "choose: 132 draws in a row keep the same rows as in the next update"),
        ("OncePerStepToo", "choose: 20 draws in a row keep the same rows as in the next update"),
        ("OnceForAll", "choose: 20 draws in a row keep the same rows as in the next step"),
        ("OncePerPrompt", "choose: 20 draws in a row keep the same rows as in the next epoch"),
    ],
)
def test_draws_that_do_not_resume_or_repeat_are_said_at_the_start(name: str, message: str) -> None:
    """A resumed run would draw other numbers; and no later draw shows that two updates share one."""
    with pytest.raises(UserError, match=message):
        _try(name)


@pytest.mark.parametrize(
    "name",
    ["Coins", "Curious", "FirstHalf", "Saving", "Drawn", "Whole", "Longer", "Shortest", "Fresh", "ByRow", "Certain"],
)
def test_fresh_draws_pass_the_trial(name: str) -> None:
    """Also of groups kept as a whole, without chance, from a generator that is saved, and by the row."""
    for size in range(2, 12):
        _try(name, size)


def test_draws_that_change_where_a_run_needs_it_pass_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a state that moves in `feedback` or `learn`, whatever it is at first; once per epoch, of 58 steps; the same in
    all updates, if there is one a step or one prompt to draw."""
    for word, pi, offered in product(range(40), (0.6, 0.9), (8, 32)):
        monkeypatch.setattr(policies.Drawn, "word", word)
        monkeypatch.setattr(policies.Drawn, "pi", pi)
        _try("Drawn", offered=offered)
        _try("Learning", offered=offered)
    _try("OncePerEpoch", prompts=4 * 58)
    _try("OncePerStep", updates=1)
    _try("OncePerStepToo", updates=1)
    _try("OncePerStep", prompts=1)


def _drawn(kept: Any, pi: float, count: int) -> Draw:
    return Draw(np.broadcast_to(kept, count).copy(), np.full(count, pi), fixed_size=False)


def _systematic(first: float, pi: float, count: int) -> Draw:
    return _drawn(np.diff(np.floor(first + pi * np.arange(count + 1))) == 1, pi, count)


def _stratified(rng: np.random.Generator, count: int) -> Draw:
    """One of each two neighbours, and the last one if it has none."""
    kept = np.ones(count, dtype=np.bool_)
    pairs = count // 2
    kept[2 * np.arange(pairs) + rng.integers(2, size=pairs)] = False
    return Draw(kept, np.where(np.arange(count) < 2 * pairs, 0.5, 1.0), fixed_size=True)


def _designs(seed: int, pi: float, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those that may be drawn in a run, by name, and those that may not; each of (rows, step, minibatch, epoch)."""
    rng, word, coins, table = np.random.default_rng, [seed, int(10 * pi)], policies.coins, np.full(steps, pi)
    own = rng(word)

    def by(rows: Any, *counters: int) -> Draw:
        return _drawn(uniforms(seed, "coins", rows, *counters) < pi, pi, len(rows))

    def half_certain(rows: Any, step: int, minibatch: int) -> Draw:
        drawn = coins(*word, step, minibatch, count=len(rows), pi=pi)
        return Draw(drawn.kept | (rows % 2 == 0), np.where(rows % 2 == 0, 1.0, pi), fixed_size=False)

    return {
        "coins": lambda r, s, m, e: coins(*word, s, m, count=len(r), pi=pi),
        "by row and step": lambda r, s, m, e: by(r, s),
        "certain": lambda r, s, m, e: _drawn(True, 1.0, len(r)),
        "half certain": lambda r, s, m, e: half_certain(r, s, m),
        "by a table": lambda r, s, m, e: coins(*word, s, m, count=len(r), pi=float(table[s])),
        "all or nothing": lambda r, s, m, e: _drawn(rng([*word, s, m]).random() < pi, pi, len(r)),
        "systematic": lambda r, s, m, e: _systematic(rng([*word, s, m]).random(), pi, len(r)),
        "stratified": lambda r, s, m, e: _stratified(rng([*word, s, m]), len(r)),
        "by prompt and epoch": lambda r, s, m, e: by(r, e),
        "systematic in an epoch": lambda r, s, m, e: _drawn((r + rng([*word, e]).integers(2)) % 2 == 0, 0.5, len(r)),
        "by step, one update": lambda r, s, m, e: coins(*word, s, count=len(r), pi=pi),
    }, {
        "no step": lambda r, s, m, e: coins(*word, m, count=len(r), pi=pi),
        "no step, by row": lambda r, s, m, e: by(r, m),
        "no mini-batch": lambda r, s, m, e: coins(*word, s, count=len(r), pi=pi),
        "no epoch": lambda r, s, m, e: by(r),
        "own generator": lambda r, s, m, e: _drawn(own.random(len(r)) < pi, pi, len(r)),
    }


@pytest.mark.parametrize(
    ("offered", "prompts", "updates", "steps"),
    [
        (4, 16, 2, 400),
        (8, 464, 2, 100),
        (8, 464, 1, 100),
        (8, 360, 1, 100),
        (3, 5, 2, 300),
        (1, 9, 1, 300),
        (4, 1, 2, 9),
    ],
)
def test_designs_that_are_fresh_are_never_refused(
    monkeypatch: pytest.MonkeyPatch, offered: int, prompts: int, updates: int, steps: int
) -> None:
    """Whatever the seed, and in epochs that end within a step or not in the run at all."""
    for seed, pi in product(range(40), (0.6, 0.9)):
        for name, design in _designs(seed, pi, steps)[0].items():
            at_most = 1 if name == "by step, one update" else updates
            monkeypatch.setattr(policies.Designed, "design", staticmethod(design))
            _try("Designed", offered=offered, prompts=prompts, updates=at_most, steps=steps)
            if "epoch" not in name:
                monkeypatch.setattr(policies.DesignedToo, "design", staticmethod(design))
                _try("DesignedToo", updates=at_most, steps=steps)


@pytest.mark.parametrize(
    ("name", "prompts", "updates"),
    [
        ("no step", 16, 2),
        ("no step", 8 * 400, 1),
        ("no step, by row", 16, 1),
        ("no mini-batch", 8 * 400, 2),
        ("no epoch", 16, 2),
        ("own generator", 16, 1),
    ],
)
def test_designs_that_repeat_are_always_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, prompts: int, updates: int
) -> None:
    """Whatever the seed, also in a run of a single epoch where the rows alone repeat."""
    for seed, own in product(range(40), ("Designed", "DesignedToo")):
        design = _designs(seed, 0.6, 400)[1][name]
        monkeypatch.setattr(getattr(policies, own), "design", staticmethod(design))
        with pytest.raises(UserError, match=r"draws in a row keep the same|answers equal arguments differently"):
            _try(own, offered=8, prompts=prompts, updates=updates, steps=400)


def test_a_trial_asks_no_more_than_it_can_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a design without chance, nor for steps that the run does not have: here the epoch is as long as the run."""
    monkeypatch.setattr(policies.Scheduled, "calls", 0)
    _try("Scheduled", steps=100)
    assert 0 < policies.Scheduled.calls < 20
    _try("Scheduled", prompts=400, steps=100)


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
    try_prompt_policy(small_config(OWN + "Tossing").pruning.prompt, features, 4, 3, 12, updates=2, steps=400)
    assert (random.random(), np.random.rand()) == expected
