"""Dense sequence packing: turns sequence lengths into micro-batches, on one rank, deterministically."""
