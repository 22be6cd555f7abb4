"""The code reads as agreed: ruff's rules and format, and the type checker, on the whole repository."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.job import REPOSITORY

pytestmark = pytest.mark.slow


CHECKS = [
    ["ruff", "check", "."],
    ["ruff", "format", "--check", "."],
    pytest.param(["mypy"], marks=pytest.mark.long),  # half a minute of CPU time; `make lint` runs it too
]


@pytest.mark.parametrize("arguments", CHECKS, ids=lambda one: " ".join(one))
def test_clean(arguments: list[str]) -> None:
    """No finding."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_are_not_dense() -> None:
    """JavaScript, style sheets and HTML keep to the 120 characters a line that ruff asks of Python."""
    assets = [
        path for path in (REPOSITORY / "dppo_megatron").rglob("assets/*") if path.suffix in (".js", ".css", ".html")
    ]
    lines = [(path.name, line) for path in assets for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 1000 and not [one for one in lines if len(one[1]) > 120]
