"""Every layout of `test_actor_layouts.py` through start, a sync by each channel, updates and a save under NCCL's rule.

One launch for each layout. The ranks, the channels and `WeightSync` are the product's; a server is an object beside
rank 0, which notes the bytes that it is given, because what servers do among themselves is their engine's business.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.fake_fleet import fleet_of
from support.launch import RankError, run_ranks
from support.settings import rollout_config
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model
from test_actor_layouts import LAYOUTS, MOE_LAYOUTS

from dppo_megatron.actor import layout as actor_layout
from dppo_megatron.actor.actor import Actor
from dppo_megatron.algorithms.objectives import clipped_surrogate
from dppo_megatron.config.schema import ActorConfig
from dppo_megatron.platform import prepare
from dppo_megatron.rollout.servers.device_map import DeviceMap
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.protocol import TensorNote
from dppo_megatron.rollout.sync import broadcast
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel
from dppo_megatron.rollout.sync.channels import Channel, DiskChannel
from dppo_megatron.rollout.sync.colocated import SharedMemoryChannel
from dppo_megatron.rollout.sync.weight_sync import WeightSync
from dppo_megatron.weights.architecture import read_architecture
from rehearsal.nccl_rule import Communicator, start_as_the_job_does, under_rule

pytestmark = pytest.mark.slow

VOCAB, BUCKET, TIMEOUT_S = 37, 1 << 16, 60.0
WAYS = [(name, colocated) for name in ("disk", "gloo", "nccl", "ipc") for colocated in (False, True)]
MAY_BE_IDLE = {"PIPELINE_MODEL_PARALLEL_GROUP"}
"""Made at start though some layout sends nothing through it: an interleaved pipeline has messages of pairs only, unless
`batch_p2p_comm` is set."""
PAIRS = {"PIPELINE_MODEL_PARALLEL_GROUP", "default_pg"}
"""Where two ranks talk outside a batch: a pipeline's stages."""


class Server:
    """Beside rank 0; takes weights from any channel and notes a digest of them."""

    def __init__(self) -> None:
        self.http = type("Address", (), {"url": "http://127.0.0.1:9", "close": lambda self: None})()
        self._broadcast: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._digest = hashlib.sha256()
        self._version, self.digests, self.world_size = "", [], 1

    def __getattr__(self, name: str) -> Any:
        if name in ("healthy", "sleep", "wake", "pause", "resume", "begin_update", "join_group"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def weights_version(self, *, timeout_s: float) -> str:
        return self._version

    def load_from_disk(self, path: str, version: str, *, timeout_s: float) -> None:
        from safetensors.torch import load_file

        for file in sorted(Path(path).glob("*.safetensors")):
            tensors = load_file(file)
            for name in sorted(tensors):
                self._digest.update(name.encode() + tensors[name].numpy().tobytes())
        self.end_update(version, timeout_s=timeout_s)

    def own_group(self, meeting: Any) -> Any:
        def send(memory: torch.Tensor) -> None:
            self._broadcast.put(memory.numpy().tobytes())

        return type("Group", (), {"send": lambda _, memory: send(memory), "abandon": lambda _: None})()

    def receive(self, notes: Sequence[TensorNote], *, timeout_s: float) -> None:
        self._take(self._broadcast.get(timeout=timeout_s), notes)

    def receive_shared(self, offers: Sequence[bytes], notes: Sequence[TensorNote], *, timeout_s: float) -> None:
        assert len(set(offers)) == 1, "every worker reads whole tensors"
        self._take(offers[0], notes)

    def end_update(self, version: str, *, timeout_s: float) -> None:
        self._version = version
        self.digests.append(self._digest.hexdigest())
        self._digest = hashlib.sha256()

    def _take(self, data: bytes, notes: Sequence[TensorNote]) -> None:
        start, tensors = 0, {}
        for note in notes:
            end = start + 4 * torch.Size(note.shape).numel()
            tensors[note.name], start = data[start:end], end
        for name in sorted(tensors):
            self._digest.update(name.encode() + tensors[name])


def _channel(name: str, fleet: Fleet | None, device_map: DeviceMap, root: Path, model: Path) -> Channel:
    if name == "disk":
        return DiskChannel(fleet, root, str(model), BUCKET, TIMEOUT_S)
    if name == "ipc":
        return SharedMemoryChannel(fleet, device_map, lambda memory, _: _bytes(memory), BUCKET, TIMEOUT_S)
    broadcast.own_group = lambda meeting, server: cast(Any, server).own_group(meeting)
    return BroadcastChannel(fleet, cast(Any, name), BUCKET, TIMEOUT_S)


def _bytes(buffer: Any) -> Any:
    return buffer.memory.numpy().tobytes()


def _life(model: Path, parallel: Parallel, root: Path, ways: list[tuple[str, bool]]) -> list[list[str]]:
    """On ranks. The digests that the servers of each way took, one for each sync."""
    from dppo_megatron.checkpoint.store import CheckpointStore, describe

    kept = start_as_the_job_does()
    actor = build_actor(model, parallel)
    samples, objective = random_samples(12, VOCAB), clipped_surrogate(0.2, 0.28, 3.0)
    plan = plan_for(samples, parallel)
    servers, syncs = [], []
    for number, (name, colocated) in enumerate(ways):
        server, world = Server(), dist.get_world_size()
        config = rollout_config({"engine": "vllm", "servers.launch": "local", "servers.colocate": colocated,
                                 "sync.verify_every": 0, "limits.sync_timeout_s": TIMEOUT_S})  # fmt: skip
        fleet = fleet_of([server], config) if dist.get_rank() == 0 else None
        # beside all ranks, or beside one that is not rank 0
        device_map = {server.http.url: tuple(range(world)) if colocated else (world - 1,)}
        channel = _channel(name, fleet, device_map, root / str(number), model)
        if name == "disk" and fleet is not None:
            (root / str(number)).mkdir()
        servers.append(server)
        syncs.append((WeightSync(config, channel, fleet), fleet, colocated))
    _sync_all(actor, syncs)
    actor.logprobs(samples, plan)
    actor.update(samples, plan, objective)
    _sync_all(actor, syncs)
    store = CheckpointStore(root / "checkpoints", run="r", assets=model, keep=0, async_save=False)
    store.save(actor, {"step": 1}, describe(1, {"seed": 1}, run="r"))
    actor.update(samples, plan, objective)
    del kept
    return [server.digests for server in servers]


def _sync_all(actor: Actor, syncs: list[tuple[WeightSync, Fleet | None, bool]]) -> None:
    for sync, _, colocated in syncs:

        def weights(receivers: Sequence[int] = sync._channel.receivers, leaves: bool = colocated) -> Iterator[Any]:
            yield from actor.weights(receivers, BUCKET)
            if leaves:
                actor.offload(weights=True)

        if colocated:
            actor.offload()
            sync.sleep()
        sync.to(weights)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, one that ties its embeddings, and mixtures of experts, of which one has correction biases."""
    prepare()
    import dppo_megatron.checkpoint.store  # noqa: F401 (here once, not in each rank)

    root = tmp_path_factory.mktemp("models")
    return {
        "dense": write_model(root / "dense", vocab_size=VOCAB),
        "tied": write_model(root / "tied", vocab_size=VOCAB, tie_word_embeddings=True),
        "experts": write_model(root / "experts", family="qwen3_moe", vocab_size=VOCAB),
        "biases": write_model(root / "biases", family="glm4_moe", vocab_size=VOCAB),
    }


CASES = [
    *((parallel, ("dense", "tied")[number % 2]) for number, parallel in enumerate(LAYOUTS)),
    *((parallel, "experts") for parallel in MOE_LAYOUTS),
    (Parallel(tp=2, ep=2, etp=1, distributed_optimizer=True), "biases"),
]


@pytest.mark.parametrize(("parallel", "family"), CASES, ids=str)
def test_nobody_waits_for_a_rank_that_does_not_come(
    models: dict[str, Path], tmp_path: Path, parallel: Parallel, family: str
) -> None:
    """Through every channel, colocated and split, before and after an update. All servers have the same weights, groups
    are connected at start, and none is that nobody uses."""
    results = run_ranks(under_rule, parallel.world_size, _life, models[family], parallel, tmp_path, WAYS)
    first, second = zip(*results[0][0], strict=True)
    assert len(first) == len(WAYS) == 8 and len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
    _check([one for _, made in results for one in made], parallel)


def _check(made: list[Communicator], parallel: Parallel) -> None:
    assert bool(made) == (parallel.world_size > 1), "the rule has not looked"
    for one in made:
        group = one.group.split()[1]
        if one.is_pair:
            assert group in PAIRS, f"{one.call} makes a communicator of ranks {one.members}"
        else:
            assert one.at_start, f"the communicator of {one.group} is made by {one.call}"
            assert one.uses or group in MAY_BE_IDLE, f"{one.group} is connected in vain"


def _layouts(most_ranks: int = 8) -> list[tuple[Parallel, str]]:
    """All that the tiny models allow: 4 layers, 4 heads, 4 experts. Experts that are spread are not split as well:
    ranks would gather unequal numbers of tokens, which gloo cannot."""
    sizes = itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (1, 2, 4), (False, True))
    found = []
    for tp, pp, vpp, cp, dp, ep, sharded in sizes:
        fits = 1 < tp * pp * cp * dp <= most_ranks and (vpp == 1 or pp == 2)
        if fits and (tp * cp * dp) % ep == 0:
            etp = 1 if ep > 1 else 0
            parallel = Parallel(tp, pp, dp, vpp, cp, ep, etp, distributed_optimizer=sharded)
            found += [(parallel, family) for family in (("experts",) if ep > 1 else ("dense", "tied", "experts"))]
    return found


RANDOM = random.Random(22).sample(_layouts(), int(os.environ.get("DPPO_LAYOUTS", "2")))


@pytest.mark.parametrize(("parallel", "family"), RANDOM, ids=str)
def test_any_layout_is_connected_at_start(
    models: dict[str, Path], tmp_path: Path, parallel: Parallel, family: str
) -> None:
    """On layouts that nobody has chosen; `DPPO_LAYOUTS=300` tries so many."""
    ways = [("disk", False), ("ipc", True)]
    results = run_ranks(under_rule, parallel.world_size, _life, models[family], parallel, tmp_path, ways)
    _check([one for _, made in results for one in made], parallel)


def _connects_amax(model: Path, parallel: Parallel, settings: dict[str, bool]) -> bool:
    """On ranks: whether the group in which `fp8_utils.get_fp8_context` has Transformer Engine reduce is connected."""
    from megatron.core import parallel_state

    connected: list[Any] = []
    actor_layout.connect = lambda groups, *_: connected.extend(groups)
    actor_layout.build_layout(parallel.layout, 0)
    actor = ActorConfig(layout=parallel.layout, fp8="delayed", megatron=settings)
    actor_layout.connect_groups(actor, read_architecture(model))
    reduces_in = parallel_state.get_amax_reduction_group(
        with_context_parallel=True, tp_only_amax_red=settings.get("tp_only_amax_red", False)
    )
    return reduces_in in connected


@pytest.mark.parametrize("settings", [{}, {"tp_only_amax_red": True}], ids=str)
def test_delayed_scaling_is_connected_at_start(models: dict[str, Path], settings: dict[str, bool]) -> None:
    """It needs Transformer Engine's layers, so no life of it is led here."""
    parallel = Parallel(tp=2, dp=2)
    assert run_ranks(_connects_amax, 4, models["dense"], parallel, settings) == [True] * 4


def _life_unconnected(model: Path, parallel: Parallel) -> None:
    """On ranks: as before groups were connected at start."""
    actor_layout.connect = lambda *_: None
    build = build_actor(model, parallel)
    for _ in build.weights([0], BUCKET):
        pass
    dist.all_gather_object([None] * dist.get_world_size(), 1)


@pytest.mark.parametrize("parallel", [Parallel(tp=2, dp=2), Parallel(pp=2, dp=2)], ids=str)
def test_an_unconnected_group_is_found(models: dict[str, Path], parallel: Parallel) -> None:
    """Split jobs with model parallelism hung here: the first exchange of the first sync is one of some ranks only, a
    holder and rank 0 among them."""
    with pytest.raises(RankError) as failed:
        run_ranks(under_rule, 4, _life_unconnected, models["dense"], parallel)
    said = re.search(r"Ranks \[(.+)\] do, ranks \[(.+)\] do not: rank (\d) is in all_gather_object", str(failed.value))
    assert said and said.group(3) in said.group(2) and not set(said.group(1)) & set(said.group(2)) & set("0123")
    assert "the first batch_isend_irecv at weights/sharded.py" in str(failed.value)
