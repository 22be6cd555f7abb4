"""Print a script that completes commands, options, files and settings in your shell. Add to the shell's startup file:

  eval "$(dppo-megatron completion bash)"          # ~/.bashrc
  eval "$(dppo-megatron completion zsh)"           # ~/.zshrc
  dppo-megatron completion fish | source           # ~/.config/fish/config.fish

The shell asks this program at each Tab, so nothing has to be installed again when a setting is added.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from dppo_megatron.config.reference import all_keys, all_settings
from dppo_megatron.pruning.policies import COMPLETION_POLICIES, PROMPT_POLICIES

_COMPINIT = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"
"""A .zshrc that does not run compinit has no `compdef`, and the script would fail at every start of the shell."""


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=("bash", "zsh", "fish"))


def execute(arguments: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    if arguments.shell == "zsh":
        print(_COMPINIT)
    print(shellcode(["dppo-megatron"], shell=arguments.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Print the completions that the shell asks for, and exit."""
    import argcomplete

    [commands] = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    actions: list[Any] = [action for command in commands.choices.values() for action in command._actions]
    for action in actions:
        if action.dest == "overrides":
            action.completer = lambda prefix, **_: list(settings(prefix))
        elif action.dest == "key":
            action.completer = lambda prefix, **_: [one.key for one in all_settings() if one.key.startswith(prefix)]
    argcomplete.autocomplete(parser, always_complete_options=False)


def settings(prefix: str) -> Iterator[str]:
    """What may complete `prefix` on a command line: `key=` of settings, or, after an `=`, `key=choice`.

    Example: `model.d` -> `model.dtype=`; `model.dtype=b` -> `model.dtype=bfloat16`.
    """
    key, equals, value = prefix.partition("=")
    if equals:
        yield from (f"{key}={one}" for one in _choices(key) if one.startswith(value))
        return
    sections = {one.key for one in all_settings() if one.is_section}
    yield from (f"{one}=" for one in all_keys() if one not in sections and one.startswith(key))


def _choices(key: str) -> Iterable[str]:
    policies: dict[str, Iterable[str]] = {
        "pruning.prompt.method": PROMPT_POLICIES,
        "pruning.completion.method": COMPLETION_POLICIES,
    }
    if key in policies:
        return policies[key]
    setting = next((one for one in all_settings() if one.key == key), None)
    if setting is None:
        return ()
    if setting.kind == "true or false":
        return ("true", "false")
    return setting.allowed.removeprefix("one of ").split(", ") if setting.allowed.startswith("one of ") else ()
