# ruff: noqa: RUF001, RUF002 - the signs that look like others are what this file is about
"""One spelling for what LaTeX, Unicode and people spell in many ways, before anything is parsed.

Only spellings that mean the same are made the same here; what changes a meaning (units, order, names) is decided by the
comparison. Regular expressions without nested repetition: linear in the answer's length.
"""

from __future__ import annotations

import re
import unicodedata

from dppo_megatron.rewards.math.patterns import regex

# signs in pairs: what is read, and what it is spelled as
_SIGNS = r"""
√ \sqrt ∛ \sqrt[3] ∜ \sqrt[4] π \pi ∞ \infty ≤ \le ≥ \ge ⩽ \le ⩾ \ge ≠ \ne ≈ \approx ∪ \cup ∩ \cap ∈ \in ± \pm ∓ \mp
∅ \emptyset ℝ \mathbb{R} ℤ \mathbb{Z} ° ^\degree º ^\degree ⟨ \langle ⟩ \rangle ∠ \angle ∖ \setminus … \ldots ∀ \forall
∑ \sum ∏ \prod ∫ \int ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil
≡ \equiv △ \triangle
""".split()  # noqa: SIM905
_UNICODE = {
    **dict.fromkeys("\u2212\u2013\u2014\u2012\ufe63\u2010\u2011", "-"),
    **dict.fromkeys("×∗·⋅∙•", "*"),
    **dict.fromkeys("÷∕\u2044", "/"),
    **dict.fromkeys("′’‘`", "'"),
    **dict.fromkeys("“”", '"'),
    "″": "''",
    **{sign: spelling + " " for sign, spelling in zip(_SIGNS[::2], _SIGNS[1::2], strict=True)},
}
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega"
_UNICODE.update(zip("αβγδεζηθικλμνξρστφχψω", (f"\\{name} " for name in _GREEK.split()), strict=True))
_POWERS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_INDICES = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_CIRCLED = regex("[\u2460-\u2468]+")
_RUN_OF_POWERS = regex("[" + "".join(_POWERS) + "]+")
_RUN_OF_INDICES = regex("[" + "".join(_INDICES) + "]+")


def to_ascii(text: str) -> str:
    """Digits of any script, full-width forms, mathematical signs and powers as LaTeX would write them; characters of no
    width are dropped.

    Example:
        >>> to_ascii("５x²")
        '5x^{2}'
    """
    if text.isascii():
        return text
    text = _RUN_OF_POWERS.sub(lambda run: "^{" + "".join(_POWERS[sign] for sign in run.group()) + "}", text)
    text = _RUN_OF_INDICES.sub(lambda run: "_{" + "".join(_INDICES[sign] for sign in run.group()) + "}", text)
    text = _CIRCLED.sub(lambda run: ",".join(str(ord(sign) - 0x245F) for sign in run.group()), text)
    out = []
    for sign in text:
        plain = unicodedata.normalize("NFKC", sign)  # full-width forms, letters of mathematical alphabets, spaces
        if sign in _UNICODE:
            out.append(_UNICODE[sign])
        elif unicodedata.category(sign) == "Cf":
            continue  # zero-width spaces and joiners, byte order marks, direction marks
        elif (digit := unicodedata.decimal(sign, None)) is not None:
            out.append(str(digit))
        elif "\u2044" in plain:
            out.append("\\frac{{{}}}{{{}}}".format(*plain.split("\u2044")))
        else:
            out.append(plain)
    return "".join(out)


_FONT = r"(?:math(?:rm|bf|it|sf|tt|cal)|boldsymbol|bm|pmb|rm|bf|operatorname\*?)"
_TEXT = r"(?:text(?:rm|bf|it|normal|sf|tt|up)?|mbox|hbox|emph|underline)"
_ORDINAL = "(?:st|nd|rd|th)"
_TOTAL = r"(?:\{\s*(\d{2,4}|[3-9])\s*\}|([3-9]))"  # C_1 and C_2 are constants
_INDEX = r"(?:\{\s*(\w+)\s*\}|(\w))"
# how a command is spelled here: its other names; what only sets type is nothing
_SPELLINGS = {
    " ": "displaystyle textstyle scriptstyle limits nolimits mathop large Large LARGE huge Huge small checkmark"
    " blacksquare square qed Box quad qquad thinspace enspace medspace",
    "": "textdollar dollar pounds euro",
    "\\frac": "dfrac tfrac cfrac sfrac nicefrac",
    "\\binom": "dbinom tbinom",
    "\\le ": "leqslant leqq leq",
    "\\ge ": "geqslant geqq geq",
    "\\ne ": "neq",
    "<": "lt",
    ">": "gt",
    "=": "eq",
    " * ": "times cdot ast cdotp",
    "/": "div",
    "%": "percent",
    "|": "lvert rvert vert mid",
    "\\{": "lbrace",
    "\\}": "rbrace",
    "[": "lbrack",
    "]": "rbrack",
    ":": "colon",
    "\\emptyset ": "varnothing empty",
    "\\cup ": "sqcup cupdot bigcup",
    "\\setminus ": "backslash",
    "\\ldots ": "dots cdots dotsb dotsc",
    "\\degree ": "degrees textcirc textdegree",
    "\\mapsto ": "longmapsto",
    "\\mathbb{R}": "R reals",
    "\\overline ": "vec hat widehat tilde bar overrightarrow overleftarrow",
    " i": "imath",
    " T": "top",
}
_MACROS = {name: spelling for spelling, names in _SPELLINGS.items() for name in names.split()}
_MACROS |= {f"var{name}": f"\\{name} " for name in ("epsilon", "theta", "phi", "rho", "pi", "sigma", "kappa")}
_MACRO = regex(r"\\([A-Za-z]+)")
# \text read as a tab and ext, \frac as a form feed and rac
_READ_ESCAPE = regex(r"[\t\x0c\x08](?=ext|imes|heta|frac|rac|box|oxed|eta|egin|inom)")
# on its way through JSON, say
_ESCAPED_TWICE = regex(
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|sqrt|pi|text|left|right|cdot|times|infty|circ|boxed|sin|cos|tan|log|ln|pm|leq?|geq?"
    r"|neq?|in|infty|cup|mathbb|theta|alpha)\b|(?:[dtc]?frac|sqrt|cdot|times)[\d{])"
)
# signs of several characters in pairs: what is written, and how it is spelled here
_WRITTEN = r"<= \le =< \le >= \ge => \ge != \ne /= \ne == = ** ^ \% % \| | ... \ldots {.} .".split()  # noqa: SIM905
_RULES = tuple(
    (regex(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*", ""),
        (r"\\(?:(?:text)?color|[hv]space|h?phantom|label|tag)\*?\s*\{[^{}]*\}", " "),
        (r"(?:(?<![A-Za-z])US)?\\\$|[€£¥]|(?<![A-Za-z])(?:USD|EUR|GBP|JPY)(?![A-Za-z])", ""),
        # {\rm cm} and {5 \over 6}, as TeX had them before LaTeX
        (r"\{\s*\\(?:rm|bf|it)(?![A-Za-z])\s*([^{}]*)\}", r"\\text{ \1}"),
        (r"(?:\{|\A)([^{}]*)\\over(?![A-Za-z])([^{}]*)(?:\}|\Z)", r"\\frac{\1}{\2}"),
        (r"(?:\{|\A)([^{}]*)\\choose(?![A-Za-z])([^{}]*)(?:\}|\Z)", r"\\binom{\1}{\2}"),
        (r"\A\s*\*\*([^*]+)\*\*\s*\Z", r"\1"),  # bold in Markdown
        (r"\A\s*(?:\\text\{\s*(?:minus|negative)\s*\}\s*|(?:minus|negative)\s+)(?=[\d.\\])", "-"),
        (r"\\text\{\s*infinity\s*\}", r"\\infty "),
        # {}_{5}C_{2}, ^{5}C_{2}, 5C2, C(5,2), C_5^2 and 5 choose 2
        (r"(?<![\w.])(\d+)\s*C\s*(\d+)(?![\w.])", r"\\binom{\1}{\2}"),
        (rf"(?:\{{\}}\s*|(?<![\w)}}\]\s]))[\^_]\s*{_INDEX}\s*C\s*_\s*{_INDEX}", r"\\binom{\1\2}{\3\4}"),
        (
            r"(?<![\w\\}])(\d+|[a-z])\s*(?:\\text\{\s*choose\s*\}|choose)\s*(\d+|[a-z])(?![\w{])",
            r"\\binom{\1}{\2}",
        ),
        (r"\A\s*\\triangle\s*(?=[A-Z]{3}\s*\Z)", ""),
        (r"\+\s*(?:\\text\{\s*)?const(?:ant|\.)?\s*\}?\s*\Z", "+C"),
        # 0.1(6) and 0.\dot{1}4\dot{2} repeat
        (r"(\.\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?", r"\1\\overline{\2\3\4}"),
        (r"(?<=\d)(\.\d*)\((\d+)\)(?=\s*\Z)", r"\1\\overline{\2}"),
        (r"(\.\d{0,9}?)(?:(\d)\2{2,40}|(\d{2,6}?)\3{1,20})\s*(?:\\ldots\s*|\.\.\.)\Z", r"\1\\overline{\2\3}"),
        (r"(?<=\d)\s*x\s*(?=10\s*\^)", "*"),
        (r"(?<!\\)\\[()\[\]]|\$", " "),
        (r"(?<=\d)'(?=\d{3}(?:'\d{3})*(?:\.\d+)?\s*\Z)", ""),  # 1'000 in Switzerland
        (r"(?<=\d)\{\}", ""),
        (r"(?<=\d)(?:\{,\}|,\\!|\\[,;:! ]|~)\s*(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,;:>! ]|~|&nbsp;", " "),
        (r"\\not\s*=", r"\\ne "),
        (
            r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\^\s*\\(?:circ|degree)(?![A-Za-z])|\{\\circ\}|(?<=\d)\\circ(?![A-Za-z])",
            r"\\degree ",
        ),
        (r"(?<!\d)(\d{1,4})\s*\\degree\s*(\d+)\s*'(?:\s*(\d+)\s*'')?", r"(\1+\2/60+0\3/3600)\\degree "),
        (r"\\(?:mathbb|Bbb)\s*(?:\{\s*([RZNQ])\s*\}|([RZNQ])(?![A-Za-z]))", r"\\mathbb{\1\2}"),
        (r"\\degree\s*\\(?:text|mathrm|rm)\s*\{\s*([CF])\s*\}", r"\\text{ \1}"),
        # fonts: a unit behind a number, a letter, a function, else text
        (r"(?<=[\d}])\s*\\(?:mathrm|rm)\s*\{\s*([msghlLNJWVAKCF])\s*\}", r"\\text{ \1}"),
        (rf"\\{_FONT}\s*\{{\s*([A-Za-z])\s*\}}", r" \1"),
        (r"(?<![\w\\])C\s*\(([^(),]{1,60}),([^(),]{1,60})\)", r"\\binom{\1}{\2}"),
        (rf"(?<![\w\\])C\s*_\s*{_TOTAL}\s*\^\s*(?:\{{\s*(\d+)\s*\}}|(\d))", r"\\binom{\1\2}{\3\4}"),
        (rf"\\{_FONT}\s*\{{\s*((?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|lcm|gcd|max|min)\s*\}}", r"\\\1 "),
        (rf"\\(?:{_FONT}|{_TEXT})\s*\{{\s*cis\s*\}}", r"\\cis "),
        (rf"\\(?:{_FONT}|{_TEXT})\s*\{{", r"\\text{"),
        # cm^{2} within the text, and metres over seconds as a fraction
        (r"\\text\{([^{}^]*)\^\{\s*(-?\d)\s*\}\s*\}", r"\\text{\1}^{\2}"),
        (r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}", r"\\text{\1}/\\text{\2}"),
        (r"(\\mathbb\{R\}|\\\})\s*[-/]\s*(?=\\\{)", r"\1\\setminus "),
        (r"\\text\{\s*([,;])\s*\}", r"\1 "),
        (r"\A\s*(?:\\text\{\s*)?(?:[Oo]ption|[Cc]hoice)\s+\(?([A-Z])\)?\s*\}?\s*\Z", r"\1"),
        (
            rf"(?<=\d) ?\^? ?(?:\{{ ?\\text\{{ ?{_ORDINAL} ?\}} ?\}}|(?:\\text)?\{{ ?{_ORDINAL} ?\}}|{_ORDINAL}\b)",
            "",
        ),
        (r"\\text\{([^{},;]+?)\s+(and|or)\s*\}", r"\\text{\1} \\text{ \2 }"),
        (r"\.(?=\s*[\])]\s*$)", ""),
    )
)


_PLAIN = regex(r"(?!.*\.\.\.)[\d.,-]*", re.ASCII)  # three dots are an ellipsis


def clean(text: str) -> str:
    """The answer in one spelling.

    Example:
        >>> clean("$\\\\left( \\\\dfrac{1}{2}, \\\\ 15{,}000 \\\\right).$")
        '( \\\\frac{1}{2}, 15000 )'
    """
    text = to_ascii(text)
    if not _PLAIN.fullmatch(text):
        text = _READ_ESCAPE.sub(lambda sign: {"\t": "\\t", "\f": "\\f", "\b": "\\b"}[sign.group()], text)
        text = _MACRO.sub(lambda command: _MACROS.get(command[1], command[0]), _ESCAPED_TWICE.sub(r"\\", text))
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
        for written, spelled in zip(_WRITTEN[::2], _WRITTEN[1::2], strict=True):
            text = text.replace(written, spelled + " " if spelled[1:].isalpha() else spelled)
        text = re.sub(r"\\text\{\s*\}", " ", " ".join(text.split()))
    return _without_paint(text)


def _without_paint(text: str) -> str:
    """Without final punctuation, braces around all of it and a bare trailing backslash."""
    for _ in range(16):
        shorter = text.strip()
        if shorter.endswith((".", ",", ";", ":")) and not re.search(r"\b[ap]\.\s?m\.$", shorter, re.IGNORECASE):
            shorter = shorter[:-1]
        shorter = shorter.rstrip("\\")
        if shorter.startswith("{") and shorter.endswith("}") and closing(shorter, 0) == len(shorter) - 1:
            shorter = shorter[1:-1]
        if shorter == text:
            break
        text = shorter
    return text


_BRACKET = regex(r"\\.|[{}()\[\]]", re.DOTALL)
_PAIRS = {"{": ({"{"}, {"}"}), "\\{": ({"\\{"}, {"\\}"}), "(": ({"(", "["}, {")", "]"})}


def closing(text: str, start: int) -> int:
    """Where the bracket at `start` is closed, -1 if it is not; braces, `\\{` and round or square brackets each count
    by themselves."""
    opens, closes = _PAIRS["(" if text[start] == "[" else "\\{" if text[start] == "\\" else text[start]]
    depth = 0
    for bracket in _BRACKET.finditer(text, start):
        depth += (bracket.group() in opens) - (bracket.group() in closes)
        if not depth:
            return bracket.start()
    return -1


_OPENS = regex(r"[(\[{]|\\(?:begin|langle|lfloor|lceil|\{)")
_CLOSES = regex(r"[)\]}]|\\(?:end|rangle|rfloor|rceil|\})")


def split_top(text: str, separators: re.Pattern[str]) -> list[str]:
    """The text cut at separators that stand in no bracket of any kind and no environment.

    Brackets count by nesting, not by shape: `[0,1)` is one pair. Where they do not balance, nothing is cut.

    Example:
        >>> split_top("(1,2), [3,4)", re.compile(","))
        ['(1,2)', ' [3,4)']
    """
    if not separators.search(text):
        return [text]
    parts: list[str] = []
    depth = begin = index = 0
    while index < len(text):
        if depth == 0 and (found := separators.match(text, index)) and found.end() > index:
            parts.append(text[begin:index])
            begin = index = found.end()
            continue
        if text[index] in "\\()[]{}":
            depth += bool(_OPENS.match(text, index)) - bool(_CLOSES.match(text, index))
            if depth < 0:
                return [text]
        index += 2 if text[index] == "\\" else 1
    return [*parts, text[begin:]] if depth == 0 else [text]
