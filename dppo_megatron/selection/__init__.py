"""All the choosing of a step: order, prompt policy, advantages, completion policy, weights, ledger.

`arrays` is what goes in and out, `coefficients` what a completion counts before any is dropped, `selector` the order of
the choices and the state between steps. No model, no process group and no text: the training loop runs it on rank 0,
and `dppo-megatron simulate` on a recorded trace.
"""

from dppo_megatron.selection.arrays import PromptDraw, Rollouts, TrainSelection
from dppo_megatron.selection.selector import Selector

__all__ = ["PromptDraw", "Rollouts", "Selector", "TrainSelection"]
