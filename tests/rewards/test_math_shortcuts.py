"""The shortcut of the extraction changes no answer: it is held against the long way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.rewards.math import extract as finding
from dppo_megatron.rewards.math.extract import extract

_MARKS = r"{ } [ ] ( ) $ \ , ; : = < > | ^ _ ! % ' & - + * / . ~ 0 1 2 5 x y e R \\ \, \! \; \% \$ \boxed{ \fbox{"
_MACROS = r"\frac \dfrac \sqrt \left \right \text{ \textbf{ \mathrm{ \mbox \circ \le \leq \neq \cdot \times \mathbb{R}"
_MORE = r"\infty \dot \binom \choose \pm \cup \mid \ldots \vec{ thinspace and or st th Option Answer the is USD boxed"
PIECES = [" ", *f"{_MARKS} {_MACROS} {_MORE} <think> </think> <answer> #### answer".split(" ")]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@settings(deadline=None, max_examples=300)
@given(before=TEXTS, inside=TEXTS, after=TEXTS)
def test_a_lone_box_is_found_as_any_box(before: str, inside: str, after: str) -> None:
    """Whatever stands in it and around it."""
    text = f"{before}\\boxed{{{inside}}}{after}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "_only_box", lambda text: None)
        long = extract(text)
    assert extract(text) == long
