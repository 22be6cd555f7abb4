"""Shortcuts of the `math` grader change no verdict."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dppo_megatron.rewards.math import clean as cleaning


@pytest.mark.parametrize("rule", cleaning._RULES, ids=lambda rule: rule[1].pattern[:40])
def test_a_rule_matches_only_where_what_it_needs_stands(rule: tuple[str, re.Pattern[str], str]) -> None:
    """Texts made from the pattern itself: one that has a match and not the need would not be cleaned."""
    needs, pattern, _ = rule

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.from_regex(pattern))
    def check(text: str) -> None:
        assert needs in text or not pattern.search(text), text

    check()
