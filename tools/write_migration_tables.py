"""Write the tables of other trainers' settings into docs/migrating.md, between their marks.

    python tools/write_migration_tables.py

`tests/test_docs.py` fails when the page holds other tables than the code.
"""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.config.other_trainers import SLIME, TRL, VERL, table

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
TABLES = {"verl": VERL, "trl": TRL, "slime": SLIME}


def main() -> None:
    """Replace what lies between each pair of marks."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(page: str) -> str:
    """The page with its tables as the code has them."""
    for name, names in TABLES.items():
        begin, end = f"<!-- begin: {name}, written by tools/write_migration_tables.py -->", "<!-- end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n\n{table(names)}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    main()
