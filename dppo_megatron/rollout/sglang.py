"""SGLang's HTTP calls: /generate with token ids, and weights from disk. Checked against 0.5.23.

One request carries G copies of the prompt rather than n = G: then each has its own request id and, on a server with
--enable-deterministic-inference, its own seed. The radix cache gives them one prefill either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.rollout.engine import Sampling
from dppo_megatron.rollout.http import Http, Refused
from dppo_megatron.rollout.server import (
    Group,
    InFlight,
    Sampled,
    ServerInfo,
    architecture_of,
    array_of,
    is_older,
    too_old,
)
from dppo_megatron.types import UserError

MINIMUM_VERSION = "0.5.23"
_PAUSE_MODE: dict[InFlight, str] = {"finish": "retract", "abort": "abort", "continue": "retract"}
"""`retract` frees the cache of running requests, which are then prefilled again under the new weights; the trainer
has already waited for them where the policy is `finish`."""


@dataclass
class SGLangServer:
    """One `sglang.launch_server`. See `server.Server` for the calls."""

    http: Http
    _seeded: bool = field(default=False, init=False)

    def describe(self, *, timeout_s: float) -> ServerInfo:
        """Raises UserError for a server that is no SGLang or too old."""
        try:
            info = self.http.get("/server_info", timeout_s=timeout_s)
            model = self.http.get("/model_info", timeout_s=timeout_s)
        except Refused as error:
            if error.status == 404:
                raise UserError(f"{self.http.url} answers, but is no SGLang server (no /server_info)") from None
            raise
        if not isinstance(info, dict) or "version" not in info:
            raise UserError(f"{self.http.url} answers, but is no SGLang server (no version in /server_info)")
        if is_older(info["version"], MINIMUM_VERSION):
            raise too_old("SGLang", info["version"], MINIMUM_VERSION, self.http.url)
        self._seeded = bool(info.get("enable_deterministic_inference"))
        root = model["model_path"]
        architecture, vocab_size = architecture_of(root)
        return ServerInfo(
            engine_version=info["version"],
            served_model=root,
            max_tokens=info.get("context_length") or info.get("max_req_input_len"),
            architecture=architecture or (model.get("architectures") or [None])[0],
            vocab_size=vocab_size,
            channels=("disk",),
            world_size=int(info.get("tp_size", 1)) * int(info.get("pp_size", 1)),
            logprobs_are_processed=None,
        )

    def healthy(self, *, timeout_s: float) -> None:
        """/health answers 503 while the scheduler does not."""
        self.http.get("/health", timeout_s=timeout_s)

    def generate(self, group: Group, sampling: Sampling, *, timeout_s: float) -> list[Sampled]:
        """One request, a batch of group.count copies of the prompt."""
        answer = self.http.post("/generate", generate_body(group, sampling, self._seeded), timeout_s=timeout_s)
        return [sampled(one) for one in answer]

    def abort(self, request_ids: Sequence[str], *, timeout_s: float) -> None:
        """SGLang aborts every id that starts with the given one."""
        for request_id in request_ids:
            self.http.post("/abort_request", {"rid": f"{request_id}/"}, timeout_s=timeout_s)

    def pause(self, in_flight: InFlight, *, timeout_s: float) -> None:
        """See `_PAUSE_MODE`."""
        self.http.post("/pause_generation", {"mode": _PAUSE_MODE[in_flight]}, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        """After `pause`."""
        self.http.post("/continue_generation", {}, timeout_s=timeout_s)

    def load_from_disk(self, path: str, version: str, *, timeout_s: float) -> None:
        """The cache is flushed by the same call."""
        self._do("/update_weights_from_disk", {"model_path": path, "weight_version": version}, timeout_s)

    def reset_cache(self, *, timeout_s: float) -> None:
        """Refused while requests run."""
        self.http.post("/flush_cache", timeout_s=timeout_s)

    def weights_version(self, *, timeout_s: float) -> str:
        """What the engine calls its present weights."""
        return str(self.http.get("/model_info", timeout_s=timeout_s).get("weight_version"))

    def checksums(self, *, timeout_s: float) -> dict[str, str]:
        """SGLang hashes with a scheme of its own, which the trainer cannot repeat: the canary is the receipt."""
        return {}

    def sleep(self, *, timeout_s: float) -> None:
        """Needs --enable-memory-saver."""
        self.http.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, timeout_s=timeout_s)

    def wake(self, what: Literal["weights", "kv_cache"], *, timeout_s: float) -> None:
        """Weights before the sync, the cache after it."""
        self.http.post("/resume_memory_occupation", {"tags": [what]}, timeout_s=timeout_s)

    def _do(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        answer = self.http.post(path, body, timeout_s=timeout_s)
        if isinstance(answer, dict) and not answer.get("success", True):
            raise Refused(409, f"{path}: {answer.get('message')}")


def generate_body(group: Group, sampling: Sampling, seeded: bool) -> dict[str, Any]:
    """Every parameter is given: the server fills what is left out from the model's generation_config.json."""
    parameters: dict[str, Any] = {
        "n": 1,
        "max_new_tokens": sampling.max_completion_tokens,
        "min_new_tokens": 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
    }
    seeds = [{"sampling_seed": group.seed + index} if seeded else {} for index in range(group.count)]
    return {
        "rid": [f"{group.request_id}/{index}" for index in range(group.count)],
        "input_ids": [list(group.prompt_ids)] * group.count,
        "sampling_params": [parameters | seed for seed in seeds],
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": False,
    }


def sampled(answer: dict[str, Any]) -> Sampled:
    """One element of /generate's answer."""
    meta = answer["meta_info"]
    reason = (meta.get("finish_reason") or {}).get("type", "abort")
    spans = meta.get("weight_versions") or []
    tokens = answer.get("output_ids") or []
    if not spans and meta.get("weight_version") is not None:
        spans = [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
    return Sampled(
        token_ids=array_of(tokens, np.int64),
        logprobs=array_of([entry[0] for entry in meta.get("output_token_logprobs") or []], np.float32),
        finish_reason=cast(Any, reason if reason in ("stop", "length") else "abort"),
        weights_versions=tuple((str(s["version"]), int(s["start"]), int(s["end"])) for s in spans),
    )


def sglang_command(
    config: RolloutConfig, python: str, model: str, max_tokens: int, dtype: str, *, cpu: bool
) -> list[str]:
    """The command line of a launched server."""
    on_cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    return [
        *(python, "-m", "sglang.launch_server", "--model-path", model, "--served-model-name", "policy"),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", dtype, "--context-length", str(max_tokens)),
        *("--max-running-requests", str(config.max_concurrent_sequences), "--skip-server-warmup"),
        *(["--enable-memory-saver"] if config.colocate else []),
        *([*on_cpu, "--disable-overlap-schedule", "--disable-cuda-graph"] if cpu else []),
        *config.server_args,
    ]


def sglang_environment(cpu: bool) -> dict[str, str]:
    """Variables of a launched server."""
    return {"HF_HUB_OFFLINE": "1"} | ({"SGLANG_USE_CPU_ENGINE": "1"} if cpu else {})
