"""Labels of `model_responses` that are wrong for the whole text, each checked by hand, with the reason.

The source's labels were made from an answer that its program extracted from the text. Where the extraction failed, the
label is wrong: `72Ihopeitiscorrect` is not 72. The benchmark counts the file with the labels as they are, and once more
with these reversed.
"""

from __future__ import annotations

RIGHT = {
    "mr-48": "10000 for 10{,}000",
    "mr-1176": "30 - 16 = 14 for 14",
    "mr-1260": "... = 6+9i. for 6+9i; the source read 9",
    "mr-1277": "The final answer is 72. I hope it is correct.",
    "mr-1293": "... = -\\frac{\\pi}{6}.; the source read 6",
    "mr-1347": "The final answer is 9. I hope it is correct.",
    "mr-1386": "... = \\frac{\\sqrt{3}}{3}.; the source read 3",
    "mr-1414": "The final answer is $2$, written twice",
    "mr-1422": "The final answer is 1251. I hope it is correct.",
    "mr-1483": "The final answer is 3 units. I hope it is correct.",
    "mr-1577": "The final answer is 6. I hope it is correct.",
    "mr-1614": "The final answer is 4. I hope it is correct.",
    "mr-2013": "the reference after a \\displaystyle",
    "mr-2060": 'The final answer is "even".',
    "mr-2195": "The correct answer is (E).; the source read a 2 in a formula",
    "mr-2360": "\\frac{16}{49} for 16/49 in a pmatrix",
    "mr-2391": "15.975 inches for \\frac{639}{40}",
}
"""Right answers that are labelled wrong."""

WRONG = {
    "mr-1265": "1 for 1,-2",
    "mr-1295": "repeats itself and is truncated; the source read the last 3 in it",
    "mr-1639": "326.53 for 326.5, which is 313.9 + 12.6",
    "mr-1714": "repeats itself and is truncated within a formula",
    "mr-2042": "the reference is damaged: (+5)(b+2) for (a+5)(b+2)",
    "mr-2317": "repeats itself and is truncated within a formula",
    "mr-2355": "repeats itself and is truncated within a formula",
}
"""Answers labelled right that are wrong, or none, or right for another reference."""


def put_right(name: str, label: int) -> int:
    """The label of a row, reversed if it is wrong."""
    return 1 if name in RIGHT else 0 if name in WRONG else label
