"""Where configs/, examples/ and docs/migrating.md are: beside the package in a checkout, inside a wheel (setup.py)."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped(*parts: str) -> Path:
    """A file or directory that comes with the package, by its place in the repository.

    Example: `shipped("configs", "quickstart.yaml")`.
    """
    checkout = _PACKAGE.parent.joinpath(*parts)
    return checkout if checkout.exists() else _PACKAGE.joinpath("shipped", *parts)
