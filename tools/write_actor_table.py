"""Write the table of config.json's keys into docs/actor.md, between its two marks, and the keys of other families.

    python tools/write_actor_table.py

The second are in dppo_megatron/weights/other_families.py, as the installed transformers has them.
`tests/test_model_config.py` fails when the page or the list holds another table than the code.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import textwrap
from pathlib import Path

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dppo_megatron.weights import config_keys, other_families
from dppo_megatron.weights.config_keys import FIXED, LEFT, MODEL_TYPES, READ
from dppo_megatron.weights.transformers_view import names_of

ROOT = Path(__file__).parent.parent
PAGE, LIST = ROOT / "docs" / "actor.md", ROOT / "dppo_megatron" / "weights" / "other_families.py"
BEGIN, END = "<!-- begin: written by tools/write_actor_table.py -->", "<!-- end -->"
_TOKENS = re.compile(r".*_token_(ids?|index)")
"""Names of special tokens: they change no computation."""


def other_families_names() -> set[str]:
    """Fields of the configs of all causal language models, without those that every supported family has a row for."""
    fields = {
        field.name
        for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        for field in dataclasses.fields(CONFIG_MAPPING[model_type])
    }
    handled: list[set[str]] = [
        {name for key in (*READ, *FIXED, *LEFT) if family in key.families for name in key.names}
        | set(names_of(model_type))
        for family, model_type in MODEL_TYPES.items()
    ]
    everywhere = handled[0].intersection(*handled[1:])
    return {name for name in fields - everywhere if not name.startswith("_") and not _TOKENS.fullmatch(name)}


def main() -> None:
    """Replace what lies between the marks, and the list."""
    head, _, _ = LIST.read_text(encoding="utf-8").partition("_NAMES =")
    listed = textwrap.fill(" ".join(sorted(other_families_names())), 118, break_long_words=False)
    LIST.write_text(
        f'{head}_NAMES = """\n{listed}\n"""\nOTHER_FAMILIES = frozenset(_NAMES.split())\n', encoding="utf-8"
    )
    importlib.reload(other_families)
    importlib.reload(config_keys)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{config_keys.table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
