# ruff: noqa: RUF001, RUF002 - the signs that look like others are what this file is about
"""One spelling for what LaTeX, Unicode and people spell in many ways, before anything is parsed.

Only spellings that mean the same are made the same here; what changes a meaning (units, order, names) is decided by the
comparison. Regular expressions without nested repetition: linear in the answer's length.
"""

from __future__ import annotations

import re
import unicodedata

# signs in pairs: what is read, and what it is spelled as
_SIGNS = r"""
√ \sqrt ∛ \sqrt[3] ∜ \sqrt[4] π \pi ∞ \infty ≤ \le ≥ \ge ⩽ \le ⩾ \ge ≠ \ne ≈ \approx ∪ \cup ∩ \cap ∈ \in ± \pm ∓ \mp
∅ \emptyset ℝ \mathbb{R} ℤ \mathbb{Z} ° ^\degree º ^\degree ⟨ \langle ⟩ \rangle ∠ \angle ∖ \setminus … \ldots ∀ \forall
½ \frac{1}{2} ⅓ \frac{1}{3} ⅔ \frac{2}{3} ¼ \frac{1}{4} ¾ \frac{3}{4} ⅕ \frac{1}{5} ⅙ \frac{1}{6} ⅛ \frac{1}{8}
⅜ \frac{3}{8} ⅝ \frac{5}{8} ⅞ \frac{7}{8} ∑ \sum ∏ \prod ∫ \int ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil
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
_CIRCLED = re.compile("[\u2460-\u2468]+")
_RUN_OF_POWERS = re.compile("[" + "".join(_POWERS) + "]+")
_RUN_OF_INDICES = re.compile("[" + "".join(_INDICES) + "]+")


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
        if sign in _UNICODE:
            out.append(_UNICODE[sign])
        elif unicodedata.category(sign) == "Cf":
            continue  # zero-width spaces and joiners, byte order marks, direction marks
        elif (digit := unicodedata.decimal(sign, None)) is not None:
            out.append(str(digit))
        elif 0xFF01 <= ord(sign) <= 0xFF5E:
            out.append(chr(ord(sign) - 0xFEE0))
        elif unicodedata.category(sign) == "Zs":
            out.append(" ")
        else:
            out.append(sign)
    return "".join(out)


_FONT = r"mathrm|mathbf|mathit|mathsf|mathtt|mathcal|boldsymbol|bm|pmb|rm|bf|operatorname\*?"
_TEXT = r"text|mbox|hbox|textrm|textbf|textit|textnormal|textsf|texttt|emph|textup|underline"
_INDEX = r"(?:\{\s*(\w+)\s*\}|(\w))"
_BEFORE = r"(?:\{\}\s*|(?<![\w)}\]\s]))"
# name of a command -> how it is spelled here; what only sets type is nothing
_SPELLINGS = (
    (
        " ",
        "displaystyle textstyle scriptstyle limits nolimits mathop big bigl bigr Big Bigl Bigr bigg biggl biggr Bigg",
    ),
    (" ", "Biggl Biggr checkmark blacksquare square qed Box"),
    ("\\frac", "dfrac tfrac cfrac sfrac nicefrac"),
    ("\\binom", "dbinom tbinom"),
    ("\\le ", "leqslant leqq leq"),
    ("\\ge ", "geqslant geqq geq"),
    ("\\ne ", "neq"),
    ("<", "lt"),
    (">", "gt"),
    ("=", "eq"),
    (" * ", "times cdot ast cdotp"),
    ("/", "div"),
    ("%", "percent"),
    ("|", "lvert rvert vert mid"),
    ("\\{", "lbrace"),
    ("\\}", "rbrace"),
    (":", "colon"),
    ("\\emptyset ", "varnothing empty"),
    ("\\cup ", "sqcup cupdot bigcup"),
    ("\\setminus ", "backslash"),
    ("\\ldots ", "dots cdots dotsb dotsc"),
    ("\\degree ", "degrees textcirc textdegree"),
    ("\\mapsto ", "longmapsto"),
    (" i", "imath"),
    (" T", "top"),
)
_MACROS = {name: spelling for spelling, names in _SPELLINGS for name in names.split()}
_MACROS |= {f"var{name}": f"\\{name} " for name in ("epsilon", "theta", "phi", "rho", "pi", "sigma", "kappa")}
_MACRO = re.compile(r"\\([A-Za-z]+)")
# \text read as a tab and ext, \frac as a form feed and rac
_READ_ESCAPE = re.compile(r"[\t\x0c\x08](?=ext|imes|heta|frac|rac|box|oxed|eta|egin|inom)")
# on its way through JSON, say
_ESCAPED_TWICE = re.compile(
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|sqrt|pi|text|left|right|cdot|times|infty|circ|boxed|sin|cos|tan|log|ln|pm|leq?|geq?"
    r"|neq?|in|infty|cup|mathbb|theta|alpha)\b|(?:[dtc]?frac|sqrt|cdot|times)[\d{])"
)
# A rule is tried where one of its needs stands in the text: without it the pattern cannot match. Of 56 patterns an
# answer has a handful, and looking for a few characters costs a tenth of a search with a pattern.
_FONTS = ("\\math", "\\bo", "\\bm", "\\pmb", "\\rm", "\\bf", "\\operatorname")
_RULES: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = tuple(
    ((needs,) if isinstance(needs, str) else needs, re.compile(pattern), replacement)
    for needs, pattern, replacement in (
        (("left", "right", "middle"), r"\\left\s*\.|\\right\s*\.|\\(?:left|right|middle)(?![A-Za-z])\s*", ""),
        (
            ("color", "arge", "LARGE", "uge", "small"),
            r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:[lL]arge|LARGE|[hH]uge|small)(?![A-Za-z])",
            " ",
        ),
        (
            ("$", "dollar", "pounds", "euro", "USD", "EUR", "GBP", "JPY", "€", "£", "¥"),
            r"(?:(?<![A-Za-z])US)?\\\$|\\(?:textdollar|dollar|pounds|euro)(?![A-Za-z])|[€£¥]"
            r"|(?<![A-Za-z])(?:USD|EUR|GBP|JPY)(?![A-Za-z])",
            "",
        ),
        # {\rm cm} and {5 \over 6}, as TeX had them before LaTeX
        (("\\rm", "\\bf", "\\it"), r"\{\s*\\(?:rm|bf|it)(?![A-Za-z])\s*([^{}]*)\}", r"\\text{ \1}"),
        ("\\over", r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        ("\\over", r"\A([^{}]*)\\over(?![A-Za-z])([^{}]*)\Z", r"\\frac{\1}{\2}"),
        ("**", r"\A\s*\*\*([^*]+)\*\*\s*\Z", r"\1"),  # bold in Markdown
        (
            ("minus", "negative"),
            r"\A\s*(?:\\text\{\s*(?:minus|negative)\s*\}\s*|(?:minus|negative)\s+)(?=[\d.\\])",
            "-",
        ),
        ("infinity", r"\\text\{\s*infinity\s*\}", r"\\infty "),
        ("\\\\[", r"\\\\\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm)\s*\]", r"\\\\ "),
        ("\\choose", r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
        # {}_{5}C_{2}, ^{5}C_{2} and 5C2; likewise P, the permutations
        (
            "C",
            rf"{_BEFORE}[\^_]\s*{_INDEX}\s*C\s*_\s*{_INDEX}",
            r"\\binom{\1\2}{\3\4}",
        ),
        ("\\text{", r"\\text\{\s*C\s*\}\s*(?=\(\s*\w+\s*,)", "C"),
        ("cis", r"\\(?:text|mbox)\{\s*cis\s*\}", r"\\cis "),
        ("triangle", r"\A\s*\\triangle\s*(?=[A-Z]{3}\s*\Z)", ""),
        ("const", r"\+\s*(?:\\text\{\s*const(?:ant|\.)?\s*\}|const(?:ant|\.)?)\s*\Z", "+C"),
        ("C", r"(?<![\w.])(\d+)\s*C\s*(\d+)(?![\w.])", r"\\binom{\1}{\2}"),
        ("P", rf"{_BEFORE}[\^_]\s*{_INDEX}\s*P\s*_\s*{_INDEX}", r"\\frac{\1\2!}{(\1\2-\3\4)!}"),
        ("P", r"(?<![\w.])(\d+)\s*P\s*(\d+)(?![\w.])", r"\\frac{\1!}{(\1-\2)!}"),
        (
            "choose",
            r"(?<![\w\\}])(\d+|[a-z])\s*(?:\\text\{\s*choose\s*\}|\\?choose)\s*(\d+|[a-z])(?![\w{])",
            r"\\binom{\1}{\2}",
        ),
        # 0.1(6) and 0.\dot{1}4\dot{2} repeat
        ("\\dot", r"(\.\d*)\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\1\\overline{\2\3\4}"),
        ("\\dot", r"(\.\d*)\\dot\s*\{?(\d)\}?", r"\1\\overline{\2}"),
        (".", r"(?<=\d)(\.\d*)\((\d+)\)(?=\s*\Z)", r"\1\\overline{\2}"),
        (("$", "\\(", "\\)", "\\[", "\\]"), r"\\\(|\\\)|\\\[|\\\]|\$", " "),
        ("{.}", r"(?<=\d)\{\.\}(?=\d)", "."),
        ("'", r"(?<=\d)'(?=\d{3}(?:'\d{3})*(?:\.\d+)?\s*\Z)", ""),  # 1'000 in Switzerland
        ("{}", r"(?<=\d)\{\}", ""),
        (("{,}", ",\\!"), r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d{3})", ""),
        (
            ("\\,", "\\;", "\\:", "\\ ", "\\!", "thinspace", "~"),
            r"(?<=\d)(?:\\[,;: !]|\\thinspace|~)+(?=\d{3}(?!\d))",
            "",
        ),
        ("\\!", r"\\!", ""),
        (
            ("\\,", "\\;", "\\:", "\\>", "\\ ", "quad", "space", "~", "&nbsp;"),
            r"(?<!\\)\\[,;:> ]|\\(?:quad|qquad|thinspace|enspace|medspace)(?![A-Za-z])|~|&nbsp;",
            " ",
        ),
        (("space", "phantom", "label", "tag"), r"\\(?:hspace|vspace|phantom|hphantom|label|tag)\*?\{[^{}]*\}", " "),
        (("<=", "=<"), r"<=|=<", r"\\le "),
        ((">=", "=>"), r">=|=>", r"\\ge "),
        (("\\not", "!=", "/="), r"\\not\s*=|!=|/=", r"\\ne "),
        ("==", "==", "="),
        (
            ("circ", "degree"),
            r"\^\s*\{\s*(?:\\circ|\\degree|\\textcirc)\s*\}|\^\s*(?:\\circ|\\degree)(?![A-Za-z])|\\degrees?(?![A-Za-z])"
            r"|\{\\circ\}|(?<=\d)\\circ(?![A-Za-z])",
            r"\\degree ",
        ),
        ("**", r"\*\*", "^"),
        ("*", r"\*", " * "),
        ("\\%", r"\\%", "%"),
        ("\\|", r"\\\|", "|"),
        ("...", r"\.\.\.", r"\\ldots "),
        (
            ("\\R", "\\reals", "\\mathb", "\\Bbb"),
            r"\\(?:R|reals)(?![A-Za-z])|\\mathbb\s*R|\\mathbf\{R\}|\\Bbb\s*\{?R\}?",
            r"\\mathbb{R}",
        ),
        (("\\mathrm", "\\rm"), r"(?<=[\d}])\s*\\(?:mathrm|rm)\s*\{\s*([msghlLNJWVAKCF])\s*\}", r"\\text{ \1}"),
        (_FONTS, rf"\\(?:{_FONT})\s*\{{\s*([A-Za-z])\s*\}}", r" \1"),
        (
            _FONTS,
            rf"\\(?:{_FONT})\s*\{{\s*(sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan|lcm|gcd|max|min|cis)\s*\}}",
            r"\\\1 ",
        ),
        (_FONTS, rf"\\(?:{_FONT})\s*\{{", r"\\text{"),
        (("\\text", "box", "\\emph", "\\underline"), rf"\\(?:{_TEXT})\s*\{{", r"\\text{"),
        (
            ("ec", "\\over", "hat", "\\tilde", "\\bar"),
            r"\\[dv]ec\s*\{|\\(?:overrightarrow|overleftarrow|hat|widehat|tilde|bar)\s*\{",
            r"\\overline{",
        ),
        (
            ("\\mathrm", "\\mathbf", "\\rm", "\\bf", "\\it", "\\text"),
            r"\\(?:mathrm|mathbf|rm|bf|it|text)(?![A-Za-z{])",
            "",
        ),
        # cm^{2} within the text, and metres over seconds as a fraction
        ("\\text{", r"\\text\{([^{}^]*)\^\{\s*(-?\d)\s*\}\s*\}", r"\\text{\1}^{\2}"),
        (
            "\\frac",
            r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}",
            r"\\text{\1}/\\text{\2}",
        ),
        ("\\{", r"(\\mathbb\{R\}|\\\})\s*[-/]\s*(?=\\\{)", r"\1\\setminus "),
        ("\\mathbb", r"\\mathbb\s*([ZNQ])(?![A-Za-z])", r"\\mathbb{\1}"),
        ("\\text{", r"\\text\{\s*([,;])\s*\}", r"\1 "),
        (
            "nswer",
            r"\A\s*\\text\{\s*(?:[Tt]he\s+)?(?:[Ff]inal\s+)?[Aa]nswer\s*(?:is|:|=|is:)\s*([^{}]*)\}",
            r"\\text{\1}",
        ),
        (("ption", "hoice"), r"\A\s*(?:\\text\{\s*)?(?:[Oo]ption|[Cc]hoice)\s+\(?([A-Z])\)?\s*\}?\s*\Z", r"\1"),
        ("\\infty", r"[+]\s*(?=\\infty)", ""),
        (
            ("st", "nd", "rd", "th"),
            r"(?<=\d) ?\^? ?\{? ?\\text\{ ?(?:st|nd|rd|th) ?\}(?: ?\})?|(?<=\d)(?:\^\{?)?(?:st|nd|rd|th)\b\}?",
            "",
        ),
        ("\\text{", r"\\text\{([^{},;]+?)\s+(and|or)\s*\}", r"\\text{\1} \\text{ \2 }"),
        (".", r"\.(?=\s*[\])]\s*$)", ""),
    )
)


_FRACTION = re.compile(r"\\[dtc]?frac(\{-?\d+\}\{\d+\})", re.ASCII)
_PLAIN = re.compile(r"(?!.*\.\.\.)[\d.,-]*", re.ASCII)  # three dots are an ellipsis, which a rule spells out


def clean(text: str) -> str:
    """The answer in one spelling.

    Example:
        >>> clean("$\\\\left( \\\\dfrac{1}{2}, \\\\ 15{,}000 \\\\right).$")
        '( \\\\frac{1}{2}, 15000 )'
    """
    text = to_ascii(text)
    if fraction := _FRACTION.fullmatch(text):
        return "\\frac" + fraction[1]
    if not _PLAIN.fullmatch(text):
        text = _commands(text)
        for needs, pattern, replacement in _RULES:
            for need in needs:
                if need in text:
                    text = pattern.sub(replacement, text)
                    break
        text = " ".join(text.split())
        if "text" in text:
            text = re.sub(r"\\text\{\s*\}", " ", text)
    return _without_paint(text)


def _commands(text: str) -> str:
    """With one name for each command."""
    text = _READ_ESCAPE.sub(lambda sign: {"\t": "\\t", "\f": "\\f", "\b": "\\b"}[sign.group()], text)
    return _MACRO.sub(lambda command: _MACROS.get(command[1], command[0]), _ESCAPED_TWICE.sub(r"\\", text))


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


def closing(text: str, start: int) -> int:
    """Where the brace at `start` is closed, -1 if it is not; `\\{` counts as its own pair."""
    depth = 0
    index = start
    escaped = text.startswith("\\{", start)
    while index < len(text):
        sign = text[index]
        if sign == "\\" and index + 1 < len(text):
            if escaped and text[index + 1] in "{}":
                depth += 1 if text[index + 1] == "{" else -1
                if depth == 0:
                    return index
            index += 2
            continue
        if not escaped and sign in "{}":
            depth += 1 if sign == "{" else -1
            if depth == 0:
                return index
        index += 1
    return -1


def split_top(text: str, separators: re.Pattern[str]) -> list[str]:
    """The text cut at separators that stand in no bracket of any kind and no environment.

    Brackets count by nesting, not by shape: `[0,1)` is one pair. Where they do not balance, nothing is cut.

    Example:
        >>> split_top("(1,2), [3,4)", re.compile(","))
        ['(1,2)', ' [3,4)']
    """
    parts = []
    depth = 0
    begin = index = 0
    while index < len(text):
        sign = text[index]
        if depth == 0 and (found := separators.match(text, index)) and found.end() > index:
            parts.append(text[begin:index])
            begin = index = found.end()
            continue
        if sign == "\\":
            if text.startswith(("\\begin", "\\langle", "\\lfloor", "\\lceil"), index) or text.startswith("\\{", index):
                depth += 1
            elif text.startswith(("\\end", "\\rangle", "\\rfloor", "\\rceil"), index) or text.startswith("\\}", index):
                depth -= 1
            index += 2
            continue
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth < 0:
                return [text]
        index += 1
    return [*parts, text[begin:]] if depth == 0 else [text]
