"""References in settings: `${seed}` to another setting, `${oc.env:SCRATCH}` to the environment (OmegaConf's notation).

OmegaConf resolves references to settings. A value from the environment is used but never written: config.yaml,
checkpoints and traces keep the reference, which is resolved again when the run resumes. So a directory that changes
with the job (Slurm's scratch) may differ, and no file reveals what the environment held. Only paths may use it: other
settings end up in command lines and messages, where a key must not appear. A `~` at the start of a path is treated in
the same way.

So OmegaConf never resolves `${oc.env:NAME}`. It gets a mark in its place, which is plain text to it and is copied to
every setting that refers to this one. Its other resolvers are refused, because `oc.env` can be reached through several.
"""

from __future__ import annotations

import os
import re

_TOKEN = re.compile(r"(\\*)\$\{([^{}]*)(\})?")
_MARK = re.compile("\0([^\0]*)\0")  # unambiguous: `yaml12` refuses text with a NUL
_ENVIRONMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:,(.*))?", re.DOTALL)
_NOT_PATHS = (
    "only paths may be read from the environment (run_dir, model.hf_path, ...), since other settings are written to"
    " files and command lines. An API key is read from the variable that rollout.servers.api_key_env names"
)


class FromEnvironment(str):
    """A path with values of environment variables in it. `written`: the same with references, as files get it."""

    written: str

    def __new__(cls, value: str, written: str) -> FromEnvironment:
        made = super().__new__(cls, value)
        made.written = written
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.written


def escaped(text: str) -> str:
    """Escape `text` for a file, so that reading it gives `text` again."""
    return text.written if isinstance(text, FromEnvironment) else re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def references(text: str) -> list[str]:
    """The text between the braces of each reference in `text`; an odd number of backslashes makes it plain text."""
    return [match[2] for match in _TOKEN.finditer(text) if len(match[1]) % 2 == 0]


def for_omegaconf(text: str, key: str) -> str:
    """`text` with marks in place of references to the environment. Raises ValueError for a reference not allowed."""

    def token(match: re.Match[str]) -> str:
        slashes, inside, end = match.groups()
        if len(slashes) % 2:
            return match[0]
        if not end:
            raise ValueError("'${' without a closing brace; write \\${ for the plain text")
        kind, colon, variable = inside.partition(":")
        if not colon:
            return match[0]
        if kind != "oc.env":
            raise ValueError("no such resolver; there are ${a.setting} and ${oc.env:NAME}")
        if not _ENVIRONMENT.fullmatch(variable):
            raise ValueError("expected ${oc.env:NAME} or ${oc.env:NAME,default}")
        if not is_path(key):
            raise ValueError(_NOT_PATHS)
        return f"{slashes[1::2]}\0{variable}\0"

    # OmegaConf reads the text ??? as a missing value; it removes one backslash before it
    return f"\\{text}" if re.fullmatch(r"\\*\?\?\?", text) else _TOKEN.sub(token, text)


def from_environment(text: str, key: str, *, keep: bool) -> str:
    """`text` with its marks, and a path's leading `~`, replaced by values, or with `keep` by the references as written.
    Raises ValueError for a variable that is not set, and for a mark in a setting that is not a path."""
    in_home = text.startswith("~") and "/" in text and (is_path(key) or key == "checkpoint.resume")
    is_home = in_home and key != "data.cache_path"  # its default has a `~`; it is expanded where it is used
    if "\0" not in text and not is_home:
        return text
    if "\0" in text and not is_path(key):
        raise ValueError(_NOT_PATHS)

    def value_of(match: re.Match[str]) -> str:
        name, comma, default = match[1].partition(",")
        if (value := os.environ.get(name, default if comma else None)) is None:
            raise ValueError(f"the environment variable {name} is not set")
        return value

    written = _MARK.sub(lambda match: f"${{oc.env:{match[1]}}}", escaped(text))
    return FromEnvironment(written if keep else os.path.expanduser(_MARK.sub(value_of, text)), written)


def located(text: str, key: str, base: str) -> str:
    """The value `text` of setting `key`, which was written while `base` was the working directory: a relative path is
    joined to `base`, in the form of files; everything else is unchanged."""
    is_name = {
        "checkpoint.resume": text in ("auto", "never"),
        "rollout.servers.python": "/" not in text,
    }
    if not text or text.startswith(("hub:", "${", "~")) or is_name.get(key, not is_path(key)):
        return text
    return os.path.join(escaped(base), text)


def is_path(key: str) -> bool:
    """Whether a setting is a path: run_dir, model.hf_path, data.eval_paths.NAME, rollout.sync.dir, ..."""
    if key in ("rollout.sync.dir", "rollout.servers.python", "rollout.servers.registry_dir"):
        return True
    return key.rpartition(".")[2].endswith(("path", "_dir")) or key.startswith("data.eval_paths.")
