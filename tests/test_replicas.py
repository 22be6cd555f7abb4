"""A server of several data-parallel replicas, and both ends of an NCCL communicator: answers are compared with answers.

vLLM's /collective_rpc calls every replica and answers for the first. `test_engine_launch.py` has a real vLLM of two.
A worker holds some of a mixture's experts, and is given all.
"""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import torch
from support.engines.fake_vllm import FakeVLLM
from support.engines.servers import needs
from support.engines.stub import StubServers
from support.fake_fleet import World, groups, work_of
from support.job import job_config, write_job_files
from support.settings import rollout_config
from support.true_shapes import write_config
from torch.multiprocessing import reductions

from dppo_megatron.config.rollout import check_rollout
from dppo_megatron.config.schema import Config
from dppo_megatron.evaluation import standalone
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout import launched_servers
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers.connect import ConnectedServers, Launched, connect
from dppo_megatron.rollout.servers.device_map import RankDevice
from dppo_megatron.rollout.servers.dialects import SGLangDialect
from dppo_megatron.rollout.servers.dispatch import dispatch
from dppo_megatron.rollout.servers.http import Http
from dppo_megatron.rollout.servers.in_engine import dppo_wire
from dppo_megatron.rollout.servers.protocol import TensorNote
from dppo_megatron.rollout.servers.server_process import make_servers
from dppo_megatron.rollout.servers.sglang import SGLangServer, sglang_command, sglang_environment
from dppo_megatron.rollout.servers.vllm import VLLMServer
from dppo_megatron.rollout.sync import colocated
from dppo_megatron.rollout.sync.colocated import SharedBuffer, SharedMemoryChannel, pickled, sglang_offer
from dppo_megatron.rollout.sync.receipts import ask_for_canary
from dppo_megatron.rollout.sync.weight_sync import ServerSide
from dppo_megatron.types import RunAborted, UserError
from dppo_megatron.weights.architecture import read_architecture

KEY = "key"
NCCL = {"version": "2.28.9", "NCCL_CUMEM_ENABLE": "-2", "NCCL_NVLS_ENABLE": "2"}


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    """Two replicas of two workers each, which the replicas tell in no order."""
    with FakeVLLM("127.0.0.1", 0, KEY) as server:
        server.instead = {
            "/server_info": {"vllm_config": _settings(2)},
            "/get_world_size": {"world_size": 4},
            "/inference/v1/generate_arrays": {"form": 2},
            "/dppo_workers": {"replicas": [[_worker(3), _worker(2)], [_worker(1), _worker(0)]]},
            "/collective_rpc": {"results": [_worker(0), _worker(1)]},
        }
        yield server


def _settings(replicas: int, **parallel: Any) -> dict[str, Any]:
    extension = {"worker_extension_cls": "dppo_vllm_extension.WorkerExtension", "data_parallel_size": replicas}
    return {
        "model_config": {"logprobs_mode": "processed_logprobs"},
        "weight_transfer_config": {"backend": "dppo"},
        "parallel_config": extension | parallel,
    }


def _worker(place: int, **more: Any) -> dict[str, Any]:
    return {"architecture": None, "vocab_size": None, "place": place, "device": f"GPU-{place}", "nccl": NCCL} | more


def _server(fake: FakeVLLM) -> VLLMServer:
    return VLLMServer(Http(fake.url, KEY))


def _described(fake: FakeVLLM) -> VLLMServer:
    server = _server(fake)
    server.describe(timeout_s=10)
    return server


def test_every_replicas_workers_are_known(fake: FakeVLLM) -> None:
    """Their devices come in the order in which vLLM looks for its offers, from whichever replica answers first."""
    server = _server(fake)
    info = server.describe(timeout_s=10)
    assert info.devices == ("GPU-0", "GPU-1", "GPU-2", "GPU-3") and info.world_size == 4
    assert server.replicas == 2 and info.nccl == NCCL


@pytest.mark.parametrize(
    "lacking",
    [
        {"/inference/v1/generate_arrays": {}},  # without our middleware: /collective_rpc answers for the first replica
        {"/dppo_workers": {"replicas": [[_worker(2), _worker(3)]]}},  # one replica of a larger job
        {"/server_info": {"vllm_config": _settings(2, worker_extension_cls="")}},
    ],
)
def test_a_server_of_which_not_all_workers_answer_is_refused(fake: FakeVLLM, lacking: dict[str, Any]) -> None:
    """Before anything is synced: the others would wait for weights, or generate with the first ones for good."""
    fake.instead |= lacking
    with pytest.raises(UserError, match=r"has 2 replicas .* [02] of their 4 workers answer.*dppo_vllm_arrays\.Arrays"):
        _server(fake).describe(timeout_s=10)


def test_other_bytes_on_the_second_replica_are_found(fake: FakeVLLM) -> None:
    """The first has what was sent. Of pieces of tensors, as of two workers a replica, there are no digests of ours."""
    assert _described(fake).shows_checksums is False
    whole = {"/get_world_size": {"world_size": 2}, "/dppo_workers": {"replicas": [[_worker(1)], [_worker(0)]]}}
    fake.instead |= whole
    sent = {"a": ("1" * 64,), "b": ("2" * 64,)}
    held = {f"dp{replica}:pp0:pcp0:tp0:{name}": digests[0] for replica in range(2) for name, digests in sent.items()}
    fake.instead["/weight_checker"] = {"checksums": held}
    server = _described(fake)
    assert server.shows_checksums and server.checksums(timeout_s=10) == [{"a": "1" * 64, "b": "2" * 64}] * 2
    held["dp1:pp0:pcp0:tp0:b"] = "3" * 64
    world = World()
    fleet = world.fleet(0)
    member = fleet.add(server)
    with fleet.lock:
        member.synced("1")

    class Sent:
        def result(self) -> dict[str, tuple[str, ...]]:
            return sent

    side = ServerSide(rollout_config({}), None, fleet, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(RunAborted, match=r"\(replica 1 of 2\) holds other bytes .*: b \(1 of 2"):
        side._compare(Sent())  # type: ignore[arg-type]


def test_a_canary_is_asked_of_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that names none goes wherever the server likes, also twice to the same."""
    world = World()
    fleet = world.fleet(2)
    world.servers[1].replicas = 3
    asked: list[tuple[str, int | None]] = []

    def generate(server: Any, group: Any, *_: Any, **__: Any) -> list[Any]:
        asked.append((server.name, group.replica))
        return []

    monkeypatch.setattr("dppo_megatron.rollout.sync.receipts.generate", generate)
    found = ask_for_canary(fleet, groups(2), work_of(groups(2)).expected, 10.0)
    assert sorted(asked, key=str) == [("a", None), ("b", 0), ("b", 1), ("b", 2)]
    assert [name for name, _ in found] == ["a", *(f"b (replica {index} of 3)" for index in range(3))]
    one = msgspec.structs.replace(groups(2)[0], prompt_ids=(1, 2), replica=1)
    bodies = [call.body for calls in SGLangDialect(19).rounds(one) for call in calls]
    assert len(bodies) == 2 and all(b'"routed_dp_rank":1' in body for body in bodies), "its prefill too"


def test_a_server_of_replicas_has_room_for_as_many_times_more() -> None:
    """`max_concurrent_sequences` is for one engine, as --max-num-seqs is."""
    world = World(reply=lambda _: None)
    fleet = world.fleet(2, max_concurrent_sequences=4)
    world.servers[1].replicas = 3
    work = work_of(groups(*[2] * 40))
    rollout = dispatch(fleet, work)

    def events(timeout_s: float) -> list[Any]:
        work.given_up = True
        return []

    world.events = events  # type: ignore[method-assign]
    assert not list(rollout)
    asked = [ask.server for ask in world.asked]
    assert [asked.count(server) for server in "ab"] == [2, 6]


@pytest.mark.parametrize(
    "spelling", ["--attn-dp-size=8", "--attention-data-parallel-size 8", "--dp 8 --enable-dp-attention"]
)
def test_groups_of_attention_are_replicas(tmp_path: Path, spelling: str) -> None:
    """SGLang reports all spellings as `attn_dp_size`, has an engine for each, and divides --max-running-requests among
    them. They are inside one tensor group, so that broadcasts and shared memory reach them, and the heads of a model
    are split within each alone."""
    with StubServers() as stubs:
        told = {"version": "0.5.23", "tp_size": 8, "dp_size": 1, "attn_dp_size": 8}
        stubs.pages["a/server_info"], stubs.pages["a/model_info"] = json.dumps(told), "{}"
        server = SGLangServer(Http(stubs.url("a")), 19)
        assert set(server.describe(timeout_s=10).channels) == {"disk", "gloo", "nccl", "ipc"}
    assert (server.replicas, server.world_size) == (8, 8)
    settings = {"engine": "sglang", "servers.launch": "local", "servers.gpus": ["0,1,2,3,4,5,6,7"]}
    settings |= {"servers.args": ["--tp-size", "8", *spelling.split()], "limits.max_concurrent_sequences": 512}
    config = rollout_config(settings)
    check_rollout(config)
    command = sglang_command(config, "python", "model", 64, "bfloat16", cpu=False)
    assert command[command.index("--max-running-requests") + 1] == "4096"
    of_28_heads = read_architecture(write_config(tmp_path, "qwen3_8b", num_attention_heads=28, num_key_value_heads=4))
    of_28_heads.check_servers(config)
    with pytest.raises(UserError, match="tensor parallel 8: the model's 28 attention heads do not divide by it"):
        of_28_heads.check_servers(rollout_config(settings | {"servers.args": ["--tp-size", "8"]}))
    for bad, said in (
        ("--tp 8 --attn-dp-size 3", "3 must divide tensor parallel 8"),
        ("--attn-dp-size 0", "at least 1"),
    ):
        with pytest.raises(UserError, match=said):
            check_rollout(rollout_config(settings | {"servers.args": bad.split()}))


# ------------------------------------------------------------------------------------------------------------- NCCL


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, ""),
        ({"version": "2.27.3"}, "NCCL is 2.27.3 there and 2.28.9 in the trainer"),
        ({"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE is 0 there and -2 in the trainer"),
        ({"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE is 0 there and 2 in the trainer"),
        ({"NCCL_CUMEM_ENABLE": "1"}, ""),  # what the default comes to on such a device
        ({"NCCL_MIN_NCHANNELS": "-2", "NCCL_PROTO": ""}, ""),  # the defaults
        ({"NCCL_MAX_NCHANNELS": "8"}, "NCCL_MAX_NCHANNELS is 8 there and -2 in the trainer"),
        ({"NCCL_PROTO": "Simple"}, "NCCL_PROTO is Simple there and not set in the trainer"),
        ({"NCCL_ALGO": "allreduce:tree"}, "NCCL_ALGO is allreduce:tree there and not set in the trainer"),
        ({"NCCL_NTHREADS": "1"}, "NCCL_NTHREADS is 1 there and not set in the trainer"),
    ],
)
def test_both_ends_of_a_communicator_are_compared(
    fake: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], found: str
) -> None:
    """Before the first transfer, through the servers' own report: nccl that was asked for is refused in a sentence, and
    `auto` takes another channel and says why."""
    for name in (*dppo_wire.NCCL_DEFAULTS, *dppo_wire.NCCL_PINNED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    fake.instead["/dppo_workers"] = {"replicas": [[_worker(p, nccl=NCCL | change) for p in range(4)]]}
    files = write_job_files(tmp_path)
    if not found:
        assert "weight sync: nccl (asked for)" in _connected(fake, files, channel="nccl", device="0").description
        return
    with pytest.raises(UserError, match=f"channel = nccl: http.*: {found}"):
        _connected(fake, files, channel="nccl", device="0")
    assert f"weight sync: disk (no NCCL communicator: {fake.url}: {found}" in (
        _connected(fake, files, channel="auto", device="0").description
    )


def test_weights_from_files_do_not_go_over_nccl(
    fake: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation on a machine with GPUs has no actor: its weights are in the host's memory, which NCCL cannot send,
    and the servers would wait for them until the request's limit."""
    for name in (*dppo_wire.NCCL_DEFAULTS, *dppo_wire.NCCL_PINNED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    fake.instead["/dppo_workers"] = {"replicas": [[_worker(p, nccl=NCCL) for p in range(4)]]}
    files = write_job_files(tmp_path)
    for device, channel in (("0", "nccl"), ("cpu", "gloo")):
        assert f"weight sync: {channel}" in _connected(fake, files, "auto", device).description
    with pytest.raises(UserError, match="nccl needs an actor on a GPU, and this one is on a CPU; use gloo"):
        _connected(fake, files, "nccl")
    made: list[dict[str, Any]] = []
    engine = MagicMock(description="")
    monkeypatch.setattr(standalone, "ServerEngine", lambda *_, **options: made.append(options) or engine)
    of_servers = {"rollout__engine": "vllm", "rollout__servers__launch": "local"}
    standalone._engine(prepare_job(job_config(files, files / "run", **of_servers), 1))
    assert made == [{"has_actor": False}]


def test_servers_of_an_evaluation_get_the_places_that_are_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is a rank's there: taken for CUDA's own numbers they would be GPUs of another job. The same places in a
    training run are refused, since one is its rank's."""
    of_servers = {"engine": "vllm", "servers__launch": "local", "servers__count": 2, "servers__gpus": "['0', '1']"}
    config = job_config(files, files / "run", **{f"rollout__{key}": value for key, value in of_servers.items()})
    job = prepare_job(config, 1)

    def would_start(*given: Any, **options: Any) -> Any:
        raise UserError(",".join(str(server.visible_devices) for server in make_servers(*given, **options)))

    monkeypatch.setattr(launched_servers, "make_servers", would_start)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(UserError, match=r"^2,3$"):
        standalone._engine(job)
    with pytest.raises(UserError, match=r"position 0 in CUDA_VISIBLE_DEVICES = 2,3 is a training rank's GPU \(1 train"):
        ServerEngine(config, job.architecture, job.tokenizer)


def _connected(fake: FakeVLLM, files: Path, channel: str, device: str = "cpu") -> ConnectedServers:
    """By a trainer on a machine with GPUs whose weights are on `device`."""
    config: Config = job_config(
        files,
        files / "run",
        rollout__engine="vllm",
        rollout__servers__endpoints=f"[{fake.url}]",
        rollout__sync__channel=channel,
    )
    job = prepare_job(config, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPPO_ENGINE_API_KEY", KEY)
        found = connect(config, job.architecture, [RankDevice(0, frozenset((device,)))])
    return found


def test_a_colocated_server_on_a_gpu_of_no_rank_is_refused(
    fake: FakeVLLM, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another job's; over disk it would train on. It is named, and the ranks' are. Numbers count as those."""
    of_servers = {"rollout__engine": "vllm", "rollout__servers__launch": "local", "rollout__servers__gpus": "['1']"}
    config = job_config(files, files / "run", **of_servers, rollout__servers__colocate=True)
    job = prepare_job(config, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert make_servers(config)[0].visible_devices == "7"
    launched = [Launched(fake.url, KEY, 0, "4,5,6,7")]
    ranks = [RankDevice(0, frozenset((str(place), f"GPU-{place}"))) for place in range(4)]
    found = connect(config, job.architecture, ranks, launched)
    assert (found.channel, found.device_map) == ("ipc", {fake.url: (0, 1, 2, 3)})
    said = r"workers on GPU-2, GPU-3 without a rank \(CUDA_VISIBLE_DEVICES=4,5,6,7\): .* are on 0/GPU-0, 1/GPU-1\."
    with pytest.raises(UserError, match=said):
        connect(config, job.architecture, ranks[:2], launched)


@pytest.mark.parametrize(("workers", "pinned"), [(1, False), (2, True)])
def test_a_sglang_without_our_file_counts_as_what_it_sets_itself(
    monkeypatch: pytest.MonkeyPatch, workers: int, pinned: bool
) -> None:
    """It turns cuMem off in itself, and with several workers pins the channels of deterministic sums, and does not say
    so: an error in the first transfer, unless the trainer has the same."""
    told = {"version": "0.5.23", "model_path": "/m", "device": "cuda", "tp_size": workers}
    with StubServers() as stubs:
        stubs.pages["a/server_info"] = json.dumps(told | {"enable_deterministic_inference": True})
        found = SGLangServer(Http(stubs.url("a")), 19).describe(timeout_s=10).nccl
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    for name in (*dppo_wire.NCCL_DEFAULTS, *dppo_wire.NCCL_PINNED):
        monkeypatch.delenv(name, raising=False)
    assert dppo_wire.nccl_difference(found) == "NCCL_CUMEM_ENABLE is 0 there and -2 in the trainer"
    for name in dppo_wire.NCCL_DEFAULTS:
        monkeypatch.setenv(name, "0")
    said = "NCCL_MIN_NCHANNELS is 8 there and -2 in the trainer" if pinned else ""
    assert dppo_wire.nccl_difference(found) == said
    if pinned:
        monkeypatch.setenv("NCCL_MIN_NCHANNELS", "8")
        monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
        assert dppo_wire.nccl_difference(found) == "NCCL_ALGO is allreduce:tree there and not set in the trainer"
        monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
        assert not dppo_wire.nccl_difference(found)


def test_launched_servers_of_sglang_get_the_trainers_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang turns both off where they are not set, and respects what is."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    got = sglang_environment(rollout_config({"engine": "sglang"}), cpu=False)
    assert (got["NCCL_CUMEM_ENABLE"], got["NCCL_NVLS_ENABLE"]) == ("0", "2")


# --------------------------------------------------------------------------------------------- memory of the channel


def test_sglang_is_told_which_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's fourth is the only one that its server sees: torch's number there would end the server."""
    like_torchs = (torch.Tensor, (2,), (1,), 0, torch.TypedStorage, torch.float32, 3, b"handle", 8, 0, False)
    monkeypatch.setattr(colocated, "reduce_tensor", lambda _: (reductions.rebuild_cuda_tensor, like_torchs))
    uuids = {3: "9a2c53cd-6c1b-4b73-8d5e-9b60cd0d0b68"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    on_gpu = type("OnGpu", (torch.Tensor,), {"is_cuda": True, "device": torch.device("cuda", 3)})
    sent = base64.b64decode(pickled([("a", torch.zeros(2).as_subclass(on_gpu)), ("b", torch.arange(3))]))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda *arguments: arguments)
    [(_, arguments), (_, on_cpu)] = pickle.loads(sent)
    assert arguments == (*like_torchs[:6], uuids[3], *like_torchs[7:])
    assert on_cpu.tolist() == [0, 1, 2], "as torch has it"


def test_a_bucket_for_sglang_has_one_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch nests each handle of a buffer in the one before, and takes them apart recursively: 176 bytes of
    stack each in a program of the same functions, which 100,000 ended (8 MiB)."""
    made = []
    like_torchs = (torch.Tensor, (2,), (1,), 0, torch.TypedStorage, torch.uint8, 0, b"handle", 8, 0, False)

    def handle(tensor: torch.Tensor) -> Any:
        made.append(tensor.nbytes)
        return reductions.rebuild_cuda_tensor, like_torchs

    monkeypatch.setattr(colocated, "reduce_tensor", handle)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="9a2c53cd"))
    buffer = SharedBuffer(4096, torch.device("cpu"))
    buffer.memory = buffer.memory.as_subclass(type("OnGpu", (torch.Tensor,), {"is_cuda": True}))
    sglang_offer(buffer, [TensorNote(f"layer{number}", "bfloat16", (2,)) for number in range(300)])
    assert made == [1200]


def test_memory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """Torch makes a file that it is to map: a worker would load zeros, and report that all went well."""
    path = tmp_path / "weights"
    with pytest.raises(RuntimeError, match="weights"):
        dppo_wire.map_memory({"path": str(path), "bytes": 16})
    assert not path.exists()


def test_buffers_are_freed_when_servers_have_unmapped_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch puts memory aside that another process still maps: freed before `end_update`, both buffers would stay the
    trainer's through the rollout. A server that fails in `end_update` keeps nobody's."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: order.append("ipc_collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("empty_cache"))

    class Buffer(SharedBuffer):
        def __init__(self, num_bytes: int, device: torch.device) -> None:
            super().__init__(num_bytes, device)
            self.is_on_gpu = True

        def close(self) -> None:
            order.append("close")
            super().close()

    monkeypatch.setattr(colocated, "SharedBuffer", Buffer)
    for fails in (False, True):

        class Server:
            def begin_update(self, *, timeout_s: float) -> None: ...

            def receive_shared(self, *_: Any, timeout_s: float) -> None: ...

            def end_update(self, version: str, *, timeout_s: float, fails: bool = fails) -> None:
                order.append("end_update")
                if fails:
                    raise ValueError("of our own")

        world = World()
        fleet = world.fleet(1)
        fleet.members[0].server.__class__ = type("Fake", (type(fleet.members[0].server), Server), {})
        channel = SharedMemoryChannel(fleet, {"a": (0,)}, lambda *_: "offer", 64, 10.0)
        weights = [(f"t{index}", torch.zeros(16)) for index in range(3)]
        if fails:
            with pytest.raises(ValueError, match="of our own"):
                channel.push(weights, fleet.members, "1")
        else:
            assert channel.push(weights, fleet.members, "1") == fleet.members
        assert order == ["end_update", "close", "close", "ipc_collect", "empty_cache"]
        order.clear()


@pytest.mark.slow
@needs("vllm")
def test_a_worker_keeps_no_expert_of_another(forked_vllm: Path) -> None:
    """Of a layer that the end of a bucket splits, with vLLM's own loader, in `support/engines/waiting_experts.py`: 24
    tensors, five at a time, of which experts 2 and 3 are its own. With these it is complete, and right."""
    done = subprocess.run([forked_vllm, "-m", "waiting_experts"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"kept": [[], [2, 2, 2, 3], [], [], []], "right": True}
