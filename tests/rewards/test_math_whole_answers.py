"""Answers that are compared as wholes: choices by letter or text, letters that the problem asks for; and sentences
beside or for an answer. None is taken from a data set."""

from __future__ import annotations

import itertools
import random

import pytest
from support.math_cases import Case, case, check

from dppo_megatron.rewards.math.grader import grade_math
from tests.support.cases import Choose

TAN = {"problem": r"Solve $\tan x = 1$."}
WINS = {"problem": "Alice and Bob take stones in turn. Who has a winning strategy, if both play well?"}
FAR = {"problem": "It is a star. How far away is it, in parsecs?"}
MOLAR = {"problem": "Find the molar solubility of the salt."}
CURVE = {"problem": 'Which curve is it? Enter "C" for circle, "P" for parabola, and "N" for none of the above.'}
PARITY = r"\begin{cases} \frac{n}{2} & n \text{ even} \\ \frac{n+1}{2} & n \text{ odd} \end{cases}"
MORE = [r"\frac{n}{2} & n \text{ odd}", r"n & n \equiv 0 \pmod 4"]
BENT = r"\frac{\pi}{4} + (n + n(n-1)(n-977))\pi"  # straight at three places
NICKELS = {"problem": "He has 3 dimes. How many nickels has he?"}
SAID = ["because six is right too", "by symmetry also minus five", "since six is one", "by Ten", "by Bob and six by Al"]
CASES = [
    case(
        r"\text{Yes}",
        [r"\text{Yes, since it is prime}", r"\text{yes (by Fermat)}"],
        [
            r"\text{Yes (maybe)}",
            r"\text{Yes, since no, wait}",
            r"\text{No, since } 3 = 3",
            r"\text{Yes, but only if } n>2",
            r"\text{Yes (no)}",
            r"\text{Yes, because I guess}",
            r"\text{Yes } (n=2) \text{, No } (n=3)",
            r"\text{Yes (the answer is no in fact)}",
        ],
    ),
    case(
        r"\text{False}",
        [r"\text{false}"],
        [r"\text{True (Weierstrass function)}", r"\text{False or true}", r"\text{False (true)}"],
    ),
    case(r"\text{No}", [r"\text{no}"], [r"\text{no solution}", r"\text{No, wait, yes}"]),
    case(
        r"\text{March 14}",
        [r"\text{Mar. 14}", r"\text{14 Mar}", r"\text{On March 14th}"],
        [r"\text{May 14}", r"\text{Mar. 15}", r"\text{March or 14}", r"\text{Marc 14}"],
    ),
    case(r"\text{Monday to Friday}", [r"\text{monday to friday}"], [r"\text{Friday to Monday}"]),
    case(r"\text{May to June}", [r"\text{May to Jun}"], [r"\text{June to May}"]),
    case("5", [], [rf"5 \text{{ ({said})}}" for said in SAID]),
    case(
        r"\text{Tuesday}",
        [r"\text{On Tuesday}", r"\text{on a Tuesday}"],
        [r"\text{Thu.}", r"\text{not on Tuesday}", r"\text{On Tuesday or Friday}"],
    ),
    case(
        r"\text{Alice}",
        [r"\text{Alice has a winning strategy}", r"\text{Alice wins}", r"\text{Alice will always win}"],
        [
            r"\text{Alice loses}",
            r"\text{Bob wins}",
            r"\text{Alice or Bob has a winning strategy}",
            r"\text{Alice has no winning strategy}",
            r"\text{Alice wins Bob wins}",
        ],
        WINS,
    ),
    case(
        r"\text{first player}",
        [r"\text{first player wins}"],
        [r"\text{first player second}", r"\text{the first player the second player}"],
        {"problem": "Who wins, the first or the second player?"},
    ),
    case(r"\text{Dana}", [r"\text{Dana has larger bowls}"], [], {"problem": "Who has larger bowls?"}),
    case(
        r"\text{no solution}",
        [r"\text{none}", r"\text{There are no solutions.}", r"\text{No such integer exists}", r"\emptyset"],
        [r"\text{no}", r"\text{There is one solution}", "0", r"\text{no negative solutions}"],
    ),
    case(
        r"\text{infinitely many}",
        [r"\text{There are infinitely many solutions}", r"\text{infinitely many such pairs}", r"\infty"],
        [r"\text{not infinitely many}", r"\text{many solutions}", r"\text{finitely many}"],
    ),
    case(
        r"\text{all positive integers } n",
        [r"\text{every positive integer}", r"\mathbb{Z}^+", r"\text{all natural numbers}"],
        [r"\text{every integer}", r"n \ge 2", r"\text{every odd positive integer}", r"\mathbb{Z}"],
    ),
    case(r"\mathbb{Z}", [r"\text{all integers}"], [r"\mathbb{N}", r"\mathbb{R}", r"\text{all real numbers}"]),
    case(
        r"\mathbb{R}\setminus\{-4,-2\}",
        [r"\text{All real numbers except } x=-2 \text{ and } x=-4", r"\text{all real } x \text{ except } -2, -4"],
        [r"\text{All real numbers except } x=-2", r"\text{All real numbers}"],
    ),
    case("4", [], ["AD = 4^2", "AD^2 = 5 = 4"], {"problem": "Find the value of $AD^2.$"}),
    case("4", ["AD = 4"], ["AD^2 = 4"], {"problem": "Let $AD^2 = x$. Find $AD$."}),
    case("4", ["AD^2 = 4"], ["AD^2 = 5"], {"problem": "Find $AD^2.$"}),
    case(r"3a+2b", [r"\log 72 = 3a+2b"], [r"\log 72 = 2a+3b"], {"problem": r"With $a=\log 2$, express $\log 72$."}),
    case("x^3-3x^2+3x-1", ["(x-1)^3 = x^3-3x^2+3x-1"], ["(x-1)^3 = (x-1)^3"], {"problem": "Expand $(x-1)^3$."}),
    case(
        r"\frac{n}{n+1}", [r"1-\frac{1}{n+1} = \frac{n}{n+1}"], [r"1-\frac{1}{n} = \frac{n}{n+1}", r"x = 3 = n/(n+1)"]
    ),
    case(r"\frac{1}{\lambda}", [r"E[X] = \frac1\lambda"], [r"E[X] = \lambda"]),
    case("0", ["x = 0"], ["x + y = 0"]),
    case("55", [r"\binom{11}{2} = 55"], [r"\binom{11}{2} = \binom{11}{2}"], {"problem": r"Compute $\binom{11}{2}$."}),
    case(r"\frac13", [r"\text{P(red)} = \frac26 = \frac13"], [r"\text{P(red)} = \frac25 = \frac13"]),
    case("100p^{1/2}", ["y^s(p) = 100p^{1/2}"], ["y^s(p) = 100p"]),
    case("100", [r"100 \text{ pc}", r"100\text{ parsecs}"], [r"100 \text{ light-years}", r"100\text{ leagues}"], FAR),
    case("8", [r"8 \text{ full hours}", r"8\text{ hrs}"], [r"8 \text{ shifts}"], {"problem": "How many hours is it?"}),
    case(r"4 \text{ ly}", [r"4 \text{ light-years}", r"4 \text{ light years}"], [r"4 \text{ years}"]),
    case("8.49e-4", [r"8.49 \times 10^{-4} \text{ M}"], [r"8.49 \times 10^{-4} \text{ mol/mL}s"], MOLAR),
    case("5", [], [r"5 \text{ M}"], {"problem": "How many people live there?"}),
    case("5", [rf"5 \text{{ {coins} }}" for coins in ("coins", "nickels")], [], NICKELS),
    case("7", ["7\\text{ coins}", "7\\text{ pennies}", "7\\text{ units}"], [], {"problem": "How many pennies has he?"}),
    case("AB", [], ["(AB)^T", "BA^T"]),
    case(r"\text{A}", ["(A) 0"], ["(A) 0 (B) 1", "(A) 0 (B) 1 (C) 2"], {"problem": "Which? (A) 0 (B) 1 (C) 2"}),
    case(r"\text{(P)}", [r"\text{P (parabola)}", r"\text{parabola}"], [r"\text{P (circle)}", r"\text{circle}"], CURVE),
    case("n!", [r"n(n-1)(n-2)\cdots 2 \cdot 1", r"1\cdot 2\cdots n"], [r"n(n-1)\cdots 3", r"(n-1)(n-2)\cdots 1"]),
    case(
        r"\ln|x-1| - \ln|x+1| + C",
        [r"\ln\left|\frac{x-1}{x+1}\right| + C", r"\ln|1-x| - \ln|1+x| + C"],
        [r"\ln\left|\frac{x+1}{x-1}\right| + C", r"\ln(x-1) - \ln(x+1) + C"],
    ),
    case(
        r"f(x) = ax \text{ for some } a \in \mathbb{R}",
        [r"f(x) = kx \text{ where } k \text{ is an arbitrary real constant}", r"f(x) = cx,\ c \in \mathbb{R}"],
        ["f(x) = 2x", "f(x) = c", r"f(x) = a^2x", r"f(x) = cx + 1,\ c \in \mathbb{R}"],
    ),
    case(
        r"f(x) = ax+b \text{ for some } a, b \in \mathbb{R}",
        [r"f(x) = mx+c \text{ for some } m, c"],
        ["f(x) = mx+m", "f(x)=mx"],
    ),
    case(
        r"x = \frac{\pi}{4} + n\pi, n \in \mathbb{Z}",
        [
            r"\left\{\frac{(4n+1)\pi}{4} : n \in \mathbb{Z}\right\}",
            r"\{x \in \mathbb{R} \mid x = \frac{\pi}{4}+k\pi, k \in \mathbb{Z}\}",
        ],
        [r"\{\frac{\pi}{4}+n\pi : n \in \mathbb{N}\}", r"y = \frac{5\pi}{4}+n\pi", r"\frac{5\pi}{4} + n^2\pi", BENT],
        TAN,
    ),
    case(
        r"x = \frac{\pi}{6} + 2k\pi \text{ or } x = \frac{5\pi}{6} + 2k\pi, k \in \mathbb{Z}",
        [r"x = \frac{5\pi}{6} + 2m\pi \text{ or } x = \frac{\pi}{6} + 2m\pi"],
        [r"x = (-1)^{n+1} \frac{\pi}{6} + n\pi,\ n\in\mathbb{Z}", r"x = (-1)^n \frac{\pi}{6} + 2n\pi"],
        {"problem": r"Solve $2\sin x = 1$."},
    ),
    case(
        rf"f(n) = {PARITY}",
        [PARITY],
        [r"\lfloor \frac{n}{2} \rfloor", r"\frac n2", r"\lfloor \frac{n+2}{2} \rfloor"],
    ),
    case(PARITY, [], [PARITY.replace(r"\end", rf"\\ {more} \end") for more in MORE]),
    case(
        r"\begin{cases} x & x < 1 \\ 2-x & x \ge 1 \end{cases}",
        [],
        [r"\begin{cases} x & y < 1 \\ 2-x & y \ge 1 \end{cases}"],
    ),
    case("6", [r"\text{P(red)} = 6"], [r"\text{answer (wrong)} = 6", r"\text{Six (maybe)} = 6"]),
    case("1, 2", ["s=1, r=2", "r=1, s=2"], ["r=1, s=3"], {"problem": "Let $r$ and $s$ be the roots. Find all roots."}),
    case("1, 2", ["m=2, n=1"], ["m=2, n=2"], {"problem": "Find $m$ and $n$, in either order."}),
    case(r"\lceil \frac n2 \rceil", [], [r"\begin{cases} \frac{n}{2} & n \text{ even} \end{cases}"]),
    case(r"4:51:06 \text{ p.m.}", ["4:51:06 PM"], [r"4:51:06 \text{ a.m.}", "04:51:06", "4:51:07 PM"]),
    case(
        "4:51 PM", ["04:51", "4:51"], ["4:52", "5:51", "4:51 AM"], {"problem": 'Write the time without "am" or "pm".'}
    ),
    # a letter times a power of a number; without a letter in the power it may be an index
    case("n2^{n-1}", [r"\frac{n\cdot2^n}{2}", "2^{n-1}n", "n 2^n/2"], ["n2^{n}", "2^{n-1}", "n3^{n-1}"]),
    case("(n-2)2^n+1", ["1+n2^n-2^{n+1}"], ["1+n2^n-2^n", "1+n_2^n-2^{n+1}"]),
    case("8x", ["x*2^3"], ["x2^3", "x8", "x_8"]),
    # functions as they are called elsewhere
    case(
        r"\frac{\tan x}{\cot y}",
        [r"\tg x\tg y", r"\frac{\operatorname{tg} x}{\operatorname{ctg} y}", r"\frac{\tg x}{\ctg y}"],
        [r"\tg x\ctg y", r"\frac{\th x}{\ctg y}"],
    ),
    case(r"\arccos\frac13", [r"\operatorname{arctg} 2\sqrt2", r"\arctg(2\sqrt2)"], [r"\operatorname{tg} 2\sqrt2"]),
    case(r"\sinh x", [r"\sh x", r"\operatorname{sh} x", r"\frac{e^x-e^{-x}}2"], [r"\ch x", r"\operatorname{ch} x"]),
    case(r"\theta\chi", [r"\chi\theta"], [r"\th\ch", r"\theta"]),  # which begin as \th and \ch do
    # semicolons between coordinates; letters that share a value
    case("(1,1,1)", ["(x;y;z)=(1;1;1)", "x=y=z=1"], ["(x;y;z)=(1;1;2)", "x=y=z=2", "x=y=1"]),
    case("(3,2)", [r"V(3;\,2)", "(x;y)=(3;2)"], ["V(2;3)", "x=y=3"]),
    case("x=y=z=1", ["(1,1,1)"], ["(1,1,2)", "(1,1)"]),
    case("-2,-2", ["a=b=-2", "a=-2, b=-2"], ["a=b=2", "a=b=c=-2"], {"problem": "Determine $a$ and $b$."}),
    case("5", ["x=y=5"], ["x=y=4"]),
    # the order of what the problem names
    case(
        "2, 3",
        [r"\text{median}=2, \text{mean}=3", r"\text{mean}=3, \text{median}=2", r"\text{Mean: }3, \text{Median: }2"],
        ["3, 2", r"\text{median}=3, \text{mean}=2", r"\text{mean}=2, \text{median}=3"],
        {"problem": "Find the median and the mean of $1,2,2,7$, in that order."},
    ),
    case(
        "2, 3, 9",
        ["f(16)=3, f(6)=2, f(72)=9", "f(6)=2, f(16)=3, f(72)=9"],
        ["9, 3, 2", "3, 2, 9", "f(16)=2, f(6)=3, f(72)=9"],
        {"problem": "For all $n$ it is known. Compute $f(6), f(16)$, and $f(72)$."},
    ),
    case("2, 3", [], ["3, 2"], {"problem": "What are the mass and the charge of it, respectively?"}),
    case("2, 3", ["3, 2"], [], {"problem": "Find the roots if $a$ and $b$ are 5 and 6, respectively."}),
    case("2, 3", ["3, 2"], [], {"problem": "Find all $x$ for which $f(1)$ and $f(2)$ vanish with $x$."}),
    case(
        r"\text{Tea, Milk, Water}",
        [r"\text{Tea, Milk and Water}"],
        [r"\text{Milk, Tea, Water}"],
        {"problem": "List the drinks from most popular to least popular."},
    ),
    *(
        case(
            "60",
            [r"60\text{ km/h}", r"60\text{ kilometers per hour}", "60 km/h", r"\frac{50}{3}\text{ m/s}"],
            [r"60\text{ m/s}", r"60\text{ km}", r"60\text{ hours}", r"60\text{ mph}"],
            {"problem": f"It drives 150 km in 2.5 hours. What is its speed in {unit}?"},
        )
        for unit in ("km/h", "kilometers per hour")
    ),
    case("0<x<1", [r"x>0\ \wedge\ x<1", r"0<x \land x<1"], [r"x>0 \land x<2", r"x>0 \vee x<1"]),
    case(r"p \wedge q", [r"p\land q"], [r"p \vee q", "p, q"]),
    case(
        r"\begin{pmatrix}3&-1\\-5&2\end{pmatrix}",
        [r"A^{-1}=\begin{bmatrix}3&-1\\-5&2\end{bmatrix}"],
        [r"A^{-1}=\begin{bmatrix}3&1\\-5&2\end{bmatrix}"],
    ),
    case(
        r"A=\begin{pmatrix}3&4\end{pmatrix}",
        [r"\begin{pmatrix}3&4\end{pmatrix}"],
        [r"A^{-1}=\begin{pmatrix}3&4\end{pmatrix}"],
    ),
]


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases[0][0][:40])
def test_answers(cases: list[Case]) -> None:
    """What is right is 1, what is not 0."""
    check(cases)


def test_a_bold_label_is_no_part_of_the_answer() -> None:
    for label in (r"$$\textbf{Answer: } 90$$", r"$$\text{Answer:} 90$$", r"\textbf{The answer is:} 90"):
        assert [grade_math(f"We obtain {label}", gold, {}).reward for gold in ("90", "91")] == [1.0, 0.0], label
    assert grade_math(r"We obtain $$\textbf{Answer: } 90$$ or less", "90", {}).reward == 0.0


def reward(answer: str, gold: str, problem: str) -> float:
    """The grade of an answer in a box."""
    return grade_math(f"\\boxed{{{answer}}}", gold, {"problem": problem}).reward


OPTIONS = ["97", r"\frac{3}{7}", r"\sqrt{5}", "-4", "x^2+1", "(1, 2)", r"\text{ellipse}", r"6\pi", "0.25", r"\frac12"]
MARKS = ["({}) ${}$", "{}. ${}$", "{}) ${}$", r"$\textbf{{({})}}\ {}\qquad$"]


def test_a_choice_is_its_letter_or_its_text(cases: Choose) -> None:
    """Whichever of the two the reference is; a letter beside the text of another one is wrong."""
    for seed in cases("choices", 150):
        drawn = random.Random(seed)
        texts, mark, num = drawn.sample(OPTIONS, 4), drawn.choice(MARKS), drawn.randrange(4)
        problem = "Which is it? " + " ".join(mark.format(name, text) for name, text in zip("ABCD", texts, strict=True))
        for gold in ("ABCD"[num], texts[num]):
            for at, (name, text) in enumerate(zip("ABCD", texts, strict=True)):
                other = texts[(at + 1) % 4]
                for answer in (name, f"({name})", text, f"({name}) {text}"):
                    assert reward(answer, gold, problem) == float(at == num), (problem, gold, answer)
                for answer in (f"({name}) {other}", rf"{text} \text{{ or }} {other}", f"{text}, {other}"):
                    assert reward(answer, gold, problem) == 0.0, (problem, gold, answer)


def test_named_letters_are_in_the_order_that_is_asked(cases: Choose) -> None:
    """A reference without letters has their values in the order in which the problem asks for them."""
    for seed in cases("letters asked", 150):
        drawn = random.Random(seed)
        names = drawn.sample(["a", "b", "c", "k", "m", "n", "p", "q"], drawn.choice((2, 3)))
        values = [str(value) for value in drawn.sample(range(-9, 30), len(names))]
        asked = drawn.choice(["${}$", "the numbers ${}$"]).format("$, $".join(names[:-1])) + f" and ${names[-1]}$"
        problem = f"The curve has two letters. Find {asked}."
        for order in itertools.permutations(values):
            pairs = [f"{name} = {value}" for name, value in zip(names, order, strict=True)]
            drawn.shuffle(pairs)
            assert reward(", ".join(pairs), ", ".join(values), problem) == float([*order] == values), (problem, pairs)


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        (r"Either $2x-1=5$, so $\boxed{x=3}$, or $2x-1=-5$, so $\boxed{x=-2}$.", "3,-2", 1),
        (r"So $x=\boxed{2}$. Substituting back, $y=5-2=\boxed{3}$.", "2, 3", 1),
        (r"So $x=\boxed{2}$. Then again $\boxed{2}$, and $y=5-2=\boxed{3}$.", "2, 3", 1),
        (r"So $x=\boxed{2}$. Substituting back, $y=5-2=\boxed{3}$.", "3", 1),
        (r"So $x=\boxed{2}$. Substituting back, $y=5-2=\boxed{3}$.", "(2, 3)", 0),
        (r"First $\boxed{1}$, then $\boxed{2}$, at last $\boxed{3}$.", "2, 3", 0),
        (r"It is $\boxed{2}$, or perhaps $\boxed{3}$.", "2, 3", 0),
        (r"So $x=\boxed{2}$. Substituting back, $y=\boxed{3}$.", "2", 0),
    ],
)
def test_an_item_in_each_box(completion: str, reference: str, reward: float) -> None:
    """With sentences between them; all boxes together are the list, or the last one is the answer."""
    assert grade_math(completion, reference, {}).reward == reward
