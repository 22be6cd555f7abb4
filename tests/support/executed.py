"""What a run of the tests has executed, so that nothing is green that has not run.

Every run leaves a table: how many cases of each parametrized test were executed, and how often each reason to skip was
given. `python -m pytest --cache-show 'executed/*'` prints that of the last run. A run is red if it was given a reason
that is not expected here, if no test has the case that DPPO_FUZZ_SEED names, or if it skipped everything. A parameter
list without an entry is an error of pytest's own (`empty_parameter_set_mark`), and random cases count themselves
(`support/cases.py`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from support.cases import PROPERTY

EXPECTED = (  # what a machine may lack, or a test be for
    r"actor\.fp8 = \w+: (there is no CUDA device|it needs a chip of sm_)",
    r"needs a CUDA device|nccl needs a second GPU|the machine has CUDA",
    r"condition: this_machine\(\)\.lacks_transformer_engine",
    r"the CPU platform is never active where CUDA is|these ranks are forked|ranks of CPU tests are forked",
    r"no (vllm|sglang): .* is not there",
    r"no (vllm|sglang)_router; DPPO_",
    r"`make test-(slurm|adapters)` runs it",
    r"the real sets are not here|no problem sets in ",
    r"(fish|zsh) is not installed|chromium and chromedriver are not installed",
    r"Triton is not installed|could not import 'triton'|could not import 'torch.nn.attention.varlen'",
    r"its torch store listens|n = G is one request|SGLang multiplies with the weights it shows",
    r"DPPO_FUZZ_SEED=",
    r"no pseudo-terminal can be opened|no device that is always full|anonymous shared files are Linux's",
    r"the base's packages cannot be had",
    r"only root can give a (directory|file) away",
)
"""Reasons to skip, as regular expressions of their beginnings. What `.[dev]` installs is no reason."""
_GIVEN = {r"no vllm: ": "DPPO_VLLM_PYTHON", r"no sglang: ": "DPPO_SGLANG_PYTHON"}
"""Reasons that are none if a variable says that the engine is there."""


@dataclass(frozen=True)
class Executed:
    """Of one run."""

    generators: dict[str, int]
    """Executed cases by parametrized test; 0 where all were skipped."""
    skips: dict[str, int]
    """Skipped tests by reason."""
    tests: int
    """Executed, parametrized or not."""
    random: int = 0
    """Of these, with random cases."""

    @classmethod
    def of(cls, reports: list[Any]) -> Executed:
        """By pytest's reports of all phases."""
        executed = [report.nodeid for report in reports if report.when == "call" and not report.skipped]
        skipped = [report for report in reports if report.skipped and isinstance(report.longrepr, tuple)]
        cases = Counter(_generator(nodeid) for nodeid in executed if "[" in nodeid)
        cases.update({_generator(report.nodeid): 0 for report in skipped if "[" in report.nodeid})
        reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
        done = [report for report in reports if report.when == "call"]  # a module that was skipped has no properties
        random = sum(any(name == PROPERTY for name, _ in report.user_properties) for report in done)
        return cls(dict(sorted(cases.items())), dict(sorted(reasons.items())), len(executed), random)

    def faults(self) -> list[str]:
        """Why the run is red."""
        found = [f"not expected as a reason to skip {n}: {why}" for why, n in self.skips.items() if not _expected(why)]
        if any(why.startswith("DPPO_FUZZ_SEED=") for why in self.skips) and not self.random:
            found.append(f"no test has a case DPPO_FUZZ_SEED={os.environ.get('DPPO_FUZZ_SEED', '')!r}")
        return found + ["every test was skipped: nothing has run"] * (not self.tests and bool(self.skips))

    def lines(self) -> list[str]:
        """For the end of pytest's output."""
        idle = sum(not count for count in self.generators.values())
        cases = sum(self.generators.values())
        said = [f"{cases} cases of {len(self.generators) - idle} parametrized tests; {idle} had no case that ran here"]
        return (
            said
            + [f"skipped {n:>4}: {why}" for why, n in self.skips.items()]
            + [f"RED: {one}" for one in self.faults()]
        )


def _generator(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _expected(reason: str) -> bool:
    if any(re.match(pattern, reason) and variable in os.environ for pattern, variable in _GIVEN.items()):
        return False
    return any(re.match(pattern, reason) for pattern in EXPECTED)
