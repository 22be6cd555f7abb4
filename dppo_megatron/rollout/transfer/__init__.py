"""Bytes between two processes: broadcast groups and shared memory. The ground of the rollout wing."""
