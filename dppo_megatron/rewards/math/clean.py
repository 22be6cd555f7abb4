# ruff: noqa: RUF001 - this file is about characters that look like others
"""Replaces the many spellings of LaTeX, Unicode and people by one, before anything is parsed.

Only spellings with the same meaning are unified here; differences of meaning (units, order, names) are left to the
comparison. The regular expressions have no nested repetition, so they are linear in the answer's length.
"""

from __future__ import annotations

import functools
import re
import unicodedata

from dppo_megatron.rewards.math import regex
from dppo_megatron.rewards.math.answers import Unreadable
from dppo_megatron.rewards.math.units import DOUBTS, MONTHS, SMALL

# pairs: a sign, and its spelling here
_SIGNS = r"""
√ \sqrt ∛ \sqrt[3] ∜ \sqrt[4] π \pi ∞ \infty ≤ \le ≥ \ge ⩽ \le ⩾ \ge ≠ \ne ≈ \approx ∪ \cup ∩ \cap ∈ \in ± \pm ∓ \mp
∅ \emptyset ℝ \mathbb{R} ℤ \mathbb{Z} ° ^\degree º ^\degree ∠ \angle ∖ \setminus … \ldots ∀ \forall
∑ \sum ∏ \prod ∫ \int ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil ≡ \equiv △ \triangle ⟨ ( ⟩ ) ″ ''
∨ \vee ∧ \wedge ∣ | € \euros £ \gbp ¥ \yen ₹ \rupees ¢ \text{cents}
""".split()  # noqa: SIM905
_SPELLED = {
    **dict.fromkeys("\u2212\u2013\u2014\u2012\ufe63\u2010\u2011", "-"),
    **dict.fromkeys("×∗·⋅∙•", "*"),
    **dict.fromkeys("÷∕\u2044", "/"),
    **dict.fromkeys("′’‘`", "'"),
    **dict.fromkeys("“”", '"'),
    **{sign: spelling + " " for sign, spelling in zip(_SIGNS[::2], _SIGNS[1::2], strict=True)},
}
GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega"
_SPELLED.update(zip("αβγδεζηθικλμνξρστφχψω", (f"\\{name} " for name in GREEK.split()), strict=True))
_UNICODE = str.maketrans(_SPELLED)
_plain = functools.partial(unicodedata.normalize, "NFKC")  # full-width forms, letters of mathematical alphabets, spaces
_RAISED_OR_LOWERED = regex("([⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+)|[₀-₉]+")

_FONT = r"(?:math(?:rm|bf|it|sf|tt|cal)|boldsymbol|bm|pmb|rm|bf|operatorname\*?)"
_TEXT = r"(?:text(?:rm|bf|it|normal|sf|tt|up)?|mbox|hbox|emph|underline)"
_ORDINAL = "(?:st|nd|rd|th)"
_TOTAL = r"(?:\{\s*(\d{2,4}|[3-9]|\d?[mn])\s*\}|([3-9mn]))"  # C_1 and C_2 are constants
_INDEX = r"(?:\{\s*(\w+)\s*\}|(\w))"
# words before an answer that do not change it
_FILLER = (
    r"(?i:exactly|only|just|precisely|the|there are|they are|diverges to(?= ?\}? ?-?\\infty)"
    r"|all(?= \}[a-z ]{1,3}\\[lg]e))"
)
_NOUN = r"(?:(?:point|equation|vector|set|number|value)s?|primes(?= ?\} ?\d))"  # not `circle`, which may be wrong
# in brackets or \\text behind an answer: that it is right, or why
_REMARK = (
    r"(?:(?i:as )?(?i:verified|checked|confirmed|exact|simplified|required|desired|claimed)"
    r"|(?:by (?=symm|ins|ind|[A-Z])|since\b|because\b|using\b|via\b)"
    rf"(?:(?!\b(?i:{'|'.join(sorted({*DOUBTS, *SMALL, 'also', 'too', 'and', 'other', 'answer'}))})\b)[^{{}}()\d\\])*)"
)
# spelling of a command here: the names that it replaces. What is only layout becomes a space.
_SPELLINGS = {
    " ": "displaystyle textstyle scriptstyle limits nolimits mathop large Large LARGE huge Huge small checkmark"
    " blacksquare square qed Box quad qquad thinspace enspace medspace",
    "\\frac": "dfrac tfrac cfrac sfrac nicefrac",
    "\\binom": "dbinom tbinom",
    " * ": "cdot ast cdotp",
    "|": "lvert rvert vert mid",
    "\\mathbb{R}": "R reals",
}
_MACROS = {name: spelling for spelling, names in _SPELLINGS.items() for name in names.split()}
_RENAMED = (
    "dollars: textdollar dollar; gbp: pounds; euros: euro; le: leqslant leqq leq; ge: geqslant geqq geq; ne: neq"
    "; wedge: land; vee: lor; sinh: sh; cosh: ch; tanh: th"
    "; emptyset: varnothing empty; cup: sqcup cupdot bigcup; setminus: backslash; ldots: dots cdots dotsb dotsc"
    "; degree: degrees textcirc textdegree; mapsto: longmapsto; overline: bar; hat: widehat; vec: overrightarrow"
)
for _by, _names in (row.split(":") for row in _RENAMED.split("; ")):
    _MACROS |= dict.fromkeys(_names.split(), f"\\{_by} ")
_ONE_SIGN = "lt gt eq div percent lbrack rbrack colon langle rangle prime"
_MACROS |= zip(_ONE_SIGN.split(), "<>=/%[]:()'", strict=True)
_MACROS |= {"lbrace": r"\{", "rbrace": r"\}", "imath": " i", "jmath": " j", "top": " T"}
_MACROS |= {f"var{name}": f"\\{name} " for name in ("epsilon", "theta", "phi", "rho", "pi", "sigma", "kappa")}
_MACRO = regex(r"\\([A-Za-z]+)")
_VECTOR = regex(r"\\(?:vec|hat|nabla)(?![A-Za-z])|\\(?:mathbf|boldsymbol|bm)\s*\{?\s*[a-z](?![A-Za-z])")
_TIMES = regex(r"(?:(?<=\\times)|(?<![\w.}]))(\d+(?:\.\d+)?)\s*\\times\s*(?=\d)")  # of two numbers
# `\t` of \text was read as a tab, `\f` of \frac as a form feed
_READ_ESCAPE = regex(r"[\t\x0c\x08](?=ext|imes|heta|frac|rac|box|oxed|eta|egin|inom)")
_ESCAPED_TWICE = regex(  # through JSON, for example
    r"(?<!\\)\\\\(?=(?:[dtc]?frac|sqrt|pi|text|left|right|cdot|times|infty|circ|boxed|sin|cos|tan|log|lg|ln|pm|leq?|geq?"
    r"|neq?|in|infty|cup|mathbb|theta|alpha)\b|(?:[dtc]?frac|sqrt|cdot|times)[\d{])"
)
# pairs: a sign of several characters, or a function in other countries, and its spelling here
_WRITTEN = r"""
<= \le =< \le >= \ge => \ge != \ne /= \ne == = ** ^ \% % \| | ... \ldots {.} . {:} : {-} -
\arctg \arctan \ctg \cot \tg \tan \text{sh} \sinh \text{ch} \cosh
""".split()  # noqa: SIM905
# patterns and their replacements; before ` : `, what a text that is searched for the pattern has to contain
_SPACES = regex(r"(\s)\s+")
_RULES = {
    r"\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*|(?<=\d)\{\}": "",
    r"\\(?:(?:text)?color|[hv]space|h?phantom|label|tag)\*?\s*\{[^{}]*\}": " ",
    r"$ : (?:(?<![A-Za-z])US)?\\\$|\A\$(?=[\d.,]+\Z)": r"\\dollars ",  # $75 is money
    r"\text : \\text\{\s*(\\(?:dollars|euros|gbp|yen|rupees) )\s*([\d.,]*)\s*\}": r"\1\2",
    r"\A\s*\\(?:bf|it|rm|sf|tt)(?![A-Za-z])(?!\s*\{)": "",  # up to the end
    # {5 \over 6}, in plain TeX
    r"\over : (?:\{|\A)([^{}]*)\\over(?![A-Za-z])([^{}]*)(?:\}|\Z)": r"\\frac{\1}{\2}",
    r"\choose : (?:\{|\A)([^{}]*)\\choose(?![A-Za-z])([^{}]*)(?:\}|\Z)": r"\\binom{\1}{\2}",
    r"\*\*(?<![\w)}]\*\*)(?! )([^*]+)(?<! )\*\*(?![\w({\\])": r"\1",  # bold in Markdown
    r"\A\s*(?:\\text\{\s*(?:minus|negative)\s*\}\s*|(?:minus|negative)\s+)(?=[\d.\\]|infinity)": "-",
    r"\\(begin|end)\s*\{(?:align(?:ed)?|split|gathered)\*?\}": r"\\\1{cases}",
    # & aligns lines here; before a condition it stays
    r"\\\{\s*(?=\\begin\{cases\})|&\s*(?=[=<>]|\\(?:le|ge|ne)(?![a-z]))": "",
    # an opening brace before rows, without a closing one
    r"\begin : (?s)\\\{\s*\\begin\s*\{(array|matrix)\}(?!.*\\\})\s*"
    r"(?:\{(?:[lcr| ]|\*\{\d+\}\{[lcr]\})*\})?(.*?)\\end\s*\{\1\}": r"\\begin{cases}\2\\end{cases}",
    # 0.1(6) and 0.\dot{1}4\dot{2} repeat
    r"(\.\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?": r"\1\\overline{\2\3\4}",
    r". : (?<=\d)(\.\d*)\((\d+)\)(?=\s*\Z)": r"\1\\overline{\2}",
    r"(\.\d{0,9}?)(?:(\d)\2{2,40}|(\d{2,6}?)\3{1,20})\s*(?:\\ldots\s*|\.\.\.)\Z": r"\1\\overline{\2\3}",
    r"x : (?<=\d)\s*x\s*(?=10\s*\^)": "*",
    r"(?<!\\)\\[()\[\]]": " ",
    r"$ : \$": " ",
    r"(?<=\d)(?:\{,\}|,\\!|\\[,;:! ]|~)\s*(?=\d{3}(?!\d))": "",
    r"{,} : (?<=\d)\{,\}(?=\d)": ".",  # of a decimal, as thousands have none any more
    r"(?:(?<!\\)\\[,;:>! ]|~|&nbsp;|\s)++": " ",
    r"\\not\s*=": r"\\ne ",
    r"' : \^\s*(?:\{\s*('[' ]*)\}|('))": r"\1\2",  # x^{\prime}
    r"\^?\s*\{\s*\\(?:circ|degree)\s*\}|(?:\^\s*\\(?:circ|degree)|(?<=\d)\\circ)(?![A-Za-z])": r"\\degree ",
    r"\degree : (?<!\d)(\d{1,4})\s*\\degree\s*(\d+)\s*'(?:\s*(\d+)\s*(?:''|\"))?": r"(\1+\2/60+0\3/3600)\\degree ",
    r"\\(?:mathbb|Bbb)\s*(?:\{\s*([RZNQ])\s*\}|([RZNQ])(?![A-Za-z]))": r"\\mathbb{\1\2}",
    r"\\degree\s*(?:\\(?:text|mathrm|rm)\s*\{\s*([CF])\s*\}|([CF])(?!\w))": r"\\text{ \1\2}",
    # fonts: of a unit after a number, of a letter, of a function, else of text
    r"rm : (?<=[\d}])\s*\\(?:mathrm|rm)\s*\{\s*([msghlLNJWVAKCF])\s*\}": r"\\text{ \1}",
    r"\\(?:mathbf|boldsymbol|bm|pmb|vec)\s*(?:\{\s*([ijk])\s*\}|\s([ijk])(?![A-Za-z]))": r"\\hat{\1\2}",  # unit vectors
    rf"\\{_FONT}\s*\{{\s*([A-Za-z])\s*\}}": r" \1",
    r"\in : (?<![A-Za-z\\])([a-z]\s*\\in\s*)([ZNRQ])(?![A-Za-z])": r"\1\\mathbb{\2}",
    r"C : (?<![\w\\])(?<!\), )(?<!\),)(?<!\) and )C\s*\(([^(),]{1,60}),([^(),]{1,60})\)": r"\\binom{\1}{\2}",
    rf"C : (?<![\w\\])C\s*_\s*{_TOTAL}\s*\^\s*{_INDEX}": r"\\binom{\1\2}{\3\4}",
    rf"\\(?:{_FONT}|{_TEXT}(?!\s*\{{\s*(?:sec|max|min)))\s*\{{\s*((?:arc)?(?:sin|cos|tan|tg)|(?:sin|cos|tan)h|ctg|cot"
    r"|sec|csc|log|lg|ln|exp|cis|lcm|gcd|max|min)\s*\}": r"\\\1 ",
    rf"\\(?:{_FONT}|{_TEXT})\s*\{{": r"\\text{",
    # cm^{2} inside \text
    r"\text : \\text\{([^{}^]*)\^\{\s*(-?\d)\s*\}\s*\}": r"\\text{\1}^{\2}",
    r"\{ : (\\mathbb\{R\}|\\\})\s*[-/]\s*(?=\\\{)": r"\1\\setminus ",
    r"\text : \\text\{\s*([,;:])\s*\}": r"\1 ",
    r"\Omega : (?<=[\d}])\s*(?:\\text\{\s*([kMmu])\s*\} ?|([kM]) ?)?\\Omega\Z": r"\\text{ \1\2ohm}",
    r"except : \A(?:\\text\{\s*)?[Aa]ll real(?: number)?s?[\s}]*(?:[a-z](?=[\s\\}]))?[\s}]*(?:\\text\{\s*)?"
    r"except(?: for)?[\s}]*([^<>]+)\Z": r"\\mathbb{R}\\setminus\\{\1\\}",
    rf"(?<=.)(?:\\text\{{\s*[,;(]?\s*{_REMARK}\s*\)?[.!]?\s*\}}|\(\s*{_REMARK}\s*\))(?=[.!\s}}]*\Z)": "",
    # {b + s n | n in Z} and {x | x = b + s n, n in Z}
    r"\in : \A(?:[a-z]\s*(?:\\in|=)\s*)?\\\{\s*(?:([a-z])\s*(?:\\in\s*\\mathbb\{[RC]\}\s*)?[|:]\s*(?=\1\s*=))?"
    r"((?![a-z]\s*[|:]).*?)\s*[|:,]\s*([a-z](?:\s*,\s*[a-z])*\s*\\in\s*\\mathbb\{[ZN]\})\s*\\\}\Z": r"\2, \3",
    r"\ldots : \A([a-z]) ?\*? ?\( ?\1 ?- ?1 ?\)(?: ?\*? ?\( ?\1 ?- ?[23] ?\))* ?\*? ?\\ldots(?:[ *]{,3}\(?3\)?)?"
    r"[ *]{,3}\(?2\)?(?:[ *]{,3}\(?1\)?)?\Z|\A1[ *]+2(?:[ *]+3)?[ *]*\\ldots[ *]*([a-z])\Z": r"\1\2!",
    r"\A\s*\\frac\s*\{\s*d\s*([a-z])\s*\}\s*\{\s*d\s*[a-z]\s*\}\s*=": r"\1'=",
    rf"(?<=\d) ?\^? ?(?:\{{ ?\\text\{{ ?{_ORDINAL} ?\}} ?\}}|(?:\\text)?\{{ ?{_ORDINAL} ?\}}|{_ORDINAL}\b)": "",
    # the comma of a date does not make a list: July 4, 1776; 4 July, 1776
    rf", : \b((?i:{'|'.join(sorted(MONTHS))})[\s}}]*(?:\d\d?[\s}}]*)?),(?=\s*(?:\\text\{{\s*)?\d{{4}}\b)": r"\1 ",
    r"\text : \\text\{([^{},;]+?)\s+(and|or)\s*\}": r"\\text{\1} \\text{ \2 }",
    rf"\text : \A\\text\{{\s*(?:(?:{_FILLER}|an?)\s+)*(?:{_FILLER}|an?(?=\s)|{_NOUN})\s*\}}\s*(?=[^\s.,;:=<>])": "",
    rf"\A(\\text\{{\s*)?(?:{_FILLER}\s+)+(?:{_NOUN}\s+)?(?=[-\d\\(]|[a-z]\s*=)": r"\1",
    r". : \.(?=\s*[\])]\s*$)": "",
    r"only : \\text\{\s*only\s*\}\Z|(?<=[\d)}]) only\Z": "",
    # ]1, 2[ is (1, 2)
    r"] : (\A|\\(?:cup|in)(?![A-Za-z])|[=,;])\s*\](?=[^\[\]()]{1,200}[,;][^\[\]()]{1,200}[\[\]])": r"\1 (",
    r"[ : ([\[(][^\[\]()]{1,200}[,;][^\[\]()]{1,200})\[(?=\s*(?:\Z|\\cup(?![A-Za-z])|[,;]|\\text))": r"\1)",
    r"T : \A((?:[^=()\[\]]{1,20}=\s*)?[(\[](?!\s*\\begin).*[,;].*[)\]])\s*\^\s*\{?\s*T\s*\}?\Z": r"\1",  # a column
    r"\mapsto : (?s)\A(?:[A-Za-z]\s*:\s*)?(?:[^:\n]{1,80}?\\(?:to|rightarrow)(?![A-Za-z])[^:\n]{1,80}?[,;:]?\s*)?"
    r"([a-z])\s*\\mapsto(?![A-Za-z])(.+)\Z": r"f(\1)=\2",
}
_COMPILED = [  # a template would be prepared in each call, found or not
    (needle, regex(pattern), lambda found, by=by: found.expand(by))
    for rule, by in _RULES.items()
    for needle, _, pattern in [rule.rpartition(" : ")]
]


_MAX_ITEMS = 100
_REPEATING = regex(r"(?<!\d)(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}(?!\s*\d)", re.ASCII)
_NO_TEXT = regex(r"\\text\{\s*\}")
_PLAIN = regex(r"(?!.*\.\.\.)[\d.,-]*", re.ASCII)  # three dots are an ellipsis
_A_BRACKET = r"(?P<opens>[(\[{]|\\(?:begin|lfloor|lceil|\{))|(?P<closes>[)\]}]|\\(?:end|rfloor|rceil|\}))|\\."
_BRACKET = regex(_A_BRACKET, re.DOTALL)
_compiled = functools.cache(lambda pattern: re.compile(pattern, re.DOTALL))  # `re` takes longer to find one that it has


def to_ascii(text: str) -> str:
    """Digits of any script, full-width forms, mathematical signs and powers in LaTeX, without zero-width characters."""
    if text.isascii():
        return text
    text = _RAISED_OR_LOWERED.sub(lambda run: f"{'^' if run[1] else '_'}{{{_plain(run.group())}}}", text)
    text = re.sub("[①-⑨]+", lambda run: ",".join(_plain(run.group())), text)
    text = re.sub("[¼-¾⅐-⅞↉]", lambda sign: "\\frac{{{}}}{{{}}}".format(*_plain(sign.group()).split("\u2044")), text)
    text = re.sub(r"\d", lambda digit: str(int(digit.group())), _plain(text.translate(_UNICODE)))
    return "".join(sign for sign in text if unicodedata.category(sign) != "Cf")


def clean(text: str) -> str:
    """The answer in one spelling.

    Example:
        >>> clean("$\\\\left( \\\\dfrac{1}{2}, \\\\ 15{,}000 \\\\right).$")
        '( \\\\frac{1}{2}, 15000 )'
    """
    text = to_ascii(text)
    if not _PLAIN.fullmatch(text):
        text = _READ_ESCAPE.sub(lambda sign: {"\t": "\\t", "\f": "\\f", "\b": "\\b"}[sign.group()], text)
        text = _SPACES.sub(r"\1", text)  # 400 in a row took a rule two seconds
        text = _MACRO.sub(lambda command: _MACROS.get(command[1], command[0]), _ESCAPED_TWICE.sub(r"\\", text))
        if "\\times" in text:  # with vectors it may be another product, which nothing reads
            text = _TIMES.sub(r"\1 * ", text) if _VECTOR.search(text) else text.replace("\\times", " * ")
        for needle, pattern, replacement in _COMPILED:
            if needle in text:
                text = pattern.sub(replacement, text)
        for written, spelled in zip(_WRITTEN[::2], _WRITTEN[1::2], strict=True):
            text = text.replace(written, spelled + " " if spelled[1:].isalpha() else spelled)
        text = _NO_TEXT.sub(" ", " ".join(text.split()))
        text = _REPEATING.sub(_as_fraction, text) if "\\overline" in text else text
    return _without_wrapping(text)


def _as_fraction(repeating: re.Match[str]) -> str:
    """1/6 for 0.1666..."""
    whole, fixed, period = repeating.groups()
    above = int(whole + fixed + period) - int(whole + fixed or 0)
    return f"\\frac{{{above}}}{{{'9' * len(period) + '0' * len(fixed)}}}"


def _without_wrapping(text: str) -> str:
    """Without final punctuation, braces or a code's marks around all of it and a bare trailing backslash."""
    for _ in range(16):
        shorter = text.strip().strip("`")
        if shorter.endswith((".", ",", ";", ":")) and not re.search(r"\b[ap]\.\s?m\.$", shorter, re.IGNORECASE):
            shorter = shorter[:-1]
        shorter = shorter.rstrip("\\")
        if shorter.startswith("{") and closing(shorter) == len(shorter) - 1:
            shorter = shorter[1:-1]
        if shorter == text:
            break
        text = shorter
    return text


def closing(text: str, start: int = 0) -> int:
    """Where the bracket at `start` is closed, -1 if it is not. Any opening and closing bracket make a pair, as in
    `[0,1)`, but a brace can be closed only by a brace."""
    depth, shapes = 0, "{}" if text[start] == "{" else ""
    for bracket in _BRACKET.finditer(text, start):
        if not shapes or bracket.group() in shapes:
            depth += bool(bracket["opens"]) - bool(bracket["closes"])
            if depth < 1:
                return bracket.end() - 1
    return -1


def split_top(text: str, separators: str, *, keep: bool = False) -> list[str]:
    """The text split at the separators outside all brackets and environments; with `keep`, the separators are returned
    between the parts. If brackets do not balance, it is not split."""
    if not _compiled(separators).search(text):  # as most
        return [text]
    parts, begin, depth = [], 0, 0
    for found in _compiled(f"(?P<between>{separators})|{_A_BRACKET}").finditer(text):
        depth += bool(found["opens"]) - bool(found["closes"])
        if depth < 0:
            return [text]
        if found["between"] and not depth:
            parts += [text[begin : found.start()], found.group()] if keep else [text[begin : found.start()]]
            begin = found.end()
    if len(parts) >= _MAX_ITEMS * (1 + keep):
        raise Unreadable("too many items")
    return [text] if depth else [*parts, text[begin:]]
