"""What is compared: a method at a number of prompts a step, as settings of a job.

`grpo@32` is GRPO with 32 prompts a step. A baseline whose batch was never tuned is easy to beat: above the batch that
still shortens the run, half the prompts give the same in half the time, and a pruned run would be credited for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dppo_megatron.config.schema import Config
from dppo_megatron.pruning.policies import levels, method_overrides
from dppo_megatron.types import UserError

BASELINE = "grpo"
WITHOUT_ZEROS = "grpo_nonzero"
"""GRPO that does not train on completions without an advantage. They have no gradient, so it is GRPO, faster; what a
method is worth beyond it is what its draws are worth."""
_WITHOUT_ZEROS = (
    *method_overrides("grpo")[:1],
    "pruning.completion.method=dppo",
    "pruning.completion.allocation=false",
    "pruning.completion.max_design_effect=1",  # no growth of the variance: all that has gradient is kept
    "pruning.completion.fill_slack=false",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the comparison."""

    name: str
    """As the user wrote it: `dppo`, `grpo@32`."""
    method: str
    steps: int
    settings: tuple[str, ...]
    """Overrides of the job."""

    @property
    def directory(self) -> str:
        """Its part of a path: a plugin's name has a colon."""
        return self.name.replace(":", ".")


def parse_arms(names: str, config: Config, steps_factor: float) -> list[Arm]:
    """Arms from a list such as `grpo@16,grpo,dppo`.

    All see equally many prompts: at half the prompts a step there are twice the steps, and the evaluations between them
    are as many. Pruned methods may be given more.

    Args:
        steps_factor: the methods other than GRPO run this many times the steps. A pruned step is cheaper, and times
            are compared: at 1, a method that needs more but cheaper steps could not show its advantage.

    Raises:
        UserError: an unknown or repeated name, or a number of prompts that is no whole number.
    """
    given = [name.strip() for name in names.split(",") if name.strip()]
    if not given or len(set(given)) < len(given):
        raise UserError(f"--methods '{names}': expected different names, separated by commas")
    return [_arm(name, config, steps_factor) for name in given]


def _arm(name: str, config: Config, steps_factor: float) -> Arm:
    method, at, prompts_text = name.partition("@")
    if method != WITHOUT_ZEROS:
        levels(method)
    nominal = config.rollout.prompts_per_step
    if at and not (prompts_text.isdecimal() and int(prompts_text) > 0):
        raise UserError(f"--methods {name}: after @ stands the number of prompts a step, such as {method}@{nominal}")
    prompts = int(prompts_text) if at else nominal
    factor = steps_factor if method not in (BASELINE, WITHOUT_ZEROS) else 1.0
    scale = nominal / prompts
    steps = max(1, round(config.steps * factor * scale))
    every = max(1, round((config.eval.every_steps or max(1, config.steps // 16)) * scale))
    pruning = _WITHOUT_ZEROS if method == WITHOUT_ZEROS else tuple(method_overrides(method))
    settings = (f"steps={steps}", f"eval.every_steps={every}", f"rollout.prompts_per_step={prompts}", *pruning)
    return Arm(name, method, steps, settings)
