"""Real engine servers for tests, started once for a module, and an independent account of what they should say.

The engine lives in an environment of its own; DPPO_VLLM_PYTHON names its interpreter (`make test` makes .venv-vllm).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import job_config
from transformers import AutoModelForCausalLM

from dppo_megatron.config.schema import Config
from dppo_megatron.rollout.connect import launch_servers
from dppo_megatron.rollout.engine import Request
from dppo_megatron.rollout.hf import cut
from dppo_megatron.rollout.http import Http
from dppo_megatron.rollout.launch import LaunchedServer
from dppo_megatron.types import Completion

VLLM_PYTHON = os.environ.get("DPPO_VLLM_PYTHON") or str(Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python")
needs_vllm = pytest.mark.skipif(
    not Path(VLLM_PYTHON).exists(),
    reason=f"no vLLM: {VLLM_PYTHON} is not there; `make test` makes it, DPPO_VLLM_PYTHON names another",
)
API_KEY = "test-key-of-the-servers"


def start_servers(files: Path, run_dir: Path, count: int, **extra: Any) -> list[LaunchedServer]:
    """`count` vLLM servers of the job's model, ready. They hold its weights and ask for `API_KEY`."""
    extra = {"rollout__server_args": f"[--api-key, {API_KEY}]", "rollout__max_concurrent_sequences": 64} | extra
    config = job_config(
        files,
        run_dir,
        rollout__engine="vllm",
        rollout__launch="local",
        rollout__local_servers=count,
        rollout__server_python=VLLM_PYTHON,
        rollout__max_completion_tokens=96,
        **extra,
    )
    servers = launch_servers(config)
    try:
        for server in servers:
            http = Http(server.url)
            server.wait_ready(lambda http=http: http.get("/health", timeout_s=5.0), timeout_s=500.0)
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


def serving_config(files: Path, run_dir: Path, servers: Sequence[LaunchedServer], **extra: Any) -> Config:
    """A job that uses running servers."""
    urls = ",".join(server.url for server in servers)
    return job_config(files, run_dir, rollout__engine="vllm", rollout__endpoints=f"[{urls}]", **extra)


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
        scores = cut(logits, top_p, top_k).log_softmax(-1)
        return scores.gather(1, torch.tensor(list(tokens))[:, None])[:, 0].numpy()

    def difference(self, requests: Sequence[Request], completions: Sequence[Completion], **sampling: Any) -> np.ndarray:
        """|difference| of every token's recorded log-probability, [all tokens]."""
        return np.concatenate(
            [
                np.abs(self.logprobs(r.prompt.token_ids, c.token_ids.tolist(), **sampling) - c.logprobs)
                for r, c in zip(requests, completions, strict=True)
            ]
        )
