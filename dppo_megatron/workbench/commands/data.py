"""Download a known set and write it as train.jsonl and test.jsonl, one {problem, answer, source, ...} a line:

dppo-megatron data math --out data/math
dppo-megatron data gsm8k --out data/gsm8k --from downloads/gsm8k    # a copy of its repository; no network
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dppo_megatron.data.known import KNOWN_SETS, write_known_set
from dppo_megatron.texts import show


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", help=f"one of {', '.join(KNOWN_SETS)}")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    command.add_argument("--from", dest="origin", metavar="DIR", help="a local copy of the set's repository on the hub")
    command.add_argument("--overwrite", action="store_true", help="replace existing files")


def execute(arguments: argparse.Namespace) -> int:
    origin = arguments.origin or ""
    show(*write_known_set(arguments.name, arguments.out, origin=origin, overwrite=arguments.overwrite))
    return 0
