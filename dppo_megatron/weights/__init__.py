"""Hugging Face tensors <-> Megatron shards: one table of names and shapes for files and for the weight sync."""

from dppo_megatron.platform import prepare

prepare()  # makes Megatron importable for `sharded`, without importing it
