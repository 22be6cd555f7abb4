"""Grading of completions."""
