"""Numbers and units as people write them, read exactly.

Number words are read only if all of a run make one number: `seven or eight`, `one two` and `second` are left as they
are. If both sides state a unit and one of the two is known, both must measure the same thing. Words that are no unit
(`12 ways`, `7 goats`) are ignored, unless they change the number (`3 million`, `3 at most`). Units have no digits but
exponents: `5 choose 2` has no unit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from dppo_megatron.rewards.math import regex

ZERO = Fraction(0)
MAX_DIGITS = 2000  # of a number: int() of a long text takes quadratic time
MAX_EXPONENT = 5000  # of scientific notation: 1e999999999 would fill the memory
_PLAIN = regex(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|[+-]?\.\d+", re.ASCII)
_DECIMAL = regex(
    r"[+-]?([\d,]*)(?:\.(\d*))?(?:[eE]([+-]?\d+)|\s*\*\s*10\s*\^\s*\{?\s*([+-]?\d+)\s*\}?)?(?:\s*[%\\A-Za-z].*)?",
    re.ASCII,
)
_SPACED = regex(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_DOTTED = regex(r"[+-]?[1-9]\d{0,2}(?:(?:\.\d{3}){2,}|(?:\.\d{3})+,\d+)", re.ASCII)

_BELOW_100 = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
SMALL = dict(zip(_BELOW_100.split(), (*range(20), *range(20, 100, 10)), strict=True))
MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_WORD = rf"(?:{'|'.join((*SMALL, *MULTIPLIERS, 'and', 'an?'))})"
_RUN = regex(rf"(?<![\w\\-])(?=[a-z])(?:(?:minus|negative) +)?{_WORD}(?:(?:-| +){_WORD})*(?![\w-])", re.IGNORECASE)
_GOES_ON = regex(r"\s*[\[(\\^_\d]|\s+(?:first|second)\b", re.IGNORECASE)


def read_number(text: str) -> Fraction | None:
    """The exact value of a decimal: 7, -1,234.50, .5, 1 000, 1.234,50."""
    if not text or text[0] not in "+-.0123456789" or len(text) > MAX_DIGITS:
        return None
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    elif _DOTTED.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    return decimal(text.replace(",", "").rstrip(".")) if _PLAIN.fullmatch(text) else None


def decimal(text: str) -> Fraction:
    """The value of a decimal without commas."""
    return Fraction(int(text) if text.isdigit() else text)  # of a text it takes three times as long


def stated_digits(text: str) -> tuple[int, Fraction]:
    """The number of digits of a decimal, and the value of 1 in the last of them: 3 and 1/10 for 12.0 or 1.20e1. Both
    are 0 without point and exponent, since such a number is exact."""
    match = _DECIMAL.fullmatch(text)
    whole, places, *exponents = match.groups() if match else ("", None, None, None)
    exponent = exponents[0] or exponents[1]
    if (places is None and exponent is None) or len(exponent or "") > 5:
        return 0, ZERO
    digits = (whole + (places or "")).replace(",", "").lstrip("0")
    return len(digits), Fraction(10) ** (int(exponent or 0) - len(places or ""))


def read_number_words(text: str) -> Fraction | None:
    """The number that all of the words make together; None if they make none."""
    words = text.lower().replace("-", " ").split()
    if not words or len(words) > 30:
        return None
    if words[0] in ("minus", "negative"):
        value = read_number_words(" ".join(words[1:]))
        return None if value is None else -value
    return _whole(words)


def _whole(words: Sequence[str]) -> Fraction | None:
    """A cardinal number; each scale (million, thousand ...) has to be smaller than the one before."""
    if not words or words[-1] in ("a", "an", "and") or (len(words) > 1 and "zero" in words):
        return None
    total, group, bound = 0, 0, 10**15
    for word in words:
        value, scale = SMALL.get(word), MULTIPLIERS.get(word, bound)
        if value is not None and (group % 100 == 0 or (group % 100 >= 20 and group % 10 == 0 and value < 10)):
            group += value
        elif word in ("a", "an") and not group + total:
            group = 1
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif word != "hundred" and group and scale < bound:
            total, group, bound = total + group * scale, 0, scale
        elif word != "and" or group % 100 or not group + total:
            return None
    return Fraction(total + group)


def with_digits(text: str) -> str:
    """The text with its numbers in words as digits, where they are surely numbers.

    Example: "three to two" becomes "3 to 2"; "the second" stays.
    """

    def as_digits(run: re.Match[str]) -> str:
        value = read_number_words(run.group())
        # before an expression it would become a factor; `twenty second` is no number of seconds
        return run.group() if value is None or _GOES_ON.match(text, run.end()) else str(value)

    return _RUN.sub(as_digits, text)


# ------------------------------------------------------------------------------------------------- units

# Per line: what is measured, then factors to the base unit, each followed by names. Names of three letters or more may
# also have an s, and names with a star prefixes. Case matters only if both spellings are units (MHz, mHz).
_TABLE = """
length: 1 m* meter* metre* 381/1250 ft foot feet 127/5000 in inch inches 1143/1250 yd yard 201168/125 mi mile
length: 1/10000000000 angstrom 149597870700 au 9460730472580800 ly
time: 1 s* sec secs second* 60 min mins minute 3600 h hr hrs hour 86400 day days 604800 week
mass: 1 g* gm gram* 45359237/100000 lb lbs pound 45359237/1600000 oz ounce 1000000 tonne
mole,length^-3: 1000 M molar 1 mM millimolar
length^3: 1/1000 l* L* liter* litre* 473176473/125000000000 gal gallon
length^3: 473176473/500000000000 qt quart 473176473/1000000000000 pt pint
mass,length,time^-2: 1000 N* newton* 1000000 kn 1/100 dyn dyne
mass,length^-1,time^-2: 1000 Pa* pascal* 100000000 bar* 101325000 atm atmosphere
mass,length^2,time^-2: 1000 J* j joule* 3600000 Wh* 4184 cal* calorie* 1/10000 erg 1.602176634e-16 eV*
mass,length^2,time^-3: 1000 W* w watt*
time^-1: 1 Hz* hertz*
T: 1 T* tesla* 1/10000 gauss
bytes: 1 byte* 1000 kB KB 1000000 MB 1000000000 GB 1000000000000 TB
money: 1 usd buck dollar 1/100 cent 1/20 nickel 1/10 dime
sterling: 1 gbp quid 1/100 pence
angle: 1 deg degree
"""
# units that are not converted to others, but for their prefixes; the first name is the dimension's
_ALONE = (
    "percent % pct; radian rad; unit un u; month; year yr*; euro eur; yen jpy; yuan cny rmb; parsec* pc*; mole* mol*;"
    " ohm*; volt* V*; ampere* amp* A*; kelvin K*; celsius coulomb* C*; fahrenheit farad* F*; henry* H*; weber* Wb*"
)
_PREFIXES = "k kilo 3 c centi -2 m milli -3 d deci -1 u micro -6 n nano -9 p pico -12 M mega 6 G giga 9 T tera 12"

_DOUBTFUL = (
    "not no non nor never neither none nope cannot wrong incorrect error false invalid fails failing excluded excluding"
    " except rejected extraneous impossible nonexistent guess guessed maybe perhaps possibly probably likely unsure"
    " hopefully if unless hope alternatively versus vs instead unproven"
)
DOUBTS = frozenset(_DOUBTFUL.split())
"""Words that negate or weaken what is beside them, or make it a condition."""
_MODIFIERS = (
    "or and than more less least most about approximately around when where minus plus times over half third"
    " divided by quarter to from up under above below between but either almost nearly roughly greater fewer it bound"
    " without mod modulo base th st nd rd is are was equals equal for all any some every other true correct answer"
    " i only log sin cos tan ln sqrt pi undefined infinity infinite squared cubed factorial inverse negative"
    " opposite point double twice triple k max min minimum maximum upwards onwards off mille ish permille ppm ppb"
    " bps basis remainder debt choose tau powers short too few many noon out bn mil thou mio grand top odd low"
)
_MONTHS = "january february march april may june july august september october november december"
MONTHS = frozenset(_MONTHS.split())
_CHANGES_MEANING = DOUBTS | MONTHS | frozenset(_MODIFIERS.split())
_RARE = ("lakh", "crore", "score", "gross", "myriad")
_PARTS = "half halve third quarter fourth fifth sixth seventh eighth ninth tenth".split()  # noqa: SIM905
_NUMBERS = frozenset({*SMALL, *MULTIPLIERS, *_PARTS, *_RARE, *_PREFIXES.split()[1::3]})
_EXPONENT = r"(?:\s*\^\s*-?\s*\d(?!\d))?"
_WORDS = regex(rf"[a-z]+{_EXPONENT}(?:[\s*,.'()-]+[a-z]+{_EXPONENT})*")
_NEAR = (
    "of them per long wide high tall deep thick away apart old older younger later each total altogether apiece left"
    " increase profit celsius fahrenheit kelvin newton hertz ohm volt pascal mole degree"
)
_BESIDE = frozenset(_NEAR.split())
_IN_ALL = regex(
    r"\bin (?:total|all|length|width|height|area|volume)\b|\bdegrees? (?=celsius|fahrenheit)|\A\s*of an? (?=[a-z]+\Z)",
    re.IGNORECASE,
)
_COUNTED = regex(r"[a-z]+[^isu]s|[a-z]{3,}i|(?:wo)?men|(?:grand)?children|people|feet|teeth|mice|fish|sheep")
_COUNTS = frozenset(["integers", "numbers", "ways", "values", "solutions", "times", "pairs"])
_FACTOR = regex(r"[\s*-]*(?P<name>[A-Za-z%]+)\.?(?:\s*\^\s*(?P<power>-?\s*\d))?(?![A-Za-z^])\s*")
_POWERS = {
    regex(r"\blight[- ]?years?\b"): "ly",
    # square metres and metres squared are metres^2
    regex(r"\b(?:square|sq\.?)\s+([A-Za-z]+)|\s*\bsquared\b"): r"\1^2",
    regex(r"\b(?:cubic|cu\.?)\s+([A-Za-z]+)|\s*\bcubed\b"): r"\1^3",
}


@functools.cache  # on first use: some hundred fractions would delay the import
def _table() -> dict[str, tuple[dict[str, int], Fraction]]:
    known: dict[str, tuple[dict[str, int], Fraction]] = {}
    alone = [f"{names.split()[0].rstrip('*')}: 1 {names}" for names in _ALONE.split(";")]
    for dimension, names in (row.split(":") for row in (*_TABLE.split("\n")[1:-1], *alone)):
        powers = {name: int(power or 1) for name, _, power in (part.partition("^") for part in dimension.split(","))}
        for name in names.split():
            if name[0].isdigit():
                factor = Fraction(name)
                continue
            bare = name.rstrip("*")
            known[bare] = powers, factor
            prefixes = ["", *_PREFIXES.split()[len(bare) > 3 :: 3]] if name != bare else []
            for prefix, power in zip(prefixes, ["0", *_PREFIXES.split()[2::3]], strict=False):
                unit = known.setdefault(prefix + bare, (powers, factor * Fraction(10) ** int(power)))
                if len(bare) == 2 and prefix not in "mM":  # khz; mhz may be either
                    known.setdefault((prefix + bare).lower(), unit)
    return {f"{name}s": unit for name, unit in known.items() if len(name) > 2} | known


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: if it is known, its `dimension` and its `factor` to the base unit; else only the words."""

    words: str
    dimension: str = ""
    factor: Fraction = Fraction(1)


def read_unit(words: str) -> Unit | None:
    """The unit that the words name; None if they may change what the number means. Words that are neither known nor
    plurals or abbreviations may do so, as in `5 halved`.

    Example:
        >>> read_unit("square feet").dimension, read_unit("more apples"), read_unit("hundredths")
        ('length^2', None, None)
    """
    words = _IN_ALL.sub("", re.sub(r"[{}\\~]", " ", words)).strip(" .,;()")
    words = re.sub(r"(?<=%)\s*(?:increase|profit)\Z|\A(?:profit|increase)\Z", "", words)
    dimension, factor = _known(words)
    words = re.sub(r"\s*/\s*", " per ", words.lower()).strip()
    if dimension or not words:
        return Unit(words, dimension, factor)
    found = re.findall("[a-z]+", words)
    if not _WORDS.fullmatch(words) or not len(words) > 1 or len(found) > 6 or any(map(changes, found)):
        return None
    for end in range(len(found) - 1, 0, -1):  # `miles away`, `square feet of carpet`; but kg m is a unit of its own
        is_noun = found[end] in _BESIDE or any(map(_COUNTED.fullmatch, found[end:]))
        is_alone = found[0] != "in" and _table().keys().isdisjoint(found[end:])
        if is_alone and is_noun and (first := _known(" ".join(found[:end])))[0]:
            return Unit(words, *first)
    is_counted = any(map(_COUNTED.fullmatch, found)) and all(len(word) > 1 for word in found)
    return Unit(words) if is_counted or found[-1] in _BESIDE or "per" in found or len(words) < 4 else None


def changes(word: str) -> bool:
    """Whether the word is a number (also a plural or an ordinal), or changes a number's meaning."""
    stem = word.removesuffix("s")
    is_number = word != "zeros" and not _NUMBERS.isdisjoint((word, stem, stem.removesuffix("th")))
    return is_number or word in _CHANGES_MEANING


def compatible(gold: Unit, other: Unit) -> bool:
    """Whether both may measure the same thing: known units of one dimension, or unknown ones that share a word (`red
    marbles` and `marbles`), where numbers, ways and the like are alike. `per
    person` alone may be of any unit."""
    if gold.words.startswith("per ") or other.words.startswith("per "):
        per = [words.rpartition("per ")[2] for words in (gold.words, other.words) if "per " in words]
        return per[0] == per[-1]
    if gold.dimension or other.dimension:
        return gold.dimension == other.dimension
    things = []
    for words in (gold.words, other.words):
        parts = [] if re.search(r" per |\^|square|cubic", words) else re.findall("[a-z]{4,}", words)
        things.append({"" if parts and word in _COUNTS else word.removesuffix("s") for word in (words, *parts)})
    return not things[0].isdisjoint(things[1])


def _known(words: str) -> tuple[str, Fraction]:
    """Dimension and factor of a product or quotient of powers of units; ("", 1) if one of them is not known."""
    if len(words) > 200:  # no unit is as long, and the patterns take more than linear time
        return "", Fraction(1)
    if len(words) > 1 or not words.isupper():  # 5 M is five million, not metres
        words = re.sub("[A-Za-z]+", lambda word: word[0] if word[0] in _table() else word[0].lower(), words)
    words = {"mph": "mi per h", "kph": "km per h", "per cent": "percent"}.get(words.strip(), words)
    for pattern, spelling in _POWERS.items():
        words = pattern.sub(spelling, words)
    powers: dict[str, int] = {}
    factor = Fraction(1)
    for index, group in enumerate(re.split(r"\s+(?:per|an?)\s+|\s*/\s*", words)):
        position = 0
        while position < len(group) or not group:
            found = _FACTOR.match(group, position)
            if found is None or found["name"] not in _table():
                return "", Fraction(1)
            position = found.end()
            power = int((found["power"] or "1").replace(" ", "")) * (-1 if index else 1)
            dimensions, size = _table()[found["name"]]
            factor *= size**power
            for name, times in dimensions.items():
                powers[name] = powers.get(name, 0) + times * power
    uncancelled = [(name, power) for name, power in sorted(powers.items()) if power]
    return " ".join(name if power == 1 else f"{name}^{power}" for name, power in uncancelled), factor
