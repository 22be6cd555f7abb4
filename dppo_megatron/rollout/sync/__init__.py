"""Sends weights to servers: the channels, a whole sync, and proofs that servers hold the weights."""
