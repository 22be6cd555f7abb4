"""What every test needs, and no more: one thread for each process, megatron-core prepared, GPU tests skipped aloud."""

import os

# Before torch: ranks are forked from this process, and an OpenMP pool does not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from dppo_megatron import platform

torch.set_num_threads(1)
platform.prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False"))
