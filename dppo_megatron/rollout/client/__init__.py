"""The rollout client: a process on each node that sends requests, reads the servers' answers and keeps the tokens."""
