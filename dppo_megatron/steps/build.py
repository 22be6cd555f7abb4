"""Builds the engine, the sampling settings and the canary of a job. A new engine is one branch here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from dppo_megatron.config.schema import Config
from dppo_megatron.job import Job
from dppo_megatron.launcher_env import launched_here
from dppo_megatron.rewards.grading import Graders
from dppo_megatron.rollout.engine import Engine, Sampling
from dppo_megatron.rollout.hf import HFEngine
from dppo_megatron.texts import log

if TYPE_CHECKING:
    from dppo_megatron.rollout.client.messages import HookFactory
    from dppo_megatron.rollout.sync.receipts import Canary


def make_engine(job: Job, dtype: torch.dtype, device: torch.device) -> Engine:
    """The engine of `rollout.engine`. Raises UserError for servers that cannot be used."""
    config = job.config
    if config.rollout.engine == "hf":
        return HFEngine(
            job.architecture,
            job.tokenizer,
            dtype=dtype,
            device=device,
            max_concurrent_sequences=config.rollout.limits.max_concurrent_sequences,
            grade=job.grade.submit,
            records_experts=config.actor.routing_replay == "engine",
        )
    # imported here: with aiohttp and the clients it takes 0.2 CPU s, which the embedded engine does not need
    from dppo_megatron.rollout.server_engine import ServerEngine

    parts = 2 if _evaluates_while_clients_grade(job) else 1

    def hook(clients: int) -> HookFactory:
        """The graders of one of `clients` clients: as many processes as the ranks of its node would have. Theirs were
        tried at the start, so that it is known whether they take many samples at a time."""
        here, rewards = launched_here(), job.grade.rewards
        rewards = {key: replace(one, processes=job.grade[key].num_processes * here) for key, one in rewards.items()}
        return partial(Graders, rewards, shared_by=clients * parts)

    engine = ServerEngine(config, job.architecture, job.tokenizer, client_hook=hook)
    job.grade.share(engine.holders * parts)  # ranks use their own graders only for evaluations' completions
    log(engine.description)
    return engine


def _evaluates_while_clients_grade(job: Job) -> bool:
    """Whether evaluations and the next steps' rollouts can run at the same time and share a grader."""
    grade, sets = job.grade, (job.train_sets, job.eval_sets)
    trained, evaluated = ([grade.rewards[grade.key_of(one.key)] for one in some.values()] for some in sets)
    overlap = job.config.rollout.async_steps > 0 and job.config.eval.every_steps > 0
    return overlap and any(one in evaluated for one in trained)


def make_canary(job: Job) -> Canary | None:
    """The check that servers have the actor's weights; None for the embedded engine, which has no servers."""
    config = job.config
    if config.rollout.engine == "hf":
        return None
    from dppo_megatron.rollout.sync.receipts import Canary  # imported here as in `make_engine`

    return Canary(config.rollout, config.seed, job.stop_token_ids)


def what_to_offload(config: Config, device: str) -> Literal["none", "optimizer", "all"]:
    """`actor.offload` with `auto` resolved: on a CPU there is no other memory to offload to."""
    if config.actor.offload == "auto":
        return "all" if config.rollout.servers.colocate and device == "cuda" else "none"
    return config.actor.offload


def make_sampling(job: Job) -> Sampling:
    how = job.config.rollout.sampling
    return Sampling(
        how.max_completion_tokens, how.temperature, job.config.seed, how.top_p, how.top_k, job.stop_token_ids
    )
