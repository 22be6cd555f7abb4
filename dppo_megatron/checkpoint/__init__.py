"""Saving and resuming a run through Megatron's distributed checkpoints."""

from dppo_megatron.platform import prepare

prepare()
