"""Dense sequence packing: from lengths to micro-batches, on one rank, deterministically."""
