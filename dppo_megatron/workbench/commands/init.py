"""Copy the shipped configs and examples to DIR/configs/ and DIR/examples/. In DIR, a config there takes precedence over
the shipped one of the same name, and code there is named as `examples.custom_grader:last_number`:

dppo-megatron init mine && cd mine
dppo-megatron plan configs/h100/qwen3_8b_8gpus_dppo.yaml
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from dppo_megatron.config.paths import check_writable, shipped
from dppo_megatron.texts import reason, show
from dppo_megatron.types import UserError


def add_options(command: argparse.ArgumentParser) -> None:
    where = "where to write; a configs/ or examples/ there is left as it is"
    command.add_argument("dir", metavar="DIR", type=Path, help=where)


def execute(arguments: argparse.Namespace) -> int:
    targets = {name: Path(arguments.dir / name) for name in ("configs", "examples")}
    for target in targets.values():
        check_writable("DIR", target, directory=True)
    if all(map(os.path.lexists, targets.values())):
        raise UserError(f"DIR: '{arguments.dir}' has configs and examples already; name another directory")
    targets = {name: target for name, target in targets.items() if not os.path.lexists(target)}
    for name, target in targets.items():
        try:
            shutil.copytree(shipped(name), target, ignore=shutil.ignore_patterns("__pycache__"))
        except OSError as error:  # a full disk
            for begun in targets.values():
                shutil.rmtree(begun, ignore_errors=True)
            raise UserError(f"DIR: '{target}' cannot be written: {reason(error)}") from None
    show(*(f"{target}: {sum(path.is_file() for path in target.rglob('*'))} files" for target in targets.values()))
    return 0
