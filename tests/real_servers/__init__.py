"""A package, so that the servers of conftest.py end after its last test and not after the whole suite."""
