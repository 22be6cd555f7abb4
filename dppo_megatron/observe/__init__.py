"""Metrics, phase timers, progress and the closing table."""
