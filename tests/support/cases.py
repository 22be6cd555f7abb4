"""Which random cases a property is tried on, and proof that it was tried on them.

    DPPO_FUZZ=20000           so many of each generator, instead of what the suite has time for
    DPPO_FUZZ_TIMES=3         so many times as many of each as that: `make test-all`, which CI runs
    DPPO_FUZZ_BASE=20261123   other cases than the suite's: with the date as base each day's are new
    DPPO_FUZZ_SEED='file 17'  this case alone, as a failure names it; tests of other generators are skipped

A test takes the fixture `cases`. It fails if the test has passed without having gone through all of them: a loop that
ran nothing must not look like a property that holds. What each test has tried stands at the end of pytest's output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest

PROPERTY = "random cases"
"""Key of what a test's report says about them."""
_PER_BASE = 1_000_000_000


def chosen_count(default: int) -> int:
    """Cases of one generator. ValueError for a DPPO_FUZZ that is no number above 0."""
    count = int(os.environ.get("DPPO_FUZZ", default * int(os.environ.get("DPPO_FUZZ_TIMES", "1"))))
    if count < 1:
        raise ValueError(f"DPPO_FUZZ={count}: at least one case")
    return count


def first_case() -> int:
    """Number of a generator's first case."""
    return int(os.environ.get("DPPO_FUZZ_BASE", "0")) * _PER_BASE


@dataclass
class Cases:
    """Numbers of the cases of one generator, to be gone through once."""

    name: str
    numbers: range
    are_few: bool = False
    """Fewer than the suite tries: what must hold of many together need not hold of them."""
    tried: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers:
            yield number
            self.tried += 1

    def __len__(self) -> int:
        return len(self.numbers)

    def __str__(self) -> str:
        return f"{self.tried} of {len(self)} cases '{self.name} {self.numbers[0]}' and on"

    @classmethod
    def choose(cls, name: str, default: int) -> Cases:
        """As the environment says. Skips the test where that is a case of another generator."""
        if wanted := os.environ.get("DPPO_FUZZ_SEED", ""):
            generator, _, number = wanted.rpartition(" ")
            if generator != name:
                pytest.skip(f"DPPO_FUZZ_SEED={wanted!r} is no case of {name!r}")
            return cls(name, range(int(number), int(number) + 1), are_few=True)
        first, count = first_case(), chosen_count(default)
        return cls(name, range(first, first + count), are_few=count < default)


Choose: TypeAlias = Callable[[str, int], Cases]
CHOSEN = pytest.StashKey[list[Cases]]()
"""What a test has asked for; conftest.py reports it."""


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Iterator[Choose]:
    """`cases(name, default)`: the cases of generator `name`; `default` of them in the suite."""
    chosen = request.node.stash[CHOSEN] = []

    def choose(name: str, default: int) -> Cases:
        chosen.append(Cases.choose(name, default))
        return chosen[-1]

    yield choose
    if request.node.stash.get(PASSED, False):
        assert chosen, "the test has asked for no cases"
        for one in chosen:
            assert one.tried == len(one), f"only {one}"


PASSED = pytest.StashKey[bool]()
"""Whether a test's body has passed, set by conftest.py."""
