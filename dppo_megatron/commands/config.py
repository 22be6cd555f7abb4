"""`dppo-megatron config [KEY]`: every setting, told by the schema itself."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator

from dppo_megatron.commands.parser import Commands, add_command
from dppo_megatron.config.hints import unknown_key
from dppo_megatron.config.readers import readings
from dppo_megatron.config.reference import Setting, all_settings, find
from dppo_megatron.config.schema import Config
from dppo_megatron.texts import show
from dppo_megatron.types import counted

_CONFIG = """\
Print every setting, or those of a section, or those with KEY in their name: type, default, range, meaning, the lines
of the package that read it, and the page that explains it.

  dppo-megatron config
  dppo-megatron config rollout.sampling
  dppo-megatron config temperature

How files and the command line are read is in docs/configuration.md.
"""
_SHOWN_READINGS = 3


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add `dppo-megatron config`."""
    command = add_command(
        commands, "config", _config, summary="print settings with default, range and meaning", description=_CONFIG
    )
    command.add_argument("key", metavar="KEY", nargs="?", default="", help="a setting, a section, or a part of a name")


def _config(arguments: argparse.Namespace) -> int:
    chosen = find(arguments.key) if arguments.key else list(all_settings())
    if not chosen:
        raise unknown_key("config", arguments.key, [], Config, Config)
    width = min(120, max(60, shutil.get_terminal_size((100, 0)).columns))
    with arguments.watch("looking up where settings are read", len(chosen), "settings") as advance:
        said = [line for one in counted(chosen, advance) for line in ("", *describe(one, width))]
    show(*said[1:])
    return 0


def describe(setting: Setting, width: int = 100) -> Iterator[str]:
    """What there is to say about a setting, as lines of at most `width` characters where words allow it."""
    facts = [setting.kind] if setting.is_section else [setting.kind, f"default {setting.default}", setting.allowed]
    yield f"{setting.key}  ({', '.join(fact for fact in facts if fact)})"
    meaning = setting.meaning + (f" ({setting.why})" if setting.why else "")
    yield from _indented(meaning, "", width)
    if not setting.is_section:
        places = readings(setting.owner, setting.name)
        more = f" and {len(places) - _SHOWN_READINGS} more" if len(places) > _SHOWN_READINGS else ""
        yield from _indented(", ".join(map(str, places[:_SHOWN_READINGS])) + more, "read in ", width)
    yield f"    see docs/{setting.page}"


def _indented(text: str, start: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=f"    {start}", subsequent_indent="    ", break_long_words=False)
