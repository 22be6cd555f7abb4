"""Loads and streams the weights of a sharded Megatron model under their Hugging Face names.

Both directions use Megatron's sharded state dict, which has the global key and offset of every local tensor. Export
gathers one bucket of full tensors at a time, and only on the receiving ranks. A rank is never sent what it holds, and
each node receives what it lacks over the network once (`routes.py`): under pure data parallelism nothing is sent.

    rank that only holds    pack 0, send 0 | pack 1, send 1 | pack 2, ...   waits for the send of k before k + 2
    receiving rank          receive 0, pass on 0 | receive 1 while 0 is read | pass on 1 | receive 2 while 1 is ...

Why this cannot deadlock: an exchange is two batches of sends and receives, the hops of `routes.py`. All ranks begin the
batches of all buckets in one order (first 0, second 0, first 1, second 1, ...), each skipping batches in which it has
no part, and wait only for batches that they have begun. Sends and their receives are in the same batch, so the earliest
unfinished batch never waits for a later one, neither in gloo's threads nor on NCCL's stream. Between two ranks, the
messages of a batch follow one order of blocks that all ranks know. A rank begins the first batch of k + 1 before it
yields bucket k, so consumers of bucket k that wait for each other never wait for an exchange.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor

from dppo_megatron.distributed import gather_all, on_every_rank
from dppo_megatron.launcher_env import launched_node
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.hf_files import check_finite
from dppo_megatron.weights.mapping import (
    EXPERT_BIAS,
    PADDED_TO_VOCAB,
    Place,
    adapter_key,
    adapter_parts,
    adapter_rows,
    by_kind,
    hf_names,
    hf_shapes,
    join,
    merged,
    of_layer,
    split,
    table,
)
from dppo_megatron.weights.routes import Block, BlockPart, Catalogue, Item, RankReport, Role, RoutedBucket

DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One bucket that is being exchanged."""

    items: list[Item]
    units: list[BlockPart]
    flat: list[Tensor]
    """The data of each unit, kept until it has been sent or read."""
    works: list[dist.Work]


_Shard: TypeAlias = Callable[[], Tensor]
"""Returns the current values; of a weight with an adapter, with this rank's shard of that merged in."""


@torch.no_grad()
def load_hf_weights(model: Sequence[torch.nn.Module], architecture: Architecture, get: Callable[[str], Tensor]) -> None:
    """Copy full Hugging Face tensors, which `get` returns by name, on the CPU, into this rank's shards. Collective.

    Raises:
        UserError: on every rank, if one of them found a tensor that cannot be read or has a NaN or an infinity.
    """
    problems: list[str] = []
    try:
        for shard in local_shards(model):
            _load_shard(shard, architecture, get)
    except UserError as error:
        problems.append(str(error))
    for problem in gather_all(problems):  # with pipeline stages, maybe only one rank has read the tensor
        raise on_every_rank(UserError(problem))


def _load_shard(shard: ShardedTensor, architecture: Architecture, get: Callable[[str], Tensor]) -> None:
    assert shard.data is not None
    key, axes, parts = shard.key, shard.prepend_axis_num, []
    place, start, shape = place_of(shard), shard.global_offset[axes:], tuple(shard.global_shape[axes:])
    for name in hf_names(key, place, architecture):
        # convert before the check: a float64 value too large for the actor's dtype becomes an infinity here
        part = get(name).to(shard.data.dtype)
        check_finite(name, part)
        parts.append(part)
    full = join(key, parts, architecture)
    if key in PADDED_TO_VOCAB:
        padding = full.new_zeros(shape[0] - full.shape[0], *full.shape[1:])
        full = torch.cat([full, padding])
    if tuple(full.shape) != shape:
        raise ValueError(f"{key}: checkpoint has shape {tuple(full.shape)}, the model {shape}")
    shard.data.copy_(full[_index(start, shard.data.shape)])


class WeightStream:
    """Streams full tensors under their Hugging Face names to the receiving ranks. With `adapters`, the adapters under
    PEFT's names, instead of the weights with the adapters merged in.

    The ranks report their shards once, when the stream is created, and compute routes once for each set of receivers; a
    pass transfers only tensors.
    """

    def __init__(self, model: Sequence[torch.nn.Module], architecture: Architecture, *, adapters: bool = False) -> None:
        self._architecture = architecture
        self._me = dist.get_rank()
        local = _blocks_of(model, architecture, adapters=adapters)
        parameter = next(iter(model[0].parameters()))
        self._dtype, self._device = parameter.dtype, parameter.device
        # pickled, so that a block which many ranks report is unpickled once, not once per rank
        report = RankReport(launched_node(self._me), [pickle.dumps(block) for block in local])
        # the table's order: it keeps adjacent what SGLang joins within one call (`rollout/sync/channels.py`)
        rows = (*table(architecture), *adapter_rows(architecture))
        self._catalogue = Catalogue(gather_all([report]), [by_kind(key, ())[0] for key in rows])
        self._blocks = self._catalogue.blocks
        self._local: dict[tuple[int, Place], list[_Shard]] = {}
        for number, block in enumerate(self._blocks):
            if block in local:
                self._local |= {(number, place): data for place, data in zip(block.places, local[block], strict=True)}
        self._hf_shapes = hf_shapes(architecture, adapter_rows(architecture) if adapters else ())
        self._model = model
        experts = architecture.experts
        self._biases: list[tuple[str, Tensor]] | None = None if experts and experts.is_sigmoid and not adapters else []
        """The routers' correction biases, on the host; None: not gathered yet."""
        self._planned: tuple[Any, list[RoutedBucket]] = (None, [])

    @torch.no_grad()
    def tensors(
        self, to: Collection[int] | None = None, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        """One pass over all weights. Collective: every rank must iterate to the end; ranks not in `to` get no tensors.

        Args:
            to: the ranks that receive tensors; None: all.
            bucket_bytes: size of an exchange, the same on every rank. A larger tensor is an exchange by itself.

        Yields:
            (name, full tensor) in a fixed order. The tensors of a bucket are contiguous in one allocation, which the
            receiver may keep. Correction biases of routers come last, in float32.
        """
        receivers = tuple(sorted(set(range(dist.get_world_size()) if to is None else to)))
        if self._planned[0] != (receivers, bucket_bytes):
            max_numel = bucket_bytes // self._dtype.itemsize
            self._planned = (receivers, bucket_bytes), self._catalogue.plan(receivers, max_numel, self._me)
        previous: _Exchange | None = None
        for bucket in (*self._planned[1], None):
            if previous is not None:
                self._pass_on(previous)
            current = self._begin(bucket) if bucket is not None else None
            if previous is not None:
                yield from self._finish(previous, receivers)
            previous = current
        biases = self._correction_biases()
        for name, tensor in biases if self._me in receivers else ():
            yield name, tensor.to(self._device, copy=True)

    def num_buckets(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> int:
        """The number of exchanges in one pass."""
        return len(self._catalogue.buckets(bucket_bytes // self._dtype.itemsize))

    def _correction_biases(self) -> list[tuple[str, Tensor]]:
        """The whole model's, under Hugging Face names. Gathered once by all ranks: they are small and never change."""
        if self._biases is None:
            mine = [
                (hf_names(shard.key, place_of(shard), self._architecture)[0], shard.data.cpu())
                for shard in local_shards(self._model)
                if shard.key.endswith(EXPERT_BIAS) and not any(shard.replica_id)  # only from the main replica
            ]
            biases = dict(gather_all(mine))
            self._biases = [(name, biases[name]) for name in self._hf_shapes if name in biases]
        return self._biases

    def _begin(self, bucket: RoutedBucket) -> _Exchange:
        """Start the first hop of a bucket: send what we hold and others lack, receive what we lack."""
        units = self._catalogue.units(bucket)
        lacking = [unit for unit in units if not self._holds(unit)]
        sizes = [len(unit.places) * self._blocks[unit.block].numel for unit in lacking]
        arriving = iter(torch.split(torch.empty(sum(sizes), dtype=self._dtype, device=self._device), sizes))
        flat = [self._packed(unit) if self._holds(unit) else next(arriving) for unit in units]
        operations: list[dist.P2POp] = []
        for piece, role in _pieces(units, flat):
            operations += [dist.P2POp(dist.isend, piece, rank) for rank in role.to]
            if role.source is not None:
                operations.append(dist.P2POp(dist.irecv, piece, role.source))
        return _Exchange(bucket.items, units, flat, dist.batch_isend_irecv(operations) if operations else [])

    def _pass_on(self, exchange: _Exchange) -> None:
        """Start the second hop: send what we have fetched to the others on our node, and receive what they fetched."""
        operations: list[dist.P2POp] = []
        for piece, role in _pieces(exchange.units, exchange.flat):
            operations += [dist.P2POp(dist.isend, piece, rank) for rank in role.onward]
            if role.relay is not None:
                operations.append(dist.P2POp(dist.irecv, piece, role.relay))
        if any(role.onward for unit in exchange.units for role in unit.roles):
            _wait(exchange.works)
        if operations:
            exchange.works.extend(dist.batch_isend_irecv(operations))

    def _finish(self, exchange: _Exchange, receivers: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Wait for an exchange; on a receiving rank, assemble its full tensors in one allocation and yield them."""
        _wait(exchange.works)
        if self._me not in receivers:
            return
        arrived: dict[tuple[int, Place], Tensor] = {}
        for unit, memory in zip(exchange.units, exchange.flat, strict=True):
            if not self._holds(unit):
                shards = torch.split(memory, self._blocks[unit.block].numel)
                arrived |= {(unit.block, place): shard for place, shard in zip(unit.places, shards, strict=True)}
        exchange.flat.clear()
        items = exchange.items
        names = [hf_names(*of_layer(*item, self._architecture), self._architecture) for item in items]
        shapes = [self._hf_shapes[name] for item_names in names for name in item_names]
        sizes = list(map(math.prod, shapes))
        memory = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        views = [part.view(shape) for part, shape in zip(torch.split(memory, sizes), shapes, strict=True)]
        targets = iter(views)
        for item, item_names in zip(items, names, strict=True):
            self._fill(item, [next(targets) for _ in item_names], arrived)
        arrived.clear()
        yield from zip(chain.from_iterable(names), views, strict=True)

    def _fill(self, item: Item, targets: list[Tensor], arrived: dict[tuple[int, Place], Tensor]) -> None:
        """Copy the shards of one key into the Hugging Face tensors that it is made of."""
        place, (key, _) = item[1], of_layer(*item, self._architecture)
        shape = self._blocks[self._catalogue.parts[item][0]].shape
        is_direct = len(targets) == 1 and tuple(targets[0].shape) == shape  # no intermediate tensor
        full = targets[0] if is_direct else torch.empty(shape, dtype=self._dtype, device=self._device)
        for number in self._catalogue.parts[item]:
            block = self._blocks[number]
            own = self._local.get((number, place))
            shards = (shard() for shard in own) if own else torch.split(arrived[number, place], block.sizes)
            for (start, size), shard in zip(block.parts, shards, strict=True):
                full[_index(start, size)].copy_(shard.view(size))
        if is_direct:
            return
        if key in PADDED_TO_VOCAB:
            full = full[: self._architecture.vocab_size]
        for target, part in zip(targets, split(key, full, self._architecture), strict=True):
            target.copy_(part)

    def _holds(self, unit: BlockPart) -> bool:
        return (unit.block, unit.places[0]) in self._local

    def _packed(self, unit: BlockPart) -> Tensor:
        parts = [shard for place in unit.places for shard in self._local[unit.block, place]]
        return torch.cat([shard().to(self._dtype).flatten() for shard in parts])


def _pieces(units: Sequence[BlockPart], flat: Sequence[Tensor]) -> Iterator[tuple[Tensor, Role]]:
    for unit, memory in zip(units, flat, strict=True):
        yield from zip(memory.tensor_split(len(unit.roles)), unit.roles, strict=True)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
    works.clear()


def _blocks_of(
    model: Sequence[torch.nn.Module], architecture: Architecture, *, adapters: bool
) -> dict[Block, list[list[_Shard]]]:
    """This rank's shards of the weights, or of the adapters: for each block by place, then by part."""
    at: dict[tuple[str, Place], tuple[tuple[int, ...], dict[tuple[int, ...], Tensor]]] = {}
    for shard in local_shards(model):
        assert shard.data is not None
        if shard.key.endswith(EXPERT_BIAS):
            continue
        axes = shard.prepend_axis_num
        item, shape = (shard.key, place_of(shard)), tuple(shard.global_shape[axes:])
        at.setdefault(item, (shape, {}))[1][tuple(shard.global_offset[axes:])] = shard.data
    rows = adapter_rows(architecture)

    def readable(key: str, place: Place, start: tuple[int, ...]) -> _Shard:
        """A rank with a shard of a weight also has the rows of B and the columns of A that belong to it."""
        weight = at[key, place][1][start]
        if architecture.lora is None or adapter_key(key, "a") not in rows:
            return lambda: weight
        a, b = (at[adapter_key(key, half), place][1] for half in "ab")
        of_rows = adapter_parts(key, architecture)[start[0] : start[0] + len(weight)].to(weight.device)
        return partial(merged, weight, a[0, start[1]], b[start[0], 0], of_rows, architecture.lora)

    blocks: dict[tuple[Any, ...], dict[Place, list[_Shard]]] = {}
    for (kind, where), key, place in sorted((by_kind(*item), *item) for item in at):
        if (key in rows) == adapters:
            shape, shards = at[key, place]
            parts = tuple((start, tuple(shards[start].shape)) for start in sorted(shards))
            blocks.setdefault((kind, shape, parts), {})[where] = [readable(key, place, start) for start, _ in parts]
    return {
        Block(kind, shape, parts, tuple(found)): list(found.values()) for (kind, shape, parts), found in blocks.items()
    }


def _index(start: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))


def place_of(shard: ShardedTensor) -> Place:
    """Which tensor of its key a shard belongs to."""
    return tuple(shard.global_offset[: shard.prepend_axis_num])


def local_shards(model: Sequence[torch.nn.Module]) -> Iterator[ShardedTensor]:
    """Every tensor of this rank's model chunks, with its global key; one with gate and up projection as two."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    for chunk in model:
        state = chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        apply_factories(state)  # makes the fused gate and up projection two shards that view the parameter
        yield from (value for value in nested_values(state) if isinstance(value, ShardedTensor))
