"""Answers as the grammar has them: sets, labels, parameters, clauses, number locales, compound units, pieces."""

from __future__ import annotations

import pytest
from support.math_cases import Case, case, check

CASES = [
    case(
        r"(-\infty,-1)\cup(1,\infty)",
        [r"|x|>1", r"(-\infty,-1),(1,\infty)", r"\mathbb{R}\setminus[-1,1]", r"x<-1 \text{ or } x>1"],
        [r"|x|<1", r"|x|\ge 1", r"(-1,1)"],
    ),
    case(r"[-1,1]", [r"|x|\le 1", r"[-1,0]\cup[0,1]", r"[-1,0)\cup[0,1]"], [r"|x|<1", r"[-1,0)\cup(0,1]"]),
    case(r"(2,5]", [r"(2,3]\cup(3,5]", r"(2,4]\cup[3,5]"], [r"(2,3)\cup(3,5]"]),
    case(r"(0,\infty)", [r"\mathbb R^+", r"\mathbb{R}_{>0}", r"x>0"], [r"\mathbb R", r"[0,\infty)"]),
    case(
        r"\{1,2,3\}",
        [r"\{x\in\mathbb Z: 1\le x\le3\}", r"\{x \in \mathbb{Z} \mid 0<x<4\}", r"1, 2 \text{ and } 3"],
        [r"\{x\in\mathbb Z: 1\le x<3\}", r"[1,3]"],
    ),
    case(
        r"(-\infty,-6)\cup(-6,\frac32)",
        [r"\{x|x<3/2\}-\{-6\}", r"x<\frac{3}{2}, x\ne -6", r"(-\infty,3/2)\setminus\{-6\}"],
        [r"x<\frac32"],
    ),
    case("(a,b)", ["(a, b)"], ["(b,a)"]),
    # a half-line up to a letter; x < y is none, and an equation is no set
    case(r"(-\infty,a)", ["x<a", "a>x", r"x\in(-\infty,a)"], ["x>a", r"x\le a", "a<x", "x<b", "x=a", "0<x<a", "y>-x"]),
    case("x<a", [r"(-\infty,a)", r"x\in(-\infty,a)"], [r"(-\infty,a]", r"(a,\infty)", r"y\in(-\infty,a)", "x<b", "a"]),
    case(r"(\frac1a,\infty)", [r"k>\frac{1}{a}", r"\frac1a<k"], [r"k<\frac1a", r"k>a", r"ka>1"]),
    case(r"[-b,\infty)", [r"x\ge -b"], [r"x>-b", r"x\ge b"]),
    case(
        r"a\ge 2b", [r"a\in[2b,\infty)", r"[2b,\infty)"], [r"a\in(2b,\infty)", r"c\in[2b,\infty)", r"b\in[2b,\infty)"]
    ),
    case(r"m\in(-\infty,-\frac1a)", [r"m<-\frac1a"], [r"n<-\frac1a", r"m\le-\frac1a", r"m<\frac1a"]),
    case("x<y", ["y>x", "x-y<0"], ["y<x", r"(-\infty,y)", r"(x,\infty)"]),
    case(r"(-\infty,a)\cup(a,\infty)", [r"x\ne a"], [r"x\ne b", "x=a"]),
    case(r"1, 2", ["1 and 2"], [r"x \in (1,2)"]),
    case(r"(-1,5)", [r"|x-2|<3"], [r"|x-2|>3", r"|x-2|\le 3"]),
    case("1,3", [r"\text{Minimum: }1, \text{Maximum: }3", "Minimum: 1, Maximum: 3"], ["Minimum: 1, Maximum: 4"]),
    case("18, 14", ["Paolo: 18, Qing: 14"], ["Paolo: 18"]),
    case("Paolo: 18, Qing: 14", ["18, 14", "Qing: 14, Paolo: 18"], ["Paolo: 14, Qing: 18"]),
    case("(n,1)", ["(f(n),g(n))=(n,1)"], ["(f(n),g(n))=(1,n)"]),
    case(r"k\pi", [r"n\pi", r"n\pi, n\in\mathbb{Z}", r"(k+1)\pi"], [r"2n\pi", r"n"]),
    case(
        r"\frac{\pi}{4}+k\pi",
        [r"\frac{5\pi}{4}+n\pi", r"-\frac{3\pi}{4}+k\pi", r"\frac{\pi}{4}-k\pi", r"x=\frac\pi4+k\pi, k \in \mathbb{Z}"],
        [r"\frac{3\pi}{4}+k\pi", r"\frac\pi4+2k\pi"],
    ),
    case(r"f(x)=cx", ["f(x)=cx", "cx"], ["f(x)=kx", "kx", "f(x)=cx^2", "f(x)=x", "f(x)=c+x"]),
    case("(a,-a)", [], ["(b,-b)", "(a+1,-a-1)"]),
    case("a+C", ["C+a"], ["a+k", "a+c"]),
    case("Cx+1", ["1+Cx"], ["kx+1", "Kx+1"]),
    case("n+3", [], [r"n+3+(\gcd(n,7)-1)(\gcd(n,11)-1)"]),
    case("n^2", [], [r"n^2+\gcd(n,7)-1", r"n^2+\gcd(n,1009)-1", r"n^2+\gcd(n+5,1009)-1"]),
    case("(-1)^n", ["(-1)^{n+2}"], ["(-1)^{2n}", "(-1)^{n+1}"]),
    case(r"\{1,2\}", [], [r"\{\{1,2\}\}", r"\{1,\{2\}\}", r"\{\{1\},\{2\}\}"]),
    case("5", [], [r"5\text{ for all }x, 6"]),
    case(r"2Cx^2", ["2cx^2"], ["2x^2"]),
    case("x+1", [], ["y+1", "x+2", "t+1", r"0 \pmod 1"]),
    case("A", [], [r"0 \pmod 1"]),
    case("2x+1", [], [r"1 \pmod 2"]),
    case(r"(n-2)\pi", [r"n\pi-2\pi"], [r"(n-1)\pi", r"n\pi", r"-n\pi"]),
    case("(n,2n)", [], ["(n+1,2n+2)", "(-n,-2n)"]),
    case("56", [r"\frac{8!}{3!5!}"], []),
    case("72", ["2^{3}3^{2}"], []),
    case(
        "f(x)=x",
        [
            r"f(x)=x, \forall x\in\mathbb R",
            r"f(x)=x \text{ for all } x \in \mathbb{R}",
            r"f(x)=x \text{ for all real } x",
        ],
        [r"f(x)=2x, \forall x\in\mathbb R"],
    ),
    case(
        "f(x)=-1, f(x)=x",
        [r"f(x)=-1 \text{ for all } x \in \mathbb{Z}, \text{ and } f(x)=x \text{ for all } x\in\mathbb{Z}"],
        [r"f(x)=-1 \text{ for all } x \in \mathbb{Z}, \text{ and } f(x)=2x \text{ for all } x\in\mathbb{Z}"],
    ),
    case("1234567", ["1.234.567", "12,34,567"], ["1.234.568"]),
    case("1200.5", ["1.200,50", "1200,5"], ["1.200,51"]),
    case(r"\frac13", [r"0.333\ldots", "0.333..."], ["0.333"]),
    case(r"\frac16", [r"0.1666\ldots"], ["0.1666"]),
    case("(1000,2000)", ["(1,000, 2,000)"], ["(1,000, 2,001)"]),
    case(r"5 \text{ cm}", ["0.05 m", "0.05m", r"50\text{ mm}"], ["0.5 m"]),
    case(
        r"90 \text{ minutes}",
        ["1 hour 30 minutes", r"1\text{ hour }30\text{ minutes}", "1.5 hours"],
        ["1 hour 20 minutes"],
    ),
    case(r"3 \text{ L}", ["3000 mL", r"3000\text{ mL}"], ["300 mL"]),
    case(r"66 \text{ inches}", ["5 feet 6 inches"], ["5 feet 7 inches"]),
    case(r"60^\circ 42'", [r"60.7^\circ", "60^\\textcirc 42'"], [r"60^\circ 43'"]),
    case(
        r"x \equiv 3 \pmod 5",
        [r"3 \pmod 5", r"x=5k+3", r"8 \pmod{5}", r"x\equiv -2 \mod 5", r"5k+3"],
        [r"4 \pmod 5", r"3\pmod 6", "x=5k+4"],
    ),
    case(r"3 \pmod 5", [r"x \equiv 3 \pmod 5", "5n+3"], [r"2 \pmod 5"]),
    case(
        r"\begin{cases} x^2 & x<0 \\ x & x\ge 0\end{cases}",
        [
            r"\begin{cases} x^2, & \text{if } x<0 \\ x, & \text{if } x\ge 0\end{cases}",
            r"\begin{cases} x & \text{if } x\ge 0 \\ x^2 & \text{for } x<0 \end{cases}",
            r"f(x)=\begin{cases} x\cdot x & x<0 \\ x & x\ge 0\end{cases}",
            r"\begin{cases} x^2 & x<0 \\ x & \text{otherwise}\end{cases}",
        ],
        [r"\begin{cases} x^2 & x>0 \\ x & x\le 0\end{cases}", r"\begin{cases} x^3 & x<0 \\ x & x\ge 0\end{cases}"],
    ),
    case("(1,2),(-1,2)", [r"(\pm 1,2)"], [r"(\pm 2,1)"]),
    case(
        "(1,-2,3)",
        [
            "(1,-2,3)^T",
            r"\begin{pmatrix}1\\-2\\3\end{pmatrix}",
            r"(1,-2,3)^{\top}",
        ],
        ["(1,2,3)"],
    ),
    case(
        r"1+i\sqrt3",
        [r"2\text{ cis }60^\circ", r"2\operatorname{cis}\frac{\pi}{3}"],
        [r"2\operatorname{cis}\frac{\pi}{6}"],
    ),
    case(r"\text{Yes}", ["Yes, it is possible", r"\text{Yes, it is possible}"], ["No, it is not possible", "No"]),
    case(
        r"\text{ellipse}",
        ["The graph is an ellipse", r"\text{an ellipse}", r"\text{The graph is an ellipse.}"],
        ["The graph is a hyperbola", r"\text{not an ellipse}"],
    ),
    case(r"\text{does not exist}", ["DNE", r"\text{DNE}"], ["0"]),
    case(
        "14",
        [
            "There are 14 ways",
            r"\text{There are }14\text{ ways}",
            r"14\;\blacksquare",
            r"14 \checkmark",
            r"14 \quad \square",
        ],
        ["There are 15 ways"],
    ),
    case("ABC", [r"\triangle ABC"], ["ABD"]),
    case(r"\triangle ABC", ["ABC"], ["ABD"]),
    case(r"\text{July 4, 1776}", ["4 July 1776", "July 4 1776", r"\text{4th of July 1776}"], ["July 4, 1777", "1776"]),
    case(r"\text{May 12}", [r"12 \text{ May}", "May 12th", r"\text{12th of May}"], ["May 13"]),
    # a parameter is one number in a whole tuple or interval; whole numbers where that is said
    case(
        r"[2k\pi, 2k\pi+\pi]",
        [r"[2n\pi-2\pi, 2n\pi-\pi]"],
        [r"[2k\pi, 2k\pi+3\pi]", r"[2k\pi+2\pi, 2k\pi+\pi]"],
    ),
    case(
        r"n=6k+1, k\in\mathbb{Z}",
        [r"n\equiv 1\pmod 6", r"n=6m+1\text{ for some integer }m", r"n=6k-5, k\in\mathbb{Z}"],
        [r"n=6m+2\text{ for some integer }m", r"n=3m+1\text{ for some integer }m"],
    ),
    case(r"n=6k+1, k\in\mathbb{N}", [], [r"n=6k-5, k\in\mathbb{N}"]),
    case(r"f(n)=n+1, n\in\mathbb{Z}", [], [r"f(n)=n+2, n\in\mathbb{Z}"]),
    case(r"f(k)=2k, k\in\mathbb{Z}", [], [r"f(k)=-2k, k\in\mathbb{Z}"]),
    case(r"2k+1\text{ for all integers }k", [r"2k+1"], [r"2k+3"]),
    case(
        r"(3+5t,2-4t), t\in\mathbb{Z}",
        [r"(x,y)=(3+5k,2-4k), k\in\mathbb{Z}", "(8+5k,-2-4k)", r"x=3+5t, y=2-4t\text{ for integers }t"],
        ["(8+5k,2-4k)", "x=8+5k, y=2-4k", "x=3-5k, y=2-4k"],
    ),
    case(
        r"\begin{pmatrix}k\\2k\end{pmatrix}, k\in\mathbb{Z}",
        [r"\begin{pmatrix}k+1\\2k+2\end{pmatrix}", r"(m, 2m), m\in\mathbb{Z}"],
        [r"\begin{pmatrix}k+1\\2k\end{pmatrix}, k\in\mathbb{Z}"],
    ),
    case(r"((k,1),(k+1,2)), k\in\mathbb{Z}", [r"((k-1,1),(k,2))"], [r"((k,1),(k,2)), k\in\mathbb{Z}"]),
    case(r"x=2k+1, y=k, k\in\mathbb{Z}", ["x=2k-1, y=k-1", "y=m, x=2m+1"], ["x=2k+1, y=k+1", "x=2k-1, y=k"]),
    case(r"f(2k)=k+1, k\in\mathbb{Z}", [], ["f(2k)=k", "f(2k)=k+2", "f(2k)=-k"]),
    case(r"a_{2k}=2k+1, k\in\mathbb{Z}", [], ["a_{2k}=2k+3"]),
    case(r"f(k+m)=2m, m\in\mathbb{Z}, k\in\mathbb{Z}", [], ["f(k+m)=2m+2"]),
    case(r"x=k, k\in\mathbb{Z}", ["x=n", "x=k+5"], ["x=y"]),
    case(r"(x, 5\text{ m})", [r"(x, 500\text{ cm})"], [r"(x, 5\text{ km})", r"(x, 6\text{ m})"]),
    case(
        r"n\equiv\pm1\pmod 6",
        [r"n\equiv 1, 5\pmod 6", r"n=6k+1\text{ or }n=6k-1", r"n\equiv 5\text{ and }-5\pmod 6"],
        [r"n\equiv 1\pmod 6", r"n\equiv 1, 4\pmod 6"],
    ),
    case(r"n\equiv 1, 2\pmod 5", [r"n=5k+1\text{ or }n=5k+2"], [r"m\equiv 1, 2\pmod 5", r"n\equiv 1, 3\pmod 5"]),
    case("0", [], [r"n\text{ is even}", r"n\equiv 0\pmod 2", r"2\mid n"]),
    case(
        r"n\text{ is even}", ["n=2k"], ["2n", r"n=2k, k\in\mathbb{R}", r"n=2k\text{ for all positive integers }k", "2x"]
    ),
    case(r"3\mid n", [r"n\text{ is divisible by }3"], [r"3!\mid n", r"3\mid m"]),
    case(r"3\nmid n", [r"n\not\equiv 0\pmod 3", r"n\equiv 1\text{ or }2\pmod 3"], [r"3\mid n", r"n\equiv 1\pmod 3"]),
    case(r"n\equiv 1\pmod 2", [r"n\text{ is odd}", r"\text{all odd }n", "odd"], [r"n\text{ is even}", "even"]),
    case(r"\text{odd}", [r"n\text{ is odd}"], [r"n\text{ is even}", r"n\text{ is not odd}", "1", r"1\pmod 2"]),
    case("x=1", [], ["odd", r"\text{positive}"]),
    case(
        r"f(n)=\begin{cases}0&n\text{ even}\\1&n\text{ odd}\end{cases}",
        [r"\begin{cases}1&\text{if }n\text{ is odd}\\0&\text{if }n\text{ is even}\end{cases}"],
        [r"\begin{cases}0&\text{if }n\text{ is odd}\\1&\text{if }n\text{ is even}\end{cases}"],
    ),
    case(r"k<0", [r"k\text{ is negative}"], [r"k\text{ is nonpositive}", r"m\text{ is negative}"]),
    # constants of integration
    case(r"\sin^2 x+C", [r"-\cos^2 x+C"], [r"\cos^2 x+C", r"-\cos^2 x", r"\sin^2 x+2C"]),
    case("y=C_1e^{x}+C_2e^{-x}", ["y=Ae^{-x}+Be^{x}"], ["y=Ae^{-x}+Ae^{x}", "y=Ae^{-x}+Be^{2x}"]),
    case("y=Ce^{-x}", ["y=Ae^{-x}"], ["y=e^{-x}", "y=Axe^{-x}"]),
    case("y=Cx", ["y=cx"], ["y=kx", "y=Dx", "y=Ax"]),
    case("Ax+By+C", [], ["Ax+By+D", "Ax+By+C+1"]),
    case(r"\sin\theta+C", [r"C+\sin\theta"], [r"\sin\theta+\theta+C"]),
    # equations
    case("xy=1", ["2yx=2"], [r"y=\frac{2}{x}"]),
    case("y=x", ["x=y", "2y-2x=0"], ["xy=x^2", "y=2x"]),
    case("y<x", ["2y<2x", "x-y>0"], ["y>x", "2x<2y", r"y\le x"]),
    case("y=2x+1", [r"\ell: 2x-y+1=0"], [r"\hat y=2x+1", r"\text{a circle }y=2x+1"]),
    *(case(rf"{f}(x)=\frac1x", [rf"{f}(x)=x^{{-1}}"], [f"{f}(x^2)=1", f"{f}(1)=x"]) for f in "fgPuy"),
    # a hat or an arrow is another thing, but for unit vectors, which are components in a sum of multiples alone
    case("p", [], [r"\hat p", r"\vec p", r"\bar p"]),
    case("ab", ["ba"], [r"\vec a\cdot\vec b"]),
    case(r"\vec a\cdot\vec b", [], [r"\vec a\times\vec b", r"|\vec a||\vec b|", "ab"]),
    case(r"\vec a\times\vec b", [], [r"\vec b\times\vec a", r"\vec a\vec b", r"1\times\vec a\vec b"]),
    # what stands behind a number is multiplied by it, whatever letters are vectors; no other sign is read between them
    case(
        r"3\times10^{5}\hat{i}",
        [r"3 \times 10^5 \hat{i}", r"300000\hat{i}", r"3\times10^5\times\hat i"],
        [r"3\times10^5", r"3\times10^{5}\hat{j}", r"3\times10^5i"],
    ),
    case("300000", [r"\mathbf{x}=3\times 10^5"], [r"\mathbf{x}=3\times 10^4"]),
    case("6", [r"\vec{v}=2\times3"], [r"\vec{v}=2\times4"]),
    case(r"6\hat i\hat j", [], [r"2\hat i\times 3\hat j", r"3\hat{j}2\times\hat i"]),
    case("6ab", [], [r"2\mathbf a\times3\mathbf b", r"6\mathbf{a}\times\mathbf{b}"]),
    case("eb", [], [r"\mathbf{e}\times\mathbf{b}"]),
    case(r"\hat e_1\hat e_2", [], [r"\hat e_1\times\hat e_2"]),
    case("-7", [r"\vec{a}\cdot\vec{b}=-7"], [r"\vec{a}\cdot\vec{b}=7", r"\vec a\times\vec b=-7"]),
    case(
        r"\vec{a}\cdot\vec{b}=-7",
        ["-7", r"\vec a\cdot\vec b=-7"],
        ["7", r"\vec a\cdot\vec c=-7", r"\vec a\times\vec b=-7", r"ab=-7", r"\vec a=-7"],
    ),
    case("8", [r"\overrightarrow{AB}\cdot\overrightarrow{AC}=8"], [r"\overrightarrow{AB}\cdot\overrightarrow{AC}=-8"]),
    case(r"\frac{\vec a\cdot\vec b}{\vec b\cdot\vec b}\vec b", [], [r"\vec a"]),
    case(r"\nabla\cdot F", [], [r"\nabla\times F"]),
    case(r"\hat p=2", ["2"], [r"\bar p=2", r"\vec p=2"]),
    case(r"\overrightarrow{AB}", [r"\vec{AB}"], [r"\overline{AB}", r"\vec{BA}"]),
    case("l:w=3:2", ["3:2", "l:w=6:4"], ["w:l=3:2"]),
    case(
        r"2\mathbf{i}-3\mathbf{j}",
        [
            r"2\hat{i}-3\hat{j}",
            "(2,-3)",
            r"\begin{pmatrix}2\\-3\end{pmatrix}",
            r"\begin{bmatrix}2&-3\end{bmatrix}",
            r"-\begin{pmatrix}-2\\3\end{pmatrix}",
        ],
        [
            r"2\hat{i}+3\hat{j}",
            r"2\hat{i}-3\hat{k}",
            r"\begin{pmatrix}-3\\2\end{pmatrix}",
            r"\begin{pmatrix}2\\-3\\1\end{pmatrix}",
            r"\begin{pmatrix}2&-3\\0&0\end{pmatrix}",
        ],
    ),
    case(
        r"\begin{pmatrix}2\\-3\\1\end{pmatrix}",
        [r"2\mathbf{i}-3\mathbf{j}+\mathbf{k}", r"\hat k+2\hat i-3\hat j"],
        [r"2\mathbf{i}-3\mathbf{j}", r"2\mathbf{i}-3\mathbf{j}-\mathbf{k}", "2i-3j+k"],
    ),
    case(
        r"\begin{bmatrix}2&-3\end{bmatrix}",
        [r"2\hat{\imath}-3\hat{\jmath}"],
        [r"2\hat{i}\hat{j}-3", r"2\hat{j}-3\hat{i}"],
    ),
    case(r"\begin{pmatrix}1&0\\0&1\end{pmatrix}", [], [r"\hat i+\hat j", r"\hat i+\hat k"]),
    case(r"(1,1)", [r"\hat\imath+\hat{\jmath}"], ["i+j", r"\hat i\hat j", r"\hat i+\hat j+1"]),
    case("-1", ["i^2"], [r"\hat i\cdot\hat i"]),
    case(
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        [r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)"],
        [r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)^T"],
    ),
    # words before an answer that say what it is not
    case("5", [r"\text{the number }5"], [r"\text{diverges to }5"]),
    case(r"\infty", [r"\text{diverges to }\infty"], [r"\text{diverges to }-\infty"]),
    case("(3,4)", [r"\text{the point }(3,4)"], [r"\text{interval }(3,4)", r"\text{circle }(3,4)"]),
    case("2,3,5", [r"\text{The primes }2, 3, 5"], [r"\text{The non-primes }2, 3, 5"]),
    case("3, 4", [], [r"\begin{aligned}S&=3\\&=4\end{aligned}"]),
    case("3, 4", [], [r"3, \text{minus }4", r"3, \text{Not: }4", r"3, \text{Minus: }4"]),
    case("3, 5", [], [r"\text{mode }3, 5", r"3, \text{minutes }5", r"3, \text{cents }5", r"3, \text{Negative: }5"]),
    # parts
    case("(3,4)", [], ["3 or 4", "x=3 or y=4"]),
    case(r"(x, \$5)", ["(x, 5)", r"(x, 500\text{ cents})"], [r"(x, 5\text{ cents})", "(x, €5)"]),
    case(
        "(1)\\ 4; (2)\\ 7", [r"\text{(1) }4,\text{ (2) }7", "4, 7", "(2) 7; (1) 4"], ["4, 14", "7, 4", "(1) 7; (2) 4"]
    ),
    case(
        r"\text{Maximum }5,\text{ minimum }-3",
        [r"\text{max}=5,\text{min}=-3"],
        [r"\text{max}=-3,\text{min}=5", r"\text{at most }5, \text{ at least }-3"],
    ),
    case(r"\text{center }(1,2),\text{ radius }3", [r"\text{Center: }(1,2),\text{Radius: }3"], [r"\text{Radius: }3"]),
    case(
        "(1,2),(2,1)",
        [
            r"x=1, y=2 \text{ or } x=2, y=1",
            r"\begin{cases}x=1\\y=2\end{cases}\begin{cases}x=2\\y=1\end{cases}",
            r"\left\{\begin{aligned}x&=1\\y&=2\end{aligned}\right.\text{ or }\begin{aligned}x&=2\\y&=1\end{aligned}",
        ],
        [r"\begin{cases}x=1\\y=2\end{cases}\begin{cases}x=1\\y=2\end{cases}"],
    ),
    case(r"2\text{ hours}", [r"1\text{ hour and }60\text{ minutes}"], [r"1\text{ hour and }1\text{ hour}"]),
    *(
        case(f"{one}, {two}", ["3, 5"] if one[3:] == two[3:] else [], ["8", f"8{one[1:]}", "305", f"305{two[1:]}"])
        for one in (r"3\text{ m}", r"3\text{ kg}", r"3\text{ dollars}")
        for two in (r"5\text{ m}", r"5\text{ cm}", r"5\text{ g}", r"5\text{ cents}", r"5\text{ dollars}")
    ),
    case(r"\frac52\text{ hours}", [r"2\text{ hours and }30\text{ minutes}"], [r"2\text{ hours and }3\text{ minutes}"]),
    case(r"\$18.50", [r"18\text{ dollars and }50\text{ cents}"], [r"18\text{ dollars and }5\text{ cents}"]),
    case(r"\text{diverges}", [r"\text{The series diverges}"], [r"\text{The series never diverges}"]),
    case(r"\text{ellipse}", [r"\text{It is an ellipse}"], [r"\text{it is a hyperbola or it is an ellipse}"]),
    case("B", [], [r"\text{It is A or it is B}"]),
    # a clause that says less than the reference does
    case(r"f(x)=0\text{ for all }x", [r"f(x)=0\text{ for every }x"], [r"f(x)=0\text{ for some }x"]),
    case(
        "f(x)=2x",
        [r"f(x)=2x \text{ for every real } x", "f(t)=2t", "y=2x", "f=2x"],
        [
            r"f(x)=2x \text{ for all } x>7",
            r"f(x)=2x \text{ for some } x",
            "g(x)=2x",
            "f'(x)=2x",
            "f^{-1}(x)=2x",
            "f(-x)=2x",
            "f(2)=2x",
            "f(y)=2x",
        ],
    ),
    case(
        r"k\pi, k\in\mathbb{Z}", [r"k\pi", r"n\pi, n\in\mathbb{Z}"], [r"k\pi, k\in\mathbb{N}", r"k\pi, k\in\mathbb{R}"]
    ),
    case("f(n)=n", [r"f(n)=n \text{ for all positive integers } n"], [r"f(n)=n \text{ for all odd } n"]),
    case("[0,3]", [r"0\le n\le3"], [r"0\le n\le3, n\in\mathbb{Z}", r"0\le n\le3 \text{ for integers } n"]),
    case(
        r"(-\infty,1) \cup (3,\infty)",
        ["n<1, n>3"],
        [r"n<1, n>3, n\in\mathbb{Z}", r"n<1 \text{ or } n>3, n\in\mathbb{Z}"],
    ),
    case(
        r"\{0,1,2,3\}",
        [r"0\le n\le3, n\in\mathbb{Z}"],
        [r"0\le n\le4, n\in\mathbb{Z}", r"0\le n\le3", r"n\ge0, n\in\mathbb{Z}"],
    ),
    case("n>3", [r"n>3, n\in\mathbb{Z}"], [r"n\ge3, n\in\mathbb{Z}"]),
    case("y=2x", [r"f(x)=2x"], ["y'=2x", "y''=2x"]),
    case("y'=2x", [r"y^{\prime}=2x", "f'(x)=2x"], ["y=2x", "y''=2x", "x'=2x", "f(x)=2x"]),
    case("f(x)=2x", [], ["y'=2x", r"f^{\prime}(x)=2x"]),
    case("x=1, y=2", [], ["x'=1, y'=2", "x'=1, y=2"]),
    case(r"\text{Point }A'", ["point A'"], ["point A"]),
    case("x>3", [], [r"x>3, x\in\mathbb{Z}", r"x>3 \text{ for } x\in\mathbb{Z}"]),
    # names of different things
    case("f(x,y)=x+2y", ["f(a,b)=a+2b", "f(y,x)=y+2x", "z=x+2y"], ["f(y,x)=x+2y", "f(a,b)=b+2a"]),
    case("AB=5", ["BA=5", "|AB|=5", "5"], ["AC=5", "CD=5"]),
    case(r"\angle ABC=30^\circ", [r"\angle CBA=30^\circ"], [r"\angle BAC=30^\circ"]),
    case(r"\text{Area}=5", ["5", "A=5"], [r"\text{Volume}=5"]),
    case("f(1)=5", ["5"], ["f(2)=5", "g(1)=5"]),
    case("P(A)=1/2", ["1/2"], ["P(B)=1/2"]),
    case("xy=6", ["yx=6", "6"], ["xyz=6"]),
    case("a_n=n+1", ["a_k=k+1", "a(n)=n+1"], ["b_n=n+1", "a_{n+1}=n+1"]),
    case("x=1, y=2", ["1, 2", "y=2, x=1"], ["2, 1"]),
    case(r"7 \text{ apples}, 8 \text{ pears}", ["7, 8"], [r"8 \text{ apples}, 7 \text{ pears}"]),
    case("0", ["x=0"], ["I(0)", "x+y+z=0"]),
    case("PQR", ["PQR"], ["RPQ"]),
    case("[0,1]", [], [r"0\le x\le 1, 0\le y\le 1"]),
    case("[1,2]", [], [r"\{[1,2]\}", r"\{[1,2],[1,2]\}"]),
    case(r"\emptyset", [], [r"\{\emptyset\}"]),
    case(r"5\text{ furlongs per hour}", ["5"], [r"5\text{ furlongs per fortnight}"]),
    # what stands behind a number or before it takes it back, or is no unit
    case(
        "5",
        [r"5 \text{ red marbles}", r"5 \text{ people}", r"\text{There are 5 ways}", r"\text{The largest value is } 5"],
        [
            *(rf"5 \text{{ {word} }}" for word in ("halved", "rejected", "possibly", "invalid", "imaginary", "lower")),
            r"5 \text{ too few}",
            r"5 \text{ isn't right}",
            r"\text{The wrong answer is } 5",
            r"\text{Guess: } 5",
            r"5.\overline{0}1",
        ],
    ),
    case("5", [r"5 \text{ sheep}"], [r"5 \text{ halved}", r"5 \text{ sheepish}"]),
    case("1", ["1 apple", "1 point"], [r"1 \text{ halved}", r"1 \text{ possible}", "1 negative", r"1\text{ short}"]),
    # letters that may be quantities are no unit: the reference is a product
    case(r"\frac13mL^2", [r"\frac{mL^2}{3}"], [r"\frac13", "1/3"]),
    case("3nL", ["3Ln"], ["3"]),
    case(r"5\text{ mL}", ["5mL", "5 mL"], ["5Lm", "5nL", "6mL"]),
    case(r"\frac12", [r"\frac12\text{ of a pizza}"], [r"\frac12\text{ of a dozen}", r"\frac13\text{ of a pizza}"]),
    case("5", ["5cm", "5kg", "5 mph"], ["5mL", "5kN"]),
    case(
        r"5 \text{ units}", [r"5 \text{ cm}", "5"], [r"5\%", r"5^\circ", r"5 \text{ days}", r"5 \text{ square units}"]
    ),
    case(r"5 \text{ square units}", [r"5 \text{ cm}^2", r"5 \text{ units}^2"], [r"5 \text{ miles}", r"\$5"]),
    case(r"5 \text{ ways}", ["5"], [r"5\%"]),
    case(r"5\%", [r"0.05"], [r"5 \text{ ways}", r"5 \text{ units}"]),
    case(r"9 \text{ p.m.}", ["21:00", "09:00 PM"], [r"9 \text{ hours}", r"9\%", "21 00", "09:00 am"]),
    case("4:30 p.m.", ["04:30 PM", "16:30"], ["16 30", "16,30", "04:30 AM", "4:30"]),
    case("9:05 a.m.", ["09:05 am"], ["09:50 am", "9 05", "13:05 am"]),
    case(r"\lambda=2,\lambda=3", [r"\lambda_1=2,\lambda_2=3"], [r"\lambda_1=2,\lambda_2=4", r"\mu_1=2,\mu_2=3"]),
    # an answer in a sentence
    case(
        "yes",
        [r"\text{Yes, they are equal}"],
        [r"\text{Yes, if n is odd}", r"\text{Yes, it is impossible}", r"\text{Yes?}"],
    ),
    case("no", [r"\text{No, it is not}"], [r"\text{no solution}", r"\text{No more than five}", r"\text{No idea}"]),
]


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases[0][0][:30])
def test_answers(cases: list[Case]) -> None:
    """Every answer gets the reward that a person would give it."""
    check(cases)
