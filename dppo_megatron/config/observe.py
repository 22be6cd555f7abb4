"""Settings of what a run leaves for people to look at. None of them changes what is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from dppo_megatron.config.ranges import COUNT, ranged


@dataclass
class SamplesConfig:
    """The groups of each step in `samples/` of the run directory, as parquet (docs/run_directory.md)."""

    share: float = ranged(1.0, "[0, 1]")
    """Share of a step's groups that is written, drawn anew for each step."""
    fixed_share: float = ranged(0.0, "[0, 1]")
    """Share of the prompts whose groups are written beside those, whenever they come up: the same ones all the time, so
    that what becomes of one prompt can be followed."""
    max_mb_per_step: float = ranged(16.0, "(0, 1e6]")
    """Bound of a step's samples of all ranks together, before compression. Prompts of `fixed_share` come first."""
    max_gb: float = ranged(2.0, "(0, 1e9]")
    """Bound of `samples/` on the disk. The oldest steps go first; each rank has an equal part of it."""


@dataclass
class ObserveConfig:
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    """Prompts, completions and what became of them."""
    noise_scale_every_steps: int = ranged(32, COUNT)
    """Every so many steps the gradient of a random half of an update's prompts is taken too, which costs about one more
    update: with it the log can say how many prompts a step should have. 0: never."""
