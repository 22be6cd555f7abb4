"""Which rank sends a piece of the weights to which, so that each node receives it over the network only once.

    a holder ──▶ the receivers of its own node that lack it                first hop, inside the node
    a holder ──▶ one receiver of each node without a holder                first hop, the only one over the network
                 that one ──▶ the other receivers of its node              second hop, inside the node

A network card has an eighth of the speed of the links inside a node, so a block is divided into pieces: its holders
take turns in sending them, a node's receivers in fetching them. Every rank computes its own part of the plan, by the
same rule, from what all know: the holders, the receivers, the node of each rank. At 1,024 ranks the computation must
not visit each shard and receiver, so shards that the same ranks hold are one block, and many of them one message.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

from dppo_megatron.weights.mapping import Place, layer_of

_PIECES = 16
"""A bucket's data for the network is sent in at least this many pieces, so that they spread over a node's eight network
cards even if one block is half of the bucket."""
Item: TypeAlias = tuple[str, Place]
"""Key and place of one of Megatron's full tensors."""


@dataclass(frozen=True, slots=True)
class Block:
    """Shards at the same offsets in the full tensors of one key. The same ranks hold all of them."""

    key: str
    """Without the layer's number, which is in the places (`mapping.by_kind`), so that layers can share a block."""
    shape: tuple[int, ...]
    """The shape of each full tensor, with the padding of a vocabulary."""
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """(start, size) of each shard in the full tensor; a fused gate and up projection has two."""
    places: tuple[Place, ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each part."""
        return [math.prod(size) for _, size in self.parts]

    @property
    def numel(self) -> int:
        """Elements at one place."""
        return sum(self.sizes)


class RankReport(NamedTuple):
    """What a rank reports to all others when the stream is made."""

    node: int
    """The first rank on its node."""
    blocks: list[bytes]
    """The blocks that it holds, each pickled."""


class Role(NamedTuple):
    """What one rank does with one piece. A rank that holds the piece or does not need it receives nothing."""

    to: tuple[int, ...] = ()
    """Of a holder: the ranks that it sends the piece to in the first hop."""
    source: int | None = None
    """The rank from which the piece is received in the first hop."""
    onward: tuple[int, ...] = ()
    """Of the rank that fetches the piece for its node: the ranks that it sends it to in the second hop."""
    relay: int | None = None
    """The rank from which the piece is received in the second hop."""


class Route:
    """Rank `me`'s part in sending the blocks of `holders` to all receivers. `nodes`: the node of each rank, as any
    integer; `receivers`: the receiving ranks of each node."""

    def __init__(
        self, holders: tuple[int, ...], nodes: Sequence[int], receivers: dict[int, list[int]], me: int
    ) -> None:
        holder_nodes = {nodes[rank] for rank in holders}
        self._holders, self._me = holders, me
        # the receivers of each node without a holder; then, on this rank's node, the holders and those that lack it
        self._lacking = [ranks for node, ranks in receivers.items() if node not in holder_nodes]
        self._beside = [rank for rank in holders if nodes[rank] == nodes[me]]
        self._waiting = [rank for rank in receivers.get(nodes[me], []) if rank not in holders]
        self._order = self._lacking.index(self._waiting) if self._waiting in self._lacking else 0
        self._period = math.lcm(len(holders), len(self._beside) or 1, *map(len, self._lacking), len(self._waiting) or 1)
        self._roles: dict[tuple[int, int], tuple[Role, ...]] = {}

    @property
    def crosses(self) -> bool:
        """Whether the blocks cross the network, because a node has no holder. The same on every rank."""
        return bool(self._lacking)

    def roles(self, turn: int, count: int) -> tuple[Role, ...]:
        """This rank's role in each of `count` pieces, () if it has none; `turn`, equal on all ranks, is the first's."""
        key = turn % self._period, count
        if key not in self._roles:
            roles = tuple(self._role(turn + piece) for piece in range(count))
            self._roles[key] = roles if any(role != Role() for role in roles) else ()
        return self._roles[key]

    def _role(self, turn: int) -> Role:
        nodes, count = len(self._lacking), len(self._holders)
        if self._me in self._holders:
            first = (self._holders.index(self._me) - turn * nodes) % count  # holders take turns over (piece, node)
            far = [ranks[turn % len(ranks)] for ranks in self._lacking[first::count]]
            near = self._waiting[(self._beside.index(self._me) - turn) % len(self._beside) :: len(self._beside)]
            return Role(to=(*far, *near))
        if self._me not in self._waiting:
            return Role()
        if self._beside:
            return Role(source=self._beside[(turn + self._waiting.index(self._me)) % len(self._beside)])
        relay = self._waiting[turn % len(self._waiting)]
        if relay != self._me:
            return Role(relay=relay)
        source = self._holders[(turn * nodes + self._order) % count]
        return Role(source=source, onward=tuple(rank for rank in self._waiting if rank != relay))


class BlockPart(NamedTuple):
    """The part of one block that is in one bucket, contiguous."""

    block: int
    places: list[Place]
    roles: tuple[Role, ...]
    """This rank's role for each piece of the part; the sizes of the pieces differ by at most one element."""


class RoutedBucket(NamedTuple):
    """What one rank does for one bucket."""

    items: list[Item]
    roles: dict[int, tuple[Role, ...]]
    """Block -> this rank's roles, if any. `Catalogue.units` makes objects from them in the bucket's turn: keeping
    the 26,000 of a 235B model made Python's garbage collector scan the process, for twice the time of the routes."""


class Catalogue:
    """Which ranks hold which blocks in the whole job, and what a rank does in a pass over all weights. `reports`: one
    per rank; `keys`: all keys, in the order in which a pass takes those of a layer."""

    def __init__(self, reports: Sequence[RankReport], keys: Iterable[str]) -> None:
        self._nodes = [node for node, _ in reports]
        ranks_by_pickle: dict[bytes, list[int]] = {}
        for rank, (_, pickles) in enumerate(reports):
            for pickled in pickles:
                ranks_by_pickle.setdefault(pickled, []).append(rank)
        held = [(pickle.loads(pickled), tuple(ranks)) for pickled, ranks in ranks_by_pickle.items()]
        held.sort(key=lambda entry: (entry[0].key, entry[0].parts, entry[1]))
        self.blocks: list[Block] = [block for block, _ in held]
        self._holders = [holders for _, holders in held]
        self.parts: dict[Item, tuple[int, ...]] = {}
        """Numbers of the blocks that make up each full tensor."""
        turns: dict[Item, int] = {}
        for number, block in enumerate(self.blocks):
            count: Counter[Place] = Counter()
            for item in [(block.key, place) for place in block.places]:
                self.parts[item] = (*self.parts.get(item, ()), number)
                turns[item] = count[layer_of(*item)]
                count[layer_of(*item)] += 1
        order = {key: number for number, key in enumerate(keys)}
        # alternates between the holders of a layer's experts, so that all of them send in each bucket
        self._order = sorted(self.parts, key=lambda item: (layer_of(*item), turns[item], order[item[0]], item[1]))
        self._numel = {block.key: math.prod(block.shape) for block in self.blocks}

    def buckets(self, max_numel: int) -> list[list[Item]]:
        """Consecutive items that together have at most `max_numel` elements; a larger item is a bucket by itself."""
        buckets: list[list[Item]] = []
        total = 0
        for item in self._order:
            numel = self._numel[item[0]]
            if not buckets or total + numel > max_numel:
                buckets.append([])
                total = 0
            buckets[-1].append(item)
            total += numel
        return buckets

    def plan(self, receivers: Sequence[int], max_numel: int, me: int) -> list[RoutedBucket]:
        """What rank `me` does in each bucket. It skips blocks that it neither holds nor receives."""
        on_node: dict[int, list[int]] = {}
        for rank in receivers:
            on_node.setdefault(self._nodes[rank], []).append(rank)
        routes = {held: Route(held, self._nodes, on_node, me) for held in set(self._holders)}
        route_of = [routes[held] for held in self._holders]
        concerns = [me in receivers or me in held for held in self._holders]
        sizes = [block.numel for block in self.blocks]
        turns = list(range(len(self.blocks)))  # starting at the block's number staggers blocks of the same holders
        plan = []
        for items in self.buckets(max_numel):
            largest = math.ceil(sum(self._numel[key] for key, _ in items) / _PIECES)
            roles_by_block = {}
            for number, count in Counter(chain.from_iterable(map(self.parts.__getitem__, items))).items():
                if concerns[number]:
                    route = route_of[number]
                    pieces = math.ceil(count * sizes[number] / largest) if route.crosses else 1
                    if roles := route.roles(turns[number], pieces):
                        roles_by_block[number] = roles
                    turns[number] += pieces
            plan.append(RoutedBucket(items, roles_by_block))
        return plan

    def units(self, bucket: RoutedBucket) -> list[BlockPart]:
        """The parts of blocks in which the rank that planned `bucket` has a role."""
        places: dict[int, list[Place]] = defaultdict(list)
        for item in bucket.items:
            for number in self.parts[item]:
                if number in bucket.roles:
                    places[number].append(item[1])
        return [BlockPart(number, here, bucket.roles[number]) for number, here in places.items()]
