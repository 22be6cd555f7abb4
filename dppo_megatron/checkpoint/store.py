"""Checkpoint directories: Megatron's sharded tensors and the loop's own state, complete or invisible.

A checkpoint is written under another name; when every rank has written, summed and synced its part, rank 0 writes the
manifest and renames. So a directory named step_NNNNNN was complete once, and its checksums say whether it still is.

What is random in the loop is a function of (seed, step, ids) and needs no state. The generators of Python, numpy,
torch and Megatron are saved all the same, for losses of the user's that draw from them.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from dppo_megatron import __version__
from dppo_megatron.checkpoint.manifest import (
    Manifest,
    complete,
    faults,
    read_manifest,
    step_name,
    sums,
    write_manifest,
)
from dppo_megatron.distributed import from_rank_zero
from dppo_megatron.types import UserError
from dppo_megatron.weights.hf_files import check_space, copy_assets, publish

_LOOP = "loop.pt"


class Sharded(Protocol):
    """What can be saved and restored shard by shard (the actor)."""

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Megatron sharded state dict of model, optimizer and schedule."""

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Take over a loaded state."""


@dataclass(slots=True)
class _Pending:
    """A checkpoint whose sharded part is still being written."""

    aside: Path
    manifest: Manifest


class CheckpointStore:
    """The checkpoints of one run. Every method is collective.

    Args:
        root: their directory.
        assets: directory whose config.json and tokenizer each checkpoint takes along.
        keep: complete checkpoints that stay; 0: all.
        async_save: return from `save` once the state is copied, and write in another process.
    """

    def __init__(self, root: Path, *, assets: Path, keep: int, async_save: bool) -> None:
        self._root, self._assets, self._keep, self._async = root, assets, keep, async_save
        self._queue = AsyncCallsQueue()
        self._pending: _Pending | None = None
        from_rank_zero(self._sweep)

    def save(self, actor: Sharded, loop_state: dict[str, Any], manifest: Manifest) -> None:
        """Write a checkpoint of `manifest.step`; with `async_save` it is complete after a later `finalize`.

        Args:
            loop_state: rank 0's is kept. Anything that pickles.

        Raises:
            UserError: the disk is full. What was complete before is untouched.
        """
        self.finalize(blocking=True)
        state = actor.sharded_state()
        num_bytes = _total_bytes(state)
        generators: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(generators, _generators())
        aside = from_rank_zero(lambda: self._begin(manifest.step, num_bytes))
        self._pending = _Pending(aside, manifest)
        request = dist_checkpointing.save({"actor": state}, str(aside), async_sharded_save=self._async)
        from_rank_zero(lambda: self._write_own(aside, {"loop": loop_state, "generators": generators}))
        if self._async:
            self._queue.schedule_async_request(request)
        else:
            self._publish()

    def finalize(self, *, blocking: bool) -> bool:
        """Give a checkpoint that has been written meanwhile its name; returns whether none is left being written.

        Raises whatever writing it raised, on every rank.
        """
        if self._pending is not None and self._async:
            try:
                self._queue.maybe_finalize_async_calls(blocking=blocking)
            except BaseException:
                self._pending = None
                raise
            if not self._queue.get_num_unfinalized_calls():
                self._publish()
        return self._pending is None

    def abandon(self) -> None:
        """Forget a checkpoint that could not be written. Not collective."""
        pending, self._pending = self._pending, None
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                self._sweep()
        del pending

    def newest_good(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint whose files are all as they were written, and a line for each newer one that is not."""
        said: list[str] = []
        for _, path in reversed(from_rank_zero(lambda: complete(self._root))):
            wrong = check(path)
            if not wrong:
                return path, said
            said.append(f"warning: checkpoint {path} is not used: {wrong}")
        return None, said

    def _begin(self, step: int, num_bytes: int) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        check_space(self._root, num_bytes + (1 << 20))
        # a name of its own each time: writers that outlived a killed run must not meet those of its continuation
        aside = self._root / f"{step_name(step)}.incomplete.{os.urandom(4).hex()}"
        aside.mkdir()
        return aside

    def _write_own(self, aside: Path, state: dict[str, Any]) -> None:
        copy_assets(self._assets, aside)
        torch.save(state, aside / _LOOP)

    def _publish(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        dist.barrier()
        names = [path.name for path in pending.aside.iterdir() if _writer(path.name) == dist.get_rank()]
        parts: list[dict[str, tuple[int, str]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, sums(pending.aside, sorted(names)))

        def publish_and_prune() -> None:
            files = {name: entry for part in parts for name, entry in part.items()}
            write_manifest(pending.aside, replace(pending.manifest, files=dict(sorted(files.items()))))
            target = self._root / step_name(pending.manifest.step)
            publish(pending.aside, target)
            _point_at(self._root / "latest", target.name)
            for _, old in complete(self._root)[: -self._keep] if self._keep else []:
                _remove(old)

        from_rank_zero(publish_and_prune)

    def _sweep(self) -> None:
        """Remove what crashes have left."""
        if self._root.is_dir():
            for path in self._root.iterdir():
                if any(mark in path.name for mark in (".incomplete", ".removed")):
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name.endswith(".replaced"):  # a crash between the two renames of `publish`
                    whole = path.with_name(path.name.removesuffix(".replaced"))
                    if whole.exists():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.rename(whole)


def describe(step: int, config: dict[str, Any], fingerprint: str, data: dict[str, Any] | None = None) -> Manifest:
    """The manifest of a checkpoint that is about to be written."""
    versions = {"dppo_megatron": __version__, "torch": torch.__version__, "megatron_core": megatron_version}
    return Manifest(step, fingerprint, config, dist.get_world_size(), {}, versions, data or {})


def check(directory: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing is. Collective."""
    manifest = from_rank_zero(lambda: read_manifest(directory))
    return manifest if isinstance(manifest, str) else "; ".join(faults(directory, manifest))


def load_checkpoint(directory: Path, actor: Sharded) -> dict[str, Any]:
    """Restore `actor` from `directory`, at any layout; returns the loop's state. Collective.

    The generators are restored where the checkpoint was written by as many ranks.

    Raises:
        UserError: no good checkpoint is there.
    """
    if wrong := check(directory):
        raise UserError(f"'{directory}' is no good checkpoint: {wrong}")
    loaded = dist_checkpointing.load({"actor": actor.sharded_state(loading=True)}, str(directory))
    actor.load_sharded_state(loaded["actor"])
    # a pickle, like the metadata of torch's own format: a checkpoint is to be trusted like a program
    own = torch.load(directory / _LOOP, weights_only=False)
    if len(own["generators"]) == dist.get_world_size():
        _restore_generators(own["generators"][dist.get_rank()])
    loop_state: dict[str, Any] = own["loop"]
    return loop_state


def _total_bytes(state: dict[str, Any]) -> int:
    """Bytes of all ranks' tensors: replicas count too often, which is the safe side. Collective."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

    mine = sum(
        value.data.numel() * value.data.element_size()
        for value in nested_values(state)
        if isinstance(value, (ShardedTensor, ShardedTensorFactory))
        and isinstance(value.data, torch.Tensor)
        and is_main_replica(value.replica_id)
    )
    parts = [0] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return sum(parts)


def _writer(name: str) -> int:
    """The rank that wrote a file of a checkpoint: Megatron names its shards __<rank>_<number>.distcp."""
    number = name.removeprefix("__").partition("_")[0]
    return int(number) if name.startswith("__") and number.isdigit() else 0


def _generators() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _restore_generators(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def _point_at(link: Path, name: str) -> None:
    """For people; resuming looks at the directories themselves."""
    aside = link.with_name(f"{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    aside.replace(link)


def _remove(directory: Path) -> None:
    doomed = directory.with_name(directory.name + ".removed")
    directory.rename(doomed)  # first, so that a half-removed one is never met under its name
    shutil.rmtree(doomed, ignore_errors=True)
