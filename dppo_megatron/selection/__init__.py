"""All the choosing of a step: `arrays` is what goes in and out, `coefficients` what a completion counts before any is
dropped, `selector` the order of the choices and the state between steps."""

from dppo_megatron.selection.arrays import PromptDraw, Rollouts, TrainSelection
from dppo_megatron.selection.selector import Selector

__all__ = ["PromptDraw", "Rollouts", "Selector", "TrainSelection"]
