"""The parts of benchmarks/data_plane.py: each has a `run(smoke)` that returns its bars."""
