"""Settings of what a run leaves for people to look at. None of them changes what is trained."""

from __future__ import annotations

import importlib.util
import netrc
import os
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from dppo_megatron.config.ranges import COUNT, SECONDS, ranged
from dppo_megatron.types import UserError

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass
class SamplesConfig:
    """The groups of each step in `samples/` of the run directory, as parquet (docs/run_directory.md)."""

    share: float = ranged(1.0, "[0, 1]")
    """Share of a step's groups that is written, drawn anew for each step."""
    max_mb_per_step: float = ranged(16.0, "(0, 1e6]")
    """Bound of a step's samples of all ranks together, before compression."""
    max_gb: float = ranged(2.0, "(0, 1e9]")
    """Bound of `samples/` on the disk. The oldest steps go first; each rank has an equal part of it."""


@dataclass
class TrackingConfig:
    """What all trackers of `observe.trackers` are told (docs/observe.md). Credentials come from the environment."""

    project: str = "dppo-megatron"
    """Project (wandb, trackio) or experiment (mlflow)."""
    name: str = ""
    """Name of the run; empty: the last part of run_dir and the first six digits of the run's id."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run, as plain words."""
    offline: bool = False
    """Nothing leaves the machine: wandb and mlflow write to the run directory, for `wandb sync` or a later import.
    tensorboard always does, trackio unless its environment names a server."""
    samples_every: int = ranged(10, COUNT)
    """Send a table of 16 samples at every so many-th step; 0: never."""
    drain_s: float = ranged(60.0, SECONDS)
    """How long the end of a run waits for a tracker that is behind."""


@dataclass
class ObserveConfig:
    page = "observe.md"
    free_at_resume = True
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    """Prompts, completions and what became of them."""
    trace_max_gb: float = ranged(2.0, "(0, 1e9]")
    """Bound of `trace.jsonl` on the disk; when it is full its older half goes. 512 x 16 rollouts have 0.18 MB."""
    noise_scale_every_steps: int = ranged(32, COUNT)
    """Every so many steps the gradient of a random half of an update's prompts is taken too, which costs about one more
    update: with it the log can say how many prompts a step should have. 0: never. Not with
    actor.fp8 = delayed, whose scales it would move."""
    trackers: list[TrackerName] = field(default_factory=list)
    """Where metrics go beside the run directory: any of tensorboard, wandb, mlflow, trackio."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """What those trackers are told."""
    timeline: int = ranged(0, COUNT)
    """Write `timeline/` (docs/observe.md) for this many steps from the start or a resume on. 0: for none."""
    timeline_every: int = ranged(0, COUNT)
    """And for every so many-th step, so that a long run has a late one too. 0: for none."""
    profile_steps: list[int] = ranged([], "[1, 1e9]")
    """Steps that torch's profiler records, in `profile/`. It slows them down."""
    profile_ranks: list[int] = ranged([0], "[0, 1e6]")
    """Ranks that it runs on; empty: all. A rank's file of one step can have a hundred MB."""


def check_observe(observe: ObserveConfig) -> None:
    """Raise `UserError` for a tracker that is not installed, named twice, or would ask for a login in mid-run."""
    if len(set(observe.trackers)) < len(observe.trackers):
        raise UserError(f"observe.trackers = {observe.trackers}: one is named twice")
    for name in observe.trackers:
        package = "mlflow-skinny" if name == "mlflow" else name
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a directory ./wandb of earlier runs looks like a package without code
            raise UserError(
                f"observe.trackers: {name} needs the package {package}, which is not installed;"
                f" pip install {package}, or 'dppo-megatron[trackers]' for all of them"
            )
    if not observe.tracking.project:
        raise UserError("observe.tracking.project is empty; give it a name, such as dppo-megatron")
    if "wandb" in observe.trackers and not observe.tracking.offline and not _can_log_in_to_wandb():
        raise UserError(
            "observe.trackers: wandb has no credentials: set WANDB_API_KEY, or run `wandb login` once, or keep to this"
            " machine with observe.tracking.offline=true"
        )


def _can_log_in_to_wandb() -> bool:
    """Without asking the network, and without wandb's own question on a terminal."""
    environment = os.environ
    if environment.get("WANDB_MODE", "online") != "online":
        return True
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        return netrc.netrc(environment.get("NETRC") or os.path.expanduser("~/.netrc")).authenticators(host) is not None
    except (OSError, ValueError, netrc.NetrcParseError):
        return False
