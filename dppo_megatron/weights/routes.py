"""Who sends a piece of the weights to whom, so that a node takes it from the network once.

    a holder ──▶ the receivers of its own node that lack it                first hop, inside the node
    a holder ──▶ one receiver of each node without a holder                first hop, the only one over the network
                 that one ──▶ the other receivers of its node              second hop, inside the node

A network card has an eighth of the speed of the links inside a node, and colocated servers make every rank a receiver:
sent by whoever is nearest by number, the ranks at the border of a pipeline stage sent everything to everybody. So the
pieces of what the same ranks hold take turns: holders in sending them, the receivers of a node in fetching them.

Every rank computes its own part, from what all know: the holders, the receivers, the node of each rank. The parts fit
together because each is read off the same rule. At 1,024 ranks that must not cost a visit to each shard and receiver:
shards that the same ranks hold make one block, and many of them one message.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from dppo_megatron.weights.mapping import Place

_PIECES = 16
"""At least so many to a bucket of what crosses the network, in turns over eight cards of a node: one block alone may be
half of a bucket."""
Item: TypeAlias = tuple[str, Place]
"""One full tensor of Megatron's."""


@dataclass(frozen=True, slots=True)
class Block:
    """Shards that lie alike in the full tensors of one key. The same ranks hold all of them."""

    key: str
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


class Told(NamedTuple):
    """What a rank tells the others."""

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


IDLE = Role()


class _Spread(NamedTuple):
    """One set of holders, as a rank sees it."""

    lacking: list[list[int]]
    """The receivers of each node that has no holder, in the order of the nodes."""
    order: int | None
    """Place of this rank's node among them."""
    beside: list[int]
    """Holders on this rank's node."""
    waiting: list[int]
    """Receivers on this rank's node that are no holders."""
    holds: int | None
    """Place of this rank among the holders."""


class Routes:
    """The routes of one rank, for one set of receivers.

    Args:
        nodes: the node of each rank of the job, under any name; nodes may differ in size.
        me: the rank.
    """

    def __init__(self, nodes: Sequence[int], receivers: Iterable[int], me: int) -> None:
        self._nodes, self._me = nodes, me
        self._on_node: dict[int, list[int]] = {}
        for rank in sorted(receivers):
            self._on_node.setdefault(nodes[rank], []).append(rank)
        self._spreads: dict[tuple[int, ...], _Spread] = {}

    def crosses(self, holders: tuple[int, ...]) -> bool:
        """Whether a node lacks what these ranks hold, so that it crosses the network. The same on every rank."""
        return bool(self._spread(holders).lacking)

    def role(self, holders: tuple[int, ...], turn: int) -> Role:
        """This rank's part in bringing a piece from `holders` to all receivers.

        Args:
            turn: counts the pieces of these holders; the same on every rank.
        """
        lacking, order, beside, waiting, holds = self._spread(holders)
        nodes, count = len(lacking), len(holders)
        if holds is not None:
            first = (holds - turn * nodes) % count  # pairs of piece and node go round the holders
            far = [there[turn % len(there)] for there in lacking[first::count]]
            near = waiting[(beside.index(self._me) - turn) % len(beside) :: len(beside)]
            return Role(to=(*far, *near)) if far or near else IDLE
        if self._me not in waiting:
            return IDLE
        if order is None:
            return Role(source=beside[(turn + waiting.index(self._me)) % len(beside)])
        relay = waiting[turn % len(waiting)]
        if relay != self._me:
            return Role(relay=relay)
        source = holders[(turn * nodes + order) % count]
        return Role(source=source, onward=tuple(rank for rank in waiting if rank != relay))

    def _spread(self, holders: tuple[int, ...]) -> _Spread:
        if (found := self._spreads.get(holders)) is None:
            have = {self._nodes[rank] for rank in holders}
            lacking = [node for node in self._on_node if node not in have]
            mine = self._nodes[self._me]
            found = self._spreads[holders] = _Spread(
                [self._on_node[node] for node in lacking],
                lacking.index(mine) if mine in lacking else None,
                [rank for rank in holders if self._nodes[rank] == mine],
                [rank for rank in self._on_node.get(mine, []) if rank not in holders],
                holders.index(self._me) if self._me in holders else None,
            )
        return found


class Unit(NamedTuple):
    """What one bucket has of one block, end to end."""

    block: int
    places: list[Place]
    roles: list[Role]
    """This rank's in each piece of it; the pieces are of one size, up to an element."""


class Bucket(NamedTuple):
    """What one rank does for one bucket."""

    items: list[Item]
    units: list[Unit]


class Catalogue:
    """Who holds what in the whole job, and what a rank does in a pass over all of it.

    Args:
        told: by each rank, in their order.
    """

    def __init__(self, told: Sequence[Told]) -> None:
        self._nodes = [node for node, _ in told]
        by_text: dict[bytes, list[int]] = {}
        for rank, (_, texts) in enumerate(told):
            for text in texts:
                by_text.setdefault(text, []).append(rank)
        found = [(pickle.loads(text), tuple(held)) for text, held in by_text.items()]
        found.sort(key=lambda entry: (entry[0].key, entry[0].parts, entry[1]))
        self.blocks: list[Block] = [block for block, _ in found]
        self._holders = [holders for _, holders in found]
        self.parts: dict[Item, list[int]] = {}
        """Numbers of the blocks that make up each full tensor."""
        turns: dict[Item, int] = {}
        for number, block in enumerate(self.blocks):
            count: Counter[Place] = Counter()
            for place in block.places:
                self.parts.setdefault((block.key, place), []).append(number)
                turns[block.key, place] = count[place[:1]]
                count[place[:1]] += 1
        # a layer's experts in turns over their holders, so that all of these send in each bucket
        self._order = sorted(self.parts, key=lambda item: (item[1][:1], turns[item], item[1], item[0]))

    def buckets(self, max_numel: int) -> list[list[Item]]:
        """Consecutive items that together have at most `max_numel` elements, unless one alone has more."""
        buckets: list[list[Item]] = []
        total = 0
        for item in self._order:
            numel = self._numel(item)
            if not buckets or total + numel > max_numel:
                buckets.append([])
                total = 0
            buckets[-1].append(item)
            total += numel
        return buckets

    def plan(self, receivers: Sequence[int], max_numel: int, me: int) -> list[Bucket]:
        """What rank `me` does. It does not look at what it neither holds nor asks for."""
        routes = Routes(self._nodes, receivers, me)
        concerns = [me in receivers or me in holders for holders in self._holders]
        turns = list(range(len(self.blocks)))  # from numbers of their own: blocks of the same holders are staggered
        plan = []
        for items in self.buckets(max_numel):
            places: dict[int, list[Place]] = {}
            for item in items:
                for number in self.parts[item]:
                    if concerns[number]:
                        places.setdefault(number, []).append(item[1])
            largest = math.ceil(sum(map(self._numel, items)) / _PIECES)
            units = []
            for number, own in places.items():
                holders = self._holders[number]
                numel = len(own) * self.blocks[number].numel
                pieces = math.ceil(numel / largest) if routes.crosses(holders) else 1
                roles = [routes.role(holders, turns[number] + piece) for piece in range(pieces)]
                turns[number] += pieces
                if any(role != IDLE for role in roles):
                    units.append(Unit(number, own, roles))
            plan.append(Bucket(items, units))
        return plan

    def _numel(self, item: Item) -> int:
        return math.prod(self.blocks[self.parts[item][0]].shape)
