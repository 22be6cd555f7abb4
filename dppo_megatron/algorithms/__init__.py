"""Advantages and policy losses: pure functions, each with its source. No Megatron, no process group."""
