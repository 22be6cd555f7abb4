"""What holds for every answer: the `math` grader against exact arithmetic of Python's own."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dppo_megatron.rewards.math.grader import grade_math

NUMBERS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4)
TERMINATING = st.builds(Fraction, st.integers(-(10**9), 10**9), st.sampled_from([1, 2, 4, 5, 8, 10, 100, 1000, 10000]))
PARTS = [*r"{}[]()$\,;:=<>|^_!%'&-+*/. 0123456789xyein", r"\frac", r"\sqrt", r"\boxed{", r"\left", r"\text{", r"\pm"]
TEXTS = st.one_of(
    st.text(), st.lists(st.sampled_from([*PARTS, r"\cup", r"\in", " or ", "²", "٣", "\u200b"])).map("".join)
)


def reward(answer: str, gold: str) -> float:
    """Of a completion that boxes `answer`."""
    return grade_math(f"so \\boxed{{{answer}}}", gold, {}).reward


def as_decimal(value: Fraction) -> str:
    """The exact decimal of a terminating fraction."""
    digits = str(int(abs(value) * 10**9)).rjust(10, "0")
    text = f"{digits[:-9]}.{digits[-9:]}".rstrip("0").rstrip(".")
    return ("-" if value < 0 else "") + text


def spellings(value: Fraction) -> list[str]:
    """A fraction as people write it."""
    top, bottom, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    forms = [
        f"{sign}\\frac{{{top}}}{{{bottom}}}",
        f"\\dfrac{{{sign}{top}}}{{{bottom}}}",
        f"{sign}{top}/{bottom}",
        f"${sign} \\tfrac{{ {top} }}{{ {bottom} }}$",
        f"x = {sign}\\frac{{{3 * top}}}{{{3 * bottom}}}",
        f"\\left({sign}\\frac{{{top}}}{{{bottom}}}\\right)",
        f"{sign}\\frac{{{top}}}{{{bottom}}} \\text{{ apples}}",
        f"{sign}{top} \\div {bottom}",
    ]
    if bottom == 1:
        forms += [f"{sign}{top}", f"{sign}{top:,}", f"{sign}{top}.0", f"{sign}\\${top}", f"\\text{{{sign}{top}}}"]
    elif top > bottom:
        forms.append(f"{sign}{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}")
    return forms


@settings(deadline=None, max_examples=60)
@given(value=NUMBERS, data=st.data())
def test_every_spelling_of_a_number_is_that_number(value: Fraction, data: st.DataObject) -> None:
    """Whatever the reference is spelled like."""
    gold, answer = data.draw(st.sampled_from(spellings(value))), data.draw(st.sampled_from(spellings(value)))
    assume(not ("apples" in gold + answer and "\\$" in gold + answer))  # dollars are no apples
    assert reward(answer, gold) == 1.0


@settings(deadline=None, max_examples=60)
@given(value=TERMINATING, data=st.data())
def test_decimals_and_fractions_are_one(value: Fraction, data: st.DataObject) -> None:
    """0.25 and 1/4, both ways."""
    fraction = data.draw(st.sampled_from(spellings(value)))
    assert reward(as_decimal(value), fraction) == 1.0
    assert reward(fraction, as_decimal(value)) == 1.0


@settings(deadline=None, max_examples=60)
@given(gold=TERMINATING, other=TERMINATING, data=st.data())
def test_another_number_is_never_right(gold: Fraction, other: Fraction, data: st.DataObject) -> None:
    """Near or far, in any spelling; a decimal reference may be a rounded value, but not of a decimal."""
    other = data.draw(st.sampled_from([other, gold + Fraction(1, 1000), -gold, gold * 10, gold / 100, gold + 1]))
    assume(other != gold)
    golds = [*spellings(gold), as_decimal(gold)]
    others = [*spellings(other), as_decimal(other)]
    assert reward(data.draw(st.sampled_from(others)), data.draw(st.sampled_from(golds))) == 0.0


@settings(deadline=None, max_examples=60)
@given(items=st.lists(NUMBERS, min_size=2, max_size=5, unique=True), data=st.data())
def test_lists_have_no_order_and_tuples_have(items: list[Fraction], data: st.DataObject) -> None:
    """And nothing may be missing."""
    shuffled = data.draw(st.permutations(items))
    written = ", ".join(data.draw(st.sampled_from(spellings(item)[:2])) for item in shuffled)
    gold = ", ".join(f"\\frac{{{item.numerator}}}{{{item.denominator}}}" for item in items)
    assert reward(written, gold) == 1.0
    assert reward(f"\\{{{written}\\}}", f"\\{{{gold}\\}}") == 1.0
    assert reward(f"({written})", f"({gold})") == float(shuffled == items)
    assert reward(written.rsplit(",", 1)[0], gold) == 0.0


@settings(deadline=None, max_examples=60)
@given(
    low=st.integers(-99, 98), size=st.integers(1, 50), closed=st.tuples(st.booleans(), st.booleans()), data=st.data()
)
def test_intervals_and_inequalities_are_one(
    low: int, size: int, closed: tuple[bool, bool], data: st.DataObject
) -> None:
    """With the same ends, open or closed, and only so."""
    high = low + size
    other = data.draw(st.tuples(st.booleans(), st.booleans()))
    gold = f"{'[' if closed[0] else '('}{low},{high}{']' if closed[1] else ')'}"
    below, above = ("\\le" if end else "<" for end in other)
    answer = f"{low} {below} x {above} {high}"
    assert reward(answer, gold) == float(other == closed)
    assert reward(gold, answer) == float(other == closed)


NO_VALUE = [
    "0/0",
    "1/0",
    "x/0",
    "0^0",
    "0^{-1}",
    "(-1)!",
    "\\log 0",
    "\\tan(\\pi/2)",
    "9^{9^{9^9}}",
    "1/(2-2)",
    "\\sqrt{1/0}",
]
"""Written as if they had one, or with one that nobody will compute."""


@pytest.mark.parametrize("row", [{}, {"tolerance": "0.01"}, {"tolerance": "0"}, {"unit": "m"}, {"problem": "2 digits"}])
def test_what_has_no_value_is_no_error(row: dict[str, str]) -> None:
    """On either side, alone, in a relation, a list or a range, under every way to compare."""
    forms = ["{}", "x = {}", "{} x < 2", "({}, 1)", "[0, {}]", "{} \\%", "\\text{{about }} {}", "3.14", "0"]
    for bare, form in itertools.product(NO_VALUE, forms):
        for text, gold in ((form.format(bare), bare), (bare, form.format(bare)), ("0.5", form.format(bare))):
            assert grade_math(f"\\boxed{{{text}}}", gold, row).reward in (0.0, 1.0)


@given(text=TEXTS, gold=TEXTS)
@example(text="0", gold="0/0")
@settings(deadline=None, max_examples=200)
def test_no_text_is_an_error(text: str, gold: str) -> None:
    """Anything gets 0 or 1 with a reason, boxed or not."""
    for completion in (text, f"\\boxed{{{text}}}"):
        grade = grade_math(completion, gold, {"tolerance": text, "unit": gold, "problem": text})
        assert grade.reward in (0.0, 1.0)
        assert grade.why


@settings(deadline=None, max_examples=60)
@given(value=NUMBERS)
def test_the_reference_itself_is_right(value: Fraction) -> None:
    """In each of its spellings."""
    for gold in spellings(value):
        assert reward(gold, gold) == 1.0
