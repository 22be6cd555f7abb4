"""Settings of what a run records for people to look at. None of them changes what is trained."""

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
    """The groups of each step, written to `samples/` of the run directory as parquet (docs/run_directory.md)."""

    share: float = ranged(1.0, "[0, 1]")
    """Share of a step's groups that is written, chosen at random in each step."""
    max_mb_per_step: float = ranged(16.0, "(0, 1e6]")
    """Most MB of samples in one step, over all ranks, before compression."""
    max_gb: float = ranged(2.0, "(0, 1e9]")
    """Most GB that `samples/` takes on disk, shared equally between ranks. The oldest steps are deleted first."""


@dataclass
class TrackingConfig:
    """What is sent to the trackers of `observe.trackers` (docs/observe.md). Credentials come from the environment."""

    project: str = "dppo-megatron"
    """Project (wandb, trackio) or experiment (mlflow)."""
    name: str = ""
    """Name of the run; empty: the last part of run_dir and the first six digits of the run's id."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run, as plain words."""
    offline: bool = False
    """Nothing leaves the machine: wandb and mlflow write to the run directory, for `wandb sync` or a later import.
    tensorboard always does, and trackio does unless its environment names a server."""
    samples_every: int = ranged(10, COUNT)
    """Send a table of 16 samples every this many steps; 0: never."""
    drain_s: float = ranged(60.0, SECONDS)
    """How long the end of a run waits for a tracker that has not yet sent everything."""


@dataclass
class ObserveConfig:
    page = "observe.md"
    free_at_resume = True
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    """Prompts and completions with their rewards and selection."""
    trace_max_gb: float = ranged(2.0, "(0, 1e9]")
    """Most GB of `trace.jsonl` on disk; then its older half is removed. 512 x 16 rollouts take 0.18 MB."""
    noise_scale_every_steps: int = ranged(32, COUNT)
    """Every this many steps, also compute the gradient of a random half of an update's prompts (about one more update),
    to measure its noise scale. 0: never. Not with actor.fp8=delayed, whose scales would change."""
    trackers: list[TrackerName] = field(default_factory=list)
    """Where metrics go besides the run directory: any of tensorboard, wandb, mlflow, trackio."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """What is sent to those trackers."""
    timeline: int = ranged(0, COUNT)
    """Write `timeline/` (docs/observe.md) for this many steps after a start or a resume. 0: none."""
    timeline_every: int = ranged(0, COUNT)
    """Write `timeline/` for every this many-th step too, so that a long run has late ones. 0: none."""
    profile_steps: list[int] = ranged([], "[1, 1e9]")
    """Steps that torch's profiler records, in `profile/`. It slows them down."""
    profile_ranks: list[int] = ranged([0], "[0, 1e6]")
    """Ranks that the profiler runs on; empty: all. One rank's file for one step can be a hundred MB."""


def check_observe(observe: ObserveConfig) -> None:
    """Raise `UserError` for a tracker that is named twice, is not installed, or would prompt for a login mid-run."""
    if len(set(observe.trackers)) < len(observe.trackers):
        raise UserError(f"observe.trackers = {observe.trackers}: one is named twice")
    for name in observe.trackers:
        package = "mlflow-skinny" if name == "mlflow" else name
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a ./wandb directory of earlier runs is found as a namespace package
            raise UserError(
                f"observe.trackers: {name} needs the package {package}, which is not installed;"
                f" pip install {package}, or 'dppo-megatron[trackers]' for all of them"
            )
    if not observe.tracking.project:
        raise UserError("observe.tracking.project is empty; give it a name, such as dppo-megatron")
    if "wandb" in observe.trackers and not observe.tracking.offline and not _can_log_in_to_wandb():
        raise UserError(
            "observe.trackers: wandb has no credentials: set WANDB_API_KEY, or run `wandb login` once, or stay offline"
            " with observe.tracking.offline=true"
        )


def _can_log_in_to_wandb() -> bool:
    """Whether credentials are configured. Uses neither the network nor wandb, which could prompt on the terminal."""
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
