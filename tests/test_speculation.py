"""Drafted tokens: what is refused, the engines' command lines, and that real vLLM samples as without drafts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from support.distribution import check_distribution
from support.engines.servers import Reference, local_settings, needs
from support.job import job_config, write_job_files
from support.launch import run_ranks
from support.settings import rollout_config

from dppo_megatron.config.rollout import RolloutConfig, check_rollout, draft_lengths
from dppo_megatron.config.schema import Config
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers.protocol import TensorNote
from dppo_megatron.rollout.servers.server_process import make_servers
from dppo_megatron.rollout.servers.sglang import (
    _IN_ENGINE,
    MINIMUM_VERSION,
    ServerArgs,
    SGLangServer,
    _longest,
    draft_ladder,
    sglang_command,
)
from dppo_megatron.rollout.servers.vllm import vllm_command
from dppo_megatron.types import UserError

LOCAL = {"engine": "vllm", "servers.launch": "local", "speculation.method": "ngram"}
ATTENTION = ["--tp", "2", "--dp", "2", "--enable-dp-attention"]
DRAFTER = {"speculation.method": "eagle3", "speculation.draft_path": "/models/drafter"}


def _config(**values: Any) -> RolloutConfig:
    return rollout_config(LOCAL | {key.replace("__", "."): value for key, value in values.items()})


@pytest.mark.parametrize(("tokens", "budget", "most"), [(4, 128, 512), (4, 128, 64), (7, 3, 9), (5, 0, 30), (1, 1, 1)])
def test_draft_lengths_follow_concurrency(tokens: int, budget: int, most: int) -> None:
    """Against the sentence of the setting, for every number of sequences."""
    lengths = draft_lengths(
        _config(
            speculation__draft_tokens=tokens, speculation__max_drafted=budget, limits__max_concurrent_sequences=most
        )
    )
    found = {n: each for first, last, each in lengths for n in range(first, last + 1)}
    assert found == {n: min(tokens, budget // n) if budget else tokens for n in range(1, most + 1)}
    assert sum(last - first + 1 for first, last, _ in lengths) == most


def _arguments(config: RolloutConfig) -> list[str]:
    build = vllm_command if config.engine == "vllm" else sglang_command
    return build(config, "python", "model", 64, "bfloat16", cpu=False)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ({"speculation.method": "suffix"}, {"method": "suffix"}),
        (DRAFTER, {"method": "eagle3", "model": "/models/drafter"}),
    ],
)
def test_vllm_is_told_methods_and_lengths(more: dict[str, str], expected: dict[str, Any]) -> None:
    """In the names of vLLM's own SpeculativeConfig. A length at any concurrency needs no schedule."""
    values = LOCAL | more | {"speculation.draft_tokens": 2, "limits.max_concurrent_sequences": 128}
    for budget, schedule in (
        (0, {}),
        (64, {"num_speculative_tokens_per_batch_size": [[1, 32, 2], [33, 64, 1], [65, 128, 0]]}),
    ):
        arguments = _arguments(rollout_config(values | {"speculation.max_drafted": budget}))
        told = json.loads(arguments[arguments.index("--speculative-config") + 1])
        assert told == {"num_speculative_tokens": 2, **expected, **schedule}
    assert "--speculative-config" not in _arguments(_config(speculation__method="none"))


def test_sglang_is_told_methods_and_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """n-grams have one length; a drafter's go into a file that each of its processes can read."""
    monkeypatch.syspath_prepend(_IN_ENGINE)
    started = importlib.import_module("dppo_sglang_server")
    ngram = " ".join(_arguments(_config(engine="sglang")))
    assert (
        "--speculative-algorithm NGRAM --speculative-ngram-max-bfs-breadth 1 --speculative-num-draft-tokens 5" in ngram
    )
    config = rollout_config(LOCAL | DRAFTER | {"engine": "sglang", "speculation.max_drafted": 8})
    told = " ".join(_arguments(config))
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path /models/drafter" in told
    assert "--speculative-eagle-topk 1 --speculative-num-steps 4 --speculative-num-draft-tokens 5" in told
    assert draft_ladder(_config(engine="sglang")) == {}
    [(name, ladder)] = draft_ladder(config).items()
    assert name == started.DRAFT_LENGTHS
    flag, option, path = started._adaptive(ladder)
    assert (flag, option) == ("--speculative-adaptive", "--speculative-adaptive-config")
    steps = {"1": [4], "3": [2], "5": [1], "9": [0]}  # 3 each would be for 8 // 3 = 2 sequences, which have 4
    assert json.loads(Path(path).read_text()) == {n: {"candidate_steps": each} for n, each in steps.items()}
    assert started._adaptive("") == []


@pytest.mark.parametrize("tokens", [1, 2, 4, 64])
@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("method", ["none", "ngram", "eagle3"])
def test_sglang_has_room_for_the_longest_sequence_and_drafts(method: str, budget: int, tokens: int) -> None:
    """By its rules (0.5.23): TokenizerManager._validate_one_request with `compute_num_reserved_tokens`, and the
    scheduler's max_new_tokens."""
    drafts = {"speculation.draft_tokens": tokens, "speculation.max_drafted": budget}
    values = LOCAL | (DRAFTER if method == "eagle3" else {"speculation.method": method}) | drafts
    told = _arguments(rollout_config(values | {"engine": "sglang"}))

    def value(option: str) -> Any:
        return told[told.index(option) + 1] if option in told else None

    context, longest = int(value("--context-length")), 64
    names = ("eagle-topk", "num-steps", "num-draft-tokens")
    topk, steps, drafted = (int(value(f"--speculative-{name}") or 0) for name in names)
    reserved = max(topk * steps, drafted) if method == "eagle3" else 0
    assert longest - 1 + reserved < context and longest + reserved <= context and longest <= context - 2
    args = {"speculative_algorithm": value("--speculative-algorithm"), "speculative_num_draft_tokens": drafted}
    args |= {"speculative_eagle_topk": topk, "speculative_num_steps": steps, "context_length": context}
    assert _longest(ServerArgs(MINIMUM_VERSION, **args)) == longest
    assert _longest(ServerArgs(MINIMUM_VERSION, **args | {"context_length": context - 1})) == longest - 1


@pytest.mark.parametrize("colocate", [False, True])
@pytest.mark.parametrize("method", ["none", "ngram", "eagle3"])
@pytest.mark.parametrize(
    ("engine", "flag"),
    [("vllm", "--sleep-preserve-parameter-names draft.*"), ("sglang", "--enable-draft-weights-cpu-backup")],
)
def test_a_drafter_outlives_sleep(engine: str, flag: str, method: str, colocate: bool) -> None:
    """Whoever sleeps with one keeps its weights, which no sync brings."""
    values = LOCAL | (DRAFTER if method == "eagle3" else {"speculation.method": method})
    config = rollout_config(values | {"engine": engine, "servers.colocate": colocate})
    check_rollout(config)
    assert (flag in " ".join(_arguments(config))) == (colocate and method == "eagle3")


class _Asked:
    """An SGLang's answers about itself; notes what it is told to do."""

    url, api_key = "http://sglang", ""

    def __init__(self, **args: Any) -> None:
        self.args, self.told = args, dict[str, dict[str, Any]]()

    def find(self, path: str, kind: Any, *, timeout_s: float) -> Any:
        answers = {"/server_info": {"version": MINIMUM_VERSION, **self.args}, "/model_info": {}}
        return msgspec.convert(answers[path], kind) if path in answers else None

    def do(self, path: str, body: Any = None, *, timeout_s: float) -> None:
        self.told[path] = body or {}


@pytest.mark.parametrize("algorithm", [None, "NGRAM", "EAGLE3", "NEXTN"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_sglangs_drafter_is_given_no_tensor_of_the_policy(algorithm: str | None, replicas: int) -> None:
    """Every call of an update that carries tensors or opens one is for the model alone; `disk`, which cannot say so, is
    not offered beside a drafter. n-grams have no model."""
    http = _Asked(speculative_algorithm=algorithm, dp_size=replicas)
    server = SGLangServer(cast(Any, http), 10)
    channels = server.describe(timeout_s=1).channels
    assert ("disk" in channels) == (algorithm in (None, "NGRAM"))
    assert set(channels) - {"disk"} == (set() if replicas > 1 else {"gloo", "nccl", "ipc"})
    server.begin_update(timeout_s=1)
    server.receive([TensorNote("a", "bfloat16", (1,))], timeout_s=1)
    server.receive_shared(["offer"], [TensorNote("a", "bfloat16", (1,))], timeout_s=1)
    assert len(http.told) == 3 and {body["selector"] for body in http.told.values()} == {"target"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"engine": "hf", "servers.launch": "none"}, "is for launched servers"),
        ({"servers.launch": "none", "servers.endpoints": ["http://127.0.0.1:8000"]}, "draft as they were started"),
        ({"speculation.method": "eagle3"}, r"draft_path is empty, but .*eagle3; eagle3 needs"),
        ({"speculation.draft_path": "/models/drafter"}, r"draft_path is set, but .*ngram; eagle3 needs"),
        ({"engine": "sglang", "speculation.method": "suffix"}, "SGLang has ngram and eagle3"),
        ({"engine": "sglang", "servers.args": ATTENTION}, r"no n-grams with .* \(--attn-dp-size 2\); use eagle3"),
        ({"engine": "sglang", "sampling.top_p": 0.9}, "leave both at their defaults"),
        ({"engine": "sglang", "sampling.top_k": 20}, "leave both at their defaults"),
        ({"servers.args": ["--speculative_config", "{}"]}, "has --speculative-config, which rollout.spec"),
        ({"servers.args": ["-pp", "2"]}, "has -pp, with which SGLang refuses drafts"),
        ({"servers.args": ["--data-parallel-size=2"]}, "max_drafted=0"),
        (DRAFTER | {"servers.args": ["--sleep-preserve-parameter-names", "x"]}, "has --sleep-preserve-parameter-names"),
        (DRAFTER | {"engine": "sglang", "sync.channel": "disk"}, "into the draft model too; leave it at auto"),
        (DRAFTER | {"engine": "sglang", "servers.args": ["--dp", "2"]}, "has --dp-size, with which SGLang takes"),
        (DRAFTER | {"engine": "sglang", "servers.args": ATTENTION}, r"size 2\) SGLang drafts the same number"),
    ],
)  # fmt: skip
def test_what_an_engine_would_do_otherwise_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_rollout(rollout_config(LOCAL | more))


def test_what_an_engine_does_is_accepted() -> None:
    for more in (
        {"servers.args": ["--data-parallel-size", "2"], "speculation.max_drafted": 0},
        {"engine": "sglang", "servers.args": ["--dp-size", "2"]},
        {"sampling.top_p": 0.9, "speculation.method": "suffix"},
        {"servers.launch": "none", "servers.registry_dir": "/shared/servers"},
        DRAFTER | {"sync.channel": "disk"},
        DRAFTER | {"engine": "sglang", "servers.colocate": True},
        DRAFTER | {"engine": "sglang", "servers.args": ATTENTION, "speculation.max_drafted": 0},
    ):
        check_rollout(rollout_config(LOCAL | more))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_files(tmp_path_factory.mktemp("task"))


def test_paths_devices_and_routed_experts_are_checked(files: Path, tmp_path: Path) -> None:
    """Before anything is started."""
    local = {"rollout__engine": "sglang", "rollout__servers__launch": "local"}
    with pytest.raises(UserError, match=r"rollout\.speculation\.draft_path.*no-drafter"):
        drafter = {"rollout__speculation__method": "eagle3", "rollout__speculation__draft_path": files / "no-drafter"}
        job_config(files, tmp_path, **local, **drafter)
    ngram = local | {"rollout__speculation__method": "ngram"}
    with pytest.raises(UserError, match=r"routing_replay = engine with rollout\.speculation\.method = ngram"):
        job_config(files, tmp_path, **ngram, actor__routing_replay="engine")
    goes_on = {"rollout__async_steps": 2, "rollout__sync__in_flight": "continue", "actor__routing_replay": "engine"}
    with pytest.raises(UserError, match=r"routing_replay = engine with rollout\.sync\.in_flight = continue: SGLang"):
        job_config(files, tmp_path, **local | goes_on)
    job_config(files, tmp_path, **local | goes_on | {"rollout__engine": "vllm"})
    stages = {"rollout__servers__args": "['--pp-size', '2']", "actor__routing_replay": "engine"}
    with pytest.raises(UserError, match=r"SGLang returns the experts of the first one's layers only"):
        job_config(files, tmp_path, **local | stages)
    job_config(files, tmp_path, **local | stages | {"rollout__engine": "vllm"})
    for engine, why in {"sglang": "SGLang takes the likeliest token", "vllm": "uniform, 0 or NaN"}.items():
        if not torch.cuda.is_available():
            with pytest.raises(UserError, match=f"on a CPU .*{why}"):
                make_servers(job_config(files, tmp_path, **ngram | {"rollout__engine": engine}))


@pytest.mark.slow
@needs("vllm")
def test_a_real_server_samples_from_the_model(files: Path, tmp_path: Path, forked_vllm: Path) -> None:
    """Without drafts, which a CPU cannot have: what `test_engines_gpu.py` asks of both engines with them."""
    config = job_config(
        files,
        tmp_path / "run",
        data__max_prompt_tokens=40,
        packing__max_tokens_per_microbatch=128,
        **local_settings("vllm") | {"rollout__servers__python": str(forked_vllm)},
    )
    run_ranks(_samples_from_the_model, 1, config, 2048, timeout_s=300)


def _samples_from_the_model(config: Config, count: int) -> None:
    job = prepare_job(config, 1)
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    try:
        reference = Reference(Path(config.model.hf_path), 4)
        engine.load_weights(reference.weights)
        check_distribution(engine, reference, job.train_prompts[0], count)
    finally:
        engine.close()
