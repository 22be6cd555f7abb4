"""Start rollout servers on this machine for a trainer on another one, and keep them running until interrupted:

  dppo-megatron serve CONFIG rollout.servers.registry_dir=DIR --host NAME      (on each inference node)
  dppo-megatron train CONFIG rollout.servers.registry_dir=DIR                  (on the training nodes)

with the same CONFIG and settings, rollout.servers.launch=none and colocate=false among them. DIR is on a file system
that both see; addresses and keys are written there, and nobody but you can read them. rollout.servers.count servers are
started. Servers may be added and ended while the trainer runs: a new one gets the newest weights at the next weight
sync, and requests after it (docs/cluster.md).
"""

from __future__ import annotations

import argparse

from dppo_megatron.types import UserError
from dppo_megatron.workbench.commands.parser import add_config, read_config
from dppo_megatron.workbench.commands.terminal import loading


def add_options(command: argparse.ArgumentParser) -> None:
    add_config(command, "the trainer's YAML file", "settings, the same as the trainer's")
    listens = "name or address of this machine as the trainer sees it; the servers listen there (default: loopback)"
    command.add_argument("--host", default="127.0.0.1", metavar="NAME", help=listens)


def execute(arguments: argparse.Namespace) -> int:
    # `plan` does not check data and trackers: only the trainer uses them
    config = read_config(arguments.config, arguments.overrides, writes_run=False, purpose="plan")
    if not config.rollout.servers.registry_dir:
        raise UserError("serve writes addresses for a trainer: set rollout.servers.registry_dir=DIR, as for train")
    with loading("libraries"):
        from dppo_megatron.platform.capabilities import check_gpus
        from dppo_megatron.rollout.launched_servers import serve
    check_gpus()  # if torch cannot use the GPUs, servers would be started with a CPU's arguments
    serve(config, arguments.host)
    return 0
