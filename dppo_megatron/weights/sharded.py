"""Load and stream the weights of a sharded Megatron model under their Hugging Face names.

Both directions walk Megatron's sharded state dict, which knows for every local tensor its global key and offset.
Export streams one full tensor at a time, so no rank ever holds the whole model twice; each piece is broadcast by
the rank that owns it, because with an embedded engine every rank wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from torch import Tensor

from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.hf_files import check_finite
from dppo_megatron.weights.mapping import PADDED_TO_VOCAB, Place, hf_names, join, split


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where one shard lies in the full tensor of (key, place), and which rank holds it."""

    rank: int
    key: str
    place: Place
    index: tuple[slice, ...]
    shape: tuple[int, ...]


@torch.no_grad()
def load_hf_weights(model: Sequence[torch.nn.Module], architecture: Architecture, get: Callable[[str], Tensor]) -> None:
    """Copy full Hugging Face tensors into this rank's shards. Collective.

    Args:
        get: returns one full tensor by name, on the CPU.

    Raises:
        UserError: on every rank, if one of them met a tensor that cannot be read, or holds a NaN or an infinity.
    """
    refusal = ""
    try:
        for shard in _local_shards(model):
            _load_shard(shard, architecture, get)
    except UserError as error:
        refusal = str(error)
    refusals = [refusal]
    if dist.get_world_size() > 1:  # with pipeline stages, only one rank may have read the tensor
        refusals = [""] * dist.get_world_size()
        dist.all_gather_object(refusals, refusal)
    if first := next(filter(None, refusals), ""):
        raise UserError(first)


def _load_shard(shard: ShardedTensor, architecture: Architecture, get: Callable[[str], Tensor]) -> None:
    piece = _describe(shard)
    assert shard.data is not None
    parts = []
    for name in hf_names(piece.key, piece.place, architecture):
        # in the actor's own type: a float64 that bfloat16 cannot hold becomes an infinity here
        part = get(name).to(shard.data.dtype)
        check_finite(name, part)
        parts.append(part)
    full = join(piece.key, parts, architecture)
    if piece.key in PADDED_TO_VOCAB:
        padding = full.new_zeros(piece.shape[0] - full.shape[0], *full.shape[1:])
        full = torch.cat([full, padding])
    if tuple(full.shape) != piece.shape:
        raise ValueError(f"{piece.key}: checkpoint has shape {tuple(full.shape)}, the model {piece.shape}")
    shard.data.copy_(full[piece.index])


class WeightStream:
    """Streams full tensors under their Hugging Face names to every rank. Collective: all ranks iterate together.

    The plan of who owns what is exchanged once; each later pass only broadcasts.
    """

    def __init__(self, model: Sequence[torch.nn.Module], architecture: Architecture) -> None:
        self._architecture = architecture
        self._local: dict[tuple[str, Place, str], ShardedTensor] = {}
        mine: list[_Piece] = []
        for shard in _local_shards(model):
            if is_main_replica(shard.replica_id):
                piece = _describe(shard)
                mine.append(piece)
                self._local[piece.key, piece.place, str(piece.index)] = shard
        gathered: list[list[_Piece]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mine)
        self._pieces: dict[tuple[str, Place], list[_Piece]] = {}
        for piece in (p for pieces in gathered for p in pieces):
            self._pieces.setdefault((piece.key, piece.place), []).append(piece)
        self._order = sorted(self._pieces, key=lambda item: (item[1], item[0]))
        parameter = next(iter(model[0].parameters()))
        self._dtype, self._device = parameter.dtype, parameter.device

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full tensor) in a fixed order. A yielded tensor is the receiver's to keep."""
        rank = dist.get_rank()
        for key, place in self._order:
            pieces = self._pieces[key, place]
            full = torch.empty(pieces[0].shape, dtype=self._dtype, device=self._device)
            for piece in pieces:
                if piece.rank == rank:
                    data = self._local[key, place, str(piece.index)].data
                    assert data is not None
                    full[piece.index] = data
                if dist.get_world_size() > 1:
                    part = full[piece.index].contiguous()
                    dist.broadcast(part, src=piece.rank)
                    full[piece.index] = part
            if key in PADDED_TO_VOCAB:
                full = full[: self._architecture.vocab_size]
            names = hf_names(key, place, self._architecture)
            for name, tensor in zip(names, split(key, full, self._architecture), strict=True):
                yield name, tensor.contiguous()


def _local_shards(model: Sequence[torch.nn.Module]) -> Iterator[ShardedTensor]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    for chunk in model:
        state = chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        apply_factories(state)  # the fused gate and up projection become two shards that view the parameter
        yield from (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def _describe(shard: ShardedTensor) -> _Piece:
    axes = shard.prepend_axis_num
    offset, shape = shard.global_offset[axes:], shard.global_shape[axes:]
    assert shard.data is not None
    index = tuple(slice(start, start + size) for start, size in zip(offset, shard.data.shape, strict=True))
    return _Piece(dist.get_rank(), shard.key, tuple(shard.global_offset[:axes]), index, tuple(shape))
