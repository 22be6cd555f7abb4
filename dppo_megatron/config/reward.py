"""Settings of grading: which functions reward a completion, their limits, and how many may fail."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from dppo_megatron.config.ranges import SECONDS, ranged
from dppo_megatron.types import UserError

_TAKEN = ("mean", "failed", "failed_count", "timeouts", "parsed_share", "boxed_share")
"""Names of metrics under reward/."""


@dataclass
class RewardFunctionConfig:
    """One of several named rewards."""

    function: str = ""
    """A built-in grader (math, math_boxed, final_answer) or `module:function`."""
    weight: float = ranged(1.0, "[-1e9, 1e9]")
    """The reward is the weighted sum over the named ones; 0: only a metric."""


@dataclass
class SetRewardConfig:
    """Rewards of one set. Where a setting is null, that of the same name in `reward` holds, which also explains it. A
    set that names functions has none of `reward`'s."""

    page = "rewards.md"
    function: str | None = None
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    correct_from: float | None = ranged(None, "[-1e9, 1e9]")
    timeout_s: float | None = ranged(None, SECONDS)
    processes: int | None = ranged(None, "[1, 1024]")
    max_concurrent: int | None = ranged(None, "[1, 100000]")
    max_per_minute: int | None = ranged(None, "[0, 1000000000]")
    max_failures_in_a_row: int | None = ranged(None, "[0, 1000000000]")
    memory_mb: int | None = ranged(None, "[0, 100000000]")
    min_self_consistency: float | None = ranged(None, "[0, 1]")
    max_failed_share: float | None = ranged(None, "[0, 1]")

    def over(self, general: RewardConfig) -> RewardConfig:
        """All settings of the set's rewards, those that it leaves out as `general` has them."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        said = {name: value for name, value in named.items() if value is not None and value != {}}
        return replace(general, **{"functions": {}} | said if "function" in said else said)


@dataclass
class RewardConfig:
    page = "rewards.md"
    function: str = "math"
    """Grader: a built-in name (math, math_boxed, final_answer) or `module:function`, called in processes of its own as
    function(completion, answer) or, by the names of its parameters, with more, with lists, or as in verl or TRL; `async
    def` too. Returns a number or a `Grade`."""
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    """Several named rewards instead of the one in `function`; each is a metric reward/<name>. The first one decides
    what counts as correct in evaluations and in the check of the references."""
    correct_from: float = ranged(1.0, "[-1e9, 1e9]")
    """A completion counts as correct from this reward on; of several named rewards, the first one before its weight."""
    timeout_s: float = ranged(30.0, SECONDS, free_at_resume=True)
    """A grading that takes longer is given up and its process replaced; it counts in reward/failed_count, not as a
    0."""
    processes: int = ranged(1, "[1, 1024]", free_at_resume=True)
    """Grader processes of each rank; with servers a node's ranks share theirs. One does a step's 512 gradings by a
    built-in grader in milliseconds; a slow one, which runs code, say, is worth as many as the rank has cores, if their
    memory suffices."""
    max_concurrent: int = ranged(256, "[1, 100000]", free_at_resume=True)
    """Gradings that an `async def` grader has open at a time in each process; also the most completions in a call of a
    grader that takes lists."""
    max_per_minute: int = ranged(0, "[0, 1000000000]", free_at_resume=True)
    """Gradings of the whole job that begin in any minute, for a judge with such a limit; 0: no limit. Sets with rewards
    of their own have a limit of this each."""
    max_failures_in_a_row: int = ranged(0, "[0, 1000000000]", free_at_resume=True)
    """After so many failures in a row in a rank, what waits has failed too, ungraded: a judge that is down costs no
    hour of timeouts. What comes later is tried again. 0: never."""
    memory_mb: int = ranged(2048, "[0, 100000000]", free_at_resume=True)
    """Writable memory that a grader process may take beyond what it has when the grader is imported (RLIMIT_DATA);
    0: no limit. A grading that needs more is a failure."""
    min_self_consistency: float = ranged(0.99, "[0, 1]", free_at_resume=True)
    """At start up to 2,000 references of each set are graded as if they were answers; if fewer than this share are
    right the run does not begin and rows are listed. 0: no check, for a grader that is not about references."""
    max_failed_share: float = ranged(0.1, "[0, 1]", free_at_resume=True)
    """A step in which more than this share of the gradings failed, and more than one, stops the run with exit code 3;
    completions that were never sampled to their end count too. 0: a single one does. 1: never."""
    cross_check: float = ranged(0.0, "[0, 1]", free_at_resume=True)
    """Share of rank 0's gradings that Math-Verify grades too, beside the training; that it disagrees is a metric, no
    reward. For `function` math and math_boxed, and not in sets with rewards of their own; math-verify must be
    installed."""


def check_reward(reward: RewardConfig, key: str = "reward") -> None:
    """Raise `UserError` for clashing names and missing functions. Whether a function can be imported is found later,
    when the grader processes start.

    Args:
        key: the section that holds the settings.
    """
    if not reward.functions and not reward.function.strip():
        raise UserError(f"{key}.function = '': must not be empty; a built-in grader (math) or module:function")
    if key == "reward" and reward.cross_check and (reward.functions or reward.function not in ("math", "math_boxed")):
        raise UserError(
            f"reward.cross_check = {reward.cross_check:g} compares the built-in graders math and math_boxed with"
            " Math-Verify; another reward needs reward.cross_check=0"
        )
    for name, item in reward.functions.items():
        if name in _TAKEN:
            raise UserError(f"{key}.functions.{name}: reward/{name} is another metric; choose another name")
        if not item.function:
            raise UserError(f"{key}.functions.{name}.function is not set: a built-in grader or module:function")
