"""Routes of a weight sync at cluster size: what they cost a rank, and how many bytes the busiest card then sends.

Ranks are only counted, not started: what each of them would report is derived from the layout, in Megatron's order of
ranks (`tests/rehearsal/test_cluster_scale.py` compares it with a real actor's report). Models are in bfloat16, nodes
have eight cards, and every rank is a receiver, as in a colocated job.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dppo_megatron.weights.routes import Block, Catalogue, RankReport, RoutedBucket
from plane.common import Bar

NODE = 8
NETWORK_GB_S = 50
"""One card's network: 400 Gbit/s."""
_LAYER = "decoder.layers."
_EXPERT = _LAYER + "mlp.experts.experts."
KEYS = (
    *("embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"),
    *(_LAYER + f"self_attention.linear_{key}" for key in ("qkv.layer_norm_weight", "qkv.weight", "proj.weight")),
    *(_LAYER + f"self_attention.{part}_layernorm.weight" for part in "qk"),
    *(_LAYER + key for key in ("pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.linear_fc1.layer_norm_weight")),
    *(path + f"linear_fc{number}.weight" for path in (_LAYER + "mlp.", _EXPERT) for number in (1, 2)),
)
"""In the order of `weights/mapping.py`, which is that of a stream."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 model and its layout; dense if `experts` is 0."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    experts: int = 0
    vocab: int = 151936
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1


QWEN3_32B = Shape(64, 5120, 64, 8, 128, 25600)
QWEN3_30B = Shape(48, 2048, 32, 4, 128, 768, experts=128)
QWEN3_235B = Shape(94, 4096, 64, 4, 128, 1536, experts=128)


def reports_of_all(world: int, shape: Shape, node: int = NODE) -> list[RankReport]:
    """The report of every rank. The tensor-parallel rank changes fastest, then context and data, then the stage."""
    texts: dict[tuple[int, ...], list[bytes]] = {}
    reports = []
    for rank in range(world):
        place = rank // (world // shape.pp), rank % shape.tp, rank // shape.etp % shape.ep, rank % shape.etp
        if place not in texts:
            texts[place] = [pickle.dumps(block) for block in _blocks(shape, *place)]
        reports.append(RankReport(rank // node * node, texts[place]))
    return reports


def _blocks(shape: Shape, stage: int, tp: int, ep: int, etp: int) -> Iterator[Block]:
    """The blocks of one rank, in the order of their keys."""
    hidden, layers = shape.hidden, [n for n in range(shape.layers) if n * shape.pp // shape.layers == stage]
    own = tuple((layer,) for layer in layers)

    def whole(key: str, *size: int, places: tuple[tuple[int, ...], ...] = own) -> Block:
        return Block(key, size, (((0,) * len(size), size),), places)

    def rows(key: str, size: int, count: int = 1, places: tuple[tuple[int, ...], ...] = own) -> Block:
        """`count` matrices stacked by rows, the rows of each split over tensor-parallel ranks."""
        part = size // shape.tp
        starts = [(size * n + part * tp, 0) for n in range(count)]
        return Block(key, (size * count, hidden), tuple((start, (part, hidden)) for start in starts), places)

    def columns(key: str, size: int) -> Block:
        part = size // shape.tp
        return Block(key, (hidden, size), (((0, part * tp), (hidden, part)),), own)

    if stage == shape.pp - 1:
        yield whole("decoder.final_layernorm.weight", hidden, places=((),))
    if shape.experts:
        here = shape.experts // shape.ep
        places = tuple((layer, expert) for layer in layers for expert in range(here * ep, here * ep + here))
        part = shape.ffn // shape.etp
        halves = tuple(((shape.ffn * n + part * etp, 0), (part, hidden)) for n in (0, 1))
        yield Block(_EXPERT + "linear_fc1.weight", (2 * shape.ffn, hidden), halves, places)
        yield Block(_EXPERT + "linear_fc2.weight", (hidden, shape.ffn), (((0, part * etp), (hidden, part)),), places)
        yield whole(_LAYER + "mlp.router.weight", shape.experts, hidden)
        yield whole(_LAYER + "pre_mlp_layernorm.weight", hidden)
    else:
        yield whole(_LAYER + "mlp.linear_fc1.layer_norm_weight", hidden)
        yield rows(_LAYER + "mlp.linear_fc1.weight", shape.ffn, 2)
        yield columns(_LAYER + "mlp.linear_fc2.weight", shape.ffn)
    yield whole(_LAYER + "self_attention.k_layernorm.weight", shape.head)
    yield columns(_LAYER + "self_attention.linear_proj.weight", shape.heads * shape.head)
    yield whole(_LAYER + "self_attention.linear_qkv.layer_norm_weight", hidden)
    yield rows(_LAYER + "self_attention.linear_qkv.weight", (shape.heads + 2 * shape.kv_heads) * shape.head)
    yield whole(_LAYER + "self_attention.q_layernorm.weight", shape.head)
    if stage == 0:
        yield rows("embedding.word_embeddings.weight", shape.vocab, places=((),))
    if stage == shape.pp - 1:
        yield rows("output_layer.weight", shape.vocab, places=((),))


def messages(plan: Sequence[RoutedBucket]) -> int:
    """Sends and receives of one rank in a pass."""
    roles = [role for bucket in plan for own in bucket.roles.values() for role in own]
    return sum(len(r.to) + len(r.onward) + (r.source is not None) + (r.relay is not None) for r in roles)


@dataclass(frozen=True, slots=True)
class Egress:
    """Bytes over the network."""

    busiest: float
    """The most that one card sends in a pass."""
    mean: float
    one_after_the_other: float
    """Sent or received by each bucket's busiest card, summed over the buckets."""


def egress(world: int, shape: Shape, bucket_mb: int) -> Egress:
    """Network bytes of a colocated sync, from the routes of all ranks."""
    catalogue = Catalogue(reports_of_all(world, shape), KEYS)
    sent: list[Counter[int]] = []
    taken: list[Counter[int]] = []
    for me in range(world):
        for index, bucket in enumerate(catalogue.plan(range(world), bucket_mb << 19, me)):
            if me == 0:
                sent.append(Counter())
                taken.append(Counter())
            for unit in catalogue.units(bucket):
                size = 2 * len(unit.places) * catalogue.blocks[unit.block].numel // len(unit.roles)
                for receiver in (receiver for role in unit.roles for receiver in role.to):
                    if receiver // NODE != me // NODE:
                        sent[index][me] += size
                        taken[index][receiver] += size
    total: Counter[int] = sum(sent, Counter())
    in_turn = sum(max([0, *out.values(), *into.values()]) for out, into in zip(sent, taken, strict=True))
    return Egress(max(total.values()), total.total() / world, in_turn)


def run(smoke: bool) -> list[Bar]:
    """Qwen3-235B on 1,024 ranks for the cost; three jobs for the bytes."""
    large = replace(QWEN3_235B, tp=8, pp=4, ep=8)
    if smoke:
        large = replace(large, layers=8)
    split, bars = replace(large, etp=8), []
    for etp, shape, name, bucket_mb in (
        ("", large, "1 GiB", 1024),
        ("", large, "256 MiB", 256),
        (" etp8", split, "256 MiB", 256),
    ):
        reports = reports_of_all(1024, shape)
        started = time.process_time()
        catalogue = Catalogue(reports, KEYS)
        read = time.process_time()
        plan = catalogue.plan(range(1024), bucket_mb << 19, 777)
        routed = time.process_time()
        what = f"{large.layers} layers of 235B, tp8 pp4 ep8{etp}, 1,024 ranks, buckets of {name}"
        bars.append(Bar("routes", f"{what}: routes", routed - read, 0.2, "CPU s", is_time=True))
        bars.append(Bar("routes", f"{what}: who holds what, once a job", read - started, 0.5, "CPU s", is_time=True))
        bars.append(Bar("routes", f"{what}: messages a bucket", messages(plan) / len(plan), 128 * shape.etp))
    jobs = [("32B tp4 pp4, 32 GPUs", 32, replace(QWEN3_32B, tp=4, pp=4), 1.0)]
    if not smoke:
        jobs.append(("235B tp2 pp2 ep32, 128 GPUs", 128, replace(QWEN3_235B, tp=2, pp=2, ep=32), 5.0))
    for name, world, shape, limit in jobs:
        found = egress(world, shape, 1024)
        bars.append(Bar("routes", f"{name}: the busiest card sends, over the mean", found.busiest / found.mean, 1.25))
        bars.append(Bar("routes", f"{name}: it sends over the network", found.busiest / 1e9, 60, "GB"))
        seconds = found.one_after_the_other / 1e9 / NETWORK_GB_S
        bars.append(Bar("routes", f"{name}: at {NETWORK_GB_S} GB/s a card, buckets in turn", seconds, limit, "s"))
    return bars
