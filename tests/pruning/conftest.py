"""GRESO's constants, which `label_configs.make_config` draws, are the package's again after each test."""

from __future__ import annotations

import pytest
from label_configs import GRESO

from dppo_megatron.pruning import prompt_baselines


@pytest.fixture(autouse=True)
def _own_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GRESO:
        monkeypatch.setattr(prompt_baselines, name, getattr(prompt_baselines, name))
