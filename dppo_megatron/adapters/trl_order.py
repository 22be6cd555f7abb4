"""Order in TRL: of the prompts after a resume, and of the rows of a step, which it pads to the longest of them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class EpochsInOrder(Sampler[int]):
    """TRL's sampler, whose generator no checkpoint has: a run resumed after the first epoch would see other prompts, so
    it draws the epochs before again, and goes on."""

    def __init__(self, inner: Any, trainer: Any) -> None:
        self.inner, self._trainer, self._drawn = inner, trainer, 0

    def __iter__(self) -> Iterator[int]:
        own, done = self._trainer, self._trainer.state.global_step
        epoch = done // (len(own.train_dataset) * own.num_generations // own.args.generation_batch_size)
        for _ in range(epoch - self._drawn if self.inner.shuffle else 0):
            torch.randperm(self.inner.num_samples, generator=self.inner.generator)
        self._drawn = epoch + 1
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def by_length(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of an optimizer step from the shortest to the longest, each micro-batch padded to its own longest."""
    rows = {name: value for name, value in batches[0].items() if isinstance(value, torch.Tensor) and value.dim()}
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in rows}
    mask, found = rows["completion_mask"], []
    for places in mask.sum(1).argsort(stable=True).chunk(len(batches)):
        longest = int(mask[places].any(0).sum().clamp(min=1))
        by_token = {name for name, value in rows.items() if value.dim() > 1 and "prompt" not in name}
        short = {name: value[places, :longest] if name in by_token else value[places] for name, value in rows.items()}
        found.append(batches[0] | short)
    return found
