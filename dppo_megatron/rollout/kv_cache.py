"""A key-value cache for the embedded engine that is written in place.

transformers' DynamicCache concatenates at every token, so a completion of n tokens copies its cache n times; its
StaticCache is padded to the longest possible completion, and attention then reads all of it at every token. This one
keeps room behind what is filled and hands out views of the filled part. The room grows by half of what is there, so a
token is copied about twice in all, and a short batch never pays for `max_completion_tokens`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_FIRST_ROOM = 32
"""Tokens of room after the prompt: half of a short completion, and nothing against a long one."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, [B, K, filled, D], as views of buffers with room for more tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, K, n, D] and return everything so far, [B, K, filled, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._filled = 0
            self._rooms = [_buffer(states, states.size(2) + _FIRST_ROOM) for states in (key_states, value_states)]
        end = self._filled + key_states.size(2)
        if end > self._rooms[0].size(2):
            capacity = max(end, self._rooms[0].size(2) * 3 // 2)
            self._rooms = [_moved(room, self._filled, capacity) for room in self._rooms]
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, self._filled : end] = states
        self._filled = end
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n] of the batch, in that order; a row may be taken several times."""
        rooms = []
        for room in self._rooms:
            kept = room.new_empty(len(indices), *room.shape[1:])
            torch.index_select(room[:, :, : self._filled], 0, indices, out=kept[:, :, : self._filled])
            rooms.append(kept)
        self._rooms = rooms
        self.keys, self.values = (room[:, :, : self._filled] for room in rooms)


def growing_cache() -> Cache:
    """An empty cache; its layers appear with the first forward pass."""
    return Cache(layer_class_to_replicate=GrowingLayer)


def _buffer(states: Tensor, capacity: int) -> Tensor:
    batch, heads, _, size = states.shape
    return states.new_empty(batch, heads, capacity, size)


def _moved(room: Tensor, filled: int, capacity: int) -> Tensor:
    larger = _buffer(room, capacity)
    larger[:, :, :filled] = room[:, :, :filled]
    return larger
