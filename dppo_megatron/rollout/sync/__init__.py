"""Weights into servers: channels, one whole sync, and receipts that the bytes have arrived."""
