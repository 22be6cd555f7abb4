"""The expected gradient through TRL's own loss, over every draw that there is: equal to the full batch's.

The rows come from TRL once; dropping, weighing, splitting and the loss are the adapter's and TRL's for each draw.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="`make test-adapters` runs it")
import torch
from accelerate.utils import gather_object
from enumeration import GROUP, PROMPTS, Played
from tiny_trl import pruning, trainer
from trl import GRPOTrainer

from dppo_megatron.adapters.trl import PrunedGRPOMixin
from dppo_megatron.types import UserError

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo, sequence ratio": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "grpo, two-sided": {"loss_type": "grpo", "delta": 1.3, "off_policy_mask_threshold": 0.05},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "vespo": {"loss_type": "vespo"},
    "grpo, vLLM": {"loss_type": "grpo"},
    "vespo, vLLM": {"loss_type": "vespo"},
}
BY_VLLM = {"grpo, vLLM", "vespo, vLLM"}
"""Rows as TRL has them from vLLM: with the engine's log-probabilities, and its ratio to them in the loss."""


class Recorded(GRPOTrainer):
    """Rolls out once; afterwards the same rows come back for the prompts that are asked for."""

    recorded: dict[str, Any] | None = None
    by_vllm = False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.recorded is None:
            out = super()._generate_and_score_completions(inputs)
            rank = self.accelerator.process_index
            mask, noise = out["completion_mask"], torch.Generator().manual_seed(1 + rank)
            # the model hardly ever says that it has come to its end, and all processes would have the same longest
            ends = torch.randint(2, mask.size(1) + 1 - 2 * rank, (len(mask), 1), generator=noise)
            mask *= torch.arange(mask.size(1)) < ends
            ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
            all_mask = torch.cat([out["prompt_mask"], mask], 1)
            now, *_ = self._get_per_token_logps_and_entropies(self.model, ids, all_mask, mask.size(1))
            # an old policy that is another one, or no ratio would be clipped
            out["old_per_token_logps"] = now.detach() + 0.3 * torch.randn(now.shape, generator=noise)
            out["advantages"] = torch.randn(len(mask), generator=noise)
            if self.by_vllm:
                engine = out["old_per_token_logps"] + 0.1 * torch.randn(now.shape, generator=noise)
                out["sampling_per_token_logps"] = engine
                ratio = torch.exp(out["old_per_token_logps"] - engine).clamp(max=1.1)
                out["importance_sampling_ratio"] = torch.where(mask.bool(), ratio, 1.0)  # as TRL has it of padding
                self.use_vllm = True  # from here on only the loss asks for it
            self.recorded_rewards = self._rewards
            self.recorded = {name: self._of_all(name, value) for name, value in out.items()}
            self.prompts = [row["prompt"] for row in gather_object(inputs)[::GROUP]]
        asked = gather_object([row["prompt"] for row in inputs])
        rows = np.array([self.prompts.index(prompt) * GROUP + place % GROUP for place, prompt in enumerate(asked)])
        self._rewards = self.recorded_rewards[rows]
        mine = np.split(rows, self.accelerator.num_processes)[self.accelerator.process_index]
        own = {name: value[mine] if value.dim() else value for name, value in self.recorded.items()}
        longest = int(own["completion_mask"].sum(1).max())  # of this process: others pad to another
        by_token = {name for name, value in own.items() if value.dim() > 1 and "prompt" not in name}
        return own | {name: own[name][:, :longest] for name in by_token}

    def _of_all(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Rows of all processes: any of them may be asked for a prompt."""
        if not value.dim():
            return value
        if value.dim() > 1:
            fill, of_prompt = int(name == "importance_sampling_ratio"), name.startswith("prompt")
            value = self.accelerator.pad_across_processes(value, dim=1, pad_index=fill, pad_first=of_prompt)
        return self.accelerator.gather(value)


class Pruned(PrunedGRPOMixin, Recorded):
    """The adapter above it."""


class WithImages(Recorded):
    """The last process has an image among its rows."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        if self.accelerator.process_index < self.accelerator.num_processes - 1:
            return out
        return out | {"pixel_values": torch.zeros(3, 4), "num_images": [1, *[0] * (len(inputs) - 1)]}


class PrunedWithImages(PrunedGRPOMixin, WithImages):
    """The adapter above it."""


@pytest.fixture
def doubles() -> Iterator[None]:
    """A model in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _trainer(folder: Path, played: Played, loss: dict[str, Any], cls: type = Pruned) -> Any:
    rows = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    made = trainer(folder, pruning(), cls, per_device_train_batch_size=rows, gradient_accumulation_steps=2, **loss)
    made.state.max_steps, made.current_gradient_accumulation_steps = 10, 2
    made.model.train()
    made.pruner._prompts = made.pruner._completions = played
    return made


def _gradient(made: Any) -> np.ndarray:
    """Of one optimizer step, by TRL's own buffering; the mean over processes, as theirs is."""
    made.model.zero_grad()
    inputs = [made.train_dataset[i] for i in (0, 1) for _ in range(GROUP)]
    share = len(inputs) // made.accelerator.num_processes
    inputs = inputs[made.accelerator.process_index * share :][:share]
    for made._step in range(2):
        made.compute_loss(made.model, made._prepare_inputs(inputs)).backward()
    found = torch.cat([one.grad.flatten() for one in made.model.parameters()])
    return made.accelerator.reduce(found, "mean").numpy().copy()


def _expected(made: Any, played: Played) -> tuple[np.ndarray, float]:
    total, mean = 0.0, 0.0
    for probability in played.draws():
        total, mean = total + probability, mean + probability * _gradient(made)
    return mean, total


def _off(mean: np.ndarray, full: np.ndarray) -> float:
    return float(np.linalg.norm(mean - full) / np.linalg.norm(full))


def check_expectation(name: str, folder: Path) -> None:
    """Prompts and completions, 289 draws; a loss per token, whose divisor is predicted, up to that known factor."""
    assert PROMPTS == 2 and GROUP == 4
    played = Played()
    made = _trainer(folder, played, LOSSES[name])
    made.by_vllm = name in BY_VLLM
    played.weighs, played.skips = False, False
    full = _gradient(made)
    played.weighs = played.skips = True
    lengths = made.recorded["completion_mask"].sum()
    made.pruner.mean_length, made.pruner._learn = 5.0, lambda *_: None
    mean, total = _expected(made, played)
    factor = float(lengths) / (8 * 5) if LOSSES[name]["loss_type"] in ("dapo", "cispo", "vespo") else 1.0
    assert total == pytest.approx(1.0)
    assert _off(mean, factor * full) < 1e-6  # advantages are float32, and 3e-8 is what is seen
    assert (factor != 1.0) == any(row.label == "ratio" for row in made.ledger)


def check_images_are_refused(folder: Path) -> None:
    """By every process, whichever has them."""
    with pytest.raises(UserError, match="rows with images cannot be dropped"):
        _gradient(_trainer(folder, Played(), LOSSES["grpo"], PrunedWithImages))


@pytest.mark.parametrize("name", LOSSES)
def test_the_expected_gradient_is_the_full_one(name: str, tmp_path: Path, doubles: None) -> None:
    check_expectation(name, tmp_path)


@pytest.mark.parametrize("name", ["dapo", "cispo", "vespo"])
def test_a_loss_per_token_keeps_its_divisor_where_no_prompt_is_skipped(
    name: str, tmp_path: Path, doubles: None
) -> None:
    played = Played(skips=False, weighs=False)
    made = _trainer(tmp_path, played, LOSSES[name])
    full = _gradient(made)
    played.weighs = True
    assert _off(_expected(made, played)[0], full) < 1e-6


def test_without_weights_it_is_another_gradient(tmp_path: Path, doubles: None) -> None:
    """The enumeration can tell."""
    played = Played(skips=False, weighs=False)
    made = _trainer(tmp_path, played, LOSSES["grpo"])
    full = _gradient(made)
    assert _off(_expected(made, played)[0], full) > 0.1
