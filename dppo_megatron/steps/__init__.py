"""A training step: its phases, what rank 0 decides in each, and what it records."""
