"""A whole run whose engine shares the actor's memory: nothing of one side is there while the other needs the room.

The engine here generates as the embedded one does and keeps account of what a colocated server would hold: nothing,
weights, or weights and cache. At every arrow of the step, in evaluations, checkpoints, at a stop by signal and at the
end, what the actor has on its device is compared with that, in bytes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import job_config, read_metrics, write_warm_job_files
from support.launch import run_ranks

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.offload import Offload
from dppo_megatron.job import Job, prepare_job
from dppo_megatron.rollout.engine import Request, Sampling, Weights
from dppo_megatron.rollout.hf import HFEngine
from dppo_megatron.rollout.sync.receipts import Canary
from dppo_megatron.run import Run, Stopped
from dppo_megatron.steps.step import RolloutTable
from dppo_megatron.train import train
from dppo_megatron.types import Completion


def _bytes_on_device(actor: Actor) -> dict[str, int]:
    """Of the gradients, of what is the optimizer's own, and of the weights; what the host holds is not counted."""
    memory = actor._memory
    host = {tensor.untyped_storage().data_ptr() for tensor in memory._host.values()}

    def total(tensors: list[torch.Tensor]) -> int:
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in storages.values() if storage.data_ptr() not in host)

    moments = []
    if actor._optimizer is not None:
        for part in actor._optimizer.chained_optimizers:
            moments += [v for state in part.optimizer.state.values() for v in state.values() if v.numel() > 1]
    return {
        "gradients": total([buffer.grad_data for buffer in memory._buffers()]),
        "optimizer": total(moments),
        "weights": total([p.data for p in actor._parameters()]),
    }


class SharingEngine(HFEngine):
    """The embedded engine with a colocated server's life."""

    def __init__(self, job: Job, mode: str) -> None:
        how = {"dtype": torch.float32, "device": torch.device("cpu"), "max_concurrent_sequences": 64}
        super().__init__(job.architecture, job.tokenizer, **how)  # type: ignore[arg-type]
        self.has_servers = True
        self.holds = "weights and cache"  # as a server that has just been started
        self.actor: Actor | None = None
        self.arrows: list[str] = []
        self._mode = mode

    def note(self, arrow: str) -> None:
        """What a server holds here must not be beside what it excludes of the actor."""
        self.arrows.append(arrow)
        if self.actor is None:
            return
        held = {name for name, size in _bytes_on_device(self.actor).items() if size}
        excluded = {"nothing": set(), "weights": {"gradients", "optimizer"}}.get(
            self.holds, {"gradients", "optimizer"} | ({"weights"} if self._mode == "all" else set())
        )
        assert not held & excluded, f"{arrow}: the engine holds {self.holds} beside the actor's {held & excluded}"

    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        assert self.holds == "nothing"
        self.holds = "weights"
        self.note("sync")
        super().load_weights(weights, release)
        self.holds = "weights and cache"
        self.note("synced")
        return True  # a canary each time

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        assert self.holds == "weights and cache", "it is to generate, and sleeps"
        self.note("evaluate" if requests[0].stream else "generate")
        return super().stream(requests, sampling)

    def probe(
        self, requests: Sequence[Request], sampling: Sampling, *, alone: bool = False
    ) -> list[tuple[str, Completion]]:
        assert self.holds == "weights and cache"
        self.note("canary")
        return [("server", completion) for completion in self.generate(requests, sampling)]

    def health(self) -> dict[str, str]:
        return {"server": "live"}

    def sleep(self) -> None:
        self.holds = "nothing"
        self.note("rest")


def _watch(engine: SharingEngine, patch: pytest.MonkeyPatch) -> None:
    """Whatever the actor takes back is counted at once."""
    came_back, saved = Offload.onload, Actor.sharded_state
    init = Actor.__init__

    def build(actor: Actor, *arguments: Any, **named: Any) -> None:
        assert engine.holds == "nothing", "the actor is built while the server holds the card"
        init(actor, *arguments, **named)
        engine.actor = actor

    def come_back(memory: Offload, *arguments: Any, **named: Any) -> None:
        came_back(memory, *arguments, **named)
        if memory._model:
            engine.note("come back")

    def sharded_state(actor: Actor, **named: Any) -> dict[str, Any]:
        engine.note("checkpoint")
        state = saved(actor, **named)
        engine.note("checkpoint")
        return state

    patch.setattr(Actor, "__init__", build)
    patch.setattr(Offload, "onload", come_back)
    patch.setattr(Actor, "sharded_state", sharded_state)


def _train(files: Path, run_dir: Path, mode: str, stop_in_step: int = 0) -> tuple[list[str], dict[str, torch.Tensor]]:
    config = job_config(
        files,
        run_dir,
        steps=3,
        eval__every_steps=2,
        checkpoint__every_steps=2,
        objective__kl__coef=0.01,  # a reference policy: its weights are swapped in on the device
        objective__updates_per_step=2,  # and log-probabilities before the first update
    )
    config.actor.offload = mode  # type: ignore[assignment]  # past the check that asks for servers
    job = prepare_job(config, 1)
    with pytest.MonkeyPatch.context() as patch:
        engine = SharingEngine(job, mode)
        if mode != "none":
            _watch(engine, patch)
        else:
            engine.note = lambda arrow: None  # type: ignore[method-assign]
        patch.setattr("dppo_megatron.steps.loop.make_engine", lambda *_: engine)
        canary = Canary(config.rollout, config.seed, job.stop_token_ids)
        patch.setattr("dppo_megatron.steps.loop.make_canary", lambda _: canary)
        with Run(job) as run:
            rollouts = RolloutTable.rollouts

            def and_stop(outcomes: RolloutTable, selected: Any) -> Any:
                if run.loop.current and run.loop.current.number == stop_in_step:
                    os.kill(os.getpid(), signal.SIGTERM)
                return rollouts(outcomes, selected)

            patch.setattr(RolloutTable, "rollouts", and_stop)
            try:
                train(run)
            except Stopped:
                assert stop_in_step
                run.loop.actor._memory.onload(None, weights_only=True) if mode == "none" else None
            weights = {name: tensor.clone() for name, tensor in _weights(run.loop.actor, engine)}
    return engine.arrows, weights


def _weights(actor: Actor, engine: SharingEngine) -> Iterator[tuple[str, torch.Tensor]]:
    engine.holds = "nothing"
    yield from actor.weights()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_warm_job_files(tmp_path_factory.mktemp("task"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["optimizer", "all"])
def test_never_both_on_the_card(files: Path, tmp_path: Path, mode: str) -> None:
    """Through a run, a stop in step 2 and its resume: every arrow is met, the trained weights are those of a run whose
    actor stayed where it was, bit for bit, and the metrics too."""
    _, stayed = run_ranks(_train, 1, files, tmp_path / "stayed", "none")[0]
    first, _ = run_ranks(_train, 1, files, tmp_path / "left", mode, 2)[0]
    rest, left = run_ranks(_train, 1, files, tmp_path / "left", mode)[0]
    met = {"rest", "sync", "synced", "canary", "generate", "evaluate", "checkpoint", "come back"}
    assert set(first) == met and set(rest) == met
    assert all(torch.equal(tensor, left[name]) for name, tensor in stayed.items())
    metrics = [read_metrics(tmp_path / run) for run in ("stayed", "left")]
    for row, other in zip(*metrics, strict=True):
        # scored when there is room for the weights, a canary is in the next step's line
        skipped = {key for key in {*row, *other} if key.startswith("rollout/canary")}
        assert {k: v for k, v in row.items() if k not in skipped} == {
            k: v for k, v in other.items() if k not in skipped
        }
    assert all("rollout/canary_logprob_diff" in row for row in metrics[1][1:])
