"""The command line of `dppo-megatron serve`. Imports nothing heavy: --help and mistakes must not wait for torch."""

from __future__ import annotations

import argparse

from dppo_megatron.config import load_config
from dppo_megatron.types import UserError

_SERVE = """\
Start rollout servers on this machine for a trainer on another one, and keep them running until it is asked to end:

  dppo-megatron serve CONFIG rollout.servers.addresses_from=DIR --host NAME      (on each inference node)
  dppo-megatron train CONFIG rollout.servers.addresses_from=DIR                  (on the training nodes)

with the same CONFIG and settings. DIR lies on a file system that both see; addresses and keys are written there, and
nobody but you can read them. rollout.servers.count servers are started. More may be started, and ended, while the
trainer runs: a new one gets the newest weights at the next weight sync, and requests after it (docs/cluster.md).
"""


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand; `arguments.run` is its function."""
    command = commands.add_parser(
        "serve",
        help="rollout servers on this machine for a trainer elsewhere",
        description=_SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("config", metavar="CONFIG", help="the trainer's YAML file")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="settings, the same as the trainer's")
    command.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="NAME",
        help="name or address of this machine as the trainer sees it; the servers listen there (default: loopback)",
    )
    command.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides, writes_run=False)
    if not config.rollout.servers.addresses_from:
        raise UserError("serve writes addresses for a trainer: set rollout.servers.addresses_from=DIR, as for train")
    with arguments.watch("loading libraries", 0, ""):
        from dppo_megatron.rollout.serving import serve
    serve(config, arguments.host, watch=arguments.watch)
    return 0
