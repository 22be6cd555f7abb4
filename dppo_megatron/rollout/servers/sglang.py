"""SGLang's HTTP calls: /generate with token ids, and its weight update sessions. Checked against 0.5.23.

A batch of G copies of the prompt is sent instead of n = G: each completion then has a request id that can be aborted
and, with --enable-deterministic-inference, its own seed. Copies that arrive together are prefilled one by one (seen in
0.5.23), so a request for 0 tokens is sent first and leaves the prompt in the radix cache, as SGLang does for n > 1.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, TypeAlias

import msgspec
import torch

from dppo_megatron.config.rollout import RolloutConfig, draft_lengths
from dppo_megatron.config.server_args import named_option, read_split
from dppo_megatron.rollout.servers.dialects import SGLANG_ARRAYS_PATH, SGLANG_NCCL_PATH, SGLangDialect
from dppo_megatron.rollout.servers.http import Done, Http, Refused
from dppo_megatron.rollout.servers.in_engine import dppo_arrays, dppo_wire
from dppo_megatron.rollout.servers.protocol import (
    DeviceMemory,
    GroupRendezvous,
    HeldTensors,
    InFlight,
    NamedWeights,
    Nccl,
    Offer,
    ServerInfo,
    TensorNote,
    Text,
    Tokens,
    Version,
    Workers,
    architecture_of,
    check_version,
)
from dppo_megatron.types import UserError

_IN_ENGINE = Path(__file__).parent / "in_engine"
MINIMUM_VERSION = "0.5.23"
_PAUSE_MODE: dict[InFlight, str] = {"finish": "retract", "abort": "abort", "continue": "retract"}
"""`retract` frees the cache of running requests, which are then prefilled again under the new weights. With `finish`
the trainer has already waited for them."""

_DRAFT_LENGTHS = "DPPO_DRAFT_LENGTHS"
"""Read by `dppo_sglang_server.py`."""

_SPARE = 2
"""Positions of its context that SGLang never fills: it truncates a completion, as `length`, when prompt and completion
together are two tokens short of --context-length (0.5.23)."""

_EAGLES = ("EAGLE", "EAGLE3", "FROZEN_KV_MTP")
"""Drafters that keep their tokens in the request's own positions: SGLang refuses a request that leaves no room for one
pass of them (0.5.23, `compute_num_reserved_tokens`). It reports NEXTN as one of these."""

_FLUSH = {"flush_cache": True, "torch_empty_cache": False}
"""Sent with every bucket, as nothing is generated from `pause` to `resume`. /flush_cache would always collect garbage
too (on a CPU) or empty the device's allocator: on a CPU that cost as much as sending the bytes."""

_TO_POLICY = {"selector": "target"}
"""Sent with every call of an update: by default (`all`) SGLang also loads the tensors into a drafter's model, which has
other shapes under the same names. /update_weights_from_disk has no such field (0.5.23)."""

_MEMORY_CHECK = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
_OWN_NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""SGLang 0.5.23's defaults for these variables (srt/entrypoints/engine.py), assumed for a server that was started
without our script, which reports them."""
_OWN_CHANNELS = {"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_NCHANNELS": "8", "NCCL_ALGO": "allreduce:tree"}
"""Those of a deterministic server with several tensor-parallel workers (srt/arg_groups/attention_hook.py)."""


Drafts: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 15)]


class ServerArgs(msgspec.Struct):
    version: Version
    model_path: Text = ""
    enable_deterministic_inference: bool | None = None
    speculative_algorithm: Text | None = None
    speculative_eagle_topk: Drafts | None = None
    speculative_num_steps: Drafts | None = None
    speculative_num_draft_tokens: Drafts | None = None
    device: Text | None = None
    quantization: Text | None = None
    enable_return_routed_experts: bool = False
    tp_size: Workers = 1
    dp_size: Workers = 1
    attn_dp_size: Workers = 1
    pp_size: Workers = 1
    context_length: Tokens | None = None
    max_req_input_len: Tokens | None = None
    sampling_mask_max_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None


class Model(msgspec.Struct):
    model_path: Text = ""
    architectures: list[Text] | None = None


class Ranks(msgspec.Struct):
    ranks: list[HeldTensors]


@dataclass
class SGLangServer:
    engine: ClassVar[str] = "SGLang"
    runs_our_receiver: ClassVar[bool] = False
    http: Http
    vocab_size: int
    replicas: int = field(default=1, init=False)
    world_size: int = field(default=1, init=False)
    _seeded: bool = field(default=False, init=False)
    _arrays: bool = field(default=False, init=False)
    """The server has our path for answers as arrays."""
    _group: str = field(default="", init=False)
    """Name of the broadcast group that its workers have joined; empty: none."""
    _hashes_bytes: bool = field(default=False, init=False)
    """/weights_checker hashes with SHA-256. On a GPU it uses a kernel of SGLang's, whose result we cannot compute."""

    def describe(self, *, timeout_s: float) -> ServerInfo:
        """Raises UserError for a server that is not SGLang, or too old."""
        info = self.http.find("/server_info", ServerArgs, timeout_s=timeout_s)
        model = self.http.find("/model_info", Model, timeout_s=timeout_s)
        if info is None or model is None:
            raise UserError(f"{self.http.url} answers, but is no SGLang server (no /server_info)")
        check_version("SGLang", info.version, MINIMUM_VERSION, self.http.url)
        self._seeded = bool(info.enable_deterministic_inference) and info.speculative_algorithm is None
        self._arrays = self.http.find(SGLANG_ARRAYS_PATH, dict[str, int], timeout_s=timeout_s) == dppo_arrays.FORM
        self._hashes_bytes = info.device == "cpu"
        # each data-parallel group of attention is a replica too; they are all inside the one tensor-parallel group
        self.world_size, self.replicas = info.tp_size, info.dp_size * info.attn_dp_size
        root = info.model_path or model.model_path  # the latter may be a snapshot of an earlier run
        architecture, vocab_size = architecture_of(root)
        single = info.pp_size == info.dp_size == 1  # SGLang numbers a group's members by tensor-parallel rank alone
        drafts = info.speculative_algorithm not in (None, "NGRAM")  # with a model; see `_TO_POLICY`
        nccl = self.http.find(SGLANG_NCCL_PATH, Nccl, timeout_s=timeout_s) if self._arrays else None
        own = _OWN_NCCL | (_OWN_CHANNELS if info.enable_deterministic_inference and info.tp_size > 1 else {})
        return ServerInfo(
            engine_version=info.version,
            served_model=root,
            max_tokens=_longest(info),
            architecture=architecture or next(iter(model.architectures or ()), None),
            vocab_size=vocab_size,
            channels=(*(() if drafts else ("disk",)), *(("gloo", "nccl", "ipc") if single else ())),
            world_size=self.world_size,
            logprobs_are_processed=None,
            max_top_k=info.sampling_mask_max_tokens or 0,
            top_p_after_top_k=False,
            returns_experts=self._arrays and info.enable_return_routed_experts,
            nccl=nccl or own,
            pauses=info.pp_size == 1,  # its loop for several pipeline stages ignores a pause (0.5.23)
            quantization=info.quantization or "",
        )

    def healthy(self, *, timeout_s: float) -> None:
        """/server_info asks the scheduler for its state. Not /health, which generates a token: a server that an
        interrupted sync has left paused never does, and would stay out for good."""
        self.http.find("/server_info", Done, timeout_s=timeout_s)  # 404: not SGLang, which `describe` reports

    @property
    def dialect(self) -> SGLangDialect:
        return SGLangDialect(self.vocab_size, self._seeded, self._arrays)

    def pause(self, in_flight: InFlight, *, timeout_s: float) -> None:
        self.http.do("/pause_generation", {"mode": _PAUSE_MODE[in_flight]}, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        self.http.do("/continue_generation", {}, timeout_s=timeout_s)

    def load_from_disk(self, path: str, version: str, *, timeout_s: float) -> None:
        # by default it uses the format it was started with, which is `dummy` if it began without weights
        body = {"model_path": path, "weight_version": version, "load_format": "safetensors"}
        self.http.do("/update_weights_from_disk", body, timeout_s=timeout_s)

    def weights_version(self, *, timeout_s: float) -> str:
        return self.http.get("/model_info", NamedWeights, timeout_s=timeout_s).weight_version

    @property
    def shows_checksums(self) -> bool:
        """Only for one worker on a CPU; otherwise the canary verifies the weights."""
        return self._hashes_bytes and self.world_size == 1

    def checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        """SGLang returns the first 16 digits of SHA-256."""
        answer = self.http.post("/weights_checker", Ranks, {"action": "checksum"}, timeout_s=timeout_s)
        return [rank.checksums for rank in answer.ranks]

    def join_group(self, rendezvous: GroupRendezvous, first_rank: int, *, timeout_s: float) -> None:
        if self._group:
            with contextlib.suppress(Refused):  # a restarted server has no group to leave
                self.http.do("/destroy_weights_update_group", {"group_name": self._group}, timeout_s=timeout_s)
        self._group = rendezvous.name
        body = {
            "master_address": rendezvous.host,
            "master_port": rendezvous.store.port,
            "rank_offset": first_rank,
            "world_size": rendezvous.world_size,
            "group_name": rendezvous.name,
            "backend": rendezvous.backend,
        }
        self.http.do("/init_weights_update_group", body, timeout_s=timeout_s)

    def begin_update(self, *, timeout_s: float) -> None:
        try:
            self.http.do("/begin_weight_update", _TO_POLICY, timeout_s=timeout_s)
        except Refused:  # an interrupted sync has left a session open
            self.http.do("/end_weight_update", {}, timeout_s=timeout_s)
            self.http.do("/begin_weight_update", _TO_POLICY, timeout_s=timeout_s)

    def receive(self, tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        body = {
            "names": [note.name for note in tensors],
            "dtypes": [note.dtype for note in tensors],
            "shapes": [list(note.shape) for note in tensors],
            "group_name": self._group,
            "load_format": "flattened_bucket",
            **_TO_POLICY,
            **_FLUSH,
        }
        self.http.do("/update_weights_from_distributed", body, timeout_s=timeout_s)

    def receive_shared(self, offers: Sequence[Offer], tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        body = {"serialized_named_tensors": list(offers), "load_format": "flattened_bucket", **_TO_POLICY, **_FLUSH}
        self.http.do("/update_weights_from_tensor", body, timeout_s=timeout_s)

    def end_update(self, version: str, *, timeout_s: float) -> None:
        self.http.do("/end_weight_update", {}, timeout_s=timeout_s)
        body = {"new_version": version, "abort_all_requests": False}
        self.http.do("/update_weight_version", body, timeout_s=timeout_s)

    def sleep(self, awake: Set[DeviceMemory], *, keeps: bool = False, timeout_s: float) -> None:
        """Needs --enable-memory-saver. On a CPU, whose memory is not released, SGLang only tracks the state."""
        # SGLang's scheduler exits if it is to sleep with running requests; queued ones do no harm while it is paused.
        # `abort` alone is not enough: a request whose client has disconnected runs for one more token, and SGLang does
        # not wait for that. `retract` moves running requests to the queue at once.
        for mode in ("retract",) if keeps else ("abort", "retract"):
            self.http.do("/pause_generation", {"mode": mode}, timeout_s=timeout_s)
        self.http.do("/release_memory_occupation", {"tags": sorted(awake)}, timeout_s=timeout_s)

    def wake(self, what: DeviceMemory, *, timeout_s: float) -> None:
        self.http.do("/resume_memory_occupation", {"tags": [what]}, timeout_s=timeout_s)


def _longest(info: ServerArgs) -> int | None:
    """Maximum tokens of prompt and completion that are not truncated. max_req_input_len is 4 below that, also if the
    cache's pool is smaller than the context: SGLang starts nevertheless, and truncates as `length` (0.5.23)."""
    spare = _SPARE
    if info.speculative_algorithm in _EAGLES:
        tree = (info.speculative_eagle_topk or 0) * (info.speculative_num_steps or 0)
        spare = max(spare, tree, info.speculative_num_draft_tokens or 0)
    limits = [] if info.context_length is None else [info.context_length - spare]
    limits += [] if info.max_req_input_len is None else [info.max_req_input_len + 4 + _SPARE - spare]
    return min(limits, default=None)


def sglang_command(
    config: RolloutConfig, python: str, model: str, max_tokens: int, dtype: str, *, cpu: bool, host: str = "127.0.0.1"
) -> list[str]:
    """The command line, with `{port}` for the port. `max_tokens`: prompt and completion together."""
    on_cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    # positions that a drafter's pass needs, see `_EAGLES`: the drafted chain and one more token are verified
    drafts = draft_lengths(config)[0][2] + 1 if config.speculation.method == "eagle3" else 0
    context = max_tokens + max(_SPARE, drafts)
    # data-parallel groups of attention share this limit, while each replica (--dp-size) has its own
    running = config.limits.max_concurrent_sequences * read_split(config.servers.args).attention
    return [
        *(python, str(_IN_ENGINE / "dppo_sglang_server.py"), "--model-path", model, "--served-model-name", "policy"),
        *("--host", host, "--port", "{port}", "--dtype", dtype, "--context-length", str(context)),
        *("--max-running-requests", str(running), "--skip-server-warmup"),
        *(["--enable-memory-saver"] if config.servers.colocate and not cpu else []),
        *([*on_cpu, "--disable-overlap-schedule", "--disable-cuda-graph", "--grammar-backend", "none"] if cpu else []),
        "--sleep-on-idle",  # otherwise its scheduler busy-waits on a core that the actor could use
        *_drafting(config),
        *config.servers.args,
    ]


def _drafting(config: RolloutConfig) -> list[str]:
    """Arguments for speculative decoding, in chains as in vLLM. SGLang verifies one token more than it drafts, by the
    model's probabilities (both accept thresholds are 1). For a drafter, `draft_ladder` sets the length too."""
    speculation, tokens = config.speculation, draft_lengths(config)[0][2]
    verified = ["--speculative-num-draft-tokens", str(tokens + 1)]
    if speculation.method == "ngram":
        return ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1", *verified]
    if speculation.method != "eagle3":
        return []
    drafter = os.path.abspath(speculation.draft_path)
    return [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter),
        *("--speculative-eagle-topk", "1", "--speculative-num-steps", str(tokens), *verified),
        # a sleeping server drops all weights, and no sync brings the drafter's
        *(["--enable-draft-weights-cpu-backup"] if config.servers.colocate else []),
    ]


def recording_arguments(given: Sequence[str]) -> list[str]:
    """Arguments with which a server on this machine's GPUs records routed experts. On Blackwell SGLang's own choice for
    a mixture routes inside its kernel, past the recorder (0.5.23, layers/moe/topk.py: `_can_bypass_trtllm_routing`)."""
    is_chosen = named_option(given, ("--moe-runner-backend", "--moe-a2a-backend"))
    return ["--moe-runner-backend", "triton"] if torch.cuda.get_device_capability()[0] == 10 and not is_chosen else []


def draft_ladder(config: RolloutConfig) -> dict[str, str]:
    """The environment variable from which our server script makes the file for --speculative-adaptive-config: smallest
    number of sequences -> draft length. Empty without a drafter, or with one length for all."""
    lengths = draft_lengths(config)
    if config.speculation.method != "eagle3" or len(lengths) == 1:
        return {}
    return {_DRAFT_LENGTHS: json.dumps({str(first): {"candidate_steps": [tokens]} for first, _, tokens in lengths})}


def sglang_environment(config: RolloutConfig, *, cpu: bool) -> dict[str, str]:
    """Environment variables of a launched server. NCCL's are the trainer's: SGLang turns both off if they are not set
    (0.5.23, entrypoints/engine.py), and in one communicator they must be the same at both ends."""
    # --context-length with its spare positions may exceed the model's; no token ever takes those positions
    variables = {"HF_HUB_OFFLINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    # where the actor's stages hold unequal shares, a server that is started again would refuse its GPUs as occupied
    variables |= {_MEMORY_CHECK: os.environ.get(_MEMORY_CHECK, "0")} if config.servers.colocate else {}
    nccl = {name: os.environ.get(name, default) for name, default in dppo_wire.NCCL_DEFAULTS.items()}
    return variables | draft_ladder(config) | ({"SGLANG_USE_CPU_ENGINE": "1"} if cpu else nccl)
