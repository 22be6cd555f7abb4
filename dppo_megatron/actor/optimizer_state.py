"""Checkpoints of the distributed optimizer without gathering the whole model on every rank.

Megatron's format that loads at any layout (`fully_reshardable`) stores whole parameters. To assemble them, Megatron
gathers the float32 parameters and both moments, 12 bytes per parameter, in the host memory of every data-parallel rank,
when saving and again when loading: 770 GB on a node of eight ranks for 8 billion parameters. But each rank holds one
contiguous range of the flat buffer, so nearly every parameter is complete on one rank already:

    flat buffer    | embedding         | q | k | v | ... | fc1        | fc2        | norm |
    ranks          |--- 0 ---|--- 1 ---|--- 2 ---------|------ 3 ------|------ 4 ----------|
                      embedding: 0 sends its part to 1       fc1: 4 gets the rest of 3, and so on

Here the rank that holds most of a parameter writes it, and only pieces of parameters that cross a boundary are sent.
When loading, a rank reads the parameters that overlap its range. The files are in Megatron's format, key for key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

_STATES = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Spread:
    """How one parameter's elements are distributed over the data-parallel ranks."""

    pieces: dict[int, slice]
    """Rank -> the slice of the flattened parameter that it holds, in order."""

    @staticmethod
    def of(start: int, end: int, stretch: int) -> Spread:
        """The spread of elements [start, end) of a bucket in which every rank holds `stretch` elements.

        Example: (6, 14, stretch 8) -> rank 0 has the parameter's [0, 2), rank 1 has [2, 8).
        """
        ranks = range(start // stretch, (end - 1) // stretch + 1)
        return Spread({r: slice(max(start, r * stretch) - start, min(end, (r + 1) * stretch) - start) for r in ranks})

    @property
    def writer(self) -> int:
        """The rank that holds most of it; the lowest one in a tie."""
        return max(self.pieces, key=lambda rank: (self.pieces[rank].stop - self.pieces[rank].start, -rank))


class LeanDistributedOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """A `DistributedOptimizer` that saves and loads whole parameters without gathering all of them."""

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict[int, dict[str, Any]]:
        """Replaces Megatron's method: position in the buffers -> the parameter's states as sharded tensors.

        Collective over the data-parallel group. A rank returns only what it writes, or what it needs to load.
        """
        described, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        by_param = {base.data: base for base in nested_values(described)}
        rank = self.data_parallel_group.rank()
        out: dict[int, dict[str, Any]] = {}
        for place, (param, spread) in enumerate(self._spreads()):
            if is_loading:
                states = self._empty(param) if rank in spread.pieces else {}
            else:
                states = self._whole(param, spread, rank)
            if states:
                base = by_param[param]
                assert base.flattened_range is None, base
                out[place] = {name: _stored(base, name, data, rank == spread.writer) for name, data in states.items()}
        return out

    def _spreads(self) -> Iterator[tuple[torch.nn.Parameter, Spread]]:
        """Every parameter, in buffer order, which is the same on all ranks of the data-parallel group."""
        size = self.data_parallel_group.size()
        for buffer in self.buffers:
            for param, (start, end, bucket_id) in buffer.param_index_map.items():
                bucket = buffer.buckets[bucket_id]
                stretch = bucket.grad_data.numel() // size
                yield param, Spread.of(start - bucket.offset, end - bucket.offset, stretch)

    def _empty(self, param: torch.nn.Parameter) -> dict[str, Tensor]:
        return {name: torch.empty(param.shape, dtype=torch.float32, device="cpu") for name in _STATES}

    def _whole(self, param: torch.nn.Parameter, spread: Spread, rank: int) -> dict[str, Tensor]:
        """The parameter's states in its shape on the rank that writes it, empty elsewhere; ranks send their pieces."""
        if rank not in spread.pieces:
            return {}
        held = self._get_main_param_and_optimizer_states(param)
        # a fused Adam has no moments before its first step
        mine = {name: held.get(name, torch.zeros_like(held["param"])).detach().float() for name in _STATES}
        if len(spread.pieces) == 1:
            return {name: tensor.view(param.shape) for name, tensor in mine.items()}
        whole = {}
        for name, tensor in mine.items():  # one at a time, so that the device holds at most one assembled state
            assembled = self._assemble(tensor, param.numel(), spread, rank)
            if assembled is not None:
                whole[name] = assembled.view(param.shape).cpu()
        return whole

    def _assemble(self, mine: Tensor, numel: int, spread: Spread, rank: int) -> Tensor | None:
        group, writer = self.data_parallel_group, spread.writer
        if rank != writer:
            dist.send(mine.contiguous(), dist.get_global_rank(group, writer), group=group)
            return None
        whole = mine.new_empty(numel)
        for other, piece in spread.pieces.items():
            if other == rank:
                whole[piece] = mine
            else:
                dist.recv(whole[piece], dist.get_global_rank(group, other), group=group)
        return whole


def _stored(base: Any, name: str, data: Tensor, is_writer: bool) -> Any:
    """`data` as a sharded tensor at the model parameter's place, under Megatron's key for this optimizer state."""
    # the last part of a replica id is the data-parallel rank; the main replica has zeros only
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{base.key}",
        "data": data,
        "replica_id": (*base.replica_id[:-1], 0 if is_writer else 1),
    }
    if not isinstance(base, ShardedTensorFactory):
        changes["dtype"] = data.dtype
    stored = replace(base, **changes)
    stored.validate_metadata_integrity()
    return stored
