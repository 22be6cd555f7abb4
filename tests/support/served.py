"""Two running servers of a real engine, and what the tests in `tests/real_servers` ask of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dppo_megatron.config.schema import Config
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import RankZero, ServerEngine
from dppo_megatron.rollout.servers.server_process import LaunchedServer
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import Completion, Prompt
from dppo_megatron.workbench.cli import main
from support.engines.servers import Reference, serving_config

LONG = 96
LONGEST = 960
"""What the servers have room for: seconds of work, so long that any machine has time to do something meanwhile."""


@dataclass(frozen=True)
class Served:
    """Two running servers of one engine and the files of the job that they serve."""

    name: str
    files: Path
    servers: list[LaunchedServer]
    engines: list[ServerEngine] = field(default_factory=list)

    def config(self, run_dir: Path, count: int = 2, **extra: Any) -> Config:
        return serving_config(self.name, self.files, run_dir, self.servers[:count], **extra)

    def engine(self, config: Config) -> ServerEngine:
        """Closed at the end of the test, whatever happens: ranks are forked from this process, and a child that
        collects a broadcast group of its parent's waits for threads that it does not have."""
        job = prepare_job(config, 1)
        self.engines.append(ServerEngine(config, job.architecture, job.tokenizer))
        return self.engines[-1]

    def same(self, ours: list[Completion], expected: list[Completion]) -> bool:
        """A completion that is asked for again is the same where the engine honours seeds; SGLang does on GPUs only."""
        pairs = zip(ours, expected, strict=True)
        return self.name != "vllm" or all(a.token_ids.tolist() == b.token_ids.tolist() for a, b in pairs)


def rank_zero(engine: ServerEngine) -> RankZero:
    """What rank 0 has of the servers, on this rank."""
    zero = engine._zero.here(lambda zero: zero)
    assert zero is not None
    return zero


def prompts_of(config: Config) -> list[Prompt]:
    return prepare_job(config, 1).train_prompts


def requests_for(prompts: list[Prompt], count: int = 8, step: int = 1) -> list[Request]:
    return [Request(prompt, index, step) for prompt in prompts for index in range(count)]


def generate_while(
    engine: ServerEngine,
    requests: list[Request],
    harm: Callable[[], None],
    tokens_each: int = LONG,
    wait_s: float = 0.2,
) -> list[Completion]:
    """The completions of `requests`, with `harm` done as soon as some requests were sent, and `wait_s` after it."""
    engine.start(requests, Sampling(tokens_each, 1.0, 0))
    deadline = time.monotonic() + 60
    while sum(member.groups for member in rank_zero(engine).fleet.members) < 2 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    threading.Event().wait(wait_s)
    harm()
    return list(engine.finish().values())


def train_on_this_rank(config: Config, world_size: int) -> None:
    with Run(prepare_job(config, world_size)) as run:
        train(run)


def command_line(arguments: list[str]) -> int:
    torch.distributed.destroy_process_group()
    return main(arguments)


def sync_until_all_live(engine: ServerEngine, reference: Reference) -> None:
    """A server that hung may first have to find out that what it waited for will never come; each sync asks it."""
    for _ in range(8):
        engine.load_weights(reference.weights)
        if all(state == "live" for state in engine.health().values()):
            return
    raise AssertionError(engine.health())


def process_group(server: LaunchedServer) -> int:
    """The process group of a server, which may be a forked one (`forked_vllm`)."""
    assert server.process is not None
    forked = Path(server.command[0]).with_name(f"group_of_{server.process.pid}")
    return int(forked.read_text()) if forked.exists() else server.process.pid


def send(server: LaunchedServer, kind: signal.Signals) -> None:
    os.killpg(process_group(server), kind)
