"""From a step's record to what trackers take: finite numbers by name, flat settings, a table of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dppo_megatron.config.changes import flat
from dppo_megatron.observe.samples import RecordedGroup
from dppo_megatron.observe.trackers.messages import Cell

COLUMNS = ["group", "completion", "prompt", "text", "reference", "extracted", "reward", "advantage", "weight", "why"]
_LONGEST_TEXT = 4000


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of metrics.jsonl; of each ledger row its kept fraction.

    Example:
        >>> numbers({"a/b": 1, "c/d": None, "prune/ledger": [{"name": "prompt", "kept_fraction": 0.5}]})
        {'a/b': 1.0, 'ledger/prompt': 0.5}
    """
    ledger = {f"ledger/{row['name']}": row["kept_fraction"] for row in line.get("prune/ledger", ())}
    return {
        name: float(value)
        for name, value in [*line.items(), *ledger.items()]
        if isinstance(value, int | float) and math.isfinite(value)
    }


def settings(values: Mapping[str, Any]) -> dict[str, Cell]:
    """Dotted key -> value; a list as text.

    Example:
        >>> settings({"rollout": {"engine": "hf"}, "steps": 4, "modules": ["a", "b"]})
        {'rollout.engine': 'hf', 'steps': 4, 'modules': "['a', 'b']"}
    """
    return {key: value if isinstance(value, Cell) else str(value) for key, value in flat(values).items()}


def table(groups: Sequence[RecordedGroup], rows: int) -> list[list[Cell]]:
    """The first `rows` completions of a step's recorded groups, in the order of `COLUMNS`."""
    found: list[list[Cell]] = []
    for one in sorted(groups, key=lambda group: group.position):
        prompt, grades = one.group.selected.prompt, one.group.grades
        for index, completion in enumerate(one.group.completions):
            if len(found) == rows:
                return found
            grade = grades[index] if grades else None
            reward = float(one.group.rewards[index])
            texts = [prompt.text, completion.text, prompt.answer, grade.extracted if grade else None]
            found.append(
                [
                    one.position,
                    index,
                    *(_cut(text) for text in texts),
                    reward if math.isfinite(reward) else None,
                    float(one.advantages[index]),
                    float(one.weights[index]),
                    one.why[index],
                ]
            )
    return found


def _cut(text: str | None) -> str | None:
    """A model can write lone surrogates, which JSON has no form for."""
    if text is None:
        return None
    plain = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return plain if len(plain) <= _LONGEST_TEXT else plain[: _LONGEST_TEXT - 3] + "..."
