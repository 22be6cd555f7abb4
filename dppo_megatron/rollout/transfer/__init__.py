"""Bytes between two processes: broadcast groups and shared memory."""
