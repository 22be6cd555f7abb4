"""The Megatron-core actor: layout, model, packed attention, log-probabilities, loss hook, optimizer step.

Importing this room imports Megatron, so it is also the place that makes Megatron importable on a CPU.
"""

from dppo_megatron.platform import prepare

prepare()
