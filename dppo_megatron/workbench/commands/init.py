"""Copy the shipped configs to DIR/configs/, where a file goes before the shipped one of its name:

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
    command.add_argument("dir", metavar="DIR", type=Path, help="where to write; may exist, but not DIR/configs")


def execute(arguments: argparse.Namespace) -> int:
    target: Path = arguments.dir / "configs"
    check_writable("DIR", target, directory=True)
    if os.path.lexists(target):
        raise UserError(f"DIR: '{target}' exists already; name another directory")
    try:
        shutil.copytree(shipped("configs"), target)
    except OSError as error:  # a full disk
        shutil.rmtree(target, ignore_errors=True)
        raise UserError(f"DIR: '{target}' cannot be written: {reason(error)}") from None
    show(f"{target}: {sum(1 for _ in target.rglob('*.yaml'))} configs")
    return 0
