"""The `math` grader on answers that are nonsense, or made to be slow."""

from __future__ import annotations

import random
import time

import pytest

from dppo_megatron.rewards.math.grader import grade_math
from tests.support.cases import Choose


@pytest.mark.parametrize(
    ("gold", "answer"),
    [("5", r"\input{5}"), ("5", "5 6"), ("5", r"\frac{5}{0}"), ("0", "0/0"), ("1,2,3", "1.2.3"), ("5", "5^\\circ 3")]
    + [(gold, r"\begin{pmatrix}\end{pmatrix}") for gold in ("5", "y=2x+1", "no solution", r"\{\}")],
)
def test_nonsense_is_not_right_by_chance(gold: str, answer: str) -> None:
    """What cannot be read as a whole is wrong, however much of it looks like the reference."""
    assert grade_math(f"\\boxed{{{answer}}}", gold, {}).reward == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "3" + "\t" * 3900 + "x",
        "3" + "~" * 3900 + "x",
        "1" + r"\," * 1900 + "x",
        "1" * 3900 + "x",
        "{" * 1900 + "}" * 1900,
        ", , \\pm",
        "1 or " * 700 + "1",
        "the exactly " * 300 + "1",
        ",;",
        "1 m , 1 m , 1 m , 4 " + "mand" * 925 + " and 3",
        "5%" + "^2 " * 25 + "?",  # a space that had two places in the pattern: twice as long for each one more
        "1 m and 1 m and 1 m and 4 " + "mand" * 925 + " and 3",
    ],
)
def test_an_answer_that_is_made_to_be_slow_is_not(answer: str) -> None:
    """Long runs of one sign, and lists of nothing: neither an error nor a second."""
    begin = time.process_time()
    assert grade_math(f"\\boxed{{{answer}}}", "3", {}).reward == 0.0
    assert time.process_time() - begin < 1.0


SPELLINGS = [
    *(r"n(n-1)(n-2)\ldots 1", r"(m,n)=(4,1),(8,7)", r"65 \text{ children}", r"x=\frac{\pi}{6}+2k\pi,\ k\in\mathbb{Z}"),
    *(r"\begin{cases} x^2 & x<1 \\ 2 & x \ge 1 \end{cases}", r"\{x \in \mathbb{R} : x>2\}", r"\text{June 20}, 1776"),
    *(r"(-\infty,2)\cup[3,\infty)", r"\begin{pmatrix}1\\2\end{pmatrix}", "A, C", "(a) 4 (b) 7", r"3\frac{1}{2}", "3:4"),
    *("1 hour 30 minutes", r"y = 2x + 1 \text{ or } y = 3", r"1 \pmod 4", r"\binom{20}{10}", "all reals except 2"),
    *("5 miles", r"\$1,234.50"),
]
RUNS = [
    *" \n~*(){}[]1aC\\,;.-+=$|'^_/&%",
    r"\,",
    "x ",
    "1 ",
    "()",
    r"\text{a}",
    r"\frac",
    r"\ldots",
    "and ",
    "or ",
    "<;",
    "3,",
]


def test_a_run_of_anything_anywhere_costs_little(cases: Choose) -> None:
    """The pattern for n(n-1)\\ldots1 took two seconds for three runs of 400 spaces, and 50 for 1,200."""
    for number in (drawn := cases("runs in answers", 400)):
        draw = random.Random(number)
        answer = spelling = draw.choice(SPELLINGS)
        places = sorted(draw.sample(range(len(answer) + 1), draw.randint(1, 3)), reverse=True)
        for place in places:
            run = draw.choice(RUNS)
            answer = answer[:place] + run * (3800 // len(places) // len(run)) + answer[place:]
        begin = time.process_time()
        grade_math(f"\\boxed{{{answer}}}", draw.choice(SPELLINGS), {})
        assert time.process_time() - begin < 1.0, (number, spelling)
    assert drawn


@pytest.mark.parametrize(
    ("problem", "gold", "answer"),
    [
        ("1.5 " * 5000, "3/2", "1.5"),
        (" " * 40_000 + r"\binom{11}{2}", "55", r"\binom{11}{2}"),
        ("1" * 20_000 + r" \binom{11}{2}", "55", r"\binom{11}{2}"),
        ("what " * 8000 + "in years", "5", r"5 \text{ months}"),
        ("what in years " * 1500, "5", r"5 \text{ months}"),
        (", list " * 3000, "1,2", "2,1"),
        (
            "what to find in years and how many more. " * 90,
            *(
                ",".join(f"{number}{unit}" for number in range(100)[::step])
                for unit, step in (("", 1), (r" \text{ years}", -1))
            ),
        ),
    ],
    ids=["numbers", "spaces", "digits", "what", "what in", "list", "a list with units"],
)
def test_a_problem_that_is_made_to_be_slow_is_not(problem: str, gold: str, answer: str) -> None:
    """What the grader looks for in it is found in a part of a second, and once for all items of a list."""
    begin = time.process_time()
    grade_math(f"\\boxed{{{answer}}}", gold, {"problem": problem})
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize(
    "text",
    [r"\boxedx{3}", "<answer>" * 100_000 + "</answer>", "\\boxed{3}" * 100_000, "so " + "<|a|> " * 24 + "!"],
    ids=["another word", "tags", "boxes", "ends of turns"],
)
def test_a_text_of_broken_marks_is_no_answer(text: str) -> None:
    """Marks by the thousand cost no more than others, and a word that begins like a mark is none."""
    begin = time.process_time()
    assert grade_math(text, "3", {}).reward == 0.0
    assert time.process_time() - begin < 1.0
