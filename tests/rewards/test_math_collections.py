"""The `math` grader, by hand. Lists, tuples, sets, intervals and matrices."""

# ruff: noqa: RUF001 - a table with one reference a line
from __future__ import annotations

import pytest
from support.math_cases import Case, case, check

CASES = [
    case("(1,-2)", right=["y=-2, x=1", r"\{(1,-2)\}"], wrong=["y=1, x=-2", r"\{1,-2\}"]),
    case("1, 2, 3", right=[r"1\text{, }2\text{, and }3"], wrong=["1, 2, 3 or 4", "1-3"]),
    case(r"(-\infty,0)\cup(0,\infty)", right=[r"\mathbb{R}-\{0\}"], wrong=[r"\mathbb{R}"]),
    case(r"6, 8\text{, and }10", right=["6,8,10", r"10, 8 \text{ and } 6"], wrong=["6,8", "6,8,11"]),
    case(
        "(3,4)",
        right=[
            "(3,4)",
            "(3, 4)",
            r"\left(3,4\right)",
            r"(3.0,\frac{8}{2})",
            "(x,y)=(3,4)",
            "3,4",
            "$(3,4)$",
            "(3;4)",
            r"\langle 3,4\rangle",
        ],
        wrong=[
            "(4,3)",
            "[3,4]",
            r"\{3,4\}",
            "(3,4,5)",
            "3",
            "(3,5)",
            "[3,4)",
            "7",
            "(3,4),(4,3)",
            r"(3,4) \text{ or } (4,3)",
            "4,3",
        ],
    ),
    case("(2,251,252)", right=["(2, 251, 252)"], wrong=["2251252", "(2,252,251)"]),
    case(
        r"\left( 3, \frac{\pi}{2} \right)",
        right=[r"(3,\pi/2)", r"(3, \frac{1}{2}\pi)"],
        wrong=["(3,90)", r"(3,\frac{\pi}{3})", r"(-3,\frac{\pi}{2})"],
    ),
    case(
        "(1,2),(3,4)",
        right=["(3,4),(1,2)", r"\{(1,2),(3,4)\}", r"(1,2) \text{ and } (3,4)", "(1,2);(3,4)"],
        wrong=["(1,2)", "(2,1),(3,4)", "(1,2),(3,4),(5,6)", "(1,3),(2,4)", "1,2,3,4"],
    ),
    case(
        "[0,1)",
        right=[
            r"0\le x<1",
            r"x\in[0,1)",
            "[0, 1)",
            r"0 \leq x < 1",
            r"1 > x \ge 0",
            "[0.0,1.0)",
            r"\{x : 0 \le x < 1\}",
            r"\{x \mid 0 \le x < 1\}",
            r"\left[0,1\right)",
        ],
        wrong=["(0,1)", "[0,1]", "(0,1]", "[0,2)", "0<x<1", r"0\le x\le 1", r"\{0,1\}", "x<1", "0", r"[0,1)\cup\{2\}"],
    ),
    case(
        r"(2,\infty)",
        right=["x>2", r"(2,+\infty)", r"(2, \infty)", "2<x", r"2<x<\infty", r"x\in(2,\infty)", "(2,∞)"],
        wrong=[r"[2,\infty)", r"x\ge2", r"(-\infty,2)", "x<2", "2", r"(3,\infty)"],
    ),
    case(
        r"(-\infty,-2)\cup(3,\infty)",
        right=[
            r"(3,\infty)\cup(-\infty,-2)",
            r"x<-2 \text{ or } x>3",
            "x<-2 or x>3",
            r"(-\infty,-2) U (3,\infty)",
            r"x\in(-\infty,-2)\cup(3,\infty)",
            r"x>3\text{ or }x<-2",
        ],
        wrong=[
            r"(-\infty,-2]\cup(3,\infty)",
            "(-2,3)",
            r"(-\infty,-2)",
            "x<-2",
            r"(-\infty,3)\cup(-2,\infty)",
            r"x<-2 \text{ and } x>3",
            "[-2,3]",
        ],
    ),
    case(
        r"(-\infty,5)\cup(5,\infty)",
        right=[r"x\neq5", r"x \ne 5", r"\mathbb{R}\setminus\{5\}", r"\mathbb{R} \backslash \{5\}"],
        wrong=[r"\mathbb{R}", "x=5", r"(-\infty,\infty)"],
    ),
    case(
        r"(-\infty,\infty)",
        right=[r"\mathbb{R}", r"\text{all real numbers}", "all real numbers", r"x\in\mathbb{R}", "ℝ"],
        wrong=[],
    ),
    case(r"\emptyset", right=[r"\varnothing", r"\{\}", r"\text{no solution}", "no solutions"], wrong=["0", r"\{0\}"]),
    case(
        r"x \in [-2,7]",
        right=["[-2,7]", r"-2\le x\le 7", r"-2 \leqslant x \leqslant 7", r"x\in [-2, 7]"],
        wrong=["(-2,7)", r"y\in[-2,7]", "[-7,2]"],
    ),
    case(
        "x > 3",
        right=["3 < x", "2x > 6", "x - 3 > 0", "-x < -3", r"(3,\infty)"],
        wrong=["x < 3", r"x \ge 3", "y > 3", "x > 4", "x=3"],
    ),
    case(r"[-1,1]\cup\{2\}", right=[r"\{2\}\cup[-1,1]", r"-1\le x\le1 \text{ or } x=2"], wrong=[]),
    case(
        "1,2,3",
        right=[
            "3,2,1",
            "1, 2, 3",
            r"\{1,2,3\}",
            "1, 2 and 3",
            r"1,2,\text{ and }3",
            "x=1,2,3",
            "1; 2; 3",
            r"1, 2, \text{and } 3",
            r"\{3,1,2\}",
        ],
        wrong=["1,2", "1,2,3,4", "1,2,4", "6", "123", "1,2,3,3"],
    ),
    case(
        r"\{1,2\}",
        right=[
            r"\{2,1\}",
            "1,2",
            "2,1",
            r"1 \text{ and } 2",
            r"\{1,2,2\}",
            r"x=1 \text{ or } x=2",
            r"\lbrace 1,2\rbrace",
        ],
        wrong=["(1,2)", "[1,2]", r"\{1\}", r"\{1,2,3\}", "12"],
    ),
    case(
        r"1 \pm \sqrt{19}",
        right=[
            r"1+\sqrt{19},1-\sqrt{19}",
            r"1-\sqrt{19}, 1+\sqrt{19}",
            r"x=1\pm\sqrt{19}",
            "1 ± √19",
            r"\{1\pm\sqrt{19}\}",
        ],
        wrong=[r"1+\sqrt{19}", r"\sqrt{19}", r"1\pm\sqrt{18}", r"1-\sqrt{19}", r"\pm\sqrt{19}"],
    ),
    case(
        r"\pm 2",
        right=["2,-2", "-2,2", r"-2 \text{ and } 2", r"x=\pm2", r"\pm2", r"\{-2,2\}", r"2 \text{ or } -2"],
        wrong=["2", "-2", "4", r"\pm 3", "|2|"],
    ),
    case(
        "-2,1",
        right=["1,-2", "x=-2,x=1", r"x=1 \text{ or } -2", "x_1=1, x_2=-2", r"x=-2\text{ and }x=1"],
        wrong=["2,-1", "-2", "-1"],
    ),
    case(
        "a=4,b=5",
        right=["a=4, b=5", "b=5,a=4", r"a = 4 \text{ and } b = 5", "a=4;b=5"],
        wrong=["a=5,b=4", "a=4", "b=4,a=5"],
    ),
    case("16,3,1,1", right=["1,1,3,16", "16, 1, 3, 1"], wrong=["16,3,1", "16,3,3,1"]),
    case(
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        right=[
            r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]",
            r"\begin{pmatrix} 1.0 & 2 \\ 3 & \frac{8}{2} \end{pmatrix}",
            r"\begin{pmatrix}1&2\\3&4\\\end{pmatrix}",
        ],
        wrong=[
            r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}",
            "(1,2,3,4)",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}",
            "1,2,3,4",
            r"\begin{pmatrix} 1 & 2 \end{pmatrix}",
            "-2",
        ],
    ),
    case(
        r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}",
        right=[
            "(-7,16,5)",
            r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}",
            r"\langle -7, 16, 5\rangle",
            r"\begin{bmatrix}-7\\16\\5\end{bmatrix}",
        ],
        wrong=["(16,-7,5)", r"\{-7,16,5\}"],
    ),
    case(
        "B, C", right=["C, B", r"\text{B, C}", r"\text{B and C}", r"B \text{ and } C"], wrong=["B", "B, D", "A, B, C"]
    ),
    case(
        "f(2) < f(1) < f(4)", right=["f(4) > f(1) > f(2)", "f(2)<f(1)<f(4)"], wrong=["f(1)<f(2)<f(4)", "f(2)>f(1)>f(4)"]
    ),
    case(
        r"\frac{-b \pm \sqrt{b^2-4ac}}{2a}",
        right=[r"\frac{-b + \sqrt{b^2-4ac}}{2a},\frac{-b - \sqrt{b^2-4ac}}{2a}"],
        wrong=[],
    ),
    case(
        r"\{x \mid x > 2\}",
        right=["x>2", r"(2,\infty)", r"\{x: x>2\}", r"\{x | x > 2\}", r"\{x \in \mathbb{R} \mid x > 2\}"],
        wrong=[r"\{2\}", r"x\ge 2", "2"],
    ),
    case("[-2,2]", right=[r"-2\le x\le 2", "[-2, 2]"], wrong=[r"\{-2,2\}", r"\pm2", "-2,2"]),
    case(
        "(0,1)",
        right=["0<x<1", "(0,1)", "(0, 1)", "(x,y)=(0,1)"],
        wrong=["[0,1]", "(1,0)", r"0<x\le1", r"\{0,1\}", "0"],
    ),
    case(
        r"\left(-\infty, \frac{1}{2}\right]",
        right=[r"x \le \frac12", r"x\leq 0.5", r"(-\infty,0.5]", "(-∞, 1/2]", r"2x \le 1", r"\frac12 \ge x"],
        wrong=[r"(-\infty,0.5)", "x<0.5", r"x\ge 0.5", r"(\infty,0.5]"],
    ),
    case("0,3a", right=["3a,0", r"0 \text{ and } 3a"], wrong=["0", "3a", "0.3a"]),
    case("1,-1,-3i", right=["-3i,1,-1", r"\pm1,-3i"], wrong=["1,-1,3i", "1,-3i"]),
    case(
        r"45^\circ, 135^\circ",
        right=[r"135^\circ, 45^\circ", "45,135", "45° and 135°"],
        wrong=[r"45^\circ", r"45^\circ,130^\circ"],
    ),
    # brackets that open outwards
    case(
        "(-3,5]",
        right=["]-3,5]", "]-3;5]", r"\left]-3,5\right]", r"x\in]-3,5]"],
        wrong=["]-3,5[", "[-3,5[", "[-3,5]"],
    ),
    case(r"(-\infty,2)\cup(3,\infty)", right=[r"]-\infty,2[\cup]3,+\infty["], wrong=[r"]-\infty,2]\cup]3,+\infty["]),
    case("]0,1[", right=["(0,1)", "0<x<1"], wrong=["[0,1]", "[0,1["]),
    # matrices as lists of rows
    case(
        r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
        right=["[[1,2],[3,4]]", "[[1, 2], [3, 4]]", "[1,2;3,4]"],
        wrong=["[[1,3],[2,4]]", "[1,2,3,4]"],
    ),
    case(r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", right=["[[1],[2]]"], wrong=["[[2],[1]]", "(1,2]"]),
    # systems as arrays, whose brace has no partner
    case(
        r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.",
        right=["x=1, y=2", "(1,2)", r"\begin{cases}x=1\\y=2\end{cases}", r"\{\begin{matrix}y=2,\\x=1.\end{matrix}"],
        wrong=["x=2, y=1", "(2,1)", r"\begin{cases}x=1\\y=3\end{cases}"],
    ),
    case(
        r"f(x)=\begin{cases}x&x>0\\-x&x\le 0\end{cases}",
        right=[r"f(x)=\left\{\begin{array}{*{20}{l}}x & x>0\\-x & x\le 0\end{array}\right."],
        wrong=[r"f(x)=\left\{\begin{array}{ll}x & x\ge 0\\-x & x<0\end{array}\right."],
    ),
    # solutions with indices, and points with names
    *(
        case(
            gold,
            right=[r"x=2 \text{ or } x=1", "x=1, x=2", "x=1,2", "x_1=1, x_2=2"],
            wrong=["x=1, x=3", "y=1, y=2", "x=1"],
        )
        for gold in ("x_{1}=1, x_{2}=2", "x=1, x=2", "x=1,2")
    ),
    case("x_1=1, x_2=2", right=["x_1=1, x_2=2"], wrong=["x_1=2, x_2=1"]),
    case("F_1 = 3, F_2 = 5", right=["F_2=5, F_1=3"], wrong=["F=5, F=3"]),
    case(
        "(x_1,y_1)=(1,2),(x_2,y_2)=(2,1)",
        right=["(1,2),(2,1)", "(x_{1},y_{1})=(1,2),(x_{2},y_{2})=(2,1)"],
        wrong=["(1,2)", "(1,2),(2,2)"],
    ),
    case("(a_{1},a_{2})=(1,2)", right=["(a_1, a_2) = (1, 2)", "(1,2)"], wrong=["(a_1,a_2)=(2,1)", "(b_1,b_2)=(1,2)"]),
    case("(1,2)", right=[r"\vec a=(1,2)"], wrong=[r"\vec a=(2,1)"]),
    case(r"\vec{a}=(1,2)", right=[r"\vec a = (1,2)"], wrong=[r"\vec b=(1,2)"]),
    # what a parameter is, in brackets
    case(
        r"k\pi+\frac{\pi}{4}(k\in\mathbb{Z})",
        right=[r"k\pi+\frac{\pi}{4}", r"\frac{\pi}{4}+n\pi, n\in Z", r"k\pi+\frac{\pi}{4}(k\in\mathbf{Z})"],
        wrong=[r"k\pi+\frac{\pi}{4}, k\in\mathbb{N}", r"k\pi+\frac{\pi}{2}(k\in\mathbb{Z})", r"\frac{\pi}{4}"],
    ),
    case(r"[k\pi, k\pi+1](k\in\mathbb{Z})", right=[r"[k\pi, k\pi+1], k\in Z"], wrong=[r"(k\pi, k\pi+1)"]),
    case(
        "(1,2),(3,4)",
        right=[r"(x,y)\in\{(1,2),(3,4)\}", r"(a, b) \in \{(3,4),(1,2)\}"],
        wrong=[
            *(rf"{names}\in\{{(1,2),(3,4)\}}" for names in ("(x,x)", "(z,y,x)", "(1,1)", "", r"(x,y)\not")),
            r"(x,y)\in\{(1,2),3\}",
        ],
    ),
    case(
        r"(x,y)\in\{(1,2),(3,4)\}",
        right=["(1,2),(3,4)", r"\{(3,4),(1,2)\}", r"(x, y) \in \{(3,4),(1,2)\}"],
        wrong=[r"(y,x)\in\{(1,2),(3,4)\}", r"(x,y)\in\{(1,2)\}", r"(x,y)\in\{(2,1),(4,3)\}"],
    ),
    case("[0,1]", right=[], wrong=[r"(x,y)\in[0,1]"]),
    case(r"\binom{n}{k}", right=["C_n^k", r"\mathrm{C}_{n}^{k}", "C(n,k)"], wrong=["C_k^n", "C_n^{k+1}", "C_n"]),
    case(r"\binom{2n}{n}", right=["C_{2n}^n"], wrong=["C_n^{2n}"]),
    case("x=k\\pi,k\\in Z", right=[r"x=k\pi", r"x=k\pi, k\in\mathbb{Z}"], wrong=["x=k"]),
    case(
        r"2k\pi(k\in\mathbb{Z}), 2k\pi+\frac{\pi}{3}(k\in\mathbb{Z})",
        right=[r"2k\pi, 2k\pi+\frac{\pi}{3}"],
        wrong=[r"2k\pi", r"2k\pi+\frac{\pi}{3}(k\in\mathbb{Z})"],
    ),
    *(
        case(gold, right=["2^n-1", r"a_n=2^n-1, n\in\mathbb{N}^{*}"], wrong=["2^n+1"])
        for gold in (r"2^n-1(n\in\mathbb{N}^*)", r"2^n-1 (n \in N_+)", r"2^n-1, n\in\mathbb{N}_{+}")
    ),
    case("x > 2", right=[], wrong=[r"x > 2 (x\in\mathbb{Z})", r"x > 2, x\in Z"]),
    case(r"\pm 3", right=["3,-3"], wrong=["(3,-3)", "(-3,3)", "[3,-3]"]),
]


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases[0][0])
def test_answers(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer gets the reward that a person would give it."""
    check(cases)
