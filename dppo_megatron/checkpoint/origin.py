"""Where a run begins or resumes: the choice among its checkpoints, and everything that speaks against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dppo_megatron.checkpoint.manifest import LOOP, read_manifest
from dppo_megatron.checkpoint.state import read_state
from dppo_megatron.checkpoint.store import CheckpointStore, Found, check
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
    """This run wrote it; else another one did, and this run begins from it."""
    record_sums: dict[str, dict[int, int]]
    """What it remembers of its run's record: CRC-32 of each line, by file and step."""
    data_changes: tuple[str, ...]
    """A line for each problem set that is not what it was, where that is allowed."""


DataCheck: TypeAlias = Callable[[Mapping[str, Any], str], list[str]]
"""Compares the data that a checkpoint remembers with that of now: (fingerprint, checkpoint) to a line for each allowed
difference. Raises UserError for one that is not allowed."""


def find_origin(config: Config, store: CheckpointStore, check_data: DataCheck) -> Origin | None:
    """The newest good checkpoint of this run, else the one that `checkpoint.resume` names; None: the run begins.

    What stands in the way under the name of a newer checkpoint is put aside, with the reason. Collective.

    Raises:
        UserError: there are checkpoints and none can be used, or the chosen one is of other settings.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    found = store.look()
    if found.newest is not None:
        _refuse_an_older_own(resume, found.newest)
        origin = _accept(found.newest, config, check_data, own=True)
        for path, why in found.passed_over:
            store.put_aside(path, why)
        return origin
    if found.passed_over:
        raise UserError(_none_is_good(config, found))
    if resume == "auto":
        return None
    if wrong := check(Path(resume)):
        raise UserError(f"checkpoint.resume = '{resume}': is no good checkpoint: {wrong}")
    return _accept(Path(resume), config, check_data, own=False)


def changes_since(config: Config, mine: Path) -> list[str]:
    """A line for each setting that differs from `mine`, the run's own config.yaml, if it is there.

    Raises:
        UserError: a setting differs that may not.
    """
    if config.checkpoint.resume == "never" or not mine.exists():
        return []
    return check_changes(config, saved_values(mine), str(mine))


def _accept(directory: Path, config: Config, check_data: DataCheck, *, own: bool) -> Origin:
    def read() -> Origin:
        """On rank 0 alone: its files are looked at once, and the others are told."""
        manifest = read_manifest(directory)
        if isinstance(manifest, str):  # it was good a moment ago
            raise UserError(f"checkpoint '{directory}' has changed while it was read: {manifest}")
        check_changes(config, manifest.config, str(directory))
        changes = check_data(manifest.data, str(directory))
        sums = read_state(directory / LOOP)["loop"].get("record", {}) if own else {}
        return Origin(directory, manifest.step, own, sums, tuple(changes))

    return from_rank_zero(read)


def _refuse_an_older_own(resume: str, newest: Path) -> None:
    if resume == "auto" or Path(resume).resolve().parent != newest.resolve().parent:
        return
    if Path(resume).resolve() != newest.resolve():
        raise UserError(
            f"checkpoint.resume = '{resume}': is an older checkpoint of run_dir itself, whose newest is {newest.name}."
            " To go back, begin another run_dir from it, or move the newer ones away"
        )


def _none_is_good(config: Config, found: Found) -> str:
    listed = "; ".join(f"{path.name}: {why}" for path, why in found.passed_over[:4])
    more = f"; and {len(found.passed_over) - 4} more" if len(found.passed_over) > 4 else ""
    where = found.passed_over[0][0].parent
    return (
        f"run_dir = '{config.run_dir}': none of its checkpoints can be resumed from: {listed}{more}. To begin again,"
        f" move them out of {where}; to begin from another run's, set checkpoint.resume to it in a new run_dir"
    )
