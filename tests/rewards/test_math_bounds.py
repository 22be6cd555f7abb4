"""No answer costs more than its operations, whatever it asks to be computed; what is not carried out is 0."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest

from dppo_megatron.rewards.math import evaluate
from dppo_megatron.rewards.math.evaluate import WorkLimit
from dppo_megatron.rewards.math.grader import grade_math

UNDONE = [
    r"\int_0^\infty\frac{\ln x}{1+x^3}dx",
    r"\lim_{n\to\infty}\frac{n!e^n}{n^n\sqrt n}",
    r"\sum_{n=1}^{\infty}\frac{1}{n^2}",
    r"\sum_{n=1}^{10^{12}} n^n",
    r"\sum_{k=0}^{2024}\binom{2024}{k}k^2",
    r"\prod_{n=1}^{10^9} n",
    r"\sum_{a=1}^{300}\sum_{b=1}^{300}\sum_{c=1}^{300} \sqrt{abc}",
    r"\oint x\,dx",
    r"\iint xy\,dx\,dy",
]
BOMBS = [
    "9^{9^{9^9}}",
    "9!!!!!!!",
    "((9!)!)!",
    "2^{2^{2^{2^{2^2}}}}",
    "10^{10^{100}}",
    "(10^{999999})!",
    r"\binom{10^9}{5\cdot 10^8}",
    r"\sin(10^{100})",
    r"e^{e^{e^{e^e}}}",
    r"1.000000001^{10^{9}}",
    r"\sqrt{2}^{10^{12}}",
    r"\sqrt[3]{10^{9000}+1}",
    r"((((2^{100})^{100})^{3})^{1/3})^{1/7}",
    r"\sum_{k=1}^{500}\sqrt[3]{10^{9000}+k}",
    r"\sum_{k=1}^{99}\sqrt{10^{9000}+k}",
    r"\sum_{k=1}^{5000}k^k",
    r"\sum_{k=1}^{2024}k^k",
    r"\sum_{k=0}^{9000}\lfloor\sqrt[3]k\rfloor",
    r"\sum_{k=1}^{5000}\lfloor\sqrt k\rfloor",
    r"\sum_{k=1}^{9000}\lfloor\pi\rfloor",
    r"\sum_{k=1}^{5000}(1+i)^k",
    r"(1+\sqrt{2})^{39999}",
    r"\gcd(2^{30000}-1, 3^{18000}-1)",
    r"\operatorname{lcm}(1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20)^{999}",
    r"\lfloor 10^{4000}\pi \rfloor",
    r"x^{x^{x^{x^{x}}}}",
    r"(x+y+z+w)^{4000}",
    "1e4999*1e4999",
    "7" * 1900 + "!",
    "0." + "3" * 1900 + r"\ldots",
    "+".join(f"\\sqrt{{{n}}}" for n in range(2, 120)),
    "+".join(f"|x-{n}|" for n in range(2, 120)),
    "+".join(f"\\lfloor \\frac{{x}}{{{n}}} \\rfloor" for n in range(2, 45)),
    r"\sqrt{" * 39 + "2" + "}" * 39,
    r"\sqrt{" * 38 + "x" + "}" * 38,
    r"\sum_{k=1}^{3}(" * 30 + r"\sqrt{k}" + ")" * 30,
    r"\sqrt{1+" * 38 + "x" + "}" * 38,
    r"\sqrt{x+" * 38 + "x" + "}" * 38,
    "|" * 20 + "x" + "|" * 20,
    "(" * 39 + "x" + ")^9" * 39,
    r"\frac{1}{1+" * 30 + "x" + "}" * 30,
    r"\max(" * 12 + "x" + ",1-x)" * 12,
    r"\pm 1 \pm \sqrt{2} \pm \sqrt{3}",
    "(" + r"\pm 1," * 60 + "1)",
    ",".join(f"\\sqrt{{{n}}}+\\pi" for n in range(150)),
    ",".join(f"{n}x" for n in range(150)),
    r"\cup".join(f"({n},{n + 1})" for n in range(190)),
    r"\{" + ",".join(f"\\sin {n}" for n in range(150)) + r"\}",
    r"\begin{pmatrix}"
    + r"\\".join("&".join(f"\\sqrt{{{a}+{b}}}" for a in range(14)) for b in range(14))
    + r"\end{pmatrix}",
    r"\{x\in\mathbb{Z}: 0<x<10^{18}\}",
    "3 \\pmod{" + "9" * 900 + "}",
    r"\prod_{k=1}^{n}\sum_{j=1}^{k}\sqrt{j}",
    r"\sum_{k=1}^{n}\lfloor\frac{n}{k}\rfloor^{k}",
    ",".join(f"\\sum_{{k=1}}^{{9}}k^{n}" for n in range(150)),
    r"\cup".join(f"(\\sum_{{k=1}}^{{{n}}}k,\\sqrt{{{n}}}!)" for n in range(90)),
    " < ".join(f"\\sum_{{k=1}}^{{{n}}}k" for n in range(90)),
]
"""Towers, long numbers, deep nests, long lists, steps without end."""


def places(text: str) -> list[tuple[str, str]]:
    """References and answers."""
    return [(text, "7"), ("7", text), ("x", text), (r"\pi+\sqrt2", text), (f"0+{text}", text), ("1,2", f"1,{text}")]


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Operations of the gradings since."""
    counted = [0]
    spend = WorkLimit.spend

    def count(work: WorkLimit, operations: int = 1) -> None:
        spend(work, operations)
        counted[0] += operations

    monkeypatch.setattr(WorkLimit, "spend", count)
    return counted


@pytest.mark.parametrize("text", [*UNDONE, *BOMBS], ids=lambda text: re.sub(r"\W+", "", text)[:20])
def test_an_answer_takes_no_more_than_its_operations(text: str, spent: list[int]) -> None:
    """As an answer, as a reference, against itself in another spelling, and in a list."""
    for gold, answer in places(text):
        spent[0] = 0
        grade = grade_math(f"\\boxed{{{answer}}}", gold, {})
        assert spent[0] < 1.5 * evaluate.WORK
        assert grade.reward in (0.0, 1.0) and not grade.failure
        if answer == text and gold in ("7", "x", "1,2"):
            assert grade.reward == 0.0 and grade.why


NESTS = [
    r"\sqrt{",
    r"\sqrt{1+",
    r"\sqrt{x+",
    r"\sqrt{y^2+",
    r"\sqrt[3]{",
    r"\frac1{1+",
    r"\max(1,",
    r"\gcd(7,",
    r"\ln(",
    "(1+",
    "|",
    "x(",
]


@pytest.fixture
def calls() -> Callable[[str, str], int]:
    """How many of Python's functions a grading calls, which are counted here and not by the grader."""

    def counted(gold: str, answer: str) -> int:
        made = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(count)
        try:
            grade_math(f"\\boxed{{{answer}}}", gold, {})
        finally:
            sys.setprofile(None)
        return made

    return counted


def test_no_nest_takes_more_than_is_counted(
    cases: Callable[[str, int], Iterable[int]], calls: Callable[[str, str], int]
) -> None:
    """At most 506,000 calls in 1,500 nests. Ten million were made when each level of roots looked through all the
    levels in it."""
    for index in cases("nest", 36):
        rng = random.Random(index)
        depth = rng.choice([12, 24, 36])
        marks = [NESTS[index]] * depth if index < len(NESTS) else rng.choices(NESTS, k=depth)
        closing = {"{": "}", "(": ")", "|": "|"}
        ends = [closing[re.findall(r"[{(|]", mark)[-1]] for mark in marks]
        text = "".join(marks) + "x" + "".join(reversed(ends))
        for gold, answer in [("7", text), (text, "7"), (text.replace("x", "(x+0)"), text)]:
            assert calls(gold, answer) < 1_000_000, f"nest {index}"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7", r"\sum_{b=a}^{a}\sum_{a=b}^{b}" * 8 + "a"),
        ("7", r"\sum_{k=1}^{" * 16 + "2" + "}1" * 16),
        ("|x|+|x-1|+|x-2|+|x-3|+|x-4|", "|x|+|x-1|+|x-2|+|x-3|+|x-4|" + r"+0x^{\sum_{k=1}^{300}k}" * 50),
    ],
    ids=["letters of sums as bounds", "sums in bounds", "sums as exponents"],
)
def test_no_tree_is_walked_again_for_each_that_holds_it(
    gold: str, answer: str, calls: Callable[[str, str], int]
) -> None:
    """Twice as long for each level more, or 4,200,000 calls for exponents that are computed for each choice of signs;
    at most 330,000 now."""
    assert calls(gold, answer) < 600_000


@pytest.mark.parametrize("text", UNDONE)
def test_what_is_not_carried_out_says_so(text: str) -> None:
    """It is 0 and not a failure: a failure would leave the sample out, which pays where one is unsure."""
    grade = grade_math(f"\\boxed{{{text}}}", "7", {})
    assert grade.reward == 0.0
    assert "not carried out" in grade.why or "certain" in grade.why


def test_all_comparisons_of_a_grading_share_its_operations(spent: list[int]) -> None:
    """A list of hard items is not as many times as hard."""
    items = [f"\\sum_{{k=1}}^{{900}} \\sqrt{{k+{n}}}" for n in range(60)]
    gold, answer = ", ".join(items), ", ".join(f"0+{item}" for item in reversed(items))
    assert grade_math(f"\\boxed{{{answer}}}", gold, {}).reward == 0.0
    assert evaluate.WORK / 2 < spent[0] <= evaluate.WORK


def test_importing_the_grader_loads_little_and_compiles_nothing() -> None:
    """A process that grades starts as fast as Python: patterns and many digits come with their first use."""
    program = (
        "import re, sys; compile = re.compile; made = []\n"
        "import dataclasses, fractions\n"
        "re.compile = lambda *a: made.append(a) or compile(*a)\n"
        "import dppo_megatron.rewards.math.grader\n"
        "print(made, *{'torch', 'sympy', 'numpy', 'mpmath', 'math_verify', 'logging', 'random'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[]"]
