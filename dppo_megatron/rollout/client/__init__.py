"""The rollout client: a process on each node that asks servers, reads their answers and keeps the tokens."""
