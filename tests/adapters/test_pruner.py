"""The part that adapters share, where no trainer gets it to: a step without prompts, and a state on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dppo_megatron.adapters import pruner as module
from dppo_megatron.adapters.pruner import Kept, StepPruner, load_state, save_state
from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig, PruningConfig
from dppo_megatron.pruning import CompletionBatch, CustomCompletionPolicy, StepCost
from dppo_megatron.texts import logged
from dppo_megatron.types import FloatArray

PROMPTS, GROUP = 6, 4


class Counting(CustomCompletionPolicy):
    """Keeps less with every step that it was told of, and counts them in types that reading a checkpoint refuses."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.told: dict[str, Any] = defaultdict(np.float64)

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> FloatArray:
        return np.full(len(batch), 0.9 / (1 + self.told["steps"]))

    def feedback(self, cost: StepCost) -> list[str]:
        self.told["steps"] += np.float64(1)
        return [f"told of step {cost.step}"]

    def own_state(self) -> dict[str, Any]:
        return self.told

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.told = defaultdict(np.float64, state)


COUNTING = f"{__name__}:Counting"


def _pruner(pruning: PruningConfig | None = None, **changes: Any) -> StepPruner:
    own = PruningConfig(PromptPruningConfig(warmup_epochs=0.5), CompletionPruningConfig(max_design_effect=0))
    sizes = {"num_prompts": 2 * PROMPTS, "prompts_per_step": PROMPTS, "group_size": GROUP, "total_steps": 20, "seed": 3}
    return StepPruner(pruning or own, **sizes, divides_by_length=True, max_tokens=8, **changes)


def _step(pruner: StepPruner, step: int, keeps_none: bool = False) -> Kept:
    nominal = (np.arange(PROMPTS) + PROMPTS * step) % (2 * PROMPTS)
    chosen = pruner.choose(nominal, step)
    if keeps_none:
        chosen = replace(chosen, kept=np.zeros(PROMPTS, dtype=bool), inclusion_prob=np.full(PROMPTS, 0.5))
    shape, rng = (int(chosen.kept.sum()), GROUP), np.random.default_rng(step)
    rewards, lengths = rng.random(shape), rng.integers(1, 9, shape)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    return pruner.finish(nominal, chosen, rewards, lengths, np.sqrt(lengths), advantages, step)


def test_a_step_that_keeps_no_prompt_trains_on_nothing_and_goes_on() -> None:
    """A Poisson draw may skip all; the trainer gets rows all the same, and a divisor that earlier steps predict."""
    pruner = _pruner(row_multiple=3)
    assert _step(pruner, 0, keeps_none=True).tokens == PROMPTS * GROUP * 8
    full = _step(pruner, 1)
    assert len(full.rows) % 3 == 0 and full.weight.sum() > 0
    kept = _step(pruner, 2, keeps_none=True)
    assert kept.rows.tolist() == [0, 0, 0] and kept.weight.tolist() == [0, 0, 0]
    assert kept.tokens == PROMPTS * GROUP * pruner.mean_length and "ratio" in [row.label for row in kept.ledger]


def test_what_the_policies_say_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a process where each step has a pruner of its own, and on its first process alone; what a score does
    whenever it changes."""
    said: list[str] = []
    monkeypatch.setattr(module, "_LOGGED", set())

    def pruner() -> Any:
        biased = CompletionPruningConfig(method="cppo", rate=0.5, min_inclusion_prob=0.3)
        made: Any = _pruner(PruningConfig(PromptPruningConfig(), biased))
        lines = iter(["no prompt is skipped", "prompts are skipped again"])
        monkeypatch.setattr(made._prompts.monitor, "judge", lambda: next(lines))
        return made

    with logged(said.append):
        first = pruner()
        _step(first, 0)
        _step(first, 1)
        monkeypatch.setenv("RANK", "1")
        _step(pruner(), 0)
        monkeypatch.setenv("RANK", "0")
        _step(pruner(), 0)
    unread, worse, biased, *later = said
    assert unread == "pruning.completion.method = cppo does not read min_inclusion_prob"
    assert biased.startswith("warning: completion/cppo is biased")
    assert (worse, *later) == ("no prompt is skipped", "prompts are skipped again", "no prompt is skipped")


def test_a_completion_policy_of_ones_own_learns() -> None:
    """Of each step once, and what it says is logged."""
    pruner, said = _pruner(PruningConfig(completion=CompletionPruningConfig(method=COUNTING))), list[str]()
    with logged(said.append):
        kept = [len(_step(pruner, step).rows) for step in (0, 1, 2)]
    assert said == ["told of step 1", "told of step 2", "told of step 3"] and kept[0] > kept[1] > kept[2] > 0


@pytest.mark.parametrize("completion", ["dppo", COUNTING])
def test_a_saved_state_goes_on_as_the_one_that_was_not(completion: str, tmp_path: Path) -> None:
    own = CompletionPruningConfig(method=completion, max_design_effect=0 if completion == "dppo" else 1.1)
    pruning = PruningConfig(PromptPruningConfig(warmup_epochs=0.5), own)
    whole, again = _pruner(pruning), _pruner(pruning)
    for step in range(4):
        _step(whole, step)
    save_state(whole, tmp_path)
    again.load_state_dict(load_state(tmp_path))
    ours, theirs = _step(whole, 4), _step(again, 4)
    assert len(ours.rows) < PROMPTS * GROUP and ours.metrics == theirs.metrics and ours.tokens == theirs.tokens
    np.testing.assert_array_equal(ours.rows, theirs.rows)
    np.testing.assert_array_equal(ours.weight, theirs.weight)
