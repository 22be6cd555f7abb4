"""The quickstart's directory: arithmetic problems, a tiny Qwen3 model, and in `task.json` how both were made.

They are made, not downloaded, so that the quickstart needs no network after installation and every seed is another
task and another model. `dppo-megatron compare` reads task.json to make the same for its other seeds. A second run with
the same arguments changes nothing; a directory that holds anything else is left as it is, since a run may be reading
it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dppo_megatron.config.paths import check_writable
from dppo_megatron.texts import show
from dppo_megatron.types import UserError
from dppo_megatron.workbench.quickstart.arithmetic import write_task

RECIPE = "task.json"
_MAKER = "arithmetic"


class Recipe(NamedTuple):
    """What a quickstart's directory is a function of."""

    seed: int = 0
    num_train: int = 512
    num_heldout: int = 384
    num_sft: int = 16384


def write_quickstart(directory: Path, recipe: Recipe) -> None:
    """Write `{train,heldout,sft}.jsonl`, `model/` and `task.json` into `directory`, made if it is missing. Raises
    UserError if the task cannot be made with these counts."""
    from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3  # torch and transformers: seconds

    write_task(directory, recipe.seed, recipe.num_train, recipe.num_heldout, recipe.num_sft)
    write_tiny_qwen3(directory / "model", recipe.seed)
    (directory / RECIPE).write_text(json.dumps({"maker": _MAKER} | recipe._asdict()) + "\n", encoding="utf-8")


def read_recipe(directory: Path) -> Recipe | None:
    """The recipe of a directory that `write_quickstart` made; None of any other."""
    try:
        values = json.loads((directory / RECIPE).read_text(encoding="utf-8"))
        if values.pop("maker") != _MAKER:
            return None
        if "num_warm_start" in values:  # older name
            values["num_sft"] = values.pop("num_warm_start")
        return Recipe(**{name: int(value) for name, value in values.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 2 the user's mistake."""
    args = _parse(argv)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        changed = _make(args.out, Recipe(args.seed, args.train, args.heldout, args.sft))
    except UserError as error:
        show(f"error: {error}", file=sys.stderr)
        return 2
    show(f"{args.out}: {'written' if changed else 'already up to date'}")
    return 0


def _make(out: Path, recipe: Recipe) -> bool:
    """`write_quickstart` as a whole or not at all; False if all of it was there already. Raises UserError also if `out`
    holds something else."""
    check_writable("--out", out, directory=True)
    if out.absolute() == Path.cwd():
        raise UserError(f"--out {out}: is the working directory; name a directory of its own")
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    if read_recipe(out) == recipe:  # task.json is written last: it is there when all is
        return False
    if out.exists() and any(out.iterdir()):
        raise UserError(
            f"--out {out}: holds something else than what --seed {recipe.seed} makes; choose another directory or"
            " remove that one"
        )
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=parent) as scratch:
        made = Path(scratch) / out.name
        write_quickstart(made, recipe)
        if out.exists():
            out.rmdir()
        os.replace(made, out)
    return True


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dppo_megatron.workbench.quickstart.make", description="Write the quickstart's task and model."
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems and of the model (default: 0)")
    parser.add_argument("--train", type=int, default=512, help="training problems (default: 512)")
    parser.add_argument("--heldout", type=int, default=384, help="held-out problems (default: 384)")
    parser.add_argument("--sft", type=int, default=16384, help="examples of SFT (default: 16384)")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed {args.seed}: must not be negative")
    return args


if __name__ == "__main__":
    sys.exit(main())
