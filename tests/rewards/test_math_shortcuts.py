"""Shortcuts of the `math` grader change no verdict: each is held against the long way."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dppo_megatron.rewards.math import clean as cleaning
from dppo_megatron.rewards.math import extract as finding
from dppo_megatron.rewards.math.extract import extract

_MARKS = r"{ } [ ] ( ) $ \ , ; : = < > | ^ _ ! % ' & - + * / . ~ 0 1 2 5 x y e R \\ \, \! \; \% \$ \boxed{ \fbox{"
_MACROS = r"\frac \dfrac \sqrt \left \right \text{ \textbf{ \mathrm{ \mbox \circ \le \leq \neq \cdot \times \mathbb{R}"
_MORE = r"\infty \dot \binom \choose \pm \cup \mid \ldots \vec{ thinspace and or st th Option Answer the is USD boxed"
PIECES = [" ", *f"{_MARKS} {_MACROS} {_MORE} <think> </think> <answer> #### answer".split(" ")]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@pytest.mark.parametrize("rule", cleaning._RULES, ids=lambda rule: rule[1].pattern[:40])
def test_a_rule_matches_only_where_what_it_needs_stands(rule: tuple[str, re.Pattern[str], str]) -> None:
    """Texts made from the pattern itself: one that has a match and not the need would not be cleaned."""
    needs, pattern, _ = rule

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.from_regex(pattern))
    def check(text: str) -> None:
        assert needs in text or not pattern.search(text), text

    check()


@settings(deadline=None, max_examples=300)
@given(before=TEXTS, inside=TEXTS, after=TEXTS)
def test_a_lone_box_is_found_as_any_box(before: str, inside: str, after: str) -> None:
    """Whatever stands in it and around it."""
    text = f"{before}\\boxed{{{inside}}}{after}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "_only_box", lambda text: None)
        long = extract(text)
    assert extract(text) == long
