"""Settings of grading: which functions say how good a completion is, and what their failures may cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from dppo_megatron.config.ranges import SECONDS, ranged


@dataclass
class RewardFunctionConfig:
    """One of several named rewards."""

    function: str = ""
    """A built-in grader (math, final_answer) or `module:function`."""
    weight: float = ranged(1.0, "[-1e9, 1e9]")
    """The reward is the weighted sum over the named ones."""


@dataclass
class RewardConfig:
    function: str = "math"
    """Grader: a built-in name (math, final_answer) or `module:function`, called as function(completion_text, answer)
    or function(completion_text, answer, row), in processes of its own. Returns a number or a `Grade`."""
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    """Several named rewards instead of the one in `function`; the first one decides what counts as correct."""
    correct_from: float = ranged(1.0, "[-1e9, 1e9]")
    """A completion counts as correct in evaluations from this reward on."""
    timeout_s: float = ranged(30.0, SECONDS)
    """A grading that takes longer is given up and its process replaced; it counts in reward/failed, not as a 0."""
    processes: int = ranged(1, "[1, 1024]")
    """Grader processes of each rank."""
    memory_mb: int = ranged(2048, "[0, 100000000]")
    """Address space that a grader process may take beyond what it starts with; 0: no limit."""
    min_self_consistency: float = ranged(0.99, "[0, 1]")
    """At start the references are graded as if they were answers; if fewer than this share are right the run does not
    begin and the rows are listed. 0: no check."""
    max_failed_share: float = ranged(0.1, "[0, 1]")
    """A step in which more than this share of gradings failed stops the run with exit code 3. 1: never."""
