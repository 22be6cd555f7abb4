"""Units behind a number: which are known, and how they convert.

A unit that only one side states is ignored; two known units must measure the same thing, and are converted exactly.
Words that are no unit (`12 ways`, `7 goats`) are ignored too, unless they change the number (`3 million`, `3 at most`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_TABLE: dict[str, tuple[str, dict[str, Fraction | int]]] = {
    "length": (
        "m",
        {
            "m meter meters metre metres": 1,
            "km kilometer kilometers kilometre kilometres": 1000,
            "cm centimeter centimeters centimetre centimetres": Fraction(1, 100),
            "mm millimeter millimeters millimetre millimetres": Fraction(1, 1000),
            "nm nanometer nanometers": Fraction(1, 10**9),
            "ft foot feet": Fraction(3048, 10000),
            "in inch inches": Fraction(254, 10000),
            "yd yard yards": Fraction(9144, 10000),
            "mi mile miles": Fraction(1609344, 1000),
        },
    ),
    "time": (
        "s",
        {
            "s sec second seconds secs": 1,
            "min minute minutes mins": 60,
            "h hr hour hours hrs": 3600,
            "day days": 86400,
            "week weeks": 604800,
            "month months": 1,
            "yr year years": 1,
        },
    ),
    "mass": (
        "g",
        {
            "g gram grams gm": 1,
            "kg kilogram kilograms": 1000,
            "mg milligram milligrams": Fraction(1, 1000),
            "lb lbs pound pounds": Fraction(45359237, 100000),
            "oz ounce ounces": Fraction(45359237, 1600000),
        },
    ),
    "volume": (
        "l",
        {"l liter liters litre litres": 1, "ml milliliter milliliters": Fraction(1, 1000), "gallon gallons gal": 1},
    ),
    "money": ("$", {"dollar dollars usd buck bucks": 1, "cent cents": Fraction(1, 100)}),
    "euros": ("€", {"euro euros eur": 1}),
    "sterling": ("£", {"gbp quid": 1, "pence": Fraction(1, 100)}),
    "yen": ("¥", {"yen jpy": 1}),
    "percent": ("%", {"% percent pct percents": 1}),
    "angle": ("deg", {"degree degrees deg": 1, "radian radians rad": 1}),
}
_SAME_ONLY = {"month", "yr", "gallon", "radian"}  # comparable with themselves only
_KNOWN: dict[str, tuple[str, Fraction]] = {}
for _dimension, (_, _units) in _TABLE.items():
    for _names, _factor in _units.items():
        _first = _names.split()[0]
        for _name in _names.split():
            _KNOWN[_name] = (
                f"{_dimension}:{_first}" if _first in _SAME_ONLY else _dimension,
                Fraction(_factor),
            )
MULTIPLIERS = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_CHANGES_MEANING = _word_set(
    "or not no and than more less least most about approximately around if when where minus plus times"
    " over half divided by quarter third to from up under above below between but maybe perhaps either"
    " neither almost nearly roughly except greater fewer without mod modulo base th st nd rd is are was"
    " equals equal for all any some every other never false wrong true hope correct answer i only log sin"
    " cos tan ln sqrt pi x y z n undefined infinity infinite"
)
_CHANGES_MEANING |= _word_set(
    "squared cubed factorial inverse negative opposite point double twice triple halves thirds fourths quarters fifths"
    " sixths sevenths eighths ninths tenths hundredths thousandths one two three four five six seven eight nine ten k b"
)
_WORD = re.compile(r"[A-Za-z%$]+")
_GLUED = _word_set(
    "cm mm km kg mg g m s h ml ft in lb oz mi min hr mph pct percent deg usd m/s km/h cm/s ft/s mi/h m/s^2"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: `dimension` and `factor` to its base unit where it is known, else the words only."""

    words: str
    dimension: str = ""
    factor: Fraction = Fraction(1)


def read_unit(words: str) -> Unit | None:
    """The unit that the words name; None if they may change what the number means.

    Example:
        >>> read_unit("square feet").dimension, read_unit("more apples")
        ('length^2', None)
    """
    words = re.sub(r"[{}\\~]", " ", words).strip(" .,;")
    if len(words) == 1 and words.isupper() and words != "L":  # newtons, kelvin
        return Unit(words)
    words = words.lower()
    words = re.sub(r"\bper cent\b", "percent", words)
    if not words:
        return Unit("")
    found = _WORD.findall(words)
    if found[-1:] in (["squared"], ["cubed"]):  # feet squared, but not 5 squared
        found = found[:-1] or found
    if len(found) > 6 or any(word in _CHANGES_MEANING or word in MULTIPLIERS for word in found):
        return None
    if re.search(r"[^\w\s%$/^*().,'-]", words):
        return None
    return Unit(words, *_known(words))


_PART = (
    r"(\d+(?:\.\d+)?)\s*(?:\\text\{)?\s*([A-Za-z]+)\.?\s*(?:,|and)?\s*\}?\s*(?:,|\\text\{\s*and\s*\}|and(?![a-z]))?\s*"
)
_COMPOUND = re.compile(rf"(?:{_PART}){{2,4}}", re.ASCII)
_SEXAGESIMAL = re.compile(r"(\d+)\s*\^?\s*\\degree\s*(\d+)\s*'(?:\s*(\d+)\s*'')?", re.ASCII)


def read_compound(text: str) -> tuple[Fraction, Unit] | None:
    """A measure of several parts, in its last unit: 1 hour 30 minutes, 5 feet 6 inches, 60 degrees 42'."""
    if match := _SEXAGESIMAL.fullmatch(text):
        return Fraction(int(match[1])) + Fraction(int(match[2]), 60) + Fraction(int(match[3] or 0), 3600), _DEGREES
    if not text[:1].isdigit() or not _COMPOUND.fullmatch(text):
        return None
    parts = [(Fraction(number), read_unit(words)) for number, words in re.findall(_PART, text)]
    units = [unit for _, unit in parts if unit is not None and unit.dimension]
    factors = [unit.factor for unit in units]
    if (
        len(units) < len(parts)
        or len({unit.dimension for unit in units}) > 1
        or factors != sorted(factors, reverse=True)
    ):
        return None
    return sum((n * unit.factor for (n, _), unit in zip(parts, units, strict=True)), Fraction(0)) / factors[-1], units[
        -1
    ]


def is_glued(word: str) -> bool:
    """Whether the letters may stand behind a number without a space: 5cm."""
    return word.lower() in _GLUED


_INVERSE = re.compile(r"\s+([a-z]+)\s*\^\s*-\s*1\b")  # m s^-1
_PER = re.compile(r"\s*/\s*|\s+per\s+")


def _known(words: str) -> tuple[str, Fraction]:
    words = {"mph": "mi/h", "kph": "km/h"}.get(words.strip(), words)
    above, *below = _PER.split(_INVERSE.sub(r"/\1", words.replace("*", " ")))
    if below:
        parts = [_known(part.strip()) for part in (above, *below)]
        if len(parts) > 2 or not all(dimension for dimension, _ in parts):
            return "", Fraction(1)
        return f"{parts[0][0]}/{parts[1][0]}", parts[0][1] / parts[1][1]
    power = 1
    if match := re.search(r"\^\s*(\d)\s*$", words):
        power = int(match[1])
        words = words[: match.start()]
    for prefix, size in (("square ", 2), ("sq ", 2), ("sq. ", 2), ("cubic ", 3), ("cu ", 3)):
        if words.startswith(prefix):
            power = size
            words = words[len(prefix) :]
    words = words.strip()
    if words.endswith((" squared", " cubed")):
        power = 2 if words.endswith("squared") else 3
        words = words.rsplit(" ", 1)[0]
    if words not in _KNOWN:
        return "", Fraction(1)
    dimension, factor = _KNOWN[words]
    return (dimension if power == 1 else f"{dimension}^{power}"), factor**power


_DEGREES = Unit("degrees", *_KNOWN["degrees"])
