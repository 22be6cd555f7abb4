"""The embedded engine's key-value cache: written in place, and rows that have ended cost a copy at most once.

A cache that is concatenated at every token copies itself for every token; one that is padded to the longest possible
completion is read in full at every token. This one has spare capacity and returns views of the filled part. It grows by
half, so a token is copied about twice in all.

A row that ends leaves a hole, and the last running row moves into it. So what is copied is what has ended and not what
still runs; the price is that rows change places, which the caller has to follow (`Moves`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_ROOM = 16
"""Spare tokens after the prompt. Touching new memory costs as much as the copy when it has to grow, and by then most
completions of a short task have ended."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Which rows move where, so that the running ones are the first `count`.

    Example: of five rows 0 and 2 have ended: count = 3, and rows 3 and 4 move to 0 and 2.
    """

    count: int
    source: Tensor
    target: Tensor

    @staticmethod
    def of(running: Tensor, count: int) -> Moves:
        """running: [B] bool, `count` of them true."""
        return Moves(count, running[count:].nonzero()[:, 0] + count, (~running[:count]).nonzero()[:, 0])

    def apply(self, rows: Tensor) -> Tensor:
        """[B, ...] -> [count, ...], a view of `rows`, which is overwritten."""
        if len(self.source):
            rows[self.target] = rows[self.source]
        return rows[: self.count]


class KeyValues:
    """Keys and values of every layer, for a batch of rows that are all filled to the same length.

    Args:
        capacity: tokens to begin with.
    """

    def __init__(
        self,
        num_layers: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.filled = 0
        """Tokens of each row."""
        self._rows = rows
        shape = (2, rows, kv_heads, capacity, head_dim)  # keys and values together: half as many copies to start
        self._rooms = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def reserve(self, count: int) -> None:
        """Make room for `count` more tokens in every layer; called before their `append`s."""
        capacity = self._rooms[0].size(3)
        if self.filled + count > capacity:
            self._rebuild(max(self.filled + count, capacity * 3 // 2), torch.arange(self._rows))

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, K, n, D] behind the filled part of one layer; returns everything so far, [B, K, filled + n, D]."""
        end = self.filled + keys.size(2)
        room = self._rooms[layer][:, : self._rows]
        room[0, :, :, self.filled : end] = keys
        room[1, :, :, self.filled : end] = values
        return room[0, :, :, :end], room[1, :, :, :end]

    def expand(self, rows: Tensor) -> None:
        """Keep `rows` [B'] instead, each as often as it occurs, with spare capacity for the completion's beginning."""
        self._rebuild(self.filled + _FIRST_ROOM, rows)

    def move(self, moves: Moves) -> None:
        if len(moves.source):
            for room in self._rooms:
                # by indexing: index_select and index_copy_ first make a copy of a whole view that has gaps
                room[:, moves.target, :, : self.filled] = room[:, moves.source, :, : self.filled]
        self._rows = moves.count

    def _rebuild(self, capacity: int, rows: Tensor) -> None:
        rows = rows.to(self._rooms[0].device)
        for layer, room in enumerate(self._rooms):  # one layer at a time: the peak is one layer more, not all
            larger = room.new_empty(2, len(rows), room.size(2), capacity, room.size(4))
            larger[:, :, :, : self.filled] = room[:, rows, :, : self.filled]
            self._rooms[layer] = larger
        self._rows = len(rows)
