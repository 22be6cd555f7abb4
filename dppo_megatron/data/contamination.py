"""Finds training problems that are problems of an evaluation set, even with another instruction, spacing, case or
LaTeX, or inside a longer text.

A training problem matches one of an evaluation set if its words are the same without the instruction that most rows of
its set share, or if one holds 19 of 20 of the other's runs of 13 words (the length used for GPT-3). If half of the runs
were enough, MATH's training split would have 19 problems of MATH-500, all of them the same text with other numbers.
Problems of fewer words are compared as a whole. Short training problems need no bound of their own: of MATH's and
GSM8K's, the shortest that is inside a longer problem of the public evaluation sets has 27 words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeAlias, TypeVar

Words: TypeAlias = tuple[str, ...]
T = TypeVar("T")
_RUN = 13
_CONTAINED = 0.95
_SHARED_BY = 0.5
"""Words that begin or end at least this share of a set's first rows are an instruction."""
_FEWEST = 3
"""Fewest words that must remain without the instruction: "solve x < 5" and "solve x > 5" would both leave only 5."""
_COMPARED = 1_000_000  # characters of a problem: splitting 60 MB into words takes 9 s
_WORD = re.compile(r"\\?[a-z]+|\d+|[-+*/=<>^_()\[\]|!%&\u00b0\u00b1\u00d7\u00f7\u2200-\u22ff]|[^\W\da-z_]")
"""Words, numbers and signs, including Unicode's mathematical operators, degree, plus-minus, times and division."""
_NO_WORD = {r"\left", r"\right", r"\displaystyle", r"\text", r"\mathrm", r"\quad", r"\qquad"}
"""LaTeX that affects only the layout."""
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")


def words_of(text: str) -> Words:
    r"""A problem as words and signs, which are the same for two spellings of it.

    Example:
        words_of(r"Find $\dfrac{1}{2} + x.$") == words_of(r"find \frac12+x")  # False: 1, 2 and 12
        words_of(r"Find $\dfrac{1}{2} + x.$") == words_of(r"find \frac{1} {2}+x")
    """
    plain = _FRACTION.sub(r"\\frac", text[:_COMPARED].lower())
    return tuple(word for word in _WORD.findall(plain) if word not in _NO_WORD)


def _runs(words: Words) -> list[int]:
    return [hash(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]


@dataclass
class HeldOut:
    """The problems of all evaluation sets, indexed to find them among others. A problem is a (set, position) pair."""

    _whole: dict[Words, list[tuple[str, int]]] = field(default_factory=dict)
    _by_run: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    _num_runs: dict[tuple[str, int], int] = field(default_factory=dict)
    digest: str = ""

    def __bool__(self) -> bool:
        return bool(self._whole)

    def add(self, name: str, problems: Sequence[Words]) -> None:
        """Add the problems of the set `name`, in their order."""
        self.digest = sha256(repr((self.digest, name, problems)).encode()).hexdigest()
        instruction = Instruction.of(problems)
        for position, whole in enumerate(problems):
            words = instruction.strip(whole)
            # Unstripped too: half of this set may begin with "What is", which is an instruction only in this set.
            for form in {whole, words} - {()}:
                self._whole.setdefault(form, []).append((name, position))
            runs = set(_runs(words))
            self._num_runs[name, position] = len(runs)
            for run in runs:
                self._by_run.setdefault(run, []).append((name, position))

    def find(self, whole: Words, words: Words) -> set[tuple[str, int]]:
        """The evaluation problems that equal, contain or are in `whole`; `words` is `whole` without its instruction."""
        equal = {*self._whole.get(whole, ()), *self._whole.get(words, ())}
        runs = set(_runs(words))
        hits = Counter(one for run in runs for one in self._by_run.get(run, ()))
        shorter = {one: min(len(runs), self._num_runs[one]) for one in hits}
        return equal | {one for one, count in hits.items() if count >= _CONTAINED * shorter[one]}


@dataclass(frozen=True)
class Instruction:
    """The words with which most problems of a set begin and end."""

    before: Words
    behind: Words

    @classmethod
    def of(cls, problems: Sequence[Words]) -> Instruction:
        """The instruction in the first rows of a set; empty for fewer than four rows."""
        before = _shared_start(problems) if len(problems) > 3 else ()
        behind = _shared_start([words[len(before) :][::-1] for words in problems])[::-1] if len(problems) > 3 else ()
        return cls(before, behind)

    def strip(self, words: Words) -> Words:
        """A problem's words without the instruction, or all of them if too few would remain to distinguish problems."""
        start = len(self.before) if words[: len(self.before)] == self.before else 0
        end = len(words) - len(self.behind)
        own = words[start:end] if words[end:] == self.behind else words[start:]
        return own if len(own) >= _FEWEST else words


def _shared_start(problems: Sequence[Words]) -> Words:
    """The longest sequence with which at least half of the problems begin, each followed by words of its own."""
    shared: list[str] = []
    left = [words for words in problems if words]
    while True:
        heads = Counter(words[len(shared)] for words in left if len(words) > len(shared) + 1)
        word, count = heads.most_common(1)[0] if heads else ("", 0)
        if count < _SHARED_BY * len(problems) or not count:
            return tuple(shared)
        left = [words for words in left if len(words) > len(shared) + 1 and words[len(shared)] == word]
        shared.append(word)


@dataclass
class Contamination:
    """The evaluation problems in one training set, which is read batch by batch."""

    held_out: HeldOut
    drops: bool = False
    dropped: int = 0
    found: set[tuple[str, int]] = field(default_factory=set)
    """The evaluation problems found so far, as (set, position)."""
    _instruction: Instruction | None = None

    def kept(self, rows: list[T], problems: Iterable[Words]) -> list[T]:
        """The rows to train on. `problems`: the words of each row's problem, not consumed if nothing is held out."""
        if not self.held_out:
            return rows
        batch = list(problems)
        self._instruction = self._instruction or Instruction.of(batch)
        matches = [self.held_out.find(words, self._instruction.strip(words)) for words in batch]
        self.found.update(*matches)
        if not self.drops:
            return rows
        self.dropped += sum(map(bool, matches))
        return [row for row, found in zip(rows, matches, strict=True) if not found]

    def counts(self) -> Mapping[str, int]:
        """How many problems of each evaluation set were found."""
        return Counter(name for name, _ in self.found)
