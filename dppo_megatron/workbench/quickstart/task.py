"""The quickstart's directory: problems, a tiny model, and `task.json`, which says how both were made.

They are made, not downloaded, so that the quickstart needs no network after installation and every seed is another
task and another model. `dppo-megatron compare` reads task.json to make the same for its other seeds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dppo_megatron.workbench.quickstart.arithmetic import write_task

RECIPE = "task.json"
_MAKER = "arithmetic"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a quickstart's directory is a function of."""

    seed: int = 0
    num_train: int = 512
    num_heldout: int = 384
    num_warm_start: int = 16384

    def with_seed(self, seed: int) -> Recipe:
        return replace(self, seed=seed)


def write_quickstart(directory: Path, recipe: Recipe) -> None:
    """Write `{train,heldout,warm_start}.jsonl`, `model/` and `task.json` into `directory`, made if it is missing.

    Raises:
        UserError: the task cannot be made with these counts.
    """
    from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3  # torch and transformers: seconds

    write_task(directory, recipe.seed, recipe.num_train, recipe.num_heldout, recipe.num_warm_start)
    write_tiny_qwen3(directory / "model", recipe.seed)
    (directory / RECIPE).write_text(json.dumps({"maker": _MAKER} | asdict(recipe)) + "\n", encoding="utf-8")


def read_recipe(directory: Path) -> Recipe | None:
    """The recipe of a directory that `write_quickstart` made; None of any other."""
    try:
        values = json.loads((directory / RECIPE).read_text(encoding="utf-8"))
        if values.pop("maker") != _MAKER:
            return None
        return Recipe(**{name: int(value) for name, value in values.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
