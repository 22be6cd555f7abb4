"""The Megatron-core actor: layout, model, packed attention, log-probabilities, loss hook, optimizer step.

Importing this package imports Megatron, so it first makes Megatron importable on a CPU.
"""

from dppo_megatron.platform import prepare

prepare()
