"""Load and stream the weights of a sharded Megatron model under their Hugging Face names.

Both directions walk Megatron's sharded state dict, which knows for every local tensor its global key and offset.
Export gathers one bucket of full tensors at a time, and only on the ranks that ask for it, so no rank ever holds the
whole model twice. Each bucket is one exchange of flat buffers: a holder packs all its shards of the bucket into one
message for each rank that lacks them. What a rank holds itself is never sent to it, and of several replicas the
nearest one sends: under pure data parallelism nothing is sent at all.

    rank that only holds    pack 0, send 0 | pack 1, send 1 | pack 2, ...   waits for the send of k before k + 2
    rank that asks          receive 0      | receive 1 while 0 is handed on | receive 2 while 1 is ...

Two buckets are in flight: the exchange of k + 1 runs in the background (gloo's threads, NCCL's stream) while the
reader of k is busy with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor

from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.hf_files import check_finite
from dppo_megatron.weights.mapping import PADDED_TO_VOCAB, Place, hf_names, join, split

DEFAULT_BUCKET_BYTES = 256 << 20
_EXCHANGES_AT_A_TIME = 2


@dataclass(frozen=True, slots=True)
class _Shard:
    """Where one shard lies in the full tensor of (key, place)."""

    key: str
    place: Place
    start: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the full tensor, with the padding of a vocabulary."""

    @property
    def index(self) -> tuple[slice, ...]:
        """Its part of the full tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One bucket on its way."""

    keys: list[tuple[str, Place]]
    works: list[dist.Work]
    in_use: list[Tensor]
    """The flat messages, kept until they have been sent or read."""
    arriving: dict[_Shard, Tensor]
    """Views of what is being received."""


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
    """Streams full tensors under their Hugging Face names to the ranks that ask for them.

    The plan of who holds what is exchanged once, when the stream is made; a pass moves tensors only.
    """

    def __init__(self, model: Sequence[torch.nn.Module], architecture: Architecture) -> None:
        self._architecture = architecture
        self._local: dict[_Shard, Tensor] = {}
        for shard in _local_shards(model):
            assert shard.data is not None
            self._local[_describe(shard)] = shard.data
        parameter = next(iter(model[0].parameters()))
        self._dtype, self._device = parameter.dtype, parameter.device
        gathered: list[list[_Shard]] = [list(self._local)]
        if dist.get_world_size() > 1:
            gathered = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(gathered, list(self._local))
        self._holders: dict[_Shard, list[int]] = {}
        for rank, shards in enumerate(gathered):
            for shard in shards:
                self._holders.setdefault(shard, []).append(rank)
        self._shards: dict[tuple[str, Place], list[_Shard]] = {}
        for shard in self._holders:
            self._shards.setdefault((shard.key, shard.place), []).append(shard)
        self._order = sorted(self._shards, key=lambda item: (item[1], item[0]))

    @torch.no_grad()
    def tensors(
        self, to: Collection[int] | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        """One pass over all weights. Collective: every rank iterates to the end, the others without being given any.

        Args:
            to: ranks that are given tensors; None: all.
            bucket_bytes: size of an exchange, the same on every rank. A tensor that is larger makes one of its own.

        Yields:
            (name, full tensor) in a fixed order. Tensors of a bucket lie end to end in one piece of memory, which is
            the receiver's to keep.
        """
        receivers = sorted(set(range(dist.get_world_size()) if to is None else to))
        begun: deque[_Exchange] = deque()
        for keys in self._buckets(bucket_bytes):
            begun.append(self._begin(keys, receivers))
            if len(begun) == _EXCHANGES_AT_A_TIME:
                yield from self._finish(begun.popleft(), receivers)
        while begun:
            yield from self._finish(begun.popleft(), receivers)

    def num_buckets(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> int:
        """Exchanges of one pass."""
        return len(self._buckets(bucket_bytes))

    def _buckets(self, max_bytes: int) -> list[list[tuple[str, Place]]]:
        """Consecutive keys that together have at most `max_bytes`, unless one alone has more."""
        buckets: list[list[tuple[str, Place]]] = []
        size = 0
        for item in self._order:
            num_bytes = math.prod(self._shards[item][0].shape) * self._dtype.itemsize
            if not buckets or size + num_bytes > max_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(item)
            size += num_bytes
        return buckets

    def _begin(self, keys: list[tuple[str, Place]], receivers: Sequence[int]) -> _Exchange:
        """Start sending what others lack of these keys and we hold, and receiving what we lack."""
        me = dist.get_rank()
        routes: dict[tuple[int, int], list[_Shard]] = {}
        for item in keys:
            for shard in self._shards[item]:
                for receiver in receivers:
                    source = nearest(self._holders[shard], receiver)
                    if source != receiver and me in (source, receiver):
                        routes.setdefault((source, receiver), []).append(shard)
        operations: list[dist.P2POp] = []
        arriving: dict[_Shard, Tensor] = {}
        for (source, receiver), shards in routes.items():
            flat = torch.empty(sum(shard.numel for shard in shards), dtype=self._dtype, device=self._device)
            parts = dict(zip(shards, torch.split(flat, [shard.numel for shard in shards]), strict=True))
            if source == me:
                for shard, part in parts.items():
                    part.view(shard.size).copy_(self._local[shard])
                operations.append(dist.P2POp(dist.isend, flat, receiver))
            else:
                arriving |= parts
                operations.append(dist.P2POp(dist.irecv, flat, source))
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Exchange(keys, works, [operation.tensor for operation in operations], arriving)

    def _finish(self, exchange: _Exchange, receivers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Wait for an exchange; on a rank that asks, put its tensors together end to end and yield them."""
        for work in exchange.works:
            work.wait()
        if dist.get_rank() not in receivers:
            return
        named = [(name, shape) for item in exchange.keys for name, shape in self._hf_shapes(item)]
        sizes = [math.prod(shape) for _, shape in named]
        memory = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        views = [part.view(shape) for part, (_, shape) in zip(torch.split(memory, sizes), named, strict=True)]
        waiting = iter(views)
        for item in exchange.keys:
            targets = [next(waiting) for _ in hf_names(*item, self._architecture)]
            self._fill(item, targets, exchange.arriving)
        exchange.arriving.clear()
        yield from zip((name for name, _ in named), views, strict=True)

    def _fill(self, item: tuple[str, Place], targets: list[Tensor], arriving: dict[_Shard, Tensor]) -> None:
        """Copy the shards of one key into the Hugging Face tensors that it is made of."""
        key, _ = item
        shards = self._shards[item]
        direct = len(targets) == 1 and tuple(targets[0].shape) == shards[0].shape
        full = targets[0] if direct else torch.empty(shards[0].shape, dtype=self._dtype, device=self._device)
        for shard in shards:
            data = self._local.get(shard)
            full[shard.index].copy_(arriving[shard].view(shard.size) if data is None else data)
        if direct:
            return
        if key in PADDED_TO_VOCAB:
            full = full[: self._architecture.vocab_size]
        for target, part in zip(targets, split(key, full, self._architecture), strict=True):
            target.copy_(part)

    def _hf_shapes(self, item: tuple[str, Place]) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the Hugging Face tensors behind one key."""
        key, place = item
        whole = torch.empty(self._shards[item][0].shape, device="meta")
        if key in PADDED_TO_VOCAB:
            whole = whole[: self._architecture.vocab_size]
        parts = split(key, whole, self._architecture)
        return list(zip(hf_names(key, place, self._architecture), [tuple(p.shape) for p in parts], strict=True))


def nearest(holders: Sequence[int], receiver: int) -> int:
    """Which of the ranks that hold a shard sends it: the receiver itself, else the one next to it by number, since
    launchers number the ranks of a machine in a row.

    Example:
        nearest([0, 2, 4, 6], 2) == 2        nearest([1, 5], 4) == 5        nearest([1, 5], 3) == 1
    """
    return min(holders, key=lambda rank: (abs(rank - receiver), rank))


def _local_shards(model: Sequence[torch.nn.Module]) -> Iterator[ShardedTensor]:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    for chunk in model:
        state = chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        apply_factories(state)  # the fused gate and up projection become two shards that view the parameter
        yield from (value for value in nested_values(state) if isinstance(value, ShardedTensor))


def _describe(shard: ShardedTensor) -> _Shard:
    axes = shard.prepend_axis_num
    assert shard.data is not None
    return _Shard(
        shard.key,
        tuple(shard.global_offset[:axes]),
        tuple(shard.global_offset[axes:]),
        tuple(shard.data.shape),
        tuple(shard.global_shape[axes:]),
    )
