"""Hugging Face tensors <-> Megatron shards: one table of names and shapes for files and for the live sync."""

from dppo_megatron.platform import prepare

prepare()  # `sharded` imports Megatron; this only makes that possible and imports nothing itself
