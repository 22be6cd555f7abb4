"""References in settings: `${seed}` to another setting, `${oc.env:SCRATCH}` to the environment (OmegaConf's notation).

A value from the environment is used but never written: config.yaml, checkpoints and traces keep the reference, which is
resolved again when the run resumes. So a directory that changes with the job (Slurm's scratch) may differ, and no file
reveals what the environment held. Only paths may use it: other settings end up in command lines and messages, where
a key must not appear. `\\${` is the plain text `${`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from dppo_megatron.types import UserError

_TOKEN = re.compile(r"\\\$\{|\$\{([^{}]*)\}|\$\{")
_ENVIRONMENT = re.compile(r"oc\.env:([A-Za-z_][A-Za-z0-9_]*)(?:,(.*))?", re.DOTALL)


class Reference:
    """Text of a setting with at least one reference in it, and the type that the setting must have."""

    def __init__(self, text: str, hint: Any, where: str) -> None:
        self.text, self.hint, self.where = text, hint, where


class FromEnvironment(str):
    """A path that holds values of environment variables. `written` is what files get in its place."""

    written: str

    def __new__(cls, value: str, written: str) -> FromEnvironment:
        made = super().__new__(cls, value)
        made.written = written
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.written


def has_reference(text: str) -> bool:
    """Whether `text` refers to anything."""
    return any(match.group() != r"\${" for match in _TOKEN.finditer(text))


def escaped(text: str) -> str:
    """Escape `text` for a file, so that reading it gives `text` again."""
    return text.written if isinstance(text, FromEnvironment) else text.replace("${", r"\${")


def unescaped(text: str) -> str:
    """Unescape a text without references."""
    return text.replace(r"\${", "${")


def may_use_environment(key: str) -> bool:
    """Only paths: run_dir, model.hf_path, data.eval_paths.NAME, rollout.sync.dir, rollout.servers.python, ..."""
    parts = key.split(".")
    if key in ("rollout.sync.dir", "rollout.servers.python", "rollout.servers.addresses_from"):
        return True
    return parts[-1].endswith(("path", "_dir")) or key.startswith("data.eval_paths.")


class Resolver:
    """Resolves references to settings; `look_up` gives the value of a dotted key, or raises KeyError."""

    def __init__(self, look_up: Callable[[str], Any], decode: Callable[[Any, Any, str, str], Any]) -> None:
        self._look_up, self._decode = look_up, decode

    def resolve(self, key: str, reference: Reference, seen: tuple[str, ...] = ()) -> Any:
        """The value that the setting `key` gets, of its own type.

        Raises:
            UserError: no such setting or variable, a circle, or a value of the wrong type.
        """
        where = f"{reference.where}: {key} = '{reference.text}'"
        if key in seen:
            raise UserError(f"{where}: the reference comes back to itself: {' -> '.join([*seen, key])}")
        pieces, written, position, alone, uses_environment = [], [], 0, None, False
        for match in _TOKEN.finditer(reference.text):
            between = reference.text[position : match.start()]
            pieces.append(between)
            written.append(between)
            position = match.end()
            if match.group() == r"\${":
                value: Any = "${"
            elif match.group(1) is None:
                raise UserError(f"{where}: '${{' without a closing brace; write \\${{ for the plain text")
            else:
                value = self._value(match.group(1), key, where, (*seen, key))
                alone = value if match.span() == (0, len(reference.text)) else None
            if isinstance(value, FromEnvironment):
                uses_environment = True
            pieces.append(str(value))
            written.append(escaped(value) if isinstance(value, str) else str(value))
        rest = reference.text[position:]
        text = "".join([*pieces, rest])
        if uses_environment:
            if not may_use_environment(key):
                raise UserError(
                    f"{where}: only paths may be read from the environment (run_dir, model.hf_path, ...), since other"
                    " settings stand in files and command lines. An API key is read from the variable that"
                    " rollout.servers.api_key_env names"
                )
            return FromEnvironment(text, "".join([*written, rest]))
        return self._decode(text if alone is None else alone, reference.hint, key, where)

    def _value(self, expression: str, key: str, where: str, seen: tuple[str, ...]) -> Any:
        if expression.startswith("oc.env:"):
            match = _ENVIRONMENT.fullmatch(expression)
            if match is None:
                raise UserError(f"{where}: expected ${{oc.env:NAME}} or ${{oc.env:NAME,default}}")
            found = os.environ.get(match.group(1), match.group(2))
            if found is None:
                raise UserError(f"{where}: the environment variable {match.group(1)} is not set")
            return FromEnvironment(found, f"${{{expression}}}")
        if ":" in expression:
            raise UserError(f"{where}: no such resolver; there are ${{a.setting}} and ${{oc.env:NAME}}")
        try:
            value = self._look_up(expression)
        except KeyError:
            raise UserError(f"{where}: there is no setting '{expression}'") from None
        if isinstance(value, Reference):
            value = self.resolve(expression, value, seen)
        if isinstance(value, dict | list):
            raise UserError(f"{where}: '{expression}' is not a single value")
        return value
