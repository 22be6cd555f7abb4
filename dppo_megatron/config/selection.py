"""Checks across the pruning, objective and rollout sections: how many prompts a step plans, and whether they suffice.

Each section checks itself; these contradictions show only between sections. The training job checks them before
anything is loaded, and `Selector` checks again because tests and libraries make one without a job.
"""

from __future__ import annotations

import math

from dppo_megatron.config.pruning import prompts_multiplier
from dppo_megatron.config.schema import Config
from dppo_megatron.types import UserError


def planned_prompts(config: Config) -> int:
    """Nominal prompts of a step: `rollout.prompts_per_step`, or floor of it / (1 - rate) with CPPO's allocation.

    Example: 16 prompts at rate 0.95 plan 16 / 0.05 = 320, where floating point has 319.
    """
    return math.floor(config.rollout.prompts_per_step * prompts_multiplier(config.pruning.completion))


def check_selection(config: Config) -> None:
    """Check the sections against each other.

    Raises:
        UserError: the key path, what is wrong with its value, and what would be right.
    """
    planned, updates = planned_prompts(config), config.objective.updates_per_step
    by_allocation = " by pruning.completion.allocation" if planned != config.rollout.prompts_per_step else ""
    if updates < 1 or planned % updates:
        raise UserError(
            f"objective.updates_per_step = {updates}: the {planned} nominal prompts of a step{by_allocation} do not"
            " divide by it, and mini-batches hold whole groups"
        )


def too_few_prompts(config: Config, num_prompts: int, where: str = "the prompt set") -> str:
    """Why `num_prompts` are not enough; empty if they are.

    A step that planned N prompts but found only P would still divide by N: a bias that no ledger label shows.
    """
    planned = planned_prompts(config)
    if num_prompts >= planned:
        return ""
    nominal = config.rollout.prompts_per_step
    how = "" if planned == nominal else f", of which pruning.completion.allocation makes {planned}"
    return (
        f"rollout.prompts_per_step = {nominal}{how}, but {where} holds only {num_prompts} problems: a step needs as"
        " many different ones as it plans"
    )
