"""Print every setting, or those of a section, or those with KEY in their name: type, default, range, meaning, the file
that defines it, and the page that explains it.

  dppo-megatron config
  dppo-megatron config rollout.sampling
  dppo-megatron config temperature

How files and the command line are read is in docs/configuration.md.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator

from dppo_megatron.config.paths import with_paths
from dppo_megatron.config.reference import Setting, all_settings, find, unknown_key
from dppo_megatron.config.schema import Config
from dppo_megatron.texts import show


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("key", metavar="KEY", nargs="?", default="", help="a setting, a section, or a part of a name")


def execute(arguments: argparse.Namespace) -> int:
    chosen = find(arguments.key) if arguments.key else list(all_settings())
    if not chosen:
        parent = arguments.key.rpartition(".")[0]
        section = next((one.owner for one in all_settings() if one.key.rpartition(".")[0] == parent), Config)
        raise unknown_key("config", arguments.key, [], section)
    width = min(120, max(60, shutil.get_terminal_size((100, 0)).columns))
    show(*"\n\n".join("\n".join(_described(one, width)) for one in chosen).split("\n"))
    return 0


def _described(setting: Setting, width: int) -> Iterator[str]:
    """The description of a setting, in lines of at most `width` characters unless one word is longer."""
    facts = [setting.kind] if setting.is_section else [setting.kind, f"default {setting.default}", setting.allowed]
    yield f"{setting.key}  ({', '.join(fact for fact in facts if fact)})"
    meaning = setting.meaning + (f" ({setting.why})" if setting.why else "")
    yield from textwrap.wrap(meaning, width, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    yield f"    defined in {setting.file}; see {with_paths(f'docs/{setting.page}')}"
