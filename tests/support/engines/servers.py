"""Real engine servers for tests, started once for a module, and an independent account of what they should say.

Each engine lives in an environment of its own; DPPO_VLLM_PYTHON and DPPO_SGLANG_PYTHON name their interpreters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dppo_megatron.config.schema import Config
from dppo_megatron.rollout.engine import Request
from dppo_megatron.rollout.hf import truncate_logits
from dppo_megatron.rollout.servers.http import Done, Http
from dppo_megatron.rollout.servers.server_process import LaunchedServer, make_servers, stop_all
from dppo_megatron.types import Completion
from support.job import job_config
from support.processes import patient

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parents[2]
PYTHON = {
    engine: os.environ.get(f"DPPO_{engine.upper()}_PYTHON") or str(_REPOSITORY / f".venv-{engine}" / "bin" / "python")
    for engine in ("vllm", "sglang")
}
ON_GPU = torch.cuda.is_available()
_ARGUMENTS = {"vllm": [], "sglang": [] if ON_GPU else ["--max-total-tokens", "16384", "--mem-fraction-static", "0.3"]}
API_KEY = "test-key-of-the-servers"


def needs(engine: str) -> pytest.MarkDecorator:
    """Skips, with the reason, where the engine's environment is not there."""
    target = "make test" if engine == "vllm" else "make test-sglang"
    return pytest.mark.skipif(
        not Path(PYTHON[engine]).exists(),
        reason=f"no {engine}: {PYTHON[engine]} is not there; `{target}` makes it,"
        f" DPPO_{engine.upper()}_PYTHON names another",
    )


def stand_ins(engine: str) -> dict[str, str]:
    """Variables that a process of `engine` on a CPU needs."""
    return {"PYTHONPATH": str(_HERE / "sglang_cpu")} if engine == "sglang" and not ON_GPU else {}


def local_settings(engine: str, *more_arguments: str) -> dict[str, Any]:
    """What has a trainer start servers of `engine` on this machine."""
    os.environ.update(stand_ins(engine))  # the trainer's servers inherit its environment
    arguments = ", ".join(f"'{argument}'" for argument in [*_ARGUMENTS[engine], *more_arguments])
    return {
        "rollout__engine": engine,
        "rollout__servers__launch": "local",
        "rollout__servers__python": PYTHON[engine],
        "rollout__servers__args": f"[{arguments}]",
    }


def launch_servers(config: Config) -> list[LaunchedServer]:
    """Of this machine, started and not waited for."""
    servers = make_servers(config)
    for server in servers:
        server.start()
    return servers


def start_servers(
    engine: str, files: Path, run_dir: Path, count: int, max_tokens: int, others: Path | None
) -> list[LaunchedServer]:
    """`count` servers of the job's model, ready, with room for completions of `max_tokens`. They ask for `API_KEY`.

    Args:
        others: the interpreter of all but the first server; None: as that one's.
    """
    config = job_config(
        files,
        run_dir,
        rollout__servers__count=count,
        rollout__sampling__max_completion_tokens=max_tokens,
        packing__max_tokens_per_microbatch=max_tokens + 64,
        rollout__limits__max_concurrent_sequences=64,
        **local_settings(engine),
    )
    before = os.environ.get(config.rollout.servers.api_key_env)
    os.environ[config.rollout.servers.api_key_env] = API_KEY
    try:
        servers = make_servers(config)
        for server in servers[1:]:
            server.command = [str(others or server.command[0]), *server.command[1:]]
        for server in servers:
            server.start()
    finally:
        os.environ.pop(config.rollout.servers.api_key_env)
        os.environ.update({config.rollout.servers.api_key_env: before} if before is not None else {})
    try:
        for server in servers:
            http = Http(server.url, API_KEY)
            server.wait_ready(lambda http=http: http.get("/health", Done, timeout_s=5.0), timeout_s=patient(500))
    except BaseException:
        for server in servers:
            stop_all([server])
        raise
    return servers


def serving_config(engine: str, files: Path, run_dir: Path, servers: Sequence[LaunchedServer], **extra: Any) -> Config:
    """A job that uses running servers. Buckets are small enough for the weights to come in two, cut inside a layer."""
    urls = ",".join(server.url for server in servers)
    extra = {"rollout__sync__bucket_mb": 1} | extra
    return job_config(files, run_dir, rollout__engine=engine, rollout__servers__endpoints=f"[{urls}]", **extra)


class Reference:
    """transformers' model of a checkpoint with weights of our choice: what every server must agree with."""

    def __init__(self, hf_path: Path, seed: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(hf_path, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.3 * parameter.std().clamp_min(0.1) * torch.randn(parameter.shape, generator=generator))

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Its tensors under the checkpoint's names."""
        return [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]

    @torch.no_grad()
    def logprobs(
        self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
    ) -> np.ndarray:
        """[n] log-probability of each of `tokens` after `prompt`."""
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        scores = truncate_logits(logits, top_p, top_k).log_softmax(-1)
        return scores.gather(1, torch.tensor(list(tokens))[:, None])[:, 0].numpy()

    def difference(self, requests: Sequence[Request], completions: Sequence[Completion], **sampling: Any) -> np.ndarray:
        """|difference| of every token's recorded log-probability, [all tokens]."""
        return np.concatenate(
            [
                np.abs(self.logprobs(r.prompt.token_ids, c.token_ids.tolist(), **sampling) - c.logprobs)
                for r, c in zip(requests, completions, strict=True)
            ]
        )
