"""Which rank sends a piece of the weights to which, so that a node takes it from the network once.

    a holder ──▶ the receivers of its own node that lack it                first hop, inside the node
    a holder ──▶ one receiver of each node without a holder                first hop, the only one over the network
                 that one ──▶ the other receivers of its node              second hop, inside the node

A network card has an eighth of the speed of the links inside a node, and colocated servers make every rank a receiver:
sent by the nearest rank by number, all of it came from the ranks at the border of a pipeline stage. So the
pieces of what the same ranks hold take turns: holders in sending them, the receivers of a node in fetching them.

Every rank computes its own part, from what all know: the holders, the receivers, the node of each rank. The parts fit
together because each is read off the same rule. At 1,024 ranks that must not cost a visit to each shard and receiver:
shards that the same ranks hold make one block, and many of them one message.
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
"""At least so many to a bucket of what crosses the network, in turns over eight cards of a node: one block alone may be
half of a bucket."""
Item: TypeAlias = tuple[str, Place]
"""One full tensor of Megatron's."""


@dataclass(frozen=True, slots=True)
class Block:
    """Shards at the same offsets in the full tensors of one key. The same ranks hold all of them."""

    key: str
    """With the number of the layer in the places (`mapping.by_kind`), or each layer would have blocks of its own."""
    shape: tuple[int, ...]
    """Of each full tensor, with the padding of a vocabulary."""
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
    """What it holds, each pickled."""


class Role(NamedTuple):
    """What one rank does with one piece. A rank that has it, or needs it not, receives nothing."""

    to: tuple[int, ...] = ()
    """Ranks that are sent it in the first hop, by a holder."""
    source: int | None = None
    """Comes from this rank in the first hop."""
    onward: tuple[int, ...] = ()
    """Ranks that are sent it in the second hop, by the one that has fetched it for its node."""
    relay: int | None = None
    """Comes from this rank in the second hop."""


class Route:
    """How what `holders` have comes to all receivers, as rank `me` sees it.

    Args:
        nodes: the node of each rank of the job, under any name; nodes may differ in size.
        receivers: by node.
    """

    def __init__(
        self, holders: tuple[int, ...], nodes: Sequence[int], receivers: dict[int, list[int]], me: int
    ) -> None:
        have = {nodes[rank] for rank in holders}
        self._holders, self._me = holders, me
        self._lacking = [ranks for node, ranks in receivers.items() if node not in have]
        self._beside = [rank for rank in holders if nodes[rank] == nodes[me]]
        self._waiting = [rank for rank in receivers.get(nodes[me], []) if rank not in holders]
        self._order = self._lacking.index(self._waiting) if self._waiting in self._lacking else 0
        self._period = math.lcm(len(holders), len(self._beside) or 1, *map(len, self._lacking), len(self._waiting) or 1)
        self._roles: dict[tuple[int, int], tuple[Role, ...]] = {}

    @property
    def crosses(self) -> bool:
        """Whether a node lacks what these ranks hold, so that it crosses the network. The same on every rank."""
        return bool(self._lacking)

    def roles(self, turn: int, count: int) -> tuple[Role, ...]:
        """This rank's in bringing `count` pieces, or none; `turn` counts them all, the same on every rank."""
        asked = turn % self._period, count
        if asked not in self._roles:
            found = tuple(self._role(turn + piece) for piece in range(count))
            self._roles[asked] = found if any(role != Role() for role in found) else ()
        return self._roles[asked]

    def _role(self, turn: int) -> Role:
        nodes, count = len(self._lacking), len(self._holders)
        if self._me in self._holders:
            first = (self._holders.index(self._me) - turn * nodes) % count  # (piece, node) go round the holders
            far = [there[turn % len(there)] for there in self._lacking[first::count]]
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
    """What one bucket has of one block, end to end."""

    block: int
    places: list[Place]
    roles: tuple[Role, ...]
    """This rank's in each piece of it; the pieces are of one size, up to an element."""


class RoutedBucket(NamedTuple):
    """What one rank does for one bucket."""

    items: list[Item]
    roles: dict[int, tuple[Role, ...]]
    """Its own by block, where it has any. Units are made of them when the bucket's turn comes: kept, the 26,000 of 235B
    had Python's collector go through the whole process, which took twice the time of the routes."""


class Catalogue:
    """Who holds what in the whole job, and what a rank does in a pass over all of it.

    Args:
        told: by each rank, in their order.
        keys: all there are, in the order that those of a layer have in a pass.
    """

    def __init__(self, told: Sequence[RankReport], keys: Iterable[str]) -> None:
        self._nodes = [node for node, _ in told]
        by_text: dict[bytes, list[int]] = {}
        for rank, (_, texts) in enumerate(told):
            for text in texts:
                by_text.setdefault(text, []).append(rank)
        found = [(pickle.loads(text), tuple(held)) for text, held in by_text.items()]
        found.sort(key=lambda entry: (entry[0].key, entry[0].parts, entry[1]))
        self.blocks: list[Block] = [block for block, _ in found]
        self._holders = [holders for _, holders in found]
        self.parts: dict[Item, tuple[int, ...]] = {}
        """Numbers of the blocks that make up each full tensor."""
        turns: dict[Item, int] = {}
        for number, block in enumerate(self.blocks):
            count: Counter[Place] = Counter()
            for place in block.places:
                item = block.key, place
                self.parts[item] = (*self.parts.get(item, ()), number)
                layer = layer_of(*item)
                turns[item] = count[layer]
                count[layer] += 1
        order = {key: number for number, key in enumerate(keys)}
        # a layer's experts in turns over their holders, so that all of these send in each bucket
        self._order = sorted(self.parts, key=lambda item: (layer_of(*item), turns[item], order[item[0]], item[1]))
        self._numel = {block.key: math.prod(block.shape) for block in self.blocks}

    def buckets(self, max_numel: int) -> list[list[Item]]:
        """Consecutive items that together have at most `max_numel` elements, unless one alone has more."""
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
        """What rank `me` does. It does not look at what it neither holds nor asks for."""
        on_node: dict[int, list[int]] = {}
        for rank in receivers:
            on_node.setdefault(self._nodes[rank], []).append(rank)
        routes = {held: Route(held, self._nodes, on_node, me) for held in set(self._holders)}
        route_of = [routes[held] for held in self._holders]
        concerns = [me in receivers or me in held for held in self._holders]
        sizes = [block.numel for block in self.blocks]
        turns = list(range(len(self.blocks)))  # each starts at its number: blocks of the same holders are staggered
        plan = []
        for items in self.buckets(max_numel):
            largest = math.ceil(sum(self._numel[key] for key, _ in items) / _PIECES)
            own = {}
            for number, count in Counter(chain.from_iterable(map(self.parts.__getitem__, items))).items():
                if concerns[number]:
                    route = route_of[number]
                    pieces = math.ceil(count * sizes[number] / largest) if route.crosses else 1
                    if roles := route.roles(turns[number], pieces):
                        own[number] = roles
                    turns[number] += pieces
            plan.append(RoutedBucket(items, own))
        return plan

    def units(self, bucket: RoutedBucket) -> list[BlockPart]:
        """Those in which a rank has a part, from its plan."""
        places: dict[int, list[Place]] = defaultdict(list)
        for item in bucket.items:
            for number in self.parts[item]:
                if number in bucket.roles:
                    places[number].append(item[1])
        return [BlockPart(number, own, bucket.roles[number]) for number, own in places.items()]
