"""The `math` grader, by hand. Units, money, percent, times, ratios, digits in a base, choices and other words."""

from __future__ import annotations

from itertools import product

import pytest
from support.math_cases import Case, case, check

CASES = [
    case(r"\$75", right=["75 USD", r"7500\text{ cents}"], wrong=["75 cents", "0.75"]),
    case(r"12\text{ cm}^2", right=["12 cm^2", r"1200\text{ mm}^2"], wrong=[r"12\text{ cm}", r"12\text{ m}^2"]),
    case(
        r"3.6\text{ km/h}",
        right=["3.6", r"1\text{ m/s}", r"3.6\text{ kilometers per hour}"],
        wrong=[r"3.6\text{ m/s}", r"3.6\text{ mph}"],
    ),
    case(
        r"9.8\text{ m/s}^2",
        right=[r"9.8\,\mathrm{m\,s^{-2}}", r"980\text{ cm/s}^2"],
        wrong=[r"9.8\text{ m/s}", r"9.8\text{ cm/s}^2"],
    ),
    case(r"250\text{ N}", right=[r"0.25\text{ kN}", r"250\text{ newtons}"], wrong=[r"250\text{ J}", r"250\text{ kN}"]),
    case(r"20^\circ\text{C}", right=[r"20\text{ degrees Celsius}"], wrong=[r"20^\circ\text{F}"]),
    case(r"20\%\text{ increase}", ["20", r"20\%"], [r"20\%\text{ decrease}", r"20\%\text{ loss}"]),
    case(r"20\%\text{ loss}", [], [r"20\%\text{ profit}", r"20\%\text{ discount}"]),
    case(r"5\text{ bar}", [r"5\text{ bars}"], [r"5\text{ Pa}"]),
    case(r"1\text{ cat}", [r"1\text{ cats}"], [r"1\text{ dog}"]),
    *(case(letters, [], [letters[0]]) for letters in ("2mN", "2nN", "2cN", "3cal", "3cals", "5bar", "2mV", "3au")),
    case(r"\text{pH}=7.4", right=["pH = 7.4", "7.4"], wrong=[r"\text{pOH}=7.4"]),
    case(r"\text{Alice}, \text{Bob}", right=[r"\text{Bob and Alice}"], wrong=[r"\text{Alice, Bob, Carol}"]),
    case(r"60^\circ", right=["60 deg", r"\pi/3\text{ radians}"], wrong=[r"60\text{ rad}", r"60\pi"]),
    case(
        r"20\%",
        right=["20", "20%", "0.2", r"\frac15", "20 percent", r"20\text{ percent}", r"20.0\%"],
        wrong=["2", "0.02", r"200\%", r"0.2\%", r"21\%"],
    ),
    case(r"7.2\%", right=["7.2", "0.072", r"7.20\%"], wrong=["72", "0.72"]),
    case(
        r"\$18.90",
        right=["18.9", r"\$18.90", "18.90 dollars", r"18.90\text{ dollars}", "$18.90"],
        wrong=["18.09", "1890", r"\$18.9 million"],
    ),
    case(r"\$0.50", right=["0.5", ".50"], wrong=[]),
    case(r"5.4 \text{ cents}", right=["5.4", r"5.4\text{ cents}"], wrong=[r"\$5.4 million"]),
    case(
        r"864 \mbox{ inches}^2",
        right=["864", r"864\text{ in}^2", "864 square inches", r"864\text{ square inches}", r"864 \text{ sq inches}"],
        wrong=[r"864\text{ inches}", r"864\text{ feet}^2"],
    ),
    case(
        r"5 \text{ m}",
        right=[r"5 \text{ meters}", "5", "5m", r"500 \text{ cm}", "5 m", r"0.005 \text{ km}"],
        wrong=[r"5 \text{ km}", r"5 \text{ cm}", r"5 \text{ seconds}", r"5 \text{ m}^2"],
    ),
    case(
        r"2 \text{ hours}",
        right=[r"120 \text{ minutes}", "2", "2 hours", r"2\text{ hr}"],
        wrong=["120", r"2 \text{ minutes}"],
    ),
    case(
        r"90^\circ",
        right=["90", "90 degrees", r"90\text{ degrees}", r"\frac{\pi}{2}", "90°", r"90^{\circ}"],
        wrong=[r"90\pi", r"100^\circ", r"\frac{\pi}{3}", "89"],
    ),
    case("60^\\circ 42'", right=["60^\\circ 42'", "60°42'"], wrong=[]),
    case(
        r"18 \text{ integers}",
        right=["18", "18 integers", r"18\text{ numbers}"],
        wrong=["17", r"18 \text{ million}", r"18\frac12"],
    ),
    case(r"65 \text{ children tickets }", right=["65", "65 children tickets"], wrong=[]),
    case(r"\frac{3}{4}\pi\text{ inches}", right=[r"\frac{3\pi}{4}", r"0.75\pi"], wrong=[r"\frac34", r"\frac{3}{4\pi}"]),
    case(r"-\$0.50", right=["-0.5", r"-\$0.5", r"-\$.50"], wrong=["0.5", "50"]),
    case("1011_2", right=["(1011)_2"], wrong=["1011", "11"]),
    *(  # as NuminaMath has them
        case(gold, right=["C", "(C)", r"\text{(C)}", r"(C)\ 15"], wrong=["D", r"\textbf{(D)}\ 15", "(C) or (D)"])
        for gold in (r"\textbf{(C)}\ 15", r"\mathrm{(C)}\ \frac{1}{2}", r"\textbf{(C)}\ \text{red}", "C) -3")
    ),
    case(r"(A) \to (B)", right=[r"(A)\to (B)"], wrong=["A", "B"]),
    case(r"\text{J. Bach}", right=["J. Bach"], wrong=["J"]),
    # nothing reads these: the same but for spaces
    case(r"A \cap B", right=[r"A\cap B"], wrong=[r"A\cup B", r"A\cap C"]),
    case(r"\{1, 2, \ldots, 10\}", right=[r"\{1,2,\dots,10\}"], wrong=[r"\{1,2,\dots,1 0, 1\}"]),
    case("B", right=["Option B", r"\text{Choice B}"], wrong=["Option A", r"\text{Option B or C}"]),
    case("Yes", right=["yes", r"\text{YES}"], wrong=["no", "yes or no", "yse"]),
    case("odd", right=[r"\text{odd}"], wrong=["even", "dod"]),
    case(
        r"\text{(C)}",
        right=[
            "C",
            "(C)",
            r"\text{C}",
            r"\textbf{(C)}",
            r"\mathrm{C}",
            r"\text{(C) }",
            "(c)",
            "C.",
            "C)",
            "(C) 12",
            r"\textbf{(C)}\ 12",
            r"\text{C: } 12",
            r"\text{(C)}\ 5",
            r"\textbf{(C) } 5",
            r"\text{C}.",
            r"C) \frac{1}{2}",
        ],
        wrong=[
            "D",
            "(D)",
            "B, C",
            r"C \text{ or } D",
            "ABC",
            "CC",
            "AC",
            "",
            r"\text{(C) or (D)}",
            "(C) or (D)",
            "C or D",
            r"\text{C, D}",
            r"\text{not C}",
            r"\text{(B) not (C)}",
            "(A)(B)(C)(D)(E)",
        ],
    ),
    case("C", right=[r"\text{C}", "(C)", r"\textbf{C}"], wrong=["D", "E"]),
    case(
        "4210_{7}",
        right=["4210_7", r"4210_{\text{seven}}", r"4210_{\text{7}}", r"4210 \text{ base } 7"],
        wrong=["4210", "1477", "4210_8", "4211_7", "4210_{10}", "-4210_7"],
    ),
    case("-17_8", ["(-17)_8", "-017_{8}"], ["17_8", "-16_8"]),
    case(r"\text{at most }3", [r"at most 3"], [r"\text{at most}-3", r"\text{at most - 3}", "at most-3", "at most 0.3"]),
    case(r"\text{at most }1500", ["at most 1,500"], ["at most 1.500", "at most 1 500"]),
    case(r"\text{won }2-1", ["won 2 - 1", "won 2\u20131"], ["won 21", "won 1-2", "won 2 1"]),
    case(r"8\text{ R }3", [], ["-8R3", "8R4", "83", "8 R -3"]),
    case(r"\text{tends to infinity}", [], ["tends to -infinity", "tends to - infinity", r"tends to \text{-infinity}"]),
    case(r"\text{4-sided non-convex}", ["4 sided nonconvex", r"$4$-sided non-convex"], ["-4 sided non-convex"]),
    # a hyphen between words, or after a number or a letter of mathematics, is no minus
    case(r"x\text{-axis}", ["x-axis", r"\text{the $x$-axis}", r"\text{x-axis}"], [r"y\text{-axis}"]),
    *(
        case(rf"{letter}\text{{-{word}}}", [rf"\text{{{letter}-{word}}}"], [rf"\text{{-{letter}-{word}}}"])
        for letter, word in (("y", "coordinate"), ("n", "gon"), ("3", "digit"), ("4", "sided polygon"))
    ),
    case("Type-2", [r"\text{Type-2}"], [r"\text{Type -2}", "Type 3"]),
    case("Team A-3", [r"\text{Team A-3}"], ["Team A 4"]),
    case(r"\text{3-4-5 triangle}", ["3-4-5 triangle"], [r"\text{3-5-4 triangle}", r"\text{345 triangle}"]),
    case(r"\text{slope is pi}", [], [r"\text{slope is - pi}", r"\text{slope is -pi}"]),
    case(r"\text{between 2 and 3}", [], ["between 2 and-3", "between 2 and -3"]),
    case("self - inverse", ["self-inverse"], ["inverse"]),
    case(
        r"\text{revenue} - \text{cost}",
        [r"\text{revenue - cost}"],
        [r"\text{revenue}\text{cost}", r"\text{revenue cost}"],
    ),
    case(r"\text{Monday - Friday}", [], [r"\text{Monday, Friday}"]),
    *(case(rf"\text{{{word} 3}}", [], [rf"\text{{{word}-3}}"]) for word in ("of", "at", "below", "was", "minimum")),
    case(r"\text{degree at most }n-1", [], [r"\text{degree at most }n1"]),
    case("152A_{11}", right=["152A_{11}", "152a_{11}"], wrong=["152_{11}", "152B_{12}"]),
    case(
        r"\text{4:30 p.m.}",
        right=["4:30 p.m.", r"4:30 \text{ p.m.}", "4:30 PM", "4:30pm", "16:30", r"4:30\text{ PM}"],
        wrong=["4:30 a.m.", "5:30 p.m.", "4:03 p.m.", "16:31", "4.5"],
    ),
    case(r"9\text{ a.m.}", right=["9 a.m.", "9:00 a.m.", "9 AM", "9:00 AM"], wrong=["9 p.m.", "10 a.m.", "9:30 a.m."]),
    case("3:1", right=["3", "6:2", r"\frac{3}{1}", "3 : 1"], wrong=["1:3", "3:2", "31", "4"]),
    case("1:2:3", right=["2:4:6", "1 : 2 : 3"], wrong=["3:2:1", "1:2"]),
    case(
        r"\text{Evelyn}",
        right=["Evelyn", "evelyn", r"\text{Evelyn.}", r"\textbf{Evelyn}", "Evelyn."],
        wrong=["Evelyn or Debra", "Debra", "Evelny", "Evelyn and Debra", "not Evelyn", "E"],
    ),
    case(
        r"\text{odd}",
        right=["odd", "Odd", r"\text{ odd}", "$odd$", r"\textit{odd}"],
        wrong=["even", "neither", "odd and even", "not odd", "do d"],
    ),
    case(r"\text{June 20}", right=["June 20", "june 20"], wrong=["June 2", "June 21", "20"]),
    case(r"\text{neither}", right=["neither"], wrong=["even", "odd"]),
    case(r"\overline{CD}", right=[r"\overline{CD}"], wrong=[r"\overline{AB}"]),
    case("A", right=["A", "(A)"], wrong=["B", "AB"]),
    case("12:34", right=["12:34"], wrong=["12:43", "34:12", "12.34"]),
    case(
        r"\text{Saturday}",
        right=["Saturday", r"\text{saturday}", "Saturday.", r"\mbox{Saturday}", r"\text{Saturday }"],
        wrong=["Sunday", "Saturday or Sunday", "Satur day or", "Sat"],
    ),
    case("5 per hour", right=["5", "5 apples per hour"], wrong=["5 per minute", "5 apples per minute"]),
    case(r"\$5", right=["5 per person"], wrong=["6 per person"]),
    case(r"\text{yes}", right=["Yes", "yes."], wrong=["no", "yes and no", r"\text{yes (no)}", r"\text{yes *no*}"]),
    case(r"\text{True}", right=["true"], wrong=["false"]),
    # ratios in words
    case(
        "3:2",
        right=["3 to 2", r"3\text{ to }2", "6 to 4", "three to two"],
        wrong=["2 to 3", "3 to 2 to 1", "from 3 to 2"],
    ),
    case("3 to 2", right=["3:2", r"\frac{3}{2}"], wrong=["2:3"]),
    # several choices, and small letters
    case(
        "A, C",
        right=["AC", "CA", r"\text{AC}", "A C", "(A)(C)", "(A) and (C)", "A & C", "a, c"],
        wrong=["A", "ABC", "AB", "AD", "ac", "a c b", "A or C or D"],
    ),
    case("ABD", right=["A, B, D", r"\text{A, B and D}"], wrong=["A, B", "A, B, C, D"]),
    case("AC", right=["A, C", "A and C"], wrong=["A", "CAB"]),
    case("C", right=["c", "(c)", "c.", r"\text{c}", "c) 12"], wrong=["d", "cc", "cat", "c + 1", "c = 5"]),
    case("1", right=[], wrong=["1 \\text{ unproven }"]),
    case("22", right=["22 \\text{ wide}"], wrong=["22 \\text{ wide of it}"], row={"problem": "It is 4 meters wide."}),
    case("50", right=[], wrong=["50 \\text{ as a bound}"], row={"problem": "Arcs of radius 5 as a bound of a region"}),
    case("Ann will serve first", right=["Ann"], wrong=["serve", "Bob"], row={"problem": "Who serves first?"}),
    case("C", right=["c"], wrong=[], row={"problem": "Which? (A) 1 (B) 2 (C) 3"}),
    case("C", right=["C"], wrong=["c"], row={"problem": "A circle has the centre C and the chord c."}),
]


@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases[0][0])
def test_answers(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer gets the reward that a person would give it."""
    check(cases)


COUNTS = "ten dozen hundred thousand million billion half third quarter fifth sixteen twenty score lakh gross"


def test_a_number_in_words_or_digits_is_no_unit() -> None:
    """Also in the plural, and as a part: 5 hundreds, 5 thousandths, 5 choose 2."""
    words = [f"{count}{end}" for count in COUNTS.split() for end in ("", "s", "th", "ths")]
    signs = ["^2 cm", "/2 cm", "*3 m", "(6) m", "apples 6 pears", "choose 2", "remainder 2", "e3", "E3", "±1", "% off"]
    check(case("5", [], [f"5 \\text{{ {word} }}" for word in (*words, *signs)]))
    check(case("5", [], [f"5 {word}" for word in words]))


MEASURES = ("m ft mile", "hours days", "kg lb", "L mL", "dollars cents", "J kJ", "W", "m/s mph", "months", "years")
NO_MEASURES = ["furlongs", "fortnights", "stone", "knots", "cups", "rupees", "Bq", "mSv", "light-years", "apples"]


SYMBOLS = "eV Hz Pa F T H Wb cal bar pc ohm m s g J W V A C N mol L"
PREFIXES = {"": 0, "k": 3, "M": 6, "G": 9, "m": -3, "u": -6, "n": -9, "p": -12}


def test_a_prefix_is_told_from_every_other() -> None:
    """Of units that are known; the same number of another size is wrong, the same size in another number right."""
    for unit, (one, power), (two, other) in product(SYMBOLS.split(), PREFIXES.items(), PREFIXES.items()):
        right = f"5 \\times 10^{{{power - other}}} \\text{{ {two}{unit} }}"
        if f"{one}{unit}" == "pm":  # a time
            continue
        check(case(f"5 \\text{{ {one}{unit} }}", [right], [f"5 \\text{{ {two}{unit} }}"] if one != two else []))
    check(case(r"4.7\,\mu\text{F}", [], [r"4.7\text{ F}"]))
    check(case(r"100\,\Omega", [r"0.1\text{ k}\Omega"], [r"100\text{ k}\Omega"]))


def test_two_units_measure_the_same_thing_or_are_different() -> None:
    """Where one of the two is known; what is known to nobody says nothing about the other."""
    known = [(kind, unit) for kind, units in enumerate(MEASURES) for unit in units.split()]
    wrong = [(one, two) for kind, one in known for other, two in known if kind != other]
    wrong += [pair for _, unit in known for word in NO_MEASURES for pair in ((unit, word), (word, unit))]
    check([(f"5 \\text{{ {one} }}", f"5 \\text{{ {two} }}", 0.0, {}) for one, two in wrong])
    wrong += [(one, two) for one in NO_MEASURES for two in NO_MEASURES if one != two]
    beside = [r"5 \text{ m long}", r"5 \text{ meters of rope}", r"500 \text{ cm}"]
    check(case(r"5 \text{ m}", beside, []) + case(r"5 \text{ dollars}", [r"5 \text{ dollars per ticket}"], []))
