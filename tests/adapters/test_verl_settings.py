"""The settings of verl's own default files have answers here (docs/migrating.md)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dppo_megatron.config.other_names import other_name
from dppo_megatron.config.reference import all_keys

SPEC = importlib.util.find_spec("verl")
if SPEC is None or SPEC.origin is None:
    pytest.skip("`make test-adapters` runs it", allow_module_level=True)
DEFAULTS = Path(SPEC.origin).parent / "trainer" / "config"
CLASS = "_target_"
"""Names the class of a section; no job sets it."""


def _keys(values: Any, key: str = "") -> Iterator[str]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from _keys(value, f"{key}.{name}" if key else name)
    else:
        yield key


@pytest.mark.parametrize("name", ["_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml"])
def test_keys_of_the_default_files_are_answered(name: str) -> None:
    """19 of 20, so that a release with some new settings passes; of 0.9.1 more than 99 in 100 are."""
    values = yaml.safe_load((DEFAULTS / name).read_text(encoding="utf-8"))
    keys = [key for key in _keys(values) if not key.endswith(CLASS)]
    unanswered = [key for key in keys if not other_name(key) and key not in all_keys()]
    assert len(keys) > 500 and len(unanswered) < 0.05 * len(keys), unanswered
