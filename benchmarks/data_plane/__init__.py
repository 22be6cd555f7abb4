"""The parts of `benchmarks/data_plane.py`, a module each."""
