"""Engines without a server: sampling cuts, requests and answers on the wire, buckets, receipts, and wrong settings."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.servers import PYTHON, needs, stand_ins
from support.engines.stub import StubServers
from support.job import job_config, write_job_files
from support.processes import until
from support.settings import rollout_config
from support.tiny import write_model

from dppo_megatron.config.ranges import check_ranges
from dppo_megatron.config.rollout import check_rollout
from dppo_megatron.rollout.client.connections import ServerConnections
from dppo_megatron.rollout.client.messages import ServerAddress
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.hf import truncate_logits
from dppo_megatron.rollout.servers import vllm
from dppo_megatron.rollout.servers.connect import check_server, choose_channel, ipc_warning
from dppo_megatron.rollout.servers.dialects import SGLangDialect, VLLMDialect
from dppo_megatron.rollout.servers.http import Done, Http, Peer, Unreachable
from dppo_megatron.rollout.servers.protocol import InFlight, ServerInfo, is_older
from dppo_megatron.rollout.servers.rollout_work import grouped
from dppo_megatron.rollout.servers.server_process import LaunchedServer
from dppo_megatron.rollout.servers.sglang import ServerArgs, SGLangServer, _longest
from dppo_megatron.rollout.servers.vllm import VLLMServer
from dppo_megatron.rollout.servers.wire import Call, Expected, GenerateRequest, Sampled, Submit
from dppo_megatron.rollout.sync import receipts
from dppo_megatron.rollout.sync.channels import DiskChannel, buckets, write_snapshot
from dppo_megatron.rollout.sync.colocated import SharedBuffer
from dppo_megatron.rollout.sync.receipts import Digests, canary_difference, differing, digest
from dppo_megatron.types import Prompt, RunAborted, UserError
from dppo_megatron.weights.architecture import read_architecture

SERVES = {"engine": "vllm", "servers.endpoints": ["http://127.0.0.1:8000"]}
STAGES = {"engine": "sglang", "servers.launch": "local", "servers.args": ["--pp-size", "2"]}
STREAMS = {"async_steps": 2, "sync.in_flight": "continue"}


@settings(deadline=None)
@given(
    st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=8, unique=True),
    st.floats(0.05, 1.0),
    st.integers(0, 8),
)
def test_cut_keeps_what_the_definition_keeps(logits: list[float], top_p: float, top_k: int) -> None:
    """Against the definition, token by token: among the k most likely, those whose more likely ones do not yet have
    top_p of the k's probability."""
    kept = torch.isfinite(truncate_logits(torch.tensor([logits]), top_p, top_k))[0].tolist()
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or None]
    mass = np.exp(np.array(logits, np.float64))[ranked]
    mass /= mass.sum()
    for position, token in enumerate(ranked):
        before = mass[:position].sum()
        if abs(before - top_p) > 1e-5:  # on the edge, rounding decides
            assert kept[token] == (top_p == 1 or before < top_p)
    assert not any(kept[token] for token in set(range(len(logits))) - set(ranked))


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 200))
def test_buckets(sizes: list[int], max_bytes: int) -> None:
    """All tensors in order, none above the size unless alone, and no two neighbours that would have fitted together."""
    tensors = [(str(i), torch.zeros(size)) for i, size in enumerate(sizes)]
    found = list(buckets(iter(tensors), max_bytes))
    assert [name for bucket in found for name, _ in bucket.tensors] == [name for name, _ in tensors]
    totals = [sum(tensor.nbytes for _, tensor in bucket.tensors) for bucket in found]
    for bucket, total in zip(found, totals, strict=True):
        assert total <= max_bytes or len(bucket.tensors) == 1
    for (_, total), (following, _) in itertools.pairwise(zip(found, totals, strict=True)):
        assert total + following.tensors[0][1].nbytes > max_bytes
    mixed = [("a", torch.zeros(1)), ("b", torch.zeros(1, dtype=torch.bfloat16))]
    assert len(list(buckets(iter(mixed), 1000))) == 2


def test_a_snapshot_is_there_complete_or_not_at_all(tmp_path: Path) -> None:
    """A stream that breaks leaves the previous snapshot as it was."""
    (tmp_path / "config.json").write_text("{}")
    target = tmp_path / "weights"
    write_snapshot(iter([("a", torch.ones(3)), ("b", torch.ones(5))]), target, tmp_path, bucket_bytes=12)
    assert len(list(target.glob("*.safetensors"))) == 2

    def breaks():
        yield "a", torch.zeros(3)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_snapshot(breaks(), target, tmp_path, bucket_bytes=12)
    assert len(list(target.glob("*.safetensors"))) == 2


@pytest.mark.slow
@needs("vllm")
def test_a_worker_that_does_not_see_the_snapshot_says_so() -> None:
    """Before vLLM is asked for anything: given no tensor it keeps the old weights and reports success."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(vllm.__file__).parent / "in_engine")!r})
from dppo_vllm_extension import WorkerExtension
try:
    WorkerExtension().dppo_reload("/no/such/weights_1")
except FileNotFoundError as error:
    print(error)
"""
    done = subprocess.run([PYTHON["vllm"], "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [
        "[Errno 2] no *.safetensors here, as this server sees it: '/no/such/weights_1'"
    ], done.stderr[-2000:]


def test_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    """By rank 0, which holds the run's lock; of other files none."""
    (tmp_path / "weights_9").mkdir()
    (tmp_path / "weights_9" / "model-00000.safetensors").write_text("a model")
    (tmp_path / "weights_10.incomplete").mkdir()
    (tmp_path / "notes.txt").write_text("somebody's")
    DiskChannel(None, tmp_path, "", 1, 1.0)
    assert len(list(tmp_path.iterdir())) == 3
    DiskChannel(cast(Any, "rank 0's"), tmp_path, "", 1, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_digests_join_as_engines_do() -> None:
    """Queries, keys and values in one; the vocabulary padded or not; a changed tensor is named."""
    q, k, v, norm, embedding = (torch.randn(shape) for shape in ((4, 3), (2, 3), (2, 3), (3,), (19, 3)))
    stream = [(f"model.layers.0.self_attn.{n}_proj.weight", t) for n, t in zip("qkv", (q, k, v), strict=True)]
    stream += [("model.norm.weight", norm), ("model.embed_tokens.weight", embedding)]
    digests = Digests()
    assert list(digests.tee(iter(stream))) == stream
    sent = digests.result()
    held = {
        "model.layers.0.self_attn.qkv_proj.weight": digest(torch.cat([q, k, v])),
        "model.norm.weight": digest(norm + 1e-6),
        "model.embed_tokens.weight": digest(torch.cat([embedding, torch.zeros(64 - 19, 3)])),
    }
    assert differing(sent, held) == (["model.norm.weight"], 3)
    first_digits = {name: value[:16] for name, value in held.items()}
    assert differing(sent, first_digits) == (["model.norm.weight"], 3)
    empty = dict.fromkeys(held, digest(torch.zeros(0)))
    assert differing(sent, empty) == ([], 0), "a packed layer shows no bytes"


def test_as_many_tensors_are_hashed_at_a_time_as_a_rank_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are paused meanwhile; one thread hashes less than two gigabytes a second."""
    together = threading.Barrier(5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(receipts, "digest", lambda *parts: f"{together.wait(20.0)}")
    digests = Digests()
    for _ in digests.tee((f"model.layers.{n}.input_layernorm.weight", torch.zeros(3)) for n in range(5)):
        pass
    assert sorted(found for [found] in digests.result().values()) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("part", ["mlp", "mlp.shared_expert", "mlp.shared_experts"])
def test_digests_of_gate_and_up_are_of_both(part: str) -> None:
    """Dense layers and the experts that every token visits; the gate of these (Qwen2-MoE) stands alone."""
    gate, up, one = (torch.randn(shape) for shape in ((4, 3), (4, 3), (1, 3)))
    digests = Digests()
    stream = [(f"model.layers.0.{part}.{name}_proj.weight", t) for name, t in (("gate", gate), ("up", up))]
    stream.append(("model.layers.0.mlp.shared_expert_gate.weight", one))
    for _ in digests.tee(iter(stream)):
        pass
    joined = {f"model.layers.0.{part}.gate_up_proj.weight": digest(torch.cat([gate, up]))}
    alone = {"model.layers.0.mlp.shared_expert_gate.weight": digest(one)}
    assert differing(digests.result(), joined | alone) == ([], 2)


def test_a_router_may_be_held_in_float32() -> None:
    """vLLM's of GLM-4.5; its values are the same, and another value is another digest in either form."""
    name = "model.layers.1.mlp.gate.weight"
    router = torch.randn(4, 3).bfloat16()
    digests = Digests()
    for _ in digests.tee(iter([(name, router)])):
        pass
    sent, other = digests.result(), router.clone()
    other[2, 1] += 1
    for wrong, held in (([], router), ([name], other)):
        assert differing(sent, {name: digest(held.float())}) == (wrong, 1)
        assert differing(sent, {name: digest(held)}) == (wrong, 1)


def test_a_part_without_others_is_hashed_alone_and_let_go_of() -> None:
    """Latent attention without a rank for queries has q_proj, and nothing to join it with. Tensors are views into the
    memory of their exchange, which is free again when the next layer comes."""
    memories: list[weakref.ref[np.ndarray]] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for layer in range(2):
            memory = np.full((5, 4, 3), layer + 1, np.float32)
            memories.append(weakref.ref(memory))
            views = torch.from_numpy(memory)
            del memory
            attention = ("o_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_proj")
            parts = [f"model.layers.{layer}.self_attn.{part}.weight" for part in attention]
            yield from zip([*parts, f"model.layers.{layer}.post_attention_layernorm.weight"], views, strict=True)
            del views
            if layer == 1:
                until(lambda: memories[0]() is None, "the first layer's exchange is kept", 20)

    digests = Digests()
    for _ in digests.tee(stream()):
        pass
    held = {f"model.layers.{n}.self_attn.q_proj.weight": digest(torch.full((4, 3), n + 1.0)) for n in range(2)}
    sent = digests.result()
    assert differing(sent, held) == ([], 2) and len(sent) == 10 and not digests._parts


def test_the_canary_names_the_server() -> None:
    """Its bound is on the mean of each server alone; NaN is above every bound."""
    actor = [np.zeros(4), np.zeros(4)]
    assert canary_difference(["a", "b"], [np.full(4, 0.01), np.full(4, 0.02)], actor, 0.05) == pytest.approx(0.02)
    for wrong in (0.2, np.nan):
        with pytest.raises(RunAborted, match=r"^b scores"):
            canary_difference(["a", "b"], [np.zeros(4), np.full(4, wrong)], actor, 0.05)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"servers.endpoints": ["http://127.0.0.1:1"]}, "hf has no servers"),
        ({"engine": "vllm"}, "rollout.servers.launch=local"),
        (SERVES | {"servers.launch": "local"}, "one of the three"),
        (SERVES | {"servers.endpoints": ["127.0.0.1:8000"]}, "expected http://host:port"),
        (SERVES | {"servers.endpoints": ["http://10.1.2.3:8000"]}, "allow_remote_endpoints"),
        (SERVES | {"servers.endpoints": ["http://u:secret@127.0.0.1:8000"]}, "put no key in an address"),
        (SERVES | {"sync.channel": "ipc"}, "needs rollout.servers.launch = local"),
        (
            {"engine": "vllm", "servers.launch": "local", "servers.colocate": True, "sync.channel": "nccl"},
            "two members on one GPU",
        ),
        ({"async_steps": 1}, "needs servers"),
        (
            {"engine": "vllm", "servers.launch": "local", "servers.colocate": True, "async_steps": 1},
            "sleep during the update with requests under way, which rollout.sync.in_flight = finish would end",
        ),
        (SERVES | {"async_steps": 9}, "must be at most 8"),
        (SERVES | {"async_steps": 2}, "set rollout.sync.in_flight=continue"),
        (STAGES | STREAMS, "pipeline parallel 2: SGLang .* with several stages cannot pause"),
        (SERVES | {"servers.colocate": True}, "needs rollout.servers.launch = local"),
        ({"quantization": "fp8"}, "rollout.quantization = fp8 is for servers"),
        (SERVES | {"servers.args": ["--quantization", "fp8"]}, "--quantization, which rollout.quantization chooses"),
        (SERVES | {"servers.args": ["--hf-overrides={}"], "quantization": "fp8"}, "which rollout.quantization chooses"),
        (
            {"engine": "sglang", "servers.launch": "local", "servers.colocate": True, "quantization": "fp8"}
            | {"servers.args": ["--kv-cache-dtype", "fp8_e4m3"]},
            "loses them when it sleeps",
        ),
        (SERVES | {"sampling.top_p": 0.0}, "rollout.sampling.top_p = 0.0"),
        (SERVES | {"sync.bucket_mb": 0}, "must be at least 1"),
        (SERVES | {"limits.engine_wait_s": 0}, "must be greater than 0"),
    ],
)
def test_contradictions_are_said(values: dict, message: str) -> None:
    config = rollout_config(values)
    with pytest.raises(UserError, match=message) as error:
        check_ranges(config, "rollout.")
        check_rollout(config)
    assert "secret" not in str(error.value)


def test_the_channel_is_chosen_and_can_be_forced() -> None:
    theirs, own = ("disk", "gloo", "nccl"), ("disk", "gloo", "nccl", "ipc")

    def chosen(wanted: str, *offered: tuple[str, ...], on_gpu: bool = False, colocated: bool = False) -> str:
        return choose_channel(wanted, offered, on_gpu=on_gpu, colocated=colocated)[0]

    assert chosen("auto", theirs, theirs, on_gpu=True) == "nccl"
    assert chosen("auto", theirs, theirs) == "gloo"
    assert chosen("auto", theirs, ("disk",)) == "disk"
    assert chosen("auto", own, own) == chosen("auto", own, on_gpu=True, colocated=True) == "ipc"
    assert chosen("auto", own, on_gpu=True) == "nccl", "GPUs of their own: NCCL reaches all of a server's workers"
    assert chosen("auto", theirs, on_gpu=True, colocated=True) == "disk"
    assert chosen("disk", own) == "disk" and chosen("gloo", own) == "gloo"
    with pytest.raises(UserError, match=r"sync\.channel = gloo"):
        chosen("gloo", ("disk",))
    drafts = ("gloo", "nccl", "ipc")  # an SGLang with a drafter
    assert chosen("auto", drafts, on_gpu=True, colocated=True) == "ipc"
    assert chosen("auto", drafts, on_gpu=True) == "nccl"
    for offered, colocated in ((("gloo", "nccl"), True), (("gloo",), False), ((), False)):
        with pytest.raises(UserError, match="over disk SGLang would load the policy into its draft model"):
            chosen("auto", offered, on_gpu=True, colocated=colocated)


def test_expandable_segments_are_said_with_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under either name of torch's variable; anything else in it says nothing."""
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    assert not ipc_warning()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    assert ipc_warning().startswith("; PYTORCH_CUDA_ALLOC_CONF has expandable_segments")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert not ipc_warning()


def test_a_server_does_not_inherit_the_trainers_place_or_cuda_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither torchrun's variables nor what is for the trainer's CUDA alone, unless it is given for the server, nor the
    cores that torchrun's --numa-binding has left to rank 0. First come the programs of its environment: ninja."""
    for variable in ("RANK", "MASTER_ADDR", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "KEPT"):
        monkeypatch.setenv(variable, "trainer's")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    asked = "import json, os; print(json.dumps(dict(os.environ) | {'cores': list(os.sched_getaffinity(0))}))"
    server = LaunchedServer([sys.executable, "-c", asked], {"PYTORCH_ALLOC_CONF": "server's"}, tmp_path / "log")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        server.start()
    finally:
        os.sched_setaffinity(0, cores)
    assert server.process is not None
    server.process.wait()
    found = json.loads((tmp_path / "log").read_text())
    assert set(found["cores"]) == os.sched_getaffinity(os.getppid())
    assert found["PATH"] == f"{os.path.dirname(sys.executable)}:/usr/bin:/bin"
    assert found["KEPT"] == "trainer's" and found["PYTORCH_ALLOC_CONF"] == "server's"
    assert not {"RANK", "MASTER_ADDR", "CUDA_DEVICE_MAX_CONNECTIONS"} & set(found)


def test_old_versions_are_old() -> None:
    assert is_older("0.9.1", "0.32") and is_older("0.31.9+cpu", "0.32")
    assert not is_older("0.32.0", "0.32") and not is_older("1.0rc1", "0.32")


def test_an_sglang_that_does_not_pause_gets_no_weights_while_it_generates(tmp_path: Path) -> None:
    """Over stages its scheduler goes on, refuses weights and would go out; asleep with requests it would end."""
    for more in (STREAMS | {"engine": "vllm"}, STREAMS | {"servers.args": []}, {}, {"async_steps": 1}):
        check_rollout(rollout_config(STAGES | more))
    files = write_job_files(tmp_path)
    found = []
    with StubServers() as stubs:
        for stages in (1, 2):
            told = {"version": "0.5.23", "pp_size": stages, "context_length": 4096}
            stubs.pages["a/server_info"], stubs.pages["a/model_info"] = json.dumps(told), "{}"
            found.append(SGLangServer(Http(stubs.url("a")), 19).describe(timeout_s=10))
    config, architecture = job_config(files, tmp_path / "run"), read_architecture(files / "model")
    check_server("http://x", found[1], config, architecture)
    config.rollout = rollout_config(STREAMS)
    check_server("http://x", found[0], config, architecture)
    with pytest.raises(UserError, match=r"^http://x has several pipeline stages, with which SGLang does not pause"):
        check_server("http://x", found[1], config, architecture)


def test_another_model_behind_the_address(tmp_path: Path) -> None:
    """Architecture, vocabulary, context and unheated log-probabilities; the address is in each message."""
    files = write_job_files(tmp_path)
    config = job_config(files, tmp_path / "run", rollout__sampling__temperature=0.8)
    architecture = read_architecture(files / "model")
    good = ServerInfo("0.32.0", "m", 128, "Qwen3ForCausalLM", 19, ("disk",), 1, True)
    check_server("http://x", good, config, architecture)
    wrong = {
        "a LlamaForCausalLM; the actor is a Qwen3ForCausalLM": {"architecture": "LlamaForCausalLM"},
        "20 tokens in its vocabulary; the actor has 19": {"vocab_size": 20},
        "a context or KV cache of only 8 tokens": {"max_tokens": 8},
        "--logprobs-mode processed_logprobs": {"logprobs_are_processed": False},
        "quantized as 'fp8'; rollout.quantization = off does not match that": {"quantization": "fp8"},
    }
    for message, change in wrong.items():
        fields = {name: getattr(good, name) for name in ServerInfo.__slots__} | change
        with pytest.raises(UserError, match=message) as error:
            check_server("http://x", ServerInfo(**fields), config, architecture)
        assert str(error.value).startswith("http://x")


@pytest.mark.parametrize(
    ("reported", "longest"),
    [
        ({"context_length": 34_818, "max_req_input_len": 34_818 - 1 - 5}, 34_816),
        ({"context_length": 34_818, "max_req_input_len": 20_000}, 20_004),
        ({"context_length": 34_818}, 34_816),
        ({"max_req_input_len": 20_000}, 20_004),
        ({}, None),
    ],
)
def test_an_sglang_has_room_for_what_its_cache_holds(reported: dict[str, int], longest: int | None) -> None:
    """It starts with a cache that is smaller than its context, and cuts long completions to it, as `length`."""
    assert _longest(ServerArgs("0.5.23", **reported)) == longest


def test_a_server_that_returns_no_experts_is_refused(tmp_path: Path) -> None:
    """Before the actor is built, where the run would replay them; the message has both ways out."""
    config = job_config(write_job_files(tmp_path), tmp_path / "run", actor__routing_replay="engine")
    architecture = read_architecture(write_model(tmp_path / "moe", family="qwen3_moe", vocab_size=19))
    good = ServerInfo("0.32.0", "m", 256, "Qwen3MoeForCausalLM", 19, ("disk",), 1, True, returns_experts=True)
    check_server("http://x", good, config, architecture)
    without = replace(good, returns_experts=False)
    with pytest.raises(UserError, match=r"--enable-return-routed-experts.*replay.*with actor\.routing_replay = actor"):
        check_server("http://x", without, config, architecture)


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        ({"top_p": 0.9, "top_k": 5}, "use one of the two"),
        ({"top_k": 6}, "at most 5 tokens"),
        ({"top_p": 0.9}, "--sampling-mask-max-tokens 19"),
        ({"top_k": 5}, ""),
    ],
)
def test_cuts_that_a_server_takes_otherwise_are_refused(tmp_path: Path, cuts: dict, message: str) -> None:
    """SGLang: another order of the two cuts, and log-probabilities under a cut for a bounded top_k only."""
    files = write_job_files(tmp_path)
    config = job_config(
        files, tmp_path / "run", **{f"rollout__sampling__{name}": value for name, value in cuts.items()}
    )
    info = ServerInfo("0.5.23", "m", 128, None, None, ("disk",), 1, None, max_top_k=5, top_p_after_top_k=False)
    if not message:
        return check_server("http://x", info, config, read_architecture(files / "model"))
    with pytest.raises(UserError, match=message):
        check_server("http://x", info, config, read_architecture(files / "model"))


def test_the_key_is_in_no_text() -> None:
    http = Http("http://127.0.0.1:9", "very-secret")
    with pytest.raises(Unreachable) as error:
        http.get("/health", Done, timeout_s=2)
    assert "very-secret" not in repr(http) + str(error.value)


def _group(sampling: Sampling, count: int = 2) -> GenerateRequest:
    """As `grouped` makes it."""
    prompt = Prompt(5, "", (1, 2, 3), "", "")
    [group], _ = grouped([Request(prompt, index, 3) for index in range(count)], sampling, count)
    return msgspec.structs.replace(group, seed=40)


def test_both_dialects_send_every_sampling_parameter() -> None:
    """Two servers' own defaults must not decide; the two engines' names for 'all tokens' differ."""
    group = _group(Sampling(7, 0.5, 0, 0.9, 0, (1, 4)))
    [[call]] = VLLMDialect().rounds(group)
    there = json.loads(call.body)["sampling_params"]
    assert (there["n"], there["max_tokens"], there["temperature"], there["top_p"], there["top_k"]) == (
        2,
        7,
        0.5,
        0.9,
        0,
    )
    assert there["stop_token_ids"] == [1, 4] and there["seed"] == 40
    [prefill], [call] = SGLangDialect(19, seeded=True).rounds(group)
    assert json.loads(prefill.body)["sampling_params"]["max_new_tokens"] == 0
    body = json.loads(call.body)
    assert body["input_ids"] == [[1, 2, 3]] * 2 and body["rid"] == ["3-5-0/0", "3-5-0/1"]
    for index, here in enumerate(body["sampling_params"]):
        assert (here["max_new_tokens"], here["temperature"], here["top_p"], here["top_k"]) == (7, 0.5, 0.9, 19)
        assert here["stop_token_ids"] == [1, 4] and here["sampling_seed"] == 40 + index
    assert body["return_sampling_mask"], "plain log-probabilities are those before the cut"
    plain = json.loads(SGLangDialect(19).rounds(_group(Sampling(7, 0.5, 0)))[-1][0].body)
    assert not plain["return_sampling_mask"] and plain["sampling_params"][0]["top_k"] == -1


def test_a_group_that_is_ended_while_its_prompt_is_read_is_not_asked_for() -> None:
    """SGLang is told the id that it has, the prompt's; the batch, which it could not be told of, is not posted."""
    group, url, ended = _group(Sampling(7, 0.5, 0)), "http://127.0.0.1:1", []
    posted: list[Call] = []

    async def once() -> list[Sampled]:
        connections, is_read = ServerConnections(8), asyncio.Event()
        connections.add([ServerAddress(Peer(url), SGLangDialect(19))])

        async def post(server: ServerAddress, calls: Sequence[Call], max_bytes: int) -> list[bytes]:
            posted.extend(calls)
            await is_read.wait()
            return [b"{}"]

        async def end_at(peer: Peer, method: str, path: str, body: bytes, *_: Any) -> bytearray:
            ended.append(json.loads(body)["rid"])
            is_read.set()
            return bytearray()

        connections._post_all = post  # type: ignore[method-assign]
        connections._aborts.repeat = end_at  # type: ignore[method-assign, assignment]
        asking = asyncio.create_task(connections.generate(Submit(0, 0, url, group, Expected(19, 0, 1), 20.0)))
        await asyncio.sleep(0)
        await connections.abort(url, group)
        return await asking

    found = asyncio.run(once())
    assert [json.loads(call.body)["rid"] for call in posted] == ["3-5-0/prompt"]
    assert sorted(ended) == ["3-5-0/0", "3-5-0/1", "3-5-0/prompt"]
    assert [(len(one.token_ids), one.finish_reason) for one in found] == [(0, "abort")] * 2


def test_each_policy_has_its_engines_pause() -> None:
    """vLLM 0.32: `wait` until nothing runs, `abort` it, or `keep` it frozen; with `wait` for `continue` every sync
    would wait for stragglers, and no figure of a run would say so. SGLang 0.5.23's `retract` sends requests back to
    where they wait; `finish` has none left."""
    asked: list[tuple[str, Any]] = []
    http = cast(Http, SimpleNamespace(do=lambda path, body=None, *, timeout_s: asked.append((path, body))))
    policies: tuple[InFlight, ...] = ("finish", "abort", "continue")
    for policy in policies:
        VLLMServer(http).pause(policy, timeout_s=1)
        SGLangServer(http, 19).pause(policy, timeout_s=1)
    modes = [("wait", "retract"), ("abort", "abort"), ("keep", "retract")]
    told = [[(f"/pause?mode={one}", None), ("/pause_generation", {"mode": other})] for one, other in modes]
    assert asked == list(itertools.chain(*told))


_CHECK = """
import json, sys
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams
bodies = json.load(sys.stdin)
request = io_struct.GenerateReqInput(**bodies["generate"])
request.normalize_batch_and_arguments()
for parameters in bodies["generate"]["sampling_params"]:
    SamplingParams(**parameters).verify(1000)
io_struct.UpdateWeightFromDiskReqInput(**bodies["disk"])
print(request.batch_size)
"""


@needs("sglang")
def test_requests_are_what_sglang_takes() -> None:
    """Our bodies through the engine's own request types and its own check of sampling parameters."""
    _, [call] = SGLangDialect(19, seeded=True).rounds(_group(Sampling(7, 0.5, 0, 0.9, 0, (1, 4))))
    bodies = {
        "generate": json.loads(call.body),
        "disk": {"model_path": "m", "weight_version": "3"},
    }
    answer = subprocess.run(
        [PYTHON["sglang"], "-c", _CHECK],
        input=json.dumps(bodies),
        capture_output=True,
        text=True,
        env=os.environ | stand_ins("sglang"),
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.split()[-1] == "2"


def test_an_answer_of_sglang_is_read() -> None:
    """The form of 0.5.23's /generate: [log-probability, token, text] triples, spans of weight versions."""
    answer = {
        "output_ids": [5, 6, 1],
        "meta_info": {
            "id": "3-5-0/0",
            "finish_reason": {"type": "stop", "matched": 1},
            "output_token_logprobs": [[-0.5, 5, None], [-1.5, 6, None], [-0.25, 1, None]],
            "weight_versions": [{"version": "2", "start": 0, "end": 3}],
        },
    }
    [one] = SGLangDialect(19).read([json.dumps([answer]).encode()], _group(Sampling(7, 1.0, 0), 1))
    assert one.token_ids.tolist() == [5, 6, 1] and one.logprobs.tolist() == [-0.5, -1.5, -0.25]
    assert one.finish_reason == "stop" and one.weights_versions == (("2", 0, 3),)


_MAPS = """
import json, sys, torch
handle = json.loads(sys.argv[1])
mapped = torch.from_file(handle["path"], shared=True, size=handle["bytes"], dtype=torch.uint8)
for _ in sys.stdin:
    print(mapped[:12].view(torch.float32).tolist(), mapped[12:16].view(torch.bfloat16).tolist(), flush=True)
"""


def test_another_process_sees_what_is_written_later() -> None:
    """Mapped once by another process, the buffer shows each new filling; it lives no longer than its owner."""
    buffer = SharedBuffer(64, torch.device("cpu"))
    command = [sys.executable, "-c", _MAPS, json.dumps(buffer.handle())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        for number in (1.0, 2.0):
            whole = torch.full((3,), number)
            buffer.fill(whole.view(torch.uint8))
            assert torch.equal(buffer.memory[:12].view(torch.float32), whole)
            buffer.memory[12:16].view(torch.bfloat16).fill_(-number)
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline().strip() == f"{[number] * 3} {[-number] * 2}"
        reader.stdin.close()
    path = Path(buffer.handle()["path"])
    buffer.close()
    assert not path.exists()
