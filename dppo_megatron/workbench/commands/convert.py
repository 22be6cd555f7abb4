"""Convert between Hugging Face and Megatron distributed checkpoints, one tensor at a time (docs/checkpoints.md):

  dppo-megatron convert to-megatron --hf Qwen3-8B --out qwen3-8b
  dppo-megatron convert to-hf --checkpoint runs/x/checkpoints/step_000020 --out hf --dtype bf16

A distributed checkpoint loads at any tensor, pipeline and expert parallel size.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dppo_megatron.config.paths import check_path, check_writable
from dppo_megatron.texts import show
from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands.parser import check_number
from dppo_megatron.workbench.commands.terminal import loading


def add_options(command: argparse.ArgumentParser) -> None:
    directions = command.add_subparsers(required=True, metavar="to-megatron|to-hf", dest="direction")
    to_megatron = directions.add_parser("to-megatron", help="from a Hugging Face checkpoint", allow_abbrev=False)
    to_megatron.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        to_megatron.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"check {what}-parallel size N")
    to_hf = directions.add_parser("to-hf", help="from a distributed or a run's checkpoint", allow_abbrev=False)
    to_hf.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="distributed checkpoint")
    to_hf.add_argument("--hf", type=Path, metavar="DIR", help="config.json and tokenizer, if the checkpoint has none")
    to_hf.add_argument("--dtype", default="", metavar="T", help="fp32, bf16 or fp16 (default: as stored)")
    to_hf.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="size of a file (default: 5)")
    ignored = "keys of config.json that do not change what the model computes"
    for direction in (to_megatron, to_hf):
        direction.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write; must not exist")
        direction.add_argument("--ignore-config-keys", default="", metavar="A,B", help=ignored)
        direction.add_argument("--provider", default="", metavar="P", help="as model.provider: mbridge or module:Class")
        direction.add_argument("--verify", action="store_true", help="read back, compare every tensor byte for byte")
        direction.set_defaults(run=execute)  # `cli.parse` parses with this subparser, not with `command`


def execute(arguments: argparse.Namespace) -> int:
    if os.path.lexists(arguments.out):
        raise UserError(f"--out '{arguments.out}' exists already; remove it or choose another")
    check_writable("--out", arguments.out, directory=True)
    if arguments.direction == "to-hf":
        check_path("--checkpoint", str(arguments.checkpoint), "directory")
        check_number("--shard-gb", arguments.shard_gb, "(0, 1e6]")
    if arguments.hf is not None:
        check_path("--hf", str(arguments.hf), "directory")
    with loading("libraries"):
        from dppo_megatron.convert import hf_to_megatron, megatron_to_hf
    names = [name for name in arguments.ignore_config_keys.split(",") if name]
    out, options = arguments.out, {"ignored": names, "provider": arguments.provider, "verify": arguments.verify}
    try:
        if arguments.direction == "to-megatron":
            lines = hf_to_megatron(arguments.hf, out, arguments.tp, arguments.pp, arguments.ep, **options)
        else:
            options |= {name: getattr(arguments, name) for name in ("hf", "dtype", "shard_gb")}
            lines = megatron_to_hf(arguments.checkpoint, out, **options)
    except UserError as error:  # the message names a config key where this command has an option
        message = str(error).replace("model.hf_path = ", "--hf ").replace("model.provider = ", "--provider ")
        raise UserError(message.replace("model.ignore_config_keys", "--ignore-config-keys")) from None
    show(*lines)
    return 0
