"""All selection of a step: `arrays` holds its inputs and outputs, `coefficients` computes advantages and divisors
before anything is dropped, `selector` orders the choices and keeps the state between steps."""

from dppo_megatron.selection.arrays import PromptDraw, Rollouts, TrainSelection
from dppo_megatron.selection.selector import Selector

__all__ = ["PromptDraw", "Rollouts", "Selector", "TrainSelection"]
