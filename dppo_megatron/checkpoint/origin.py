"""Chooses the checkpoint that a run resumes from, or none, and refuses one whose settings or data differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dppo_megatron.checkpoint.checkpoint_dir import LOOP, read_manifest
from dppo_megatron.checkpoint.store import VERSIONS, CheckpointStore, check, read_state
from dppo_megatron.config.changes import check_changes, saved_values
from dppo_megatron.config.schema import Config
from dppo_megatron.distributed import from_rank_zero
from dppo_megatron.types import UserError


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a run resumes or begins from."""

    directory: Path
    step: int
    own: bool
    """Whether this run wrote it; else another run did, and this run begins from it."""
    record_sums: dict[str, dict[int, int]]
    """CRC-32 of each line of the run's logs when it was written, by file and step."""
    data_changes: tuple[str, ...]
    """A line for each problem set that has changed in a way that is allowed, and each library of another version."""


DataCheck: TypeAlias = Callable[[Mapping[str, Any], str], list[str]]
"""Compares a checkpoint's data fingerprint with the current data. Takes the fingerprint and the checkpoint's path, and
returns a line for each allowed difference. Raises UserError for a difference that is not allowed."""


def find_origin(config: Config, store: CheckpointStore, check_data: DataCheck) -> Origin | None:
    """The newest good checkpoint of this run, else the one that `checkpoint.resume` names; None: the run starts anew.

    Newer directories with a checkpoint's name that are damaged or of another run are moved to `aside/`. Collective.

    Raises:
        UserError: there are checkpoints but none can be used, or the chosen one has different settings or more steps.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    newest, passed_over = store.find_newest()
    if newest is not None:
        theirs, own = Path(resume).resolve(), newest.resolve()
        if resume != "auto" and theirs.parent == own.parent and theirs != own:
            raise UserError(
                f"checkpoint.resume = '{resume}': is an older checkpoint of run_dir itself, whose newest is"
                f" {newest.name}. To go back, begin another run_dir from it, or move the newer ones away"
            )
        origin = _accept(newest, config, check_data, own=True)
        for path, why in passed_over:
            store.put_aside(path, why)
        return origin
    if passed_over:
        raise UserError(_none_is_good(config, passed_over))
    if resume == "auto":
        return None
    if wrong := check(Path(resume)):
        raise UserError(f"checkpoint.resume = '{resume}': is not a good checkpoint: {wrong}")
    return _accept(Path(resume), config, check_data, own=False)


def changes_since(config: Config, mine: Path) -> list[str]:
    """A line for each setting that differs from `mine`, the run's own config.yaml; none if that does not exist. Raises
    UserError if a setting differs that may not change."""
    if config.checkpoint.resume == "never" or not mine.exists():
        return []
    return check_changes(config, saved_values(mine), str(mine))


def _accept(directory: Path, config: Config, check_data: DataCheck, *, own: bool) -> Origin:
    def read() -> Origin:
        """Called on rank 0 only, so that the files are read once."""
        manifest = read_manifest(directory)
        if isinstance(manifest, str):  # the caller has just found it intact
            raise UserError(f"checkpoint '{directory}' has changed while it was read: {manifest}")
        check_changes(config, manifest.config, str(directory))
        if manifest.step > config.steps:
            raise UserError(f"steps = {config.steps}: {directory} has done {manifest.step}; set steps to that or more")
        changes = check_data(manifest.data, str(directory))
        before = manifest.versions  # other libraries may round otherwise: the run is then not the same bit for bit
        changes += [f"{name}: {before.get(name)} -> {now}" for name, now in VERSIONS.items() if before.get(name) != now]
        sums = read_state(directory / LOOP)["loop"].get("record", {}) if own else {}
        return Origin(directory, manifest.step, own, sums, tuple(changes))

    return from_rank_zero(read)


def _none_is_good(config: Config, passed_over: Sequence[tuple[Path, str]]) -> str:
    listed = "; ".join(f"{path.name}: {why}" for path, why in passed_over[:4])
    more = f"; and {len(passed_over) - 4} more" if len(passed_over) > 4 else ""
    where = passed_over[0][0].parent
    return (
        f"run_dir = '{config.run_dir}': none of its checkpoints can be resumed from: {listed}{more}. To begin again,"
        f" move them out of {where}; to begin from another run's, set checkpoint.resume to it in a new run_dir"
    )
