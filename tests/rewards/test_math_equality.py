"""Equality of expressions: pairs that are equal by how they were made are found equal, pairs that differ at a point
that Python's own arithmetic has found are never found equal. Most of them have steps (floor, maximum)."""

from __future__ import annotations

import contextlib
import math
import random
from fractions import Fraction

import pytest

from dppo_megatron.rewards.math import field
from dppo_megatron.rewards.math.answers import Node
from dppo_megatron.rewards.math.clean import clean
from dppo_megatron.rewards.math.compare import equal
from dppo_megatron.rewards.math.equality import Rules, same
from dppo_megatron.rewards.math.grader import grade_math
from dppo_megatron.rewards.math.parse import parse
from dppo_megatron.rewards.math.read import read_answer
from tests.support.cases import Choose

Tree = tuple  # ("x",), ("7", 7), ("+", a, b), ("abs", a), ...
AT_ZERO = {
    "power": "0^{{{}}}",
    "rounded power": "(\\cos\\frac{{\\pi}}{{2}})^{{{}}}",
    "no factors": "\\prod_{{k=1}}^{{{}}} 0",
    "step": "\\lfloor\\frac{{1}}{{1 + {}}}\\rfloor",
    "hidden step": "\\sum_{{k=1}}^{{1}}\\lfloor\\frac{{k}}{{1 + {}}}\\rfloor",
    "small step": "\\lfloor 2^{{-{}}}\\rfloor",
    "bump": "e^{{-100 {}}}",
}
"""Spellings of what is 1 where a square is 0, and 0 or nearly so elsewhere."""


@pytest.fixture(autouse=True)
def _known_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure can be repeated. Generated cases have a secret each: what depends on it is seen."""
    monkeypatch.setattr(field, "_SECRET", b"of the tests")
    field._prime.cache_clear()
    field._letter.cache_clear()


def value(tree: Tree, at: dict[str, Fraction]) -> Fraction:
    """In Python's fractions. ZeroDivisionError where it has none."""
    kind = tree[0]
    if kind == "n":
        return Fraction(tree[1])
    if kind == "s":
        return at[tree[1]]
    parts = [value(part, at) for part in tree[1:]]
    one = parts[0]
    if kind in AT_ZERO and not one:
        return Fraction(1)
    return {
        "+": lambda: one + parts[1],
        "-": lambda: one - parts[1],
        "*": lambda: one * parts[1],
        "/": lambda: one / parts[1],
        "2": lambda: one * one,
        "abs": lambda: abs(one),
        "root": lambda: abs(one),
        "floor": lambda: Fraction(math.floor(one)),
        "ceil": lambda: Fraction(math.ceil(one)),
        "max": lambda: max(parts),
        "min": lambda: min(parts),
    }[kind]()


def latex(tree: Tree) -> str:
    """As a model writes it."""
    kind = tree[0]
    if kind == "n":
        return str(tree[1]) if tree[1] >= 0 else f"({tree[1]})"
    if kind == "s":
        return str(tree[1])
    parts = [latex(part) for part in tree[1:]]
    return {
        **AT_ZERO,
        "+": "({} + {})",
        "-": "({} - {})",
        "*": "({} \\cdot {})",
        "/": "\\frac{{{}}}{{{}}}",
        "2": "({})^2",
        "abs": "|{}|" if "|" not in parts[0] else "\\max({0}, -{0})",
        "root": "\\sqrt{{({})^2}}",
        "floor": "\\lfloor {} \\rfloor",
        "ceil": "\\lceil {} \\rceil",
        "max": "\\max({}, {})",
        "min": "\\min({}, {})",
    }[kind].format(*parts)


def read(tree: Tree) -> Node:
    """What the grader reads in its text."""
    return parse(clean(latex(tree)))


def a_tree(drawn: random.Random, depth: int, names: str) -> Tree:
    """Steps, sums, products and quotients by numbers."""
    if depth == 0 or drawn.random() < 0.15:
        return ("s", drawn.choice(names)) if drawn.random() < 0.7 else ("n", a_number(drawn))
    kind = drawn.choice(["+", "-", "*", "/", "2", "abs", "floor", "ceil", "max", "min", "abs", "floor"])
    if kind == "/":
        return ("/", a_tree(drawn, depth - 1, names), ("n", abs(a_number(drawn)) + 1))
    count = 1 if kind in ("2", "abs", "floor", "ceil") else 2
    return (kind, *(a_tree(drawn, depth - 1, names) for _ in range(count)))


def a_number(drawn: random.Random) -> int:
    """Mostly small, sometimes beyond every usual point."""
    return drawn.choice([drawn.randrange(-9, 10), drawn.randrange(-99, 100), drawn.randrange(-(10**7), 10**7)])


def rewritten(tree: Tree, drawn: random.Random) -> Tree:
    """The same function, otherwise spelled, for every real number."""
    if tree[0] in "ns":
        return tree
    kind, *parts = tree[0], *(rewritten(part, drawn) for part in tree[1:])
    if drawn.random() < 0.5:
        return (kind, *parts)
    one, two = parts[0], parts[-1]
    shift = ("n", drawn.randrange(-9, 9))
    minus = ("n", -1)
    by_abs = ("abs", ("-", one, two))
    return {
        "+": lambda: ("-", two, ("*", minus, one)),
        "-": lambda: ("+", ("*", minus, two), one),
        "*": lambda: ("-", ("*", ("+", one, shift), two), ("*", shift, two)),
        "/": lambda: ("/", ("*", ("n", 3), one), ("*", two, ("n", 3))),
        "2": lambda: ("+", ("*", ("+", one, shift), ("-", one, shift)), ("2", shift)),
        "abs": lambda: drawn.choice([("max", one, ("*", minus, one)), ("root", one), ("abs", ("-", ("n", 0), one))]),
        "floor": lambda: ("-", ("floor", ("+", one, shift)), shift),
        "ceil": lambda: ("*", minus, ("floor", ("*", minus, one))),
        "max": lambda: drawn.choice([("max", two, one), halved(("+", ("+", one, two), by_abs))]),
        "min": lambda: drawn.choice([("min", two, one), halved(("-", ("+", one, two), by_abs))]),
    }[kind]()


def halved(tree: Tree) -> Tree:
    """Divided by two."""
    return ("/", tree, ("n", 2))


def changed(tree: Tree, drawn: random.Random) -> Tree:
    """Another number, sign or step somewhere, or a step left out."""
    if tree[0] == "n":
        return ("n", tree[1] + drawn.choice([-1, 1, 2, -2 * tree[1] or 3]))
    if tree[0] == "s":
        return drawn.choice([("abs", tree), ("*", ("n", -1), tree), ("+", tree, ("n", 1))])
    if drawn.random() < 0.5:
        position = drawn.randrange(1, len(tree))
        return (*tree[:position], changed(tree[position], drawn), *tree[position + 1 :])
    one = tree[1]
    return {
        "+": ("-", *tree[1:]),
        "-": ("+", *tree[1:]),
        "*": ("+", *tree[1:]),
        "/": ("*", *tree[1:]),
        "2": ("*", ("abs", one), one),
        "abs": drawn.choice([one, ("*", ("n", -1), one)]),
        "floor": drawn.choice([("ceil", one), one, ("floor", ("+", one, ("n", Fraction(1, 2))))]),
        "ceil": ("floor", one),
        "max": drawn.choice([one, tree[-1], ("min", *tree[1:])]),
        "min": drawn.choice([one, tree[-1], ("max", *tree[1:])]),
    }[tree[0]]


def differ(one: Tree, two: Tree, names: str, drawn: random.Random) -> bool:
    """Whether a point is found at which their values differ."""
    for size in (3, 30, 300, 10**4, 10**8, 10**15) * 3:
        for whole in (True, names == "n"):  # which is a whole number by its name
            at = {
                name: Fraction(drawn.randrange(-size, size), 1 if whole else drawn.randrange(1, 99)) for name in names
            }
            with contextlib.suppress(ZeroDivisionError):
                if value(one, at) != value(two, at):
                    return True
    return False


def test_different_functions_are_never_found_equal(cases: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step left out, moved or turned round, far from zero too."""
    accepted, tried = [], 0
    for seed in cases("unequal expressions", 500):
        monkeypatch.setattr(field, "_SECRET", str(seed).encode())
        drawn = random.Random(seed)
        names = drawn.choice(["x", "x", "n", "ab"])
        while True:
            one = a_tree(drawn, 3, names)
            two = rewritten(changed(one, drawn), drawn)
            if len(latex(one) + latex(two)) < 1000 and differ(one, two, names, drawn):
                break
        tried += 1
        if same(read(one), read(two)):
            accepted.append((seed, latex(one), latex(two)))
    assert tried and not accepted, f"{len(accepted)}: {accepted[:5]}"


def test_functions_that_differ_at_one_point_are_never_found_equal(
    cases: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the 1 at that point is spelled: no draw of points would meet it."""
    accepted, tried = [], set()
    for seed in cases("expressions that differ at a point", 500):
        monkeypatch.setattr(field, "_SECRET", str(seed).encode())
        drawn = random.Random(seed)
        names = drawn.choice(["x", "x", "n", "n", "ab"])
        at = {name: a_number(drawn) for name in names}
        one, kind = a_tree(drawn, drawn.randrange(3), names), drawn.choice(sorted(AT_ZERO))
        squares = [("2", ("-", ("s", name), ("n", value))) for name, value in at.items()]
        apart = ("+", *squares) if len(squares) > 1 else squares[0]
        two = ("+", rewritten(one, drawn), (kind, apart))
        point = {name: Fraction(value) for name, value in at.items()}
        assert value(two, point) == value(one, point) + 1
        tried.add(kind)
        if same(read(one), read(two)):
            accepted.append((seed, latex(one), latex(two)))
    assert tried and not accepted, f"{len(accepted)}: {accepted[:5]}"


def test_no_far_point_costs_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """At t near 300 a value takes 2000 digits, more than a grading may spend: 3 secrets in 100 drew such a point, and
    these were then neither equal nor different, for as long as the process lived."""
    gold, other, third = (
        parse(clean(text))
        for text in (
            r"-\frac{1}{18} e^{-t} + \frac{25}{54} e^{5t} - \frac{11}{27} e^{-4t}",
            r"\frac{50}{108} e^{5t} - \frac{1}{18 e^t} - \frac{11}{27} e^{-4t}",
            r"\frac{25}{54} e^{5t} - \frac{1}{18} e^{-t} - \frac{11}{27} e^{-5t}",
        )
    )
    for number in range(200):
        monkeypatch.setattr(field, "_SECRET", str(number).encode())
        assert same(gold, other) is True and same(gold, third) is False


NODES = "".join(f"(n-{at})" for at in range(1, 13))
FACTORIALS = {
    "n(n-1)": [r"\frac{n!}{(n-2)!}"],
    "n(n-1)(n-2)(n-3)(n-4)": [r"\frac{n!}{(n-5)!}"],
    r"\binom{n}{k}": [r"\frac{n!}{k!(n-k)!}", r"\binom{n}{n-k}", r"\frac{n}{k}\binom{n-1}{k-1}"],
    "m(m-1)n": [r"n\frac{m!}{(m-2)!}"],
    r"\frac{(2n)!}{n!}": ["2^n(2n-1)!!"],
}
KNOWN_POINTS = ["0(12-n)!(n-1)!", f"0(\\frac{{{NODES}}}{{1000000007}})!", "0(n-1)!2^{2^{2n}}"]
KNOWN_POINTS += [f"0\\sum_{{k=1}}^{{1+({NODES})^2}} 1", f"0\\prod_{{k=1}}^{{1+({NODES})^2}} 2"]
"""Factorials, sums and products that are defined, or short enough to be computed, where the small points are."""


def test_factorials_that_are_not_defined_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """n! / (n-2)! is n(n-1) though it has no value at 1, whatever the secret. What is equal at the points that are no
    secret, and has no value elsewhere, is not: 1 to 12 were enough for a factorial that is defined there only."""
    equal = [(gold, other) for gold, others in FACTORIALS.items() for other in others]
    unequal = [("n", f"n+{NODES}+{nothing}") for nothing in KNOWN_POINTS]
    unequal += [("n(n-1)", rf"\frac{{n!}}{{(n-2)!}}{rest}") for rest in ("+1", "+0^{n-2}", r"\cdot\frac{n}{n+1}")]
    pairs = [(parse(clean(gold)), parse(clean(other)), other) for gold, other in equal + unequal]
    for number in range(100):
        monkeypatch.setattr(field, "_SECRET", str(number).encode())
        found = [other for gold, tree, other in pairs if same(gold, tree)]
        assert found == [other for _, other in equal], number


def test_sums_are_found_equal_whatever_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large points are only as large as the sums can be carried out there: at up to 500 it was 15 of 20 secrets for
    the first sum, and 11 of 20 for the second. Nor is a sum without terms compared with what (a + b)^n is at -1."""
    sums = {
        "2^n": r"\sum_{k=0}^n\binom{n}{k}",
        r"\binom{2n}{n}": r"\sum_{k=0}^n\binom{n}{k}^2",
        r"\frac{n(n^2+1)}{2}": r"\frac{1}{n}\sum_{k=1}^{n^2}k",
        r"\binom{n+1}{m+1}": r"\sum_{k=m}^n\binom{k}{m}",
        "(a+b)^n": r"\sum_{k=0}^n\binom{n}{k}a^kb^{n-k}",
    }
    pairs = [(parse(clean(gold)), parse(clean(other))) for gold, other in sums.items()]
    for number in range(40):
        monkeypatch.setattr(field, "_SECRET", str(number).encode())
        assert [same(gold, other) for gold, other in pairs] == [True] * len(pairs), number


def test_roots_have_one_verdict_whatever_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ where s alone is negative, which one in four of the points with a negative letter were: 3 of 12
    secrets found them equal."""
    gold, other = (parse(clean(one)) for one in (r"\sqrt{s(s-a)(s-b)(s-c)}", r"\sqrt{s}\sqrt{(s-a)(s-b)(s-c)}"))
    for number in range(40):
        monkeypatch.setattr(field, "_SECRET", str(number).encode())
        assert same(gold, other) is False, number


def test_logarithms_beside_a_constant_have_one_verdict_whatever_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between -1 and 1 only the reference has a value. Points of the difference were kept where the answer has one too:
    15 of 300 secrets found a constant."""
    gold, other = (read_answer(clean(rf"{one} + C")) for one in (r"\ln|x-1|-\ln|x+1|", r"\ln(x-1)-\ln(x+1)"))
    for number in range(100):
        monkeypatch.setattr(field, "_SECRET", str(number).encode())
        assert not equal(gold, other, Rules()) and equal(other, gold, Rules()), number


def test_rewritten_functions_are_found_equal(cases: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 99.5 % of them; none is found different."""
    chosen, unknown, different = cases("equal expressions", 500), [], []
    for seed in chosen:
        monkeypatch.setattr(field, "_SECRET", str(seed).encode())
        drawn = random.Random(seed)
        one = a_tree(drawn, 3, drawn.choice(["x", "x", "n", "ab"]))
        two = rewritten(one, drawn)
        verdict = same(read(one), read(two))
        if not verdict:
            (unknown if verdict is None else different).append((seed, latex(one), latex(two)))
    assert not different
    assert len(unknown) <= 0.005 * len(chosen), unknown


@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        ("|x-5|", "5-x", 0),
        ("|n-100|", "100-n", 0),
        ("|x+1|", "x+1", 0),
        ("|x-10^9|", "10^9-x", 0),
        ("\\sqrt{x^2-10x+25}", "5-x", 0),
        ("|(x-5)(x-5.0001)|", "(x-5)(x-5.0001)", 0),
        ("\\lfloor n/2 \\rfloor", "\\lfloor n/3 \\rfloor", 0),
        ("\\lfloor n^2/4 \\rfloor", "\\lfloor n^2/5 \\rfloor", 0),
        ("mn-\\lfloor m/2\\rfloor", "mn-\\lfloor m/3\\rfloor", 0),
        ("\\max(a,b)", "b", 0),
        ("\\lceil x/2 \\rceil", "\\lfloor x/2 \\rfloor + 1", 0),
        ("-1", "\\lfloor x \\rfloor + \\lfloor -x \\rfloor", 0),
        ("|e^x-5|", "5-e^x", 0),
        ("i|x|", "ix", 0),
        ("x+2^{127}-1", "x", 0),
        ("\\pi+2^{5000}", "\\pi+1+2^{5000}", 0),
        ("10^{-50}\\pi", "0", 0),
        ("0", "\\sin\\pi", 1),
        ("0", "\\cos 270^\\circ", 1),
        ("0", "10^{-50}\\sin 1", 0),
        ("0", "\\sin(\\pi+10^{-45})", 0),
        ("0", "\\sin(e^{-300})", 0),
        ("\\lceil n/2 \\rceil", "\\lfloor (n+1)/2 \\rfloor", 1),
        ("\\lceil x/2 \\rceil", "\\lfloor (x+1)/2 \\rfloor", 0),
        ("\\cos(n\\pi)", "(-1)^n", 1),
        ("\\cos(x\\pi)", "(-1)^x", 0),
        ("\\lfloor n/2 \\rfloor", "\\frac{2n-1+(-1)^n}{4}", 1),
        ("2\\arcsin\\sqrt{a}", "\\arccos(1-2a)", 1),
        ("\\sqrt{\\frac{2h}{g}}", "\\frac{\\sqrt{2hg}}{g}", 1),
        ("2^{1000000}", "4^{500000}", 1),
        ("2^{1000000}", "4^{500000}+1", 0),
        ("\\frac{n(n+1)}{2}", "\\sum_{k=1}^{n} k", 1),
        ("\\frac{n(n-1)}{2}", "\\sum_{k=1}^{n} k", 0),
        ("n!", "\\prod_{k=1}^{n} k", 1),
        ("\\sum_{k=1}^{2024}\\lfloor\\sqrt k\\rfloor", "59730", 1),
        ("2024!-1", "\\sum_{n=1}^{2023} n\\cdot n!", 1),
        ("15!!", "2027025", 1),
        ("2027025", "15!!", 1),
        ("\\gcd(12,18)", "6", 1),
        ("\\operatorname{lcm}(4,6)", "12", 1),
        ("2^{100} \\bmod 7", "2", 1),
        ("|x|", "\\max(x,-x)", 1),
        ("|x-5|", "\\sqrt{x^2-10x+25}", 1),
        ("\\sqrt{(x-5)^2(x-5.0001)^2}", "(x-5)(x-5.0001)", 0),
        ("\\sqrt{(x-5)^2(x-5.0001)^2}", "|x-5||x-5.0001|", 1),
        ("|x|\\sqrt{2}", "\\sqrt{2x^2}", 1),
        ("|y|+\\sqrt{10201x}", "|y|-101\\sqrt{x}", 0),
        ("|y|+\\sqrt{10201x}", "7|y|-\\sqrt{x}", 0),
        ("-x^2|y|", "|ix|^2|y|", 0),
        ("\\gcd(n,1009)", "\\gcd(n,1009)^2", 0),
        ("\\sqrt{x^2+1}-x", "\\frac{1}{\\sqrt{x^2+1}+x}", 1),
        ("n!", "\\prod_{i=1}^{n} i", 1),
        ("x^2+1", "|x^2+1|", 1),
        ("x^2-1", "|x^2-1|", 0),
        ("x^4y^2+|z|", "|x^4y^2+|z||", 1),
        ("x^3+1", "|x^3+1|", 0),
        ("x^2-|y|", "|x^2-|y||", 0),
        ("n^2", "n^2+0^{(n-7)^2}", 0),
        ("2n", "2n+0^{n^2-14n+49}", 0),
        ("x^2", "x^2+(x-x)^{(x-7)^2}", 0),
        ("x^2", "x^2+\\ln(1+(\\sin\\pi)^{(x-7)^2})", 0),
        ("x^2", "x^2+\\sum_{k=1}^{2}0^{|x-k|}", 0),
        ("5-x", "\\sum_{k=1}^{1}|x-5|", 0),
        ("n^2", "n^2+\\prod_{k=1}^{|n-50|}0", 0),
        ("n^2", "n^2+\\lfloor\\frac{1}{1+(n-2^6)^2}\\rfloor", 0),
        ("n^2", "n^2+\\lfloor\\frac{1}{1+(n-4!)^2}\\rfloor", 0),
        ("n^2", "n^2+\\lfloor(n/2)^5\\rfloor-\\lfloor\\frac{n^5-1}{32}\\rfloor", 0),
        ("\\gcd(n,(1+1)^8)", "\\gcd(n,(1+1)^7)", 0),
        ("1", "\\gcd(n^7+1,(n+1)^7+1)", 0),
        ("n", "n+\\sum_{k=0}^{16}i^{4kn/17}", 0),
        ("n", "n+\\cos^{40000}(\\frac{\\pi n}{13})", 0),
        ("n", "n+(1+(-1)^n)\\sum_{k=1}^{1+10^9(1+(-1)^n)} 1", 0),
        ("\\sin x", "\\sin x+\\frac{1}{\\cosh(40(x-7))^3}", 0),
        ("\\sin 1", "\\sin 1+e^{-200}", 0),
        ("8", "\\sqrt{2}\\pi^{99}" + 5 * "\\pi^{99}" + "-\\sqrt{2}\\pi^{99}" + 5 * "\\pi^{99}" + "+7", 0),
        ("8", "\\sqrt{2}" + 150 * "\\pi" + "-\\sqrt{2}" + 150 * "\\pi" + "+7", 0),
        ("8", "\\tan\\frac{\\pi}{2}-\\tan\\frac{\\pi}{2}+7", 0),
        ("8", "\\arctan i", 0),
        ("\\pi", "\\max(1,\\pi i^0)", 1),
        ("8", "\\sqrt{x+i}", 0),
        ("i", "i\\sqrt{x^2-10x+25}", 0),
        ("x+i", "\\sqrt{x^2+2ix-1}", 0),
        ("7", "\\lfloor\\sqrt{49-10^{-50}}\\rfloor", 0),
        ("7", "\\lfloor 7-\\sqrt{2}/(" + 9 * "\\pi^{20}" + ")\\rfloor", 0),
        ("\\lfloor (n+1)^2/4 \\rfloor", "\\frac{2n^2+4n+1-(-1)^n}{8}", 1),
        ("\\gcd(n,6)", "\\gcd(6,n)", 1),
        ("\\lfloor n^2/4 \\rfloor", "\\sum_{k=1}^{n} \\lfloor k/2 \\rfloor", 1),
        ("\\cosh x", "\\frac{e^x+e^{-x}}{2}", 1),
        ("e^{-200}\\ln 2", "\\frac{\\ln 2}{e^{200}}", 1),
        ("x^x", "e^{x \\ln x}", 1),
    ],
)
def test_steps_and_sums(gold: str, answer: str, reward: float) -> None:
    """Where points between 0 and 2 say nothing, or a sum has to be carried out."""
    assert grade_math(f"\\boxed{{{answer}}}", gold, {}).reward == reward
