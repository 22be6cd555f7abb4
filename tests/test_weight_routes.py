"""Who sends what to whom in a weight sync: nothing twice over a link, nothing left out, on any nodes.

Each rank computes its own part; these tests put the parts of all ranks together, without a process group.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict

import numpy as np
import pytest

from dppo_megatron.weights.routes import Block, Catalogue, RankReport

Shard = tuple[str, tuple[int, ...], int]
"""Key, place, first row."""


def _told(owners: dict[Shard, set[int]], nodes: list[int], rows: int = 3, width: int = 5) -> list[RankReport]:
    """What ranks tell that hold these shards: `rows` of each tensor's rows, which start at the third entry."""
    told = []
    for rank, node in enumerate(nodes):
        alike: dict[tuple[str, int], list[tuple[int, ...]]] = defaultdict(list)
        for (key, place, start), ranks in sorted(owners.items()):
            if rank in ranks:
                alike[key, start].append(place)
        height = {key: max(start for k, _, start in owners if k == key) + rows for key, _ in alike}
        blocks = [
            Block(key, (height[key], width), (((start, 0), (rows, width)),), tuple(places))
            for (key, start), places in alike.items()
        ]
        told.append(RankReport(node, [pickle.dumps(block) for block in blocks]))
    return told


def _random_job(rng: np.random.Generator) -> tuple[dict[Shard, set[int]], list[int], list[int]]:
    """Owners of shards, the node of each rank, and receivers: nodes of one to five ranks, each key cut over its own
    groups of ranks as tensor, pipeline, expert and data parallelism cut it."""
    sizes = rng.integers(1, 6, rng.integers(1, 7)).tolist()
    nodes = [sum(sizes[:index]) for index, size in enumerate(sizes) for _ in range(size)]
    world = len(nodes)
    owners: dict[Shard, set[int]] = {}
    for key in "abcd"[: rng.integers(1, 5)]:
        group_of = rng.integers(0, rng.integers(1, world + 1), world).tolist()
        groups = sorted(set(group_of))
        cut = int(rng.integers(1, 4)) if len(groups) >= 3 else 1
        for place in range(int(rng.integers(1, 12))):
            for part in range(cut):
                group = groups[(part + place * cut) % len(groups)]
                owners[key, (place,), 3 * part] = {rank for rank in range(world) if group_of[rank] == group}
    receivers = np.flatnonzero(rng.random(world) < rng.choice([0.2, 0.7, 1.0])).tolist() or [0]
    return owners, nodes, receivers


def _both_ends(catalogue: Catalogue, world: int, receivers: list[int], max_numel: int) -> list[Counter[tuple]]:
    """Per hop: (bucket, sender, receiver, block, place, piece) of every message, counted; both ends must say the same,
    in the same order between any two ranks."""
    plans = [catalogue.plan(receivers, max_numel, rank) for rank in range(world)]
    sent: list[dict[tuple, list]] = [defaultdict(list), defaultdict(list)]
    taken: list[dict[tuple, list]] = [defaultdict(list), defaultdict(list)]
    for me, plan in enumerate(plans):
        assert len(plan) == len(plans[0])
        for index, bucket in enumerate(plan):
            assert bucket.items == plans[0][index].items
            for unit in catalogue.units(bucket):
                for piece, role in enumerate(unit.roles):
                    what = (unit.block, tuple(unit.places), piece, len(unit.roles))
                    for hop, to, source in ((0, role.to, role.source), (1, role.onward, role.relay)):
                        for peer in to:
                            sent[hop][index, me, peer].append(what)
                        if source is not None:
                            taken[hop][index, source, me].append(what)
    assert sent == taken
    return [
        Counter((*pair, block, place, piece) for pair, all_of in hop.items() for block, places, piece, _ in all_of
                for place in places)
        for hop in sent
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_each_node_is_sent_what_it_lacks_once(seed: int) -> None:
    """On nodes of any sizes every receiver gets everything that it does not hold, once, and nobody anything else. A
    node gets over the network what none of its ranks holds, in one copy; what is passed on has come before."""
    rng = np.random.default_rng(seed)
    owners, nodes, receivers = _random_job(rng)
    catalogue = Catalogue(_told(owners, nodes), "abcd")
    first, second = _both_ends(catalogue, len(nodes), receivers, int(rng.integers(1, 400)))
    got, over_network = Counter(), Counter()
    pieces: dict[tuple, set[int]] = defaultdict(set)
    for hop, messages in enumerate((first, second)):
        for (_, sender, receiver, number, place, piece), times in messages.items():
            block = catalogue.blocks[number]
            shard = (block.key, place, block.parts[0][0][0])
            assert times == 1 and receiver in receivers and receiver not in owners[shard]
            pieces[shard].add(piece)
            got[receiver, shard, piece] += 1
            if nodes[sender] != nodes[receiver]:
                assert hop == 0
                over_network[nodes[receiver], shard, piece] += 1
            if hop == 1:
                assert got[sender, shard, piece] == 1, "it has come in the first hop"
            else:
                assert sender in owners[shard]
    for shard, holders in owners.items():
        for receiver in set(receivers) - holders:
            assert all(got[receiver, shard, piece] == 1 for piece in pieces[shard]) and pieces[shard]
        for node in {nodes[rank] for rank in receivers}:
            expected = int(node not in {nodes[rank] for rank in holders})
            assert all(over_network[node, shard, piece] == expected for piece in pieces[shard])


def test_what_is_told_alike_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 ranks of which 512 each hold the same: two descriptions are read, not 1,024."""
    read = []
    monkeypatch.setattr(pickle, "loads", lambda text, loads=pickle.loads: read.append(text) or loads(text))
    owners = {("a", (0,), 3 * part): {rank for rank in range(1024) if rank % 2 == part} for part in (0, 1)}
    assert len(Catalogue(_told(owners, [0] * 1024), "a").blocks) == len(read) == 2
