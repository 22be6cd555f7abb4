"""Finds the final answer in a completion, in one pass over the text. If a mark is broken, earlier and weaker ones are
not searched: a truncated completion is not rewarded for a guess that it had given up."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from dppo_megatron.rewards.math import regex
from dppo_megatron.rewards.math.units import DOUBTS

_MAX_CHARS = 4000  # of an answer: no reference is as long, and parsing takes more than linear time


class Extraction(NamedTuple):
    """The final answer of a completion, or why there is none."""

    parts: tuple[str, ...]  # several for boxes side by side (`\boxed{1}` and `\boxed{2}`); empty if there is none
    mark: str = ""  # `box`, `tag`, `####`, `stated` or `equation`; empty if there is no answer
    why: str = ""  # there is no answer
    every: tuple[str, ...] = ()  # different contents of all boxes, the parts included


_BOX = regex(r"(?<!\\)\\++(?:boxed|fbox)(?![A-Za-z])")  # also \\boxed, in texts that were escaped twice
_BRACE = regex(r"\\.|[{}]", re.DOTALL)  # a brace, or an escaped character, which is none
# `a = -\boxed{256}` is -256; a dash at the start of a list item is no sign
_MINUS = regex(r"(?:=|\$|\\\(|\\\[|\bis)[ ]*[-\u2212][ ]*\\*\Z")
_MAX_BOXES = 2000
# what follows the command: a brace, a letter or number without one, or nothing more
_CONTENT = regex(r"\s*(\{)|(?:\s+([A-Za-z]|-?\d[\d.,/]*)|(-?\d+))(?=[\s$.,;)\\]|$)|[\s$.]*\Z")
_CONNECTOR = regex(
    r"(?:[a-z]+ )?(?:[,;.]|\\text\{\s*(?:and|or)\s*\}|and|or|[,;.]\s*(?:and|or))?"
    r"(?:\s*[A-Za-z](?:_\{?\w\}?)?\s*=)?|[^\w\\]*"
)
_FILLER = regex(r"\\(?:quad|qquad|[()\[\],;: ])|[\s$&]+")
_OFFERS = regex(  # between two boxes: the second is no correction of the first, but another guess
    r"\b(?:or (?:maybe|perhaps|possibly)|it (?:could|may|might) be|alternative (?:answer|reading)|answer 2)\b",
    re.IGNORECASE,
)
_HASHES = regex(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_STATED = regex(
    r"(?:\b(?:answer|correct (?:option|choice))(?:(?:\*\*)?(?: is\b\s*:?|\s*[:=])|\*{0,4}[ \t]*\n\s*+(?=\$|\\[\[(]))"
    r"|^A:|答案(?:\*\*)?(?:是|为|[:\uff1a]))(?:\*\*|\s*\})?\s*",
    re.IGNORECASE | re.MULTILINE,
)
_FORMULA = regex(
    r"(?:(?P<dollars>\$\$?)|\\(?P<bracket>[(\[]))(?P<inside>.*?)(?(dollars)(?P=dollars)|\\[)\]])"
    r"(?P<unit>(?:\s*%|\s+[a-z]+)?(?=[.\s]|\Z))?",
    re.DOTALL,
)
_STATED_TAIL = regex(r"[.\u3002\s$*]*(?:I hope it is correct|hope it is correct)?[.\s$*]*", re.IGNORECASE)
_END_OF_TURN = regex(r"(?:\s*+<\|\w{1,20}\|>\s*+(?:user|assistant)?)++\s*\Z")
_CONCLUSION = regex(
    r"(?:\A|(?<=\s))(?:So|Thus|Hence|Therefore), the [^.?!\n]{1,150} (?:is|are|equals) "
    r"(\$[^$.=]{1,60}\$|-?\$?\d[\d,./]{0,20}(?:\.\d+)?)\s*\Z"
)
_SENTENCE_END = regex(r"\.(?=\s|$)|\n")
_FULL_STOP = regex(r"(?:\.\s*(?:\$\$?|\\\]|\\\))?|\$\$?|\\\]|\\\))\s*\Z")
_LAST_EQUATION = regex(r"(?<![<>!=:])=(?!=)\s*(?P<value>(?:[^=<>\n.]|\.(?!\s)){1,80})\Z")
_PROSE = regex(r"(?<=[A-Za-z$])\s+(?:in|of|on|from|that|which)\s+[A-Za-z].*", re.DOTALL)
_SENTENCE_BEGIN = regex(r"(?<=[.?!])[\s$]+(?=[A-Z\\$])|\n\s*\n")
_NOT_A_RESULT = regex(  # a condition, a task or a doubt: the equation is then not the result of the text
    r"\b(?:if|let|suppose|assume|assuming|given|where|when|whether|unless|until|for|find|solve|evaluate|compute"
    r"|calculate|determine|simplify|express|prove|show|what|how|such that|not|cannot|never|no|wrong|maybe|perhaps|guess"
    r"|try|check|consider|need|want|would|could|should|might|may|reject|exclude|contradicts?|except|without|claims?|asks?)"
    r"\b|n't\b|\?|\\ne|(?:[A-Za-z,] |\$)\d+\s*\\?[a-z]\s*=[^=]*\Z|\d\s*,\s*[a-z]\s*=[^=]*\Z",
    re.IGNORECASE,
)
_DOUBTED = regex(
    rf"\b(?:{'|'.join(sorted(DOUBTS))}|suppose|assume|doubt|nobody|possible)\b(?:[^.?!\n]|\.\d)*\Z", re.IGNORECASE
)


def extract(text: str, *, strict: bool = False) -> Extraction:
    """The final answer of a completion. With `strict`, only a box, a tag or `####` is a mark."""
    # Only outside `<think>`. If the template prefills that, the completion has only its end.
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    if (found := _from_boxes(text)) is not None:
        return found
    if "<answer>" in text:
        inside, end, _ = text.rpartition("<answer>")[2].partition("</answer>")
        return _found(inside, "tag") if end else Extraction((), why="the last <answer> is not closed")
    if hashes := _HASHES.findall(text):
        return _found(hashes[-1].strip().strip("*"), "####")
    if strict:
        return Extraction((), why="no final answer")
    tail = _END_OF_TURN.sub("", text[-2000:])  # an answer that is stated earlier is not at the completion's end
    return _stated(tail) or _last_equation(tail) or Extraction((), why="no final answer")


def _found(answer: str, mark: str) -> Extraction:
    answer = answer.strip(" \n\r")  # a tab or a form feed may be the start of a command, read as an escape
    if not answer.strip():
        return Extraction((), why=f"the final answer ({mark}) is empty")
    if len(answer) > _MAX_CHARS:
        return Extraction((), why=f"the final answer has {len(answer)} characters")
    return Extraction((answer,), mark)


def _from_boxes(text: str) -> Extraction | None:
    """The last box, or the row of boxes at the end; None if there is none, or `\\boxed` is only mentioned."""
    marks = list(itertools.islice(_BOX.finditer(text), _MAX_BOXES + 1))
    if len(marks) > _MAX_BOXES:
        return Extraction((), why=f"more than {_MAX_BOXES} boxes")
    closed_at, open_braces = {}, []  # where a brace's content begins -> where it is closed
    for brace in _BRACE.finditer(text, marks[0].start()) if marks else ():
        if brace.group() == "{":
            open_braces.append(brace.end())
        elif brace.group() == "}" and open_braces:
            closed_at[open_braces.pop()] = brace.start()
    boxes: list[tuple[int, int, int]] = []  # outer boxes: positions of mark, content and closing brace
    end = None
    for mark in marks:
        found = _CONTENT.match(text, mark.end())
        if found is None:
            continue
        content, end = found.span(found.lastindex) if found.lastindex else (found.end(), -1)
        if found[1]:
            content, end = found.end(), closed_at.get(found.end(), -1)
        if end > (boxes[-1][2] if boxes else -1):
            boxes.append((mark.start(), content, end))
    if end is None:
        return None
    return _joined(text, boxes) if end >= 0 else Extraction((), why="the last box is not closed")


def _joined(text: str, boxes: list[tuple[int, int, int]]) -> Extraction:
    """The last box, and those before it that are separated only by `and`, `or` or a comma."""
    start = len(boxes) - 1
    while start > 0 and len(boxes) - start < 64:
        between = text[boxes[start - 1][2] + 1 : boxes[start][0]]
        if len(between) > 80 or not _CONNECTOR.fullmatch(_FILLER.sub(" ", between).strip()):
            break
        start -= 1
    if start and _OFFERS.search(text, boxes[start - 1][2], boxes[start][0]):
        first, last = (text[content:end].strip() for _, content, end in (boxes[start - 1], boxes[-1]))
        if first != last:
            return Extraction((), why="several answers are offered")
    parts: list[str] = []
    for mark, content, end in boxes[start:]:
        inside = _BOX.sub("", text[content:end])  # boxes inside a box mean nothing
        if _MINUS.search(text, max(0, mark - 20), mark):
            inside = f"-({inside})" if re.search(r"[-+,;]", inside) else f"-{inside.lstrip()}"
        found = _found(inside, "box")
        if not found.parts:
            return found
        if found.parts[0] not in parts:
            parts.append(found.parts[0])
    every = dict.fromkeys(text[content:end].strip() for _, content, end in boxes)
    return Extraction(tuple(parts), "box", every=tuple(every))


def _stated(tail: str) -> Extraction | None:
    """`The answer is x.` with nothing of substance after it."""
    *_, last = (None, *_STATED.finditer(tail))
    if last is None:
        return None
    if _DOUBTED.search(tail, max(0, last.start() - 100), last.start()):
        return Extraction((), why="the stated answer is in doubt")
    rest = tail[last.end() :]
    is_money = re.match(r"\$-?[\d.,]+(?![^$\n]*\$)", rest) is not None
    rest = rest.replace("\\$", "\\ ")  # a dollar sign within mathematics does not end it
    if (marked := _FORMULA.match(rest)) and not is_money:
        answer, behind = marked["inside"] + (marked["unit"] or ""), rest[marked.end() :]
    elif rest.startswith(("$", "\\(", "\\[")) and not is_money:
        return Extraction((), why="the stated answer is not closed")
    else:
        sentence = _SENTENCE_END.search(rest)
        stop = sentence.start() if sentence else len(rest)
        answer, behind = rest[:stop], rest[stop:]
    if not _STATED_TAIL.fullmatch(behind):
        return Extraction((), why="the text goes on after the stated answer")
    return _found(answer.strip().strip("*"), "stated")


def _last_equation(tail: str) -> Extraction | None:
    """The right side of an equation that ends the text as a complete sentence, as derivations do if the prompt does not
    ask to mark the answer: `Therefore, the area is $12-2=10$.` A text without a full stop may have been cut off, so it
    gives no answer. Nor do `3x + 4y = 0` and `x = 1, x = 2`, which are answers as a whole."""
    end = _FULL_STOP.search(tail)
    if end and (stated := _CONCLUSION.search(tail[: end.start()])) and not _NOT_A_RESULT.search(stated.group()):
        return _found(stated[1].replace("$", " "), "equation")
    found = end and _LAST_EQUATION.search(tail[: end.start()].rstrip(" \n."))
    if not found:
        return None
    *_, start = (0, *(match.end() for match in _SENTENCE_BEGIN.finditer(tail, 0, found.start())))
    sides = tail[start : found.start("value")].split("=")[:-1]
    names = [name[0] for side in sides if (name := re.search(r"(?<![\w^}])[A-Za-z](?=[\s$&]*\Z)", side))]
    if _NOT_A_RESULT.search(tail, start) or found["value"].strip(" $") == "0" or len(set(names)) < len(names):
        return None
    value = _PROSE.sub("", found["value"]).replace("$", " ")  # 31800 dollars in total
    return _found(value, "equation") if len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", value)) < 4 else None
