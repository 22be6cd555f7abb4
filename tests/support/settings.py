"""Settings of one section, written the way a user writes them: dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dppo_megatron.config.rollout import RolloutConfig


def rollout_config(values: Mapping[str, Any]) -> RolloutConfig:
    """`{"engine": "vllm", "sync.channel": "disk"}` as a `RolloutConfig`, unchecked."""
    config = RolloutConfig()
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        target = getattr(config, section) if section else config
        assert hasattr(target, name), key
        setattr(target, name, value)
    return config
