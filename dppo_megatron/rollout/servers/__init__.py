"""Servers that generate completions: each engine's protocol, each server's state, and which one gets a request."""
