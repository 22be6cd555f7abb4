"""The `math` grader, by hand. Expressions with variables, equations and functions."""

from __future__ import annotations

import pytest
from support.math_cases import Case, case, check

CASES = [
    case("(n-2) 2^{n}+1", right=["1+(n-2)2^n", r"n\cdot 2^n-2^{n+1}+1"], wrong=["(n-2)2^n", "2(n-2)^n+1"]),
    case("6+9i", right=["9i+6", "6 + 9 i", "3(2+3i)", r"6+9\mathrm{i}"], wrong=["6-9i", "9+6i", "6+9", "6,9", "(6,9)"]),
    case(
        "y = 2x + 3",
        right=["y=2x+3", "y = 3+2x", "2x+3", "y-2x=3", "2x - y + 3 = 0", "y=2(x+1.5)", "f(x)=2x+3", "2y=4x+6"],
        wrong=["y=2x-3", "y=3x+2", "x=2y+3", "3", "y=2x"],
    ),
    case(
        "x = 4",
        right=["4", "x=4", "4=x", r"x = \frac{8}{2}"],
        wrong=["x=5", "y=4", "x>4", "-4", r"x=4 \text{ or } 5", r"x=\pm4"],
    ),
    case(
        "4x-5y=-50",
        right=["5y-4x=50", "4x-5y+50=0", "-4x+5y=50", "8x-10y=-100"],
        wrong=["4x-5y=50", "4x+5y=-50", "-50", "4x-5y"],
    ),
    case(
        "x^2+y^2=13",
        right=["x^2+y^2-13=0", "13=x^2+y^2", "y^2+x^2=13"],
        wrong=["x^2+y^2=12", "x^2-y^2=13", "13", "x^2+y^2"],
    ),
    case("f(x)=x+1", right=["x+1", "f(x)=1+x", "y=x+1"], wrong=["x", "f(x)=x", "x-1"]),
    case(
        "x^2+2x+1",
        right=["(x+1)^2", "1+2x+x^2", "x(x+2)+1", r"x^2 + 2\cdot x + 1", "x^{2}+2x+1", "(1+x)^{2}", "x**2+2*x+1"],
        wrong=["x^2+2x", "(x-1)^2", "y^2+2y+1", "x^2+2x+1.0001", "x^3+2x+1", "2x^2+1", "(x+1)^2=0"],
    ),
    case(
        r"\frac{x+2}{7}",
        right=["(x+2)/7", r"\frac{1}{7}x+\frac27", r"\frac{2+x}{7}"],
        wrong=[r"x+\frac{2}{7}", r"\frac{x+2}{6}"],
    ),
    case("7(x+3)(x-3)", right=["7x^2-63", "7(x-3)(x+3)"], wrong=[]),
    case(r"\sin 3x", right=[r"\sin(3x)", r"3\sin x-4\sin^3 x"], wrong=[r"3\sin x", r"\cos 3x", r"\sin 3"]),
    case(r"\sec x", right=[r"\frac{1}{\cos x}"], wrong=[]),
    case(r"\cot x", right=[r"\frac{\cos x}{\sin x}", r"\frac{1}{\tan x}"], wrong=[]),
    case("2^{k-n}", right=[r"\frac{2^k}{2^n}"], wrong=["2^{n-k}", "2^{k-n+1}"]),
    case("e^{2x}", right=["(e^x)^2", r"\exp(2x)", r"e^{x}\cdot e^x"], wrong=["e^{x}", "2e^x", "e^{x^2}"]),
    case("n!", right=[r"n\cdot(n-1)!"], wrong=["(n-1)!", "n"]),
    # a factorial that has no value at the smallest numbers
    case(
        "n(n-1)",
        right=[r"\frac{n!}{(n-2)!}"],
        wrong=[r"\frac{n!}{(n-2)!}+1", r"\frac{n!}{(n-3)!}", r"\frac{n!}{2(n-2)!}"],
    ),
    case(r"\frac{(n+1)!}{n!}", right=["n+1"], wrong=["n", "n+2"]),
    case(r"\frac{n(n-1)}{2}", right=[r"\frac{n!}{2(n-2)!}"], wrong=[r"\frac{n!}{(n-2)!}"]),
    case("n(-1)^{n}", right=[r"(-1)^n n", r"n\cdot(-1)^{n}"], wrong=["(-n)^n", "-n"]),
    case("a(2)^{n-1}", right=[r"a\cdot 2^{n-1}"], wrong=["(2a)^{n-1}"]),
    case("f(2)^2", right=[r"f(2)\cdot f(2)"], wrong=["f(-2)^2", "4f"]),
    case(r"\binom{n}{2}", right=[r"\frac{n(n-1)}{2}"], wrong=[r"\binom{n}{3}", r"\frac{n}{2}"]),
    case(
        r"\frac{n(n+1)}{2}",
        right=[r"\frac{n^2+n}{2}", r"\binom{n+1}{2}", "n(n+1)/2", "0.5n(n+1)"],
        wrong=[r"\frac{n(n-1)}{2}", "n(n+1)"],
    ),
    case("|x|", right=[r"\sqrt{x^2}", r"\left|x\right|"], wrong=["-x"]),
    case(r"\sqrt{x}", right=["x^{1/2}", "x^{0.5}"], wrong=["x", "x^2"]),
    case("a^3+a^2", right=["a^2(a+1)"], wrong=[]),
    case("p-q", right=["-q+p", "-(q-p)"], wrong=["q-p", "p+q"]),
    case(
        r"x=\frac{\pi}{4}+k\pi",
        right=[r"\frac{\pi}{4}+k\pi", r"x=\frac{\pi}{4}+n\pi", r"\frac{\pi}{4}+\pi k"],
        wrong=[r"\frac{\pi}{4}", r"\frac{\pi}{4}+2k\pi"],
    ),
    case(
        "3x^2y",
        right=["3yx^2", "3x^{2}y", r"3\cdot x^2\cdot y", r"y\cdot3x^2"],
        wrong=["3xy^2", "3x^2", "9x^2y", "(3x)^2y"],
    ),
    case(r"\frac{a}{b}", right=["a/b", "a b^{-1}", r"\frac{2a}{2b}"], wrong=[r"\frac{b}{a}", "ab", r"\frac{A}{b}"]),
    case(r"2\pi r", right=[r"2 r \pi", r"\pi\cdot 2r", "2πr"], wrong=[r"\pi r^2", r"2\pi R", "6.28r", "2r"]),
    case("(x-1)(x+1)", right=["x^2-1", "(x+1)(x-1)"], wrong=["x^2+1", "(x-1)(x+2)"]),
    case(
        r"\cos 2x",
        right=[r"2\cos^2 x-1", r"1-2\sin^2x", r"\cos^2 x-\sin^2 x", r"\cos(2x)"],
        wrong=[r"2\cos x", r"\cos^2 x", r"\cos x"],
    ),
    case(r"\frac{2}{1+i}", right=["1-i", "1 - i"], wrong=["1+i", "-1+i"]),
    case(
        r"e^{i\pi/3}",
        right=[r"\frac12+\frac{\sqrt3}{2}i", r"\frac{1+i\sqrt{3}}{2}"],
        wrong=[r"e^{i\pi/6}", r"\frac{1-i\sqrt{3}}{2}"],
    ),
    case("i", right=["i", r"\mathrm{i}", r"\sqrt{-1}"], wrong=["-i", "1"]),
    case("f^{-1}(x)=x-3", right=["x-3", "f^{-1}(x) = x - 3", "y=x-3"], wrong=[]),
    case("S_n = n^2", right=["n^2", "S_n=n^2", "S_{n}=n^{2}"], wrong=["n", "S_n=n", "2n"]),
    case("a_n = 2^n", right=["2^n"], wrong=[]),
    case(r"\theta = \frac{\pi}{3}", right=[r"\frac{\pi}{3}", r"60^\circ"], wrong=[r"\frac{\pi}{6}", r"30^\circ"]),
    case(
        r"\log_2 3",
        right=[r"\frac{\ln 3}{\ln 2}", r"\frac{\log 3}{\log 2}", r"\log_{2}(3)", r"\frac{1}{\log_3 2}"],
        wrong=[r"\log_3 2", "1.585", r"\log 3"],
    ),
    case(r"\lg 5", right=[r"1-\lg 2", r"\log_{10} 5", r"\mathrm{lg} 5"], wrong=[r"\ln 5", r"1-\ln 2"]),
    case(r"\frac{\lg 3}{\lg 2}", right=[r"\log_2 3", r"\frac{\ln 3}{\ln 2}"], wrong=[r"\log_3 2"]),
    case("lg", right=["gl"], wrong=[r"\lg g"]),
    case("f(x)=0", right=[r"f(x)\equiv 0"], wrong=[r"f(x)\equiv 1"]),
    case(r"f(x)\equiv 0", right=["f(x)=0", "0"], wrong=["f(x)=x"]),
    case(r"\rho\cos\theta = 1", right=[], wrong=["1"]),
    case(r"x\cos\alpha = 3", right=[], wrong=["3"]),
    case(r"\sin\theta=\cos\theta", right=[], wrong=[r"\cos\theta"]),
    # a power of a value, and a letter times one
    case(r"\frac12 m v(0)^2", right=[r"\frac{m v(0)^2}{2}"], wrong=["0"]),
    case("y(0)^2 + 1", right=["1+y(0)^2"], wrong=["1"]),
    case("p(1)^2+p(2)^2", right=[], wrong=["5p"]),
    case("A(2)^t", right=[r"A\cdot 2^t"], wrong=[]),
    # a factorial is no letter for whole numbers
    case("x", right=[], wrong=[r"x + \sin(\pi x)\frac{x!}{x!}"]),
    case(r"P(X \in \mathbb{Q}) = 0", right=[], wrong=[r"P(X \in \mathbb{N}) = 0"]),
    case(r"\overrightarrow{AB} = (1,2)", right=[], wrong=[r"\overrightarrow{BA} = (1,2)"]),
    # maps, and bound variables
    case(
        "f(x) = 2x+1",
        right=[r"x\mapsto 2x+1", r"f: x \longmapsto 2x+1", r"f:\mathbb{R}\to\mathbb{R}, x\mapsto 1+2x", "f(t)=2t+1"],
        wrong=[r"x\mapsto 2x", r"x\mapsto 2y+1"],
    ),
    case(r"x\mapsto x^2", right=["x^2", "f(x)=x^2", r"t\mapsto t^2"], wrong=["x", "f(x)=x"]),
    # the constant of an antiderivative
    case(
        r"\frac{x^3}{3}+C",
        right=[r"\frac{x^3}{3}+c", r"c+\frac13x^3", r"\frac{x^3}{3}+K"],
        wrong=[r"\frac{x^3}{3}", r"\frac{x^3}{3}-c", r"\frac{x^3}{3}+cx", r"\frac{x^3}{3}+C+c", r"\frac{x^3}{3}+d"],
    ),
    case("y=x^2+C", right=["y=x^2+c"], wrong=["y=x^2"]),
    case(
        r"\frac{x^3}{3}+c", right=[r"\frac{x^3}{3}+C"], wrong=[r"\frac{x^3}{3}", r"\frac{x^3}{3}+d", r"\frac{x^3}{3}-C"]
    ),
    *(
        case(
            gold,
            right=["c_1e^{2x}+c_2e^{-x}", "C_1e^{2x}+C_2e^{-x}"],
            wrong=["c_1e^{2x}+c_1e^{-x}", "c_1e^{2x}-c_2e^{-x}"],
        )
        for gold in ("C_1e^{2x}+C_2e^{-x}", "c_1e^{2x}+c_2e^{-x}")
    ),
    case("y=Ce^{-3x}+2", right=["y=2+Ae^{-3x}"], wrong=["y=2-3Ae^{-2x}", "y=Ae^{-3x}", "y=Cx+2"]),
    case("e^x+C", right=["e^x+1+K"], wrong=["Ke^x"]),
    # the argument of a function, one letter as an index, Euler's number, logarithms of positive numbers
    case(r"\cos^3 x", right=[r"\cos x(1-\sin^2 x)"], wrong=[r"\cos(x(1-\sin^2 x))", r"\sin x(1-\sin^2 x)"]),
    case(r"\sin(2(x+1))", right=[r"\sin 2(x+1)"], wrong=[r"(x+1)\sin 2"]),
    case(r"m_{p} c^{2}", right=["m_pc^2", "c^2m_p"], wrong=["m_{pc}^2", "m_cp^2"]),
    case("x_{max}", right=["x_max"], wrong=["x_mac"]),
    case(r"2-\frac{5}{e}", right=[r"\frac{2e-5}{e}"], wrong=[r"\frac{2e+5}{e}"]),
    case("0.00002", right=["2e-5", "2E-5"], wrong=["2e-4", "-2e-5"]),
    case(
        r"3\ln x-\ln(x+1)",
        right=[r"\ln\frac{x^3}{x+1}", r"\ln(x^3)-\ln(x+1)"],
        wrong=[r"\ln\frac{x^3}{x-1}", r"\ln\frac{3x}{x+1}"],
    ),
    case(r"\ln(x^2)", right=[], wrong=[r"2\ln x"]),
    case(r"x\sqrt{x}", right=[r"\sqrt{x^3}", "x^{3/2}"], wrong=[r"\sqrt{x^5}", r"-\sqrt{x^3}", r"\sqrt{|x|^3}\sqrt2"]),
    case(r"\sqrt{x}\sqrt{x-1}", right=[r"\sqrt{x^2-x}"], wrong=[r"\sqrt{x^2-1}", r"\sqrt{x}-\sqrt{x-1}"]),
    case(r"(x-3)\sqrt{x-1}", right=[r"\sqrt{(x-1)^3}-2\sqrt{x-1}"], wrong=[r"\sqrt{(x-1)(x-3)^2}"]),
    case(r"\sqrt{-4x^2}", right=[r"2\sqrt{-x^2}"], wrong=["2|x|", r"2\sqrt{x^2}"]),
    case("|x-1|", right=[r"\sqrt{(1-x)^2}", r"\frac{\sqrt{2(x-1)^2}}{\sqrt2}"], wrong=[r"\sqrt{-(x-1)^2}"]),
    # where the reference is real at few points or none
    case(r"\sqrt{x-3}-\sqrt{5-x}", right=[r"\frac{2x-8}{\sqrt{x-3}+\sqrt{5-x}}"], wrong=[r"\sqrt{5-x}-\sqrt{x-3}"]),
    case(r"\ln(5-x)-\ln(x-3)", right=[r"\ln\frac{5-x}{x-3}"], wrong=[r"\ln\frac{x-5}{x-3}"]),
    case(r"\frac12\ln(-x-50)", right=[r"\ln\sqrt{-(x+50)}"], wrong=[r"\ln\sqrt{x+50}"]),
    case(r"\sqrt{-1-x^2}", right=[r"i\sqrt{x^2+1}"], wrong=[r"-i\sqrt{x^2+1}"]),
    case("|x|", right=[r"\sqrt{x^2}"], wrong=["x", r"\sqrt{x}^2"]),
    case(r"\sqrt{-3}x", right=[r"i\sqrt3 x"], wrong=[r"\sqrt3 x"]),
    case(r"\ln(-1)", right=[], wrong=[r"\log^{-1}x", r"\ln 1"]),
    # a value that is stated for an integral, a limit or a sum; and a rounded one for a letter
    case(
        r"\frac{\pi}{4}",
        right=[r"\int_0^1\frac{dx}{1+x^2}=\frac{\pi}{4}", r"\lim_{n\to\infty} a_n = \frac{\pi}{4}"],
        wrong=[r"\int_0^1\frac{dx}{1+x^2}=\frac{\pi}{2}", r"\int_0^1\frac{dx}{1+x^2}"],
    ),
    case("3.14", right=[r"x \approx 3.14"], wrong=[r"x \approx 3.15"]),
    case(r"\frac{22}{7}", right=[r"x=\frac{22}{7}\approx 3.14"], wrong=[r"x\approx 3.14"]),
    case(r"(-\sqrt2,\sqrt2)", right=[r"|x|<\sqrt2"], wrong=[r"|x|>\sqrt2", r"|x|<\sqrt3", r"|x|\le\sqrt2"]),
    case("ax^2+bx+c", right=["c+bx+ax^2"], wrong=["ax^2+bx+C", "ax^2+bx+k"]),
    case("a+b+c", right=["c+b+a"], wrong=["a+b+C"]),
]


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases[0][0])
def test_answers(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer gets the reward that a person would give it."""
    check(cases)
