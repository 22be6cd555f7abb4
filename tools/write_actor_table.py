"""Write the table of config.json's keys into docs/actor.md, between its two marks.

    python tools/write_actor_table.py

`tests/test_model_config.py` fails when the page holds another table than the code.
"""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.weights.config_keys import table

PAGE = Path(__file__).parent.parent / "docs" / "actor.md"
BEGIN, END = "<!-- begin: written by tools/write_actor_table.py -->", "<!-- end -->"


def main() -> None:
    """Replace what lies between the marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
