"""Checks before a long job: what is installed, what the chip can do, and whether packing and FP8 are safe here."""
