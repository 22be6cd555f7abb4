"""The checkpoints of one run: written atomically, verified when read, and pruned to the newest `keep`.

A checkpoint is written under a temporary name. When every rank has written, synced and hashed its part, rank 0 writes
the manifest and renames it. Whatever is named step_NNNNNN was therefore complete; checksums show whether it still is.

loop.pt has the loop's own state, and no random number generator: each draw is a function of what it decides. torch's
restricted unpickler (`weights_only`) reads it without running code. Anything that it could not rebuild is an error when
the checkpoint is written, not when it is needed.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from packaging.version import Version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dppo_megatron import __version__
from dppo_megatron.checkpoint import checkpoint_dir
from dppo_megatron.checkpoint.checkpoint_dir import LOOP, Manifest, faults, read_manifest, step_name
from dppo_megatron.checkpoint.writers import in_step, use_own_writers
from dppo_megatron.distributed import from_rank_zero, gather_all
from dppo_megatron.files import make_directory
from dppo_megatron.safe_pickle import force_weights_only
from dppo_megatron.texts import log, reason
from dppo_megatron.types import UserError
from dppo_megatron.weights.hf_files import check_space, copy_assets, publish
from dppo_megatron.weights.torch_dist import read_metadata

VERSIONS = {"dppo_megatron": __version__, "torch": torch.__version__, "megatron_core": megatron_version}
COMMON = "common.pt"
_COMMON_INSIDE_SINCE = Version("0.17")
"""From this version on, megatron-core stores what is not sharded among the shards; it still reads common.pt."""

Stats = dict[str, tuple[int, int, int, int]]
"""Size, inode, mtime and ctime of each file. While they are unchanged, the file is not hashed again."""


_NUMPY = [
    np.ndarray,
    np.dtype,
    bytes,  # the data of an empty array
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(type(np.dtype(kind)) for kind in "?bhilqBHILQefdU"),
]
"""What numpy arrays consist of, beside the tensors and plain containers that torch's restricted unpickler rebuilds."""


class Sharded(Protocol):
    """What can be saved and restored shard by shard (the actor)."""

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Megatron sharded state dict of model, optimizer and schedule."""

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Restore a loaded state."""


class CheckpointStore:
    """The checkpoints of one run, in `root`. Every method is collective unless it says otherwise.

    Args:
        run: id of the run; other runs' checkpoints are neither used nor counted nor deleted.
        assets: directory whose config.json and tokenizer are copied into each checkpoint.
        keep: how many good checkpoints to keep; 0: all.
        async_save: `save` returns once the state is copied; another process writes it.
    """

    def __init__(self, root: Path, *, run: str, assets: Path, keep: int, async_save: bool) -> None:
        self._root, self._run, self._assets, self._keep, self._async = root, run, assets, keep, async_save
        self._queue = AsyncCallsQueue()
        self._pending: tuple[Path, Manifest] | None = None
        """Directory and manifest of a checkpoint whose sharded part is still being written."""
        self._saved_step: int | None = None
        self._validates = True
        """Only in this process's first save does Megatron check that the ranks' shards fit together, for which every
        rank sends its list to all others. Later lists are the same."""
        self._good: dict[str, Stats] = {}  # of the checkpoints that were found intact, by name
        from_rank_zero(lambda: checkpoint_dir.sweep(root))

    def save(self, actor: Sharded, loop_state: dict[str, Any], manifest: Manifest) -> None:
        """Write a checkpoint of `manifest.step`, unless it is saved already; with `async_save` it is complete only
        after a later `finalize`. Of `loop_state`, only rank 0's is written. Raises UserError if the disk is full."""
        if self._saved_step == manifest.step:
            return
        self.finalize(blocking=True)
        state = actor.sharded_state()
        num_bytes = _total_bytes(state)
        incomplete = from_rank_zero(lambda: self._begin(manifest.step, num_bytes))
        self._pending = incomplete, manifest
        use_own_writers()
        # since 0.17 Megatron's default asynchronous writer needs another package (nvrx)
        has_choice = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
        options: dict[str, Any] = {"async_strategy": "mcore"} if has_choice else {}
        options |= {"async_sharded_save": self._async, "validate_access_integrity": self._validates}
        self._validates = False  # before the save, which may raise: the ranks have to agree on it
        with in_step():
            request = dist_checkpointing.save({"actor": state}, str(incomplete), **options)
        from_rank_zero(lambda: self._write_own(incomplete, {"loop": loop_state}))
        if self._async:
            with in_step():
                self._queue.schedule_async_request(request)
        else:
            self._publish()
        self._saved_step = manifest.step

    def finalize(self, *, blocking: bool) -> bool:
        """Complete an asynchronous save if its files are written; `blocking`: wait for that. Returns whether no save is
        in progress any more. Raises a writer's error on every rank."""
        if self._pending is not None and self._async:
            try:
                with in_step():
                    self._queue.maybe_finalize_async_calls(blocking=blocking)
            except BaseException:
                self._pending = None
                raise
            if not self._queue.get_num_unfinalized_calls():
                self._publish()
        return self._pending is None

    def abandon(self) -> None:
        """Give up a checkpoint that could not be written, and remove its files. Not collective."""
        self._pending = self._saved_step = None
        self._queue = AsyncCallsQueue()
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                checkpoint_dir.sweep(self._root)

    def find_newest(self) -> tuple[Path | None, list[tuple[Path, str]]]:
        """The newest intact checkpoint of this run, and everything newer that cannot be used, with the reasons. That
        checkpoint counts as saved: a run that resumes from it and is stopped at once does not write it again."""
        passed_over: list[tuple[Path, str]] = []
        for step, path in reversed(from_rank_zero(lambda: checkpoint_dir.named(self._root))):
            fault = self._fault(path)
            if not fault:
                self._saved_step = step
                return path, passed_over
            passed_over.append((path, fault))
        return None, passed_over

    def put_aside(self, path: Path, why: str) -> None:
        """Move a directory that is not a good checkpoint of this run to `aside/`. Raises OSError if that fails."""
        where = from_rank_zero(lambda: checkpoint_dir.put_aside(path))
        log(f"warning: checkpoint {path} is not used: {why}; it is now {where}")

    def _fault(self, path: Path, *, hashes: bool = True) -> str:
        """Why a directory is not a good checkpoint of this run; empty if it is one."""
        manifest = from_rank_zero(lambda: checkpoint_dir.read_own(path, self._run))
        if isinstance(manifest, str):
            return manifest
        if not hashes or from_rank_zero(
            lambda: bool(known := self._good.get(path.name)) and known == _stats(path, manifest)
        ):
            return ""
        stats = from_rank_zero(lambda: _stats(path, manifest))  # before the hashes: later changes are then noticed
        fault = "; ".join(faults(path, manifest))
        if not fault:
            self._good[path.name] = stats
        return fault

    def _begin(self, step: int, num_bytes: int) -> Path:
        make_directory(self._root)
        checkpoint_dir.sweep(self._root)  # half-written checkpoints after a full disk take space that this save needs
        check_space(self._root, num_bytes + (1 << 20))
        # a new name each time: writers that outlive a killed run must not write into the resumed run's checkpoint
        incomplete = self._root / f"{step_name(step)}.incomplete.{os.urandom(4).hex()}"
        incomplete.mkdir()
        return incomplete

    def _write_own(self, incomplete: Path, state: dict[str, Any]) -> None:
        copy_assets(self._assets, incomplete)
        write_state(incomplete / LOOP, state)

    def _publish(self) -> None:
        assert self._pending is not None
        (incomplete, manifest), self._pending = self._pending, None
        dist.barrier()
        parts = gather_all([_sums_of_rank(incomplete)])
        if failures := [part for part in parts if isinstance(part, str)]:
            raise OSError(failures[0])
        files = {name: entry for part in parts if not isinstance(part, str) for name, entry in part.items()}
        manifest = replace(manifest, files=dict(sorted(files.items())))
        target = from_rank_zero(lambda: self._name(incomplete, manifest))
        self._good[target.name] = from_rank_zero(lambda: _stats(target, manifest))
        try:
            self._retire(manifest.step)
        except (OSError, UserError) as error:  # the new checkpoint is complete regardless
            log(f"warning: an old checkpoint could not be checked, removed or put aside ({error})")

    def _name(self, incomplete: Path, manifest: Manifest) -> Path:
        """Write the manifest and give the directory its final name. On rank 0."""
        checkpoint_dir.write_manifest(incomplete, manifest)
        target = self._root / step_name(manifest.step)
        if target.exists() or target.is_symlink():
            log(f"warning: {target} was in the way of a new checkpoint; it is now {checkpoint_dir.put_aside(target)}")
        publish(incomplete, target)
        try:
            checkpoint_dir.point_at(self._root / "latest", target.name)
        except OSError as error:
            log(f"warning: {self._root / 'latest'} cannot be made to point at {target.name} ({error.strerror})")
        return target

    def _retire(self, newest: int) -> None:
        """Keep the newest `keep` good checkpoints up to step `newest`, just written; move the bad ones to `aside/`."""
        if not self._keep:
            return
        num_good = 1
        for step, path in reversed(from_rank_zero(lambda: checkpoint_dir.named(self._root))):
            if step >= newest:  # a stray later one is handled at the next start
                continue
            enough = num_good >= self._keep
            fault = self._fault(path, hashes=not enough)  # files are not hashed only to be deleted
            if fault:
                self.put_aside(path, fault)
            elif enough:
                self._good.pop(path.name, None)
                from_rank_zero(partial(checkpoint_dir.remove, path))
            else:
                num_good += 1


def describe(step: int, config: dict[str, Any], data: dict[str, Any] | None = None, *, run: str) -> Manifest:
    """The manifest of a checkpoint that is about to be written."""
    return Manifest(step, run, config, dist.get_world_size(), {}, VERSIONS, data or {})


def check(directory: Path) -> str:
    """What is wrong with a checkpoint, of whichever run; empty if nothing. Collective."""
    manifest = from_rank_zero(lambda: read_manifest(directory))
    return manifest if isinstance(manifest, str) else "; ".join(faults(directory, manifest))


def load_checkpoint(directory: Path, actor: Sharded) -> dict[str, Any]:
    """Restore `actor` from `directory`, at any layout; returns the loop's state. Collective.

    The caller must have verified the checkpoint (`check`, `CheckpointStore.find_newest`).

    Raises:
        UserError: it cannot be read, or reading it would have to run code.
    """
    metadata = read_metadata(directory)  # refuses code, before Megatron unpickles the same file without restriction
    _check_reader(directory)
    own, template = read_state(directory / LOOP), {"actor": actor.sharded_state(loading=True)}
    _check_tensors(template, metadata, directory)
    template = _without_new_fp8(template, metadata)
    try:
        with force_weights_only():
            # not checked here whether the ranks' shards fit together: the next save does that
            loaded = dist_checkpointing.load(template, str(directory), validate_access_integrity=False)
    except (pickle.UnpicklingError, CheckpointException) as error:
        if "Global shape mismatch" in (message := str(error)):
            shapes = message.splitlines()[-1].partition(": ")[2]
            raise UserError(f"'{directory}': the run that wrote it trained another model: {shapes}") from None
        if "weights_only" not in message:
            raise
        raise UserError(f"'{directory}' cannot be loaded: it holds a pickle that would have to run code") from None
    actor.load_sharded_state(loaded["actor"])
    loop_state: dict[str, Any] = own["loop"]
    return loop_state


def _check_tensors(template: dict[str, Any], metadata: Metadata, directory: Path) -> None:
    """Raise `UserError` for a tensor of `template` that the checkpoint lacks or describes as bytes, which torch would
    unpickle."""
    for value in nested_values(template):
        if not isinstance(value, (ShardedTensor, ShardedTensorFactory)):
            continue
        if value.key not in metadata.state_dict_metadata:
            trained = "another model, or without adapters or a reference policy"
            raise UserError(f"'{directory}': holds no tensor {value.key}; the run that wrote it trained {trained}")
        if isinstance(metadata.state_dict_metadata[value.key], BytesStorageMetadata):
            raise UserError(f"'{directory}': the tensor {value.key} is described as bytes, which are not loaded")


def _without_new_fp8(template: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """`template` without Transformer Engine's state of FP8 layers that the checkpoint lacks, such as that of a run in
    bfloat16. That state then starts afresh."""

    def is_new(value: Any) -> bool:
        is_fp8 = isinstance(value, ShardedObject) and value.key.endswith("_extra_state")
        return is_fp8 and value.unique_key not in metadata.state_dict_metadata

    rest: dict[str, Any] = extract_matching_values(template, is_new)[1]
    return rest


def _check_reader(directory: Path) -> None:
    """Raise `UserError` for a checkpoint of a newer megatron-core that stores no common.pt, which this one needs."""
    if (directory / COMMON).exists() or Version(megatron_version) >= _COMMON_INSIDE_SINCE:
        return
    manifest = read_manifest(directory)
    writer = manifest.versions.get("megatron_core", "") if isinstance(manifest, Manifest) else ""
    if writer and Version(writer) > Version(megatron_version):
        written = f"'{directory}' was written by megatron-core {writer}, and {megatron_version} cannot read it"
        raise UserError(f"{written}; install megatron-core {writer} or newer")


def _stats(path: Path, manifest: Manifest) -> Stats:
    """Empty if a file cannot be examined."""
    try:
        stats = {name: (path / name).stat() for name in manifest.files}
    except OSError:
        return {}
    return {name: (stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats.items()}


def _sums_of_rank(folder: Path) -> dict[str, tuple[int, str]] | str:
    """Checksums of the files that this rank wrote, or why they could not be read back."""
    try:
        mine = [path for path in folder.rglob("*") if _writer(path.name) == dist.get_rank() and not path.is_dir()]
        return checkpoint_dir.sums(folder, sorted(str(path.relative_to(folder)) for path in mine))
    except OSError as error:
        return f"rank {dist.get_rank()}: {error}"


def _total_bytes(state: dict[str, Any]) -> int:
    """Bytes of the tensors that all ranks write. Collective."""
    mine = sum(
        value.data.numel() * value.data.element_size()
        for value in nested_values(state)
        if isinstance(value, (ShardedTensor, ShardedTensorFactory))
        and isinstance(value.data, torch.Tensor)
        and is_main_replica(value.replica_id)
    )
    return sum(gather_all([mine]))


def _writer(name: str) -> int:
    """The rank that wrote a file of a checkpoint: Megatron names its shards __<rank>_<number>.distcp."""
    number = name.removeprefix("__").partition("_")[0]
    return int(number) if name.startswith("__") and number.isdigit() else 0


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `loop`: containers, numbers, text, numpy arrays and tensors.

    Raises:
        UserError: `state` holds something else.
        OSError: it cannot be written.
    """
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch raises it on a full disk
        raise OSError(str(error)) from None
    read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote. Raises UserError if it cannot be read, or reading it would have to run code."""
    try:
        with torch.serialization.safe_globals(_NUMPY):
            state: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise UserError(f"'{path}' cannot be read: {reason(error)}") from None
    if not isinstance(state, dict) or not isinstance(state.get("loop"), dict):
        raise UserError(f"'{path}' does not hold the state of a run")
    return state
