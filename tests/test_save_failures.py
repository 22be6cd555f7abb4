"""A save in trouble: every change that it makes on the disk fails once, on any rank, and costs no more than itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.disk_faults import Killed, Kind, disk_fault
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, write_model

from dppo_megatron.run import UNWRITTEN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class Saver:
    """On ranks: an actor and a store, and the checkpoints of steps 1 and 2 to begin with."""

    def __init__(self, model: Path, root: Path, asynchronous: bool) -> None:
        self._model, self._root, self._asynchronous = model, root, asynchronous
        self._actor = build_actor(model, Parallel(tp=dist.get_world_size()))
        self.reopen()
        for step in (1, 2):
            assert self.save(step) == "saved"
        if dist.get_rank() == 0:
            shutil.copytree(root, root.with_name("begun"), symlinks=True)

    def reopen(self) -> None:
        """As a trainer that starts."""
        from dppo_megatron.checkpoint.store import CheckpointStore

        self._store = CheckpointStore(self._root, run="mine", assets=self._model, keep=2, async_save=self._asynchronous)

    def begin_again(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._root)
            shutil.copytree(self._root.with_name("begun"), self._root, symlinks=True)
        self.reopen()
        assert self.newest() == "step_000002"

    def save(self, step: int) -> str:
        """As `Run` does it; what became of it."""
        try:
            return self._save(step)
        except Killed:
            return "killed"

    def _save(self, step: int) -> str:
        from dppo_megatron.checkpoint.store import describe

        try:
            self._store.save(self._actor, {"step": step}, describe(step, {}, run="mine"))
            self._store.finalize(blocking=True)
        except UNWRITTEN as error:
            self._store.abandon()
            return f"failed: {error}"
        return "saved"

    def newest(self) -> str:
        newest, passed_over = self._store.find_newest()
        assert not passed_over, passed_over
        return newest.name if newest else ""

    def names(self) -> set[str]:
        return {path.name for path in self._root.iterdir()}


def _save_in_trouble(model: Path, root: Path, kind: Kind, victim: int, asynchronous: bool) -> dict[str, int]:
    """On ranks: the n-th change that the save of step 3 makes on rank `victim` fails, for each n; what became of it."""
    saver, outcomes = Saver(model, root, asynchronous), {"saved": 0, "failed": 0, "killed": 0}
    for at in _points(kind):
        saver.begin_again()
        here = dist.get_rank() == victim
        with disk_fault(root, kind, at) if here else contextlib.nullcontext() as disk:
            what = saver.save(3)
        if what == "killed":
            saver.reopen()
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, (what.partition(":")[0], disk.struck if here else ""))
        story = f"{kind} at {at} of rank {victim}: {seen}: {what}"
        assert len({outcome for outcome, _ in seen}) == 1, f"{story}: ranks disagree"
        newest = saver.newest()
        expected = {"saved": {"step_000003"}, "failed": {"step_000002"}, "killed": {"step_000002", "step_000003"}}
        assert newest in expected[seen[0][0]], f"{story}: the newest good one is {newest}"
        if seen[0][0] == "failed":
            left = {name for name in saver.names() if ".incomplete." not in name}
            assert left == {"latest", "step_000001", "step_000002"}, f"{story}: left {left}"
        assert saver.save(4) == "saved" and saver.newest() == "step_000004", f"{story}: and the next one"
        assert saver.names() == {"latest", newest, "step_000004"}, f"{story}: left {saver.names()} after the next one"
        if kind != "full" and what == "saved" and not seen[victim][1]:  # what a forked writer was struck by is its own
            return outcomes
        outcomes[seen[0][0]] += 1
    return outcomes


def _points(kind: Kind) -> Iterator[int]:
    """A file that may have so many bytes; or the change that fails, until the save has no more of them."""
    yield from (0, 200, 20_000) if kind == "full" else range(1, 100)


@pytest.mark.parametrize(
    ("world_size", "kind", "victim", "asynchronous"),
    [
        pytest.param(1, "read-only", 0, False, marks=pytest.mark.long),
        (1, "dies", 0, False),
        (2, "full", 0, True),
        (2, "full", 1, False),
        pytest.param(2, "fails once", 0, False, marks=pytest.mark.long),
        (2, "fails once", 0, True),
        (2, "fails once", 1, False),
    ],
)
def test_a_save_that_fails_fails_on_every_rank_and_costs_itself_only(
    model: Path, tmp_path: Path, world_size: int, kind: Kind, victim: int, asynchronous: bool
) -> None:
    """Not one of the earlier checkpoints, no half one in its place, and the next save is as ever."""
    arguments = (model, tmp_path / "checkpoints", kind, victim, asynchronous)
    outcomes = run_ranks(_save_in_trouble, world_size, *arguments, timeout_s=200)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    if victim == 0:
        assert sum(outcomes[0].values()) > 2 and outcomes[0]["killed" if kind == "dies" else "failed"] > 2
    elif kind != "full":  # it writes one file only
        assert outcomes[0]["failed"] > 0


def _save_with_a_killed_writer(model: Path, root: Path, asynchronous: bool) -> list[str]:
    """On ranks: rank 1's writer of step 3 gets SIGKILL before it has reported."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    saver = Saver(model, root, asynchronous)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            name = "write_preloaded_data"
            patch.setattr(FileSystemWriterAsync, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        said = [saver.save(3)]
    return [*said, saver.newest(), saver.save(4), saver.newest()]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_writer_that_is_killed_costs_one_checkpoint(model: Path, tmp_path: Path, asynchronous: bool) -> None:
    """The kernel kills large processes when memory ends; Megatron would wait for this one for ever."""
    seen = run_ranks(_save_with_a_killed_writer, 2, model, tmp_path / "checkpoints", asynchronous, timeout_s=60)
    for said, *rest in seen:
        assert said.startswith("failed: ") and rest == ["step_000002", "saved", "step_000004"]
    assert any("ended without a result: killed by SIGKILL" in said for said, *_ in seen)
