"""`dppo-megatron watch`: a run in the terminal, from its files alone: over SSH, without a port, beside any trainer."""
