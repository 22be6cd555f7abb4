"""vLLM's HTTP calls: token ids in and out, and the endpoints of its development mode for reinforcement learning.

Checked against 0.32.0 and the sources of 0.33.0. A server must be started with VLLM_SERVER_DEV_MODE=1,
--enable-scale-out and --logprobs-mode processed_logprobs (vLLM's default, raw_logprobs, ignores the temperature).
docs/engines.md has the whole command; `vllm_command` builds it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import quote

import msgspec

from dppo_megatron.config.rollout import RolloutConfig, draft_lengths
from dppo_megatron.rollout.servers.dialects import VLLM_ARRAYS_PATH, VLLM_WORKERS_PATH, VLLMDialect
from dppo_megatron.rollout.servers.http import BadAnswer, Done, Http, Refused, hidden
from dppo_megatron.rollout.servers.in_engine import dppo_arrays
from dppo_megatron.rollout.servers.protocol import (
    CHUNK_BYTES,
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
from dppo_megatron.texts import one_line
from dppo_megatron.types import UserError

_IN_ENGINE = Path(__file__).parent / "in_engine"
MINIMUM_VERSION = "0.32"
_PAUSE_MODE: dict[InFlight, str] = {"finish": "wait", "abort": "abort", "continue": "keep"}
_KEPT_ASLEEP = ("--sleep-preserve-parameter-names", "draft.*")
_WHOLE_PREFILL = ("--no-enable-chunked-prefill",)
"""On a CPU, vLLM 0.32.0's engine crashes on a request with a seed whose prefill is split: it rewinds the generator of
the discarded sample by `set_offset`, which torch implements for CUDA only."""
_RPC = "/collective_rpc"
_RL_CALLS = "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (docs/engines.md)"


class VLLMVersion(msgspec.Struct):
    version: Version


class Card(msgspec.Struct):
    id: Text
    root: Text | None = None
    max_model_len: Tokens | None = None


class Cards(msgspec.Struct):
    data: Annotated[list[Card], msgspec.Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True):
    """One section of a server's settings; each section has some of these fields."""

    logprobs_mode: Text = ""
    quantization: Text | None = None
    backend: Text = ""
    worker_extension_cls: Text = ""
    data_parallel_size: Workers = 1
    enable_chunked_prefill: bool = True
    device: Text = ""
    enable_return_routed_experts: bool = False


class VLLMConfig(msgspec.Struct):
    model_config: Section
    weight_transfer_config: Section | None = None
    parallel_config: Section = Section()
    scheduler_config: Section = Section()
    device_config: Section = Section()
    aux_output_config: Section = Section()
    speculative_config: Section | None = None


class Settings(msgspec.Struct):
    vllm_config: VLLMConfig


class WorldSize(msgspec.Struct):
    world_size: Workers


class Worker(msgspec.Struct):
    """The answer of `dppo_model` in `in_engine/dppo_vllm_extension.py`."""

    architecture: Text | None
    vocab_size: Tokens | None
    device: Text
    place: Annotated[int, msgspec.Meta(ge=0, lt=4096)] = 0
    nccl: Nccl = {}


class Models(msgspec.Struct):
    results: list[Worker] = []
    replicas: list[list[Worker]] = []


class Did(msgspec.Struct):
    """The answer of `dppo_do` in `in_engine/dppo_vllm_extension.py`."""

    problem: str
    """Empty: none."""


class AllDid(msgspec.Struct):
    results: list[Did] = []
    replicas: list[list[Did]] = []


@dataclass
class VLLMServer:
    engine: ClassVar[str] = "vLLM"
    runs_our_receiver: ClassVar[bool] = True
    http: Http
    replicas: int = field(default=1, init=False)
    world_size: int = field(default=1, init=False)
    _extended: bool = field(default=False, init=False)
    _seeded: bool = field(default=True, init=False)
    """Requests may carry a seed. Not on a CPU with chunked prefill, see `_WHOLE_PREFILL`, nor with drafted tokens: how
    many random numbers a completion draws then depends on the other requests."""
    _arrays: bool = field(default=False, init=False)
    """The server has our path for answers as arrays."""
    _updates: bool = field(default=False, init=False)
    """An update was begun and has not ended: the last one was interrupted, or goes on."""

    def describe(self, *, timeout_s: float) -> ServerInfo:
        """Raises UserError for a server that is not vLLM, too old, or not started for RL."""
        http = self.http
        engine = http.find("/version", VLLMVersion, timeout_s=timeout_s)
        if engine is None:
            raise UserError(f"{http.url} answers, but is no vLLM server (no /version)")
        check_version("vLLM", engine.version, MINIMUM_VERSION, http.url)
        card = http.get("/v1/models", Cards, timeout_s=timeout_s).data[0]
        # slow at the first call: vLLM collects a description of its machine (0.32, `_get_system_env_info_cached`)
        settings = http.find("/server_info?config_format=json", Settings, timeout_s=max(60.0, timeout_s))
        if settings is None or http.find("/weight_info", NamedWeights, timeout_s=timeout_s) is None:
            raise UserError(f"{http.url}: vLLM without its RL endpoints; {_RL_CALLS}")
        config = settings.vllm_config
        transfer, parallel = config.weight_transfer_config, config.parallel_config
        self._extended = parallel.worker_extension_cls.startswith("dppo_vllm_extension.")
        on_cpu = "cpu" in config.device_config.device.lower()
        rewinds = on_cpu and config.scheduler_config.enable_chunked_prefill
        self._seeded = not rewinds and config.speculative_config is None
        self._arrays = http.find(VLLM_ARRAYS_PATH, dict[str, int], timeout_s=timeout_s) == dppo_arrays.FORM
        self.replicas = parallel.data_parallel_size
        self.world_size = http.get("/get_world_size", WorldSize, timeout_s=timeout_s).world_size
        models = self._workers(timeout_s)
        if models:
            architecture, vocab_size = models[0].architecture, models[0].vocab_size
        else:
            architecture, vocab_size = architecture_of(card.root or "")
        return ServerInfo(
            engine_version=engine.version,
            served_model=card.root or card.id,
            max_tokens=card.max_model_len,
            architecture=architecture,
            vocab_size=vocab_size,
            channels=("disk", "gloo", "nccl", "ipc") if transfer and transfer.backend == "dppo" else ("disk",),
            world_size=self.world_size,
            logprobs_are_processed=config.model_config.logprobs_mode == "processed_logprobs",
            returns_experts=self._arrays and config.aux_output_config.enable_return_routed_experts,
            devices=tuple(model.device for model in models),
            nccl=models[0].nccl if models else {},
            quantization=config.model_config.quantization or "",
        )

    def healthy(self, *, timeout_s: float) -> None:
        """/health checks the engine process, not only the front end."""
        self.http.get("/health", Done, timeout_s=timeout_s)

    @property
    def dialect(self) -> VLLMDialect:
        return VLLMDialect(self._seeded, self._arrays)

    def pause(self, in_flight: InFlight, *, timeout_s: float) -> None:
        self.http.do(f"/pause?mode={_PAUSE_MODE[in_flight]}", timeout_s=timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        self.http.do("/resume", timeout_s=timeout_s)

    def load_from_disk(self, path: str, version: str, *, timeout_s: float) -> None:
        """By our extension's call, which also repairs packed copies, or else vLLM's own."""
        if self._extended:
            self._updates = True
            self._do("dppo_reload", {"weights_path": path}, timeout_s)
            self._updates = False
        else:
            self.http.do(_RPC, _call("reload_weights", {"weights_path": path}), timeout_s=timeout_s)
        self._forget_prefixes(timeout_s)
        self.http.do("/update_weight_version", {"new_version": version}, timeout_s=timeout_s)

    def join_group(self, rendezvous: GroupRendezvous, first_rank: int, *, timeout_s: float) -> None:
        """By vLLM's weight transfer interface with our receiver, which leaves an earlier group by itself."""
        info = {
            "backend": rendezvous.backend,
            "master_address": rendezvous.host,
            "master_port": rendezvous.store.port,
            "rank_offset": first_rank,
            "world_size": rendezvous.world_size,
            "joining_s": rendezvous.joining.total_seconds(),
            "timeout_s": rendezvous.timeout.total_seconds(),
            "chunk_bytes": CHUNK_BYTES,
            "secret": rendezvous.secret,
        }
        self._do("init_weight_transfer_engine", {"init_info": info}, timeout_s)

    def begin_update(self, *, timeout_s: float) -> None:
        """An interrupted update stays open, and vLLM refuses the next one until it is finished."""
        self._updates = True
        try:
            self._do("start_weight_update", {}, timeout_s)
        except Refused:  # if no update was open, the second try raises the real reason
            self._end_interrupted(timeout_s)
            self._do("start_weight_update", {}, timeout_s)

    def _end_interrupted(self, timeout_s: float) -> None:
        """Finish an update that was interrupted, under a version name that no run accepts, since its weights are mixed.
        It is begun again first, for a worker that failed in it: vLLM has closed it there, but left the layers open."""
        self.http.do("/update_weight_version", {"new_version": "interrupted"}, timeout_s=timeout_s)
        for method in ("start_weight_update", "finish_weight_update"):
            with contextlib.suppress(Refused):
                self._do(method, {}, timeout_s)
        self._updates = False

    def receive(self, tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        self._do("update_weights", {"update_info": _update_info(tensors)}, timeout_s)

    def receive_shared(self, offers: Sequence[Offer], tensors: Sequence[TensorNote], *, timeout_s: float) -> None:
        info = [_update_info(tensors) | {"memory": offer} for offer in offers]
        self._do("update_weights", {"update_info": info}, timeout_s)

    def end_update(self, version: str, *, timeout_s: float) -> None:
        self._do("finish_weight_update", {}, timeout_s)
        self._updates = False
        self.http.do("/update_weight_version", {"new_version": version}, timeout_s=timeout_s)
        self._forget_prefixes(timeout_s)

    def weights_version(self, *, timeout_s: float) -> str:
        return self.http.get("/weight_info", NamedWeights, timeout_s=timeout_s).weight_version

    @property
    def shows_checksums(self) -> bool:
        """Not with tensor or pipeline parallelism, where they are of shards."""
        return self.world_size == self.replicas

    def checksums(self, *, timeout_s: float) -> list[dict[str, str]]:
        """vLLM's names are dp0:pp0:pcp0:tp0:NAME. On CPUs packed weights are hashed as empty tensors."""
        found = self.http.post("/weight_checker", HeldTensors, {"action": "checksum"}, timeout_s=timeout_s)
        workers: dict[str, dict[str, str]] = {}
        for name, digest in found.checksums.items():
            worker, _, tensor = name.rpartition(":")
            workers.setdefault(worker, {})[tensor] = digest
        return list(workers.values())

    def sleep(self, awake: Set[DeviceMemory], *, keeps: bool = False, timeout_s: float) -> None:
        """At level 2, which drops the weights, since the next sync brings new ones. vLLM ignores `awake`, as it knows
        what is asleep. Kept requests are prefilled again when the cache wakes. A server on a CPU keeps its memory."""
        mode = "&mode=keep" if keeps else ""
        if self._updates and "weights" in awake:  # vLLM saves the layers' buffers, and those of open ones have no data
            self._end_interrupted(timeout_s)
        try:
            self.http.do(f"/sleep?level=2{mode}", timeout_s=timeout_s)
        except Refused:
            if self.world_size > self.replicas:  # other workers' answers are left behind (see `dppo_do`): it has to end
                raise
            # If another program took GPU memory in the meantime, vLLM's worker frees everything, finds less memory free
            # than before, and raises; its executor then believes it awake and would wake nothing. A second call marks
            # it asleep; at level 1 that does not read the freed weights.
            self.http.do(f"/sleep?level=1{mode}", timeout_s=timeout_s)

    def wake(self, what: DeviceMemory, *, timeout_s: float) -> None:
        self.http.do(f"/wake_up?tags={quote(what)}", timeout_s=timeout_s)

    def _do(self, method: str, arguments: dict[str, Any], timeout_s: float) -> None:
        """Have every worker of every replica call its `method`. Raises Refused with what the first that failed says,
        and BadAnswer if one does not answer: see `dppo_do`."""
        kwargs = {"call": method, "arguments": arguments}
        if self._arrays:
            answers = self.http.post(VLLM_WORKERS_PATH, AllDid, kwargs, timeout_s=timeout_s).replicas
            did = [worker for replica in answers for worker in replica]
        else:
            did = self.http.post(_RPC, AllDid, _call("dppo_do", kwargs), timeout_s=timeout_s).results
        if len(did) != self.world_size:
            raise BadAnswer(f"{self.http.url}: {len(did)} of {self.world_size} workers answer to {method}")
        if problem := next((worker.problem for worker in did if worker.problem), ""):
            raise Refused(500, one_line(hidden(problem, self.http.api_key)))

    def _forget_prefixes(self, timeout_s: float) -> None:
        """Raises Refused while blocks of the cache are in use."""
        self.http.do("/reset_prefix_cache?reset_running_requests=true", timeout_s=timeout_s)

    def _workers(self, timeout_s: float) -> list[Worker]:
        """Each worker's `dppo_model` (`in_engine`), replica by replica; empty without our extension. Raises UserError
        if not all workers of all replicas answer: the others would get no weights."""
        models: list[Worker] = []
        if self._extended and self._arrays:
            replicas = self.http.get(VLLM_WORKERS_PATH, Models, timeout_s=timeout_s).replicas
            models = sorted((model for replica in replicas for model in replica), key=lambda model: model.place)
        elif self._extended:  # this returns the workers of the first replica only
            models = self.http.post(_RPC, Models, _call("dppo_model", {}), timeout_s=timeout_s).results
        world_size = self.world_size
        whole = [model.place for model in models] == list(range(world_size)) and world_size % self.replicas == 0
        if not whole and (self.replicas > 1 or self._extended):
            raise UserError(
                f"{self.http.url} has {self.replicas} replicas (--data-parallel-size), and {len(models)} of their"
                f" {world_size} workers answer: start it with our --worker-extension-cls and --middleware"
                " dppo_vllm_arrays.Arrays, as one server of all replicas (docs/engines.md)"
            )
        return models


def _call(method: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without vLLM's timeout, after which late answers would be taken for those to the next call (see `dppo_do`)."""
    return {"method": method, "kwargs": kwargs}


def _update_info(tensors: Sequence[TensorNote]) -> dict[str, Any]:
    return {
        "names": [note.name for note in tensors],
        "shapes": [list(note.shape) for note in tensors],
        "dtype": tensors[0].dtype,
    }


def vllm_command(
    config: RolloutConfig, python: str, model: str, max_tokens: int, dtype: str, *, cpu: bool, host: str = "127.0.0.1"
) -> list[str]:
    """The command line, with `{port}` for the port. `max_tokens`: prompt and completion together."""
    return [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "policy"),
        *("--host", host, "--port", "{port}", "--dtype", dtype, "--max-model-len", str(max_tokens)),
        *("--max-num-seqs", str(config.limits.max_concurrent_sequences), "--enable-scale-out"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--worker-extension-cls", "dppo_vllm_extension.WorkerExtension"),
        *("--middleware", "dppo_vllm_guard.RequireKey", "--middleware", "dppo_vllm_arrays.Arrays"),
        *("--weight-transfer-config", '{"backend": "dppo"}'),
        *(["--enable-sleep-mode"] if config.servers.colocate and not cpu else []),
        # without chunked prefill vLLM refuses fewer batched tokens than --max-model-len; 2048 is its default
        *(["--enforce-eager", *_WHOLE_PREFILL, "--max-num-batched-tokens", str(max(2048, max_tokens))] if cpu else []),
        *_drafting(config),
        *config.servers.args,
    ]


def _drafting(config: RolloutConfig) -> list[str]:
    """Arguments for speculative decoding. vLLM's sampler rejects drafts so that tokens follow the model's distribution
    (`rejection_sample_method` standard, the default), and returns the log-probabilities that were asked for."""
    speculation, lengths = config.speculation, draft_lengths(config)
    if speculation.method == "none":
        return []
    settings: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": lengths[0][2]}
    if len(lengths) > 1:
        settings["num_speculative_tokens_per_batch_size"] = lengths
    if speculation.method == "ngram":
        settings |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    if speculation.method == "eagle3":
        settings["model"] = os.path.abspath(speculation.draft_path)
    # a sleeping server drops all weights, and no sync brings the drafter's
    kept = speculation.method == "eagle3" and config.servers.colocate
    return ["--speculative-config", json.dumps(settings), *(_KEPT_ASLEEP if kept else ())]


def vllm_environment(cpu: bool, servers: int = 1) -> dict[str, str]:
    """Environment variables of a launched server, one of `servers` on this machine."""
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_IN_ENGINE), os.environ.get("PYTHONPATH")])),
        "PYTHONSAFEPATH": "1",  # do not import Python files of the working directory, which may be a model's
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if not cpu:
        return variables
    # A server on a CPU runs as two processes: HTTP, and the engine with its only worker in it. With vLLM's default of
    # three it takes 1.7 times the CPU seconds to start (one more process imports torch and vLLM), and the workers of
    # all servers, like all replicas, are bound to the same cores.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return variables | {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_SIM_MULTI_NUMA": "0",  # 0.33 gives each replica a NUMA node, and exits if there are too few
        "OMP_NUM_THREADS": str(max(1, cores // (2 * servers))),  # two logical cores are one physical core
    }
