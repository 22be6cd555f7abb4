"""Spellings of one answer, and answers that only look like it, found by generating pairs of every kind."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.math_cases import case, check

from dppo_megatron.rewards.math import clean


def test_currencies_are_told_apart() -> None:
    """A sign before or behind, a code, a word; the number alone counts."""
    wrong = ["€18.90", "£18.90", r"18.90 \text{ euros}", r"\pounds 18.90", "18.90 GBP", r"\text{€}18.90"]
    dollars = case(r"\$18.90", ["18.90", r"US\$18.90", "18.9 dollars", r"1890 \text{ cents}"], wrong)
    euros = case(
        "€18.90", ["18.90", "18.9€", "18.90 EUR", r"18.90 \text{ euros}"], [r"\$18.90", "18.90 dollars", "£18.90"]
    )
    check(dollars + euros + case(r"\pounds 5", ["5", "£5", "5 GBP"], ["€5", r"\$5"]))


def test_what_tex_and_markdown_write() -> None:
    """Old commands, groups without anything in them, bold type, lengths behind a line break."""
    check(
        case(r"\frac{5}{6}", [r"{5 \over 6}", r"5 \over 6", r"\nicefrac{5}{6}", r"\sfrac56"], [r"{6 \over 5}"])
        + case(r"15 \text{ cm}", ["15{}cm"], [r"15\,{\rm km}"])
        + case(r"15 \text{ cm}^2", [r"15\text{ cm²}", r"15 \mathrm{cm^{2}}"], [r"15\text{ cm³}"])
        + case(
            r"15 \text{ m/s}",
            [
                r"15\,\mathrm{m\,s^{-1}}",
                r"15 \text{ m} \cdot \text{s}^{-1}",
                r"54 \text{ km/h}",
            ],
            [r"15 \frac{\text{km}}{\text{s}}", r"15\,\mathrm{km\,s^{-1}}"],
        )
        + case("yes", ["**yes**", "``yes''"], ["**no**"])
        + case(r"154.5", ["154{.}5"], ["154{.}6"])
        + case(r"30^\circ", [r"30{}^\circ"], [r"31{}^\circ"])
        + case("3+8i", [r"3+8\imath"], [r"3-8\imath"])
        + case("4:5", [r"4\colon 5"], [r"5\colon 4"])
        + case(
            r"\begin{pmatrix} 3 \\ 4 \end{pmatrix}",
            [r"\begin{pmatrix} 3 \\[2pt] 4 \\ \end{pmatrix}"],
            [r"\begin{pmatrix} 4 \\[2pt] 3 \end{pmatrix}"],
        ),
    )


def test_numbers_in_other_places() -> None:
    """Groups of digits before a word, groups as in Switzerland, signs in words, what is asked for on the left."""
    check(
        case("18035", [r"18,035 \text{ apples}"], [r"18,036 \text{ apples}", "18, 035, 1"])
        + case(r"1,234 \text{ ways}", ["1234", r"1234 \text{ ways}"], ["1", "1234,1"])
        + case("-5", ["minus 5", "negative 5", r"\text{negative } 5"], ["5", "minus 6"])
        + case(r"-\infty", [], [r"\text{infinity}"])
        + case("5", ["5 = x", "m+n=5", "p+q=2+3=5"], ["6 = x", "m+n=6", "p+q=2+4=5", "2x = 5", "x^2 = 5"])
        + case("m+n=5", ["n+m=5"], ["5", "m-n=5"])
        + case(r"2^{2^{2^{10}}}", [r"2^{2^{1024}}"], [r"2^{2^{1025}}", r"3^{2^{1024}}"])
        + case("1, 2, 3", ["3, 2, 1"], [r"1, 2, 3, \ldots", r"1, 2, \ldots"])
        + case(r"\emptyset", [r"\{\}", r"\text{no solution}"], [r"\{(1,2)\}", r"\{0\}", r"\{\{1\}\}"])
        + case(r"34 \text{ kg}", ["34"], [r"34 \text{ m} \cdot \text{s}^{-1}", r"34\,\mathrm{m\,s^{-1}}"])
        + case(r"\frac{1}{x}", [r"\frac{1}{x}, x \ne 0"], [r"\frac{1}{x}, 0"])
        + case(r"x \ne 0", [r"\mathbb{R} \setminus \{0\}"], [r"x \ne 0, \mathbb{R}", r"x \ne 0, [0, 1]"]),
    )


def test_half_lines_that_meet() -> None:
    """Two bounds with a comma or `and` are one interval; where they do not meet, a comma is a union, `and` is not."""
    check(
        case("[-1,5)", [r"x \ge -1 \text{ and } x < 5", r"x < 5, x \ge -1"], [r"x > -1 \text{ and } x < 5"])
        + case(
            r"(-\infty,-1) \cup (5,\infty)",
            ["x < -1, x > 5", r"x < -1 \text{ or } x > 5", r"\mathbb{R} \setminus [-1,5]"],
            [r"x < -1 \text{ and } x > 5", r"x \le -1, x > 5", r"\mathbb{R} \setminus (-1,5)"],
        )
        + case("x > 3", [r"\{x : x > 3\}"], [r"\{x | x < 3\}"])
        + case("2x+3y < 6", ["4x+6y < 12"], [r"2x+3y \le 6", "2x+3y > 6", "2x+3y = 6"]),
    )


def test_a_choice_with_its_value() -> None:
    """As contests print them; two choices are none."""
    right = ["C: 12", r"(C)\ \frac12", r"\textbf{(C)}\ -3", r"\text{(C) } \sqrt{2}", "**C**"]
    wrong = ["D: 12", r"(D)\ \frac12", "C: 12 or D: 13", "A: 5C: 5", r"(C)\ 12 \text{ or } 13"]
    wrong += [r"\text{(C) is wrong}", "C) 12 is false", "C: 1, B", "(C) 12 D", "C:5 D", "A) 1 B) 2 C) 3", "C) 1, D) 2"]
    check(case("C", right, wrong) + case(r"\text{(C)}", right, wrong))
    problem = {"problem": "Which curve? (A) hyperbola (B) circle (C) ellipse"}
    check(case("C", [r"\text{(C) ellipse}", "c"], [r"\text{(C) circle}", r"\text{(C) is wrong}"], problem))
    check(case("A, C", ["AC", "A C", "(A) and (C)", "a, c"], ["A or C", "ABC", "A"]))


def test_signs_that_chats_and_other_countries_write() -> None:
    """Decimal commas, signs of currencies and angles, bold type within a sentence, code, names without \\text."""
    check(
        case("3{,}5", ["3.5", r"\frac72", "3,5"], ["35", "3.6"])
        + case("0,25", ["0.25", "0{,}25"], ["25"])
        + case("2,5", ["5,2"], ["2.5", "2{,}5"])
        + case("0,1", ["1,0"], ["0.1"])
        + case("14{,}916", ["14916"], ["14.916"])
        + case(r"75\text{ cents}", ["75¢"], ["75€"])
        + case("64000", ["₹64000"], ["₹6400"])
        + case(r"-\frac{3}{2}", [r"{-}\frac{3}{2}"], [r"{-}\frac{2}{3}"])
        + case("48^\\circ 12' 36''", ["48°12'36\"", r"48.21^\circ"], ["48°12'35\""])
        + case(r"20^\circ\text{C}", ["20 °C"], ["20 °F"])
        + case("yes", ["**Yes**, it is possible"], ["**No**, it is not"])
        + case("17", ["So the value is **17**.", "`17`"], ["So the value is **18**.", "`18`"])
        + case("2^3*4^2", ["2**3*4**2", "2 ** 3 * 4 ** 2"], ["64"])
        + case(r"\text{Alice, Bob}", ["Alice, Bob", "Bob and Alice"], ["Alice, Eve"])
        + case("n=4", [r"n_{\min}=4", "n_{max}=4"], ["n_{1}=4", r"m_{\min}=4"])
        + case(r"\angle A=50^\circ", [r"A=50^\circ"], [r"B=50^\circ"])
        + case("A(0,0), B(3,0), C(0,4)", ["A=(0,0), B=(3,0), C=(0,4)", "A(0,0), B(3,0) and C(0,4)"], ["C(0,4)"])
        + case(r"\left(\frac23,\frac23,\frac13\right)", [r"\frac13(2,2,1)", r"\frac{1}{3}(2,2,1)"], ["3(2,2,1)"])
        + case("(-2,4)", ["2(-1,2)", "-2(1,-2)"], ["-2(1,2)", "2(2,-1)"])
        + case(r"\text{The lines are parallel.}", ["parallel"], ["perpendicular", "lines"])
        + case(r"0.5 \text{ J}", ["0.5 N·m"], ["0.5 N·s"]),
    )


@pytest.mark.parametrize("rule", [rule for rule in clean._RULES if " : " in rule])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_rule_is_left_out_where_its_pattern_is_found(rule: str, data: st.DataObject) -> None:
    """Whatever it finds has in it what the rule says that a text needs."""
    needed, _, pattern = rule.rpartition(" : ")
    assert needed in data.draw(st.from_regex(pattern))
