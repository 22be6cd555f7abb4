"""Settings of grading: which functions reward a completion, their limits, and how many gradings may fail."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from dppo_megatron.config.ranges import SECONDS, ranged
from dppo_megatron.types import UserError

_RESERVED = ("mean", "mean_se", "failed", "failed_count", "timeouts", "parsed_share", "boxed_share")
"""Metrics reward/<name> that exist already, so that no reward function can have these names."""


@dataclass
class RewardFunctionConfig:
    """One of several named rewards."""

    function: str = ""
    """A built-in grader (math, math_boxed, final_answer) or `module:function`."""
    weight: float = ranged(1.0, "[-1e9, 1e9]")
    """Weight of this reward in the sum of all named rewards; 0: only a metric."""


@dataclass
class SetRewardConfig:
    """Rewards of one set. A setting that is null is taken from that of the same name in `reward`, explained there. But
    a set that names functions of its own uses none of `reward`'s."""

    page = "rewards.md"
    function: str | None = None
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    correct_from: float | None = ranged(None, "[-1e9, 1e9]")
    timeout_s: float | None = ranged(None, SECONDS)
    processes: int | None = ranged(None, "[0, 1024]")
    max_concurrent: int | None = ranged(None, "[1, 100000]")
    max_per_minute: int | None = ranged(None, "[0, 1000000000]")
    max_failures_in_a_row: int | None = ranged(None, "[0, 1000000000]")
    memory_mb: int | None = ranged(None, "[0, 100000000]")
    min_self_consistency: float | None = ranged(None, "[0, 1]")
    max_failed_share: float | None = ranged(None, "[0, 1]")

    def over(self, general: RewardConfig) -> RewardConfig:
        """All settings of the set's rewards; those that it leaves out are taken from `general`."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        own = {name: value for name, value in named.items() if value is not None and value != {}}
        return replace(general, **{"functions": {}} | own if "function" in own else own)


@dataclass
class RewardConfig:
    page = "rewards.md"
    function: str = "math"
    """Grader: a built-in name (math, math_boxed, final_answer) or `module:function`, which returns a number or a
    `Grade`. It runs in separate processes and is called as function(completion, answer); depending on the names of its
    parameters it gets more arguments, lists, or the arguments of verl or TRL. May be `async def`."""
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    """Several named rewards instead of the one in `function`; each is a metric reward/<name>. The first one decides
    what counts as correct in evaluations and in the check of the references."""
    correct_from: float = ranged(1.0, "[-1e9, 1e9]")
    """A completion is correct from this reward on. Of several named rewards the first decides, before its weight."""
    timeout_s: float = ranged(30.0, SECONDS, free_at_resume=True)
    """A grading that takes longer is ended and its process replaced. It counts as failed, not as reward 0."""
    processes: int = ranged(0, "[0, 1024]", free_at_resume=True)
    """Grader processes per rank; with rollout servers, the ranks of a node share theirs. 0: one of a built-in
    grader, or one that is `async def` or takes lists; of any other the node's cores divided by its ranks, but at most
    16, as each imports the grader. The start logs how many."""
    max_concurrent: int = ranged(256, "[1, 100000]", free_at_resume=True)
    """Most gradings in progress in each process of an `async def` grader; also the most completions in one call of a
    grader that takes lists."""
    max_per_minute: int = ranged(0, "[0, 1000000000]", free_at_resume=True)
    """Most gradings that the whole job starts in any minute, for a judge with a rate limit; 0: no limit. Sets with
    rewards of their own have their own limit."""
    max_failures_in_a_row: int = ranged(0, "[0, 1000000000]", free_at_resume=True)
    """After this many consecutive failures in a rank, all gradings that are waiting count as failed without a try, so
    that a judge that is down does not cost an hour of timeouts. Later gradings are tried again. 0: never."""
    memory_mb: int = ranged(2048, "[0, 100000000]", free_at_resume=True)
    """Writable memory, in MB, that a grader process may use beyond what it has once the grader is imported
    (RLIMIT_DATA). A grading that needs more counts as failed. 0: no limit."""
    min_self_consistency: float = ranged(0.99, "[0, 1]", free_at_resume=True)
    """At start, up to 2,000 reference answers of each set are graded as if the model had given them. If fewer than this
    share are correct, the run does not begin and lists rows. 0: no check, for graders that use no reference."""
    max_failed_share: float = ranged(0.1, "[0, 1]", free_at_resume=True)
    """If more than this share of a step's gradings fail, and more than one of them, the run stops with exit code 3.
    Completions that were never sampled to their end count as failed too. 0: a single failure stops it. 1: never."""
    cross_check: float = ranged(0.0, "[0, 1]", free_at_resume=True)
    """Share of rank 0's gradings that Math-Verify repeats, off the training path; disagreement is a metric and changes
    no reward. Only with `function` math or math_boxed, not in sets with rewards of their own. Needs math-verify."""


def check_reward(reward: RewardConfig, key: str = "reward") -> None:
    """Raise `UserError` for clashing names and missing functions. Whether a function can be imported turns out later,
    when the grader processes start.

    Args:
        key: the section that holds the settings.
    """
    if not reward.functions and not reward.function.strip():
        raise UserError(f"{key}.function = '': must not be empty; use a built-in grader (math) or module:function")
    if key == "reward" and reward.cross_check and (reward.functions or reward.function not in ("math", "math_boxed")):
        raise UserError(
            f"reward.cross_check = {reward.cross_check:g} compares the built-in graders math and math_boxed with"
            " Math-Verify; another reward needs reward.cross_check=0"
        )
    for name, item in reward.functions.items():
        if name in _RESERVED:
            raise UserError(f"{key}.functions.{name}: reward/{name} is already a metric; choose another name")
        if not item.function:
            raise UserError(f"{key}.functions.{name}.function is not set: a built-in grader or module:function")
