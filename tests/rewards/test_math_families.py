"""Families of answers in which one thing is written in several ways: parts, signs, primes, points, asked units."""

from __future__ import annotations

import itertools

import pytest
from support.math_cases import case, check

from dppo_megatron.rewards.math.grader import grade_math

LABELS = [("(a)", "(b)", "(c)"), ("(1)", "(2)", "(3)"), ("(i)", "(ii)", "(iii)")]
BETWEEN = [" ", ", ", "; ", r" \text{ and } ", r"\quad "]
VALUES = ["3", r"\frac{1}{2}", "-7", "(1,2)", r"\sqrt{2}"]


def reward(answer: str, gold: str, problem: str = "") -> float:
    """The grade of an answer in a box."""
    return grade_math(f"\\boxed{{{answer}}}", gold, {"problem": problem}).reward


@pytest.mark.parametrize("labels", LABELS)
def test_parts_keep_their_labels(labels: tuple[str, ...]) -> None:
    """In any order of the parts, with any separator; another part's value is wrong."""
    for values in itertools.permutations(VALUES, 2):
        gold = " ".join(f"{label} {value}" for label, value in zip(labels, values, strict=False))
        for between in BETWEEN:
            parts = [f"{label} {value}" for label, value in zip(labels, values, strict=False)]
            swapped = [f"{label} {value}" for label, value in zip(labels, values[::-1], strict=False)]
            texts = [rf"\text{{{label} }}{value}" for label, value in zip(labels, values, strict=False)]
            right = [between.join(parts), between.join(parts[::-1]), between.join(texts), ", ".join(values)]
            wrong = [between.join(swapped), parts[0], between.join([*parts, f"{labels[2]} 3"]), ", ".join(values[::-1])]
            wrong.append(between.join([parts[0], f"{labels[1]} 12"]))
            assert [(answer, gold) for answer in right if reward(answer, gold) != 1.0] == []
            assert [(answer, gold) for answer in wrong if reward(answer, gold) != 0.0] == []


def test_letters_in_brackets_are_factors_too() -> None:
    """Without values between them."""
    check(case("(a)(b)", right=["ab", "(b)(a)"], wrong=["a+b"]))
    check(case("(a)^2-(b)^2", right=["(a+b)(a-b)"], wrong=["(a-b)^2"]))


SIGNED = [
    ("{}(2,-1)", "(2,-1)", "(-2,1)"),
    ("({}2,3)", "(2,3)", "(-2,3)"),
    ("y={}3x+1", "y=3x+1", "y=-3x+1"),
    ("3x{}4y=0", "3x+4y=0", "3x-4y=0"),
    (r"2{}\sqrt{{5}}", r"2+\sqrt{5}", r"2-\sqrt{5}"),
    (r"x={}\sqrt{{7}}", r"x=\sqrt{7}", r"x=-\sqrt{7}"),
    (r"{}5\text{{ cm}}", r"5\text{ cm}", r"-5\text{ cm}"),
    (r"f(x)={}x", "f(x)=x", "f(x)=-x"),
]


@pytest.mark.parametrize("written, plus, minus", SIGNED)
def test_a_plus_minus_sign_stands_for_both(written: str, plus: str, minus: str) -> None:
    """Of whatever it is part, and for neither of the two alone."""
    for sign in (r"\pm ", "±", r"\mp "):
        both = written.format(sign)
        for spelled in (f"{plus}, {minus}", rf"{minus} \text{{ or }} {plus}"):
            assert reward(both, spelled) == reward(spelled, both) == 1.0, (both, spelled)
        for one in (plus, minus):
            assert reward(both, one) == reward(one, both) == 0.0, (both, one)


def test_opposite_signs_are_tied() -> None:
    """Of (1, -2) and (-1, 2) there are two, of two plus-minus signs four."""
    tied, free = r"(\pm 1, \mp 2)", r"(\pm 1, \pm 2)"
    check(case("(1,-2),(-1,2)", right=[tied, r"\pm(1,-2)", "-(1,-2), (1,-2)"], wrong=[free, r"(1,-2)", r"\pm(1,2)"]))
    check(case("(1,2),(1,-2),(-1,2),(-1,-2)", right=[free], wrong=[tied, r"\pm(1,2)"]))
    check(case(r"\{1,-1,2,-2\}", right=[r"\{\pm 1, \pm 2\}", r"\pm 1, \pm 2"], wrong=[r"\{\pm 1, 2\}"]))


PRIMES = ["{}'", r"{}^{{\prime}}", r"{}^\prime", "{}^{{'}}", "{}\u2032"]


@pytest.mark.parametrize("one, two", [*itertools.product(PRIMES, PRIMES)])
def test_a_prime_has_one_meaning(one: str, two: str) -> None:
    """After a letter, a function and minutes of an arc."""
    check(case(f"{one.format('x')} = 2", right=[f"{two.format('x')} = 2", "2"], wrong=["x = 2", "3"]))
    check(case(f"{one.format('f')}(x)=2x", right=[f"{two.format('f')}(x)=2x"], wrong=["f(x)=2x"]))
    arc = rf"67^\circ {one.format('30')}"
    check(case(arc, right=[rf"67^{{\circ}}{two.format('30')}", r"67.5^\circ"], wrong=[r"67.3^\circ", r"67^\circ"]))


def test_points_have_names() -> None:
    """Which they share with nothing else."""
    for name, at in itertools.product(["A", "P'", "F_1", "F_{2}"], ["(1,-2)", r"(0,\frac12)", "(1,2,3)"]):
        check(case(f"{name}{at}", right=[at, f"{name}={at}"], wrong=["(7,7)", "1", f"Q{at}", f"{name}(7,7)"]))
    check(case("A(1,2), B(3,4)", right=["(1,2),(3,4)", "B(3,4), A(1,2)"], wrong=["A(3,4), B(1,2)", "A(1,2)"]))
    check(case("(-2,0),(2,0)", right=["F_1(-2,0), F_2(2,0)", r"(\pm 2,0)"], wrong=["F_1(0,-2), F_2(0,2)"]))
    check(case("(-2,4)", right=["-(2,-4)"], wrong=["-(2,4)", "-(-2,4)"]))


ASKED = {
    "How many square feet are painted?": (r"16 \text{ ft}^2", [r"16 \text{ in}^2", r"16 \text{ square yards}"]),
    "How many minutes did it take?": (r"16 \text{ min}", [r"16 \text{ hours}", r"16 \text{ seconds}"]),
    "Give the length in meters.": (r"1600 \text{ cm}", [r"16 \text{ cm}", r"16 \text{ km}"]),
    "How many miles per hour is that?": (r"16 \text{ mph}", [r"16 \text{ km/h}", r"16 \text{ m/s}"]),
    "What is the price, in cents?": (r"\$0.16", [r"\$16"]),
}


@pytest.mark.parametrize("problem", ASKED)
def test_the_unit_is_the_one_that_is_asked_for(problem: str) -> None:
    """Other units of its kind are converted; without a question, or with two, a unit beside a bare 16 says nothing."""
    right, wrong = ASKED[problem]
    assert [reward(answer, "16", problem) for answer in ("16", right)] == [1.0, 1.0]
    for answer in wrong:
        assert reward(answer, "16", problem) == 0.0
        assert reward(answer, "16") == 1.0
        assert reward(answer, "16", f"{problem} In how many {answer.split('{')[-1].strip('}')}?") in (0.0, 1.0)


def test_a_measure_has_parts() -> None:
    """Each smaller than the unit before it, in any spelling; without one of them it is another measure."""
    for hours, minutes in itertools.product((1, 2, 11), (5, 30, 59)):
        spelled = [f"{hours} h {minutes} min", rf"{hours}\text{{ hours and }}{minutes}\text{{ minutes}}"]
        spelled += [f"{hours}h{minutes}min", rf"{hours} \text{{ hr. }} {minutes} \text{{ min.}}"]
        spelled += [rf"{hours * 60 + minutes} \text{{ minutes}}"]
        wrong = [f"{hours} h", rf"{minutes}\text{{ minutes}}", f"{hours}.{minutes:02} h", f"{minutes} h {hours} min"]
        wrong += [f"{hours}x h {minutes} min", f"{hours} min {minutes} h", f"{hours} h {minutes} h"]
        for gold in spelled:
            check(case(gold, right=spelled, wrong=wrong))


def test_the_letter_of_a_sum_says_nothing() -> None:
    """Nor those of sums in sums; the other letters do."""
    for one, two in itertools.permutations("ijkl", 2):
        gold = rf"\sum_{{{one}=1}}^{{n}} {one}^2 a"
        assert reward(gold.replace(one, two), gold) == 1.0
        assert reward(gold.replace(one, two).replace("a", "b"), gold) == 0.0
        nested = rf"\sum_{{{one}=1}}^{{n}} \sum_{{{two}=1}}^{{{one}}} \frac{{{one}}}{{{two}+a}}"
        swapped = nested.replace(one, "?").replace(two, one).replace("?", two)
        assert reward(swapped, nested) == 1.0
        assert reward(rf"\sum_{{{one}=1}}^{{n}} \sum_{{{two}=1}}^{{{one}}} \frac{{{two}}}{{{one}+a}}", nested) == 0.0


CASES = [
    *case(r"\textbf{(E)}\ 26", right=["26", "E", "(E) 26"], wrong=["25", "D", "(D) 26", "D: 26"]),
    *case("2^n-1, n \\geq 1", right=["2^n-1", "2^n-1, n \\ge 1"], wrong=["2^n+1", "2^n-1, n \\ge 2"]),
    *case("x=3, y \\ge 2", right=["x=3, y \\ge 2"], wrong=["x=3", "3"]),
    *case("f(x)=x^2, x>0", right=["f(x) = x^2, x>0"], wrong=["f(x)=x^2", "f(x)=x^2, x<0"]),
    *case("2^n-1", right=["2^n - 1"], wrong=["2^n-1, n > 5"]),
    *case(r"\{0,1\}", right=[r"A \cap B = \{0,1\}", r"A\cup B=\{1,0\}"], wrong=[r"A \cap B = \{0\}"]),
    *case(r"A \cap B = \{0,1\}", right=[r"\{0,1\}"], wrong=[r"A \cup B = \{0,1\}"]),
    *case(r"\frac{dy}{dx}=2x", right=["y'=2x", "2x", r"\frac{d y}{d x} = x+x"], wrong=["y=2x", "y'=x", "x'=2x"]),
    *case(
        r"\frac12",
        right=[r"\frac12 \text{ or } 50\%", r"0.5 \text{ or } \frac{1}{2}"],
        wrong=[r"\frac12 \text{ or } 2"],
    ),
    *case("5", right=[r"2^{100} \equiv 5 \pmod 7", r"\equiv 5 \pmod{7}"], wrong=[r"2^{100} \equiv 2 \pmod 7"]),
    *case(
        r"n \equiv 1 \pmod 4", right=[r"n \equiv 1 \pmod{4}"], wrong=[r"n^2 \equiv 1 \pmod 4", r"5 \equiv 1 \pmod 4"]
    ),
    *case(r"\frac{2\sqrt3}{3}", right=[r"\mathbf{\frac{2\sqrt{3}}{3}}", r"\text{$\frac{2\sqrt{3}}{3}$}"], wrong=[]),
    *case("1", right=[r"\text{maximum value } 1", r"\text{remainder } 1"], wrong=[r"\text{at most } 1"]),
    *case("x=3+7t, y=1-2t", right=["x=3+7k, y=1-2k", "(3+7s,1-2s)"], wrong=["x=3+7k, y=1-2t", "x=3-7k, y=1-2k"]),
    *case("3:30", right=["3{:}30"], wrong=["3{:}31"]),
]


def test_one_of_each_kind() -> None:
    """By hand, where a family has few members."""
    check(CASES)


REPEATED = [
    (r"Compute $\binom{11}{2}$.", "55", r"\binom{11}{2}"),
    ("Compute 2^{10}.", "1024", "2^{10}"),
    (r"What is $\log_2 8$?", "3", r"\log_2 8"),
    (r"Find $|3+4i|$.", "5", "|3+4i|"),
    (r"Compute $\sum_{k=1}^{99} k$.", "4950", r"\sum_{k=1}^{99} k"),
    (r"Evaluate $\sqrt{50}\cdot\sqrt{2}+4$.", "14", r"\sqrt{50} \cdot \sqrt{2} + 4"),
    (r"Compute $99\times 99$.", "9801", r"99 \times 99"),
    (r"Find \[\frac{\frac{2}{5}}{\frac37}.\]", r"\frac{14}{15}", r"\dfrac{\frac{2}{5}}{\frac37}"),
    ("Solve $2x+1=7$.", "x=3", "2x+1=7"),
    ("If $y=50^2-49^2$, find $y$.", "99", "50^2-49^2"),
    ("Factor x^2+x-6 completely.", "(x-2)(x+3)", "x^2+x-6"),
    (r"Expand $\left(x+5\right)^2$.", "x^2+10x+25", "(x+5)^2"),
    (r"Express $0.\overline{123}$ as a common fraction.", r"\frac{41}{333}", r"0.\overline{123}"),
    ("Write 0.75 as a common fraction.", r"\frac34", "0.75"),
    (r"Simplify $\frac{16}{20}$.", r"\frac45", r"\frac{16}{20}"),
    ("Write the prime factorization of 360.", r"2^3 \cdot 3^2 \cdot 5", "360"),
]


@pytest.mark.parametrize(("problem", "gold", "answer"), REPEATED)
def test_an_expression_of_the_problem_is_to_be_carried_out(problem: str, gold: str, answer: str) -> None:
    """It is right for another problem, and beside its value; the reference's own text is always right."""
    grade = grade_math(f"\\boxed{{{answer}}}", gold, {"problem": problem})
    assert (grade.reward, grade.why) == (0.0, "repeats the problem")
    assert reward(answer, gold) == reward(answer, gold, "What is it?") == reward(gold, gold, problem) == 1.0
    assert reward(answer, answer, problem) == 1.0


def test_what_the_problem_has_may_be_the_answer() -> None:
    """A number of which no other form is asked, a reduced fraction, another tree of the same text, a part of a longer
    expression, a choice, an interval."""
    given = r"Here $\sin B = \frac{4}{7}$, $AB = 2\sqrt3$, $t = 0.5$, the ratio is $3:4$ and $x > 0$. Find it."
    for gold, answer in [
        (r"\frac47", r"\frac{4}{7}"),
        (r"2\sqrt{3}", r"2\sqrt3"),
        (r"\frac12", "0.5"),
        ("0.75", "3:4"),
        (r"(0,\infty)", "x > 0"),
    ]:
        assert reward(answer, gold, given) == 1.0, answer
    assert reward(r"\frac{57}{160}", "0.35625", r"Convert $\frac{57}{160}$ to a decimal.") == 1.0
    assert reward("(x+1)^2", "x^2+2x+1", "Find $2(x+1)^2$ and half of it.") == 1.0
    assert reward("x^2+1", "1+x^2", r"Let $f(x)=\sqrt{x^2+1}$. Find $f(x)^2$.") == 1.0
    options = r"Which is $2^{10}+1$? (A) $2^5+1$ (B) $2^{10}+1$"
    assert reward("2^5+1", "33", r"What is it? (A) $2^4+1$ (B) $2^5+1$") == 1.0 > reward("2^{10}+1", "1025", options)


def test_an_answer_of_the_same_parts_as_the_reference_repeats_nothing() -> None:
    """The order of terms and factors is none that the problem asks for; nor is a count `write 20` a request. Where the
    problem asks which, its own expressions are the answers."""
    sides = r"Its sides are $\sqrt{3}+2$, $\frac34\sqrt2$ and $\frac{\sqrt3}{2}$, and $f(n)=n^2+1$. Find another."
    for gold, answer in [
        (r"2+\sqrt3", r"\sqrt{3}+2"),
        (r"\frac{3\sqrt2}{4}", r"\frac34\sqrt2"),
        (r"\frac12\sqrt3", r"\frac{\sqrt3}{2}"),
        ("1+n^2", "n^2+1"),
    ]:
        assert reward(answer, gold, sides) == 1, answer
    for gold, answer in [("20", "20 essays"), (r"\$20", "20"), ("twenty", "20")]:
        assert reward(answer, gold, "The students write 20 essays. How many?") == 1, gold
    for problem, gold, answer in [
        ("Which of $2^{10}$ and $3^7$ is larger?", "2187", "3^7"),
        ("Which expression equals $x^2-1$: $(x-1)(x+1)$ or $(x-1)^2$?", "x^2-1", "(x-1)(x+1)"),
    ]:
        assert reward(answer, gold, problem) == 1, problem
    for problem, gold, answer in [
        (r"Rationalize $\frac{21}{\sqrt{21}}$.", r"\sqrt{21}", r"\frac{21}{\sqrt{21}}"),
        ("Simplify $a-(b-c)$.", "a-b+c", "a-(b-c)"),
        (r"Simplify $\frac{a}{b}\cdot\frac{1}{c}$.", r"\frac{a}{bc}", r"\frac{a}{b}\cdot\frac{1}{c}"),
        (r"Combine $\ln a+\ln b$.", r"\ln(ab)", r"\ln a+\ln b"),
        (r"Express $50\%$ as a common fraction.", r"\frac12", r"50\%"),
        (r"Simplify $\frac{12}{4}$.", "3", r"\frac{12}{4}"),
    ]:
        assert reward(answer, gold, problem) == 0, problem


def test_an_order_is_kept_where_it_is_asked() -> None:
    """Of the answer; not where the problem tells of an order."""
    asked = [
        "List the roots in increasing order.",
        "Find all roots. Express your answers separated by commas and in increasing order.",
        "What are the integers in increasing order?",
        "Give $a$, $b$ and $c$ in this order.",
        "Arrange in order the roots.",
        "Order them from least to greatest.",
    ]
    told = [
        "The roots in increasing order are a, b, c. Find them.",
        "Enter $a, b, c$, not necessarily in that order.",
        "Give all roots, in order to find the sum.",
        "Find all triples.",
        "",
    ]
    for problem in asked:
        assert [reward(answer, "1,2,3", problem) for answer in ("1, 2, 3", "3, 2, 1")] == [1, 0], problem
        assert [reward(answer, "C, A, B", problem) for answer in ("C, A, B", "A, B, C")] == [1, 0], problem
        assert reward("b=2, a=1", "a=1, b=2", problem) == reward(r"\{3,1,2\}", r"\{1,2,3\}", problem) == 1
    for problem in told:
        assert reward("3, 2, 1", "1,2,3", problem) == reward("A, B, C", "C, A, B", problem) == 1, problem


def test_another_unit_than_is_asked() -> None:
    """The same number of what measures something else is wrong; a part of what is asked, or another mention, is not."""
    for problem, gold, right, wrong in [
        ("How old is Tom now, in years?", "30", r"30 \text{ years}", r"30 \text{ months}"),
        ("What is its area in square inches?", "36", r"36 \text{ in}^2", r"36 \text{ in}^3"),
        ("How many cubic centimeters are there?", "1200", r"1200 \text{ mL}", r"1200 \text{ cm}^2"),
        ("By what percent did it rise?", "150", r"150\%", r"150 \text{ dollars}"),
        ("Compute the time in years, to two places.", "8.85", "8.85 years", "8.85 months"),
        ("How many inches of rain fall?", "2", r"2 \text{ inches per hour}", r"2 \text{ hours}"),
        ("In how many days do they meet?", "14", r"2 \text{ weeks}", r"14 \text{ weeks}"),
        ("How many pounds did he pay?", "5", "£5", r"5 \text{ kg}^2, 1"),
        ("How many degrees is it?", "20", r"20^\circ\text{C}", "21"),
        ("The sides in inches are 3 and 4. Find the area.", "12", r"12 \text{ in}^2", "13"),
        ("How many marbles?", "12", r"12 \text{ in}^2", "13"),
        ("Find how many gallons it needs. How much does it cost?", "826", r"\$826", "827"),
    ]:
        assert [reward(answer, gold, problem) for answer in (gold, right, wrong)] == [1, 1, 0], problem
    assert reward(r"\theta=45 \text{ rad}", r"\theta=45^\circ") == reward("x=5 km", r"x=5 \text{ m}") == 0
    assert reward("x=5000 m", r"x=5 \text{ km}") == 1


def test_digits_without_the_base_that_the_problem_names() -> None:
    """Only the reference's digits, and not where another base is named."""
    for problem in ("Express $117_{10}$ in base 5.", "Write it in base five.", "In base $5$, what is it?"):
        assert [reward(answer, "432_5", problem) for answer in ("432", "117", "4320")] == [1, 0, 0]
    assert reward("2a", "2A_{16}", "Convert 42 to base 16.") == 1
    assert reward("432", "432_5", "Write it in base 7.") == reward("432", "432_5") == 0
