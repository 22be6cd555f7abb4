"""References in settings: `${seed}` to another setting, `${oc.env:SCRATCH}` to the environment (OmegaConf's notation).

OmegaConf resolves references to settings. A value from the environment is used but never written: config.yaml,
checkpoints and traces keep the reference, which is resolved again when the run resumes. So a directory that changes
with the job (Slurm's scratch) may differ, and no file reveals what the environment held. Only paths may use it: other
settings end up in command lines and messages, where a key must not appear. A path that begins with `~` is likewise.

So OmegaConf gets `${oc.env:NAME}` as a mark, text to it, which remains in whatever refers to that setting. Its other
resolvers are refused: `oc.env` alone could be reached through several of them.
"""

from __future__ import annotations

import os
import re

_TOKEN = re.compile(r"(\\*)\$\{([^{}]*)(\})?")
_MARK = re.compile("\0([^\0]*)\0")  # no text that is read has a NUL
_ENVIRONMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:,(.*))?", re.DOTALL)
_NOT_PATHS = (
    "only paths may be read from the environment (run_dir, model.hf_path, ...), since other settings stand in files"
    " and command lines. An API key is read from the variable that rollout.servers.api_key_env names"
)


class FromEnvironment(str):
    """A path that holds values of environment variables. `written` is what files get in its place."""

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
    """`text` with marks for what the environment holds. Raises ValueError for a reference that is not read."""

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

    # OmegaConf takes a whole text of ??? for a value that is missing, and one backslash off
    return f"\\{text}" if re.fullmatch(r"\\*\?\?\?", text) else _TOKEN.sub(token, text)


def from_environment(text: str, key: str, *, keep: bool) -> str:
    """`text` with the environment's values for its marks, and of a path for a `~` before it; with `keep` with the
    references that the marks stand for. Raises ValueError for a variable that is not set, and if `key` is no path."""
    in_home = text.startswith("~") and "/" in text and (is_path(key) or key == "checkpoint.resume")
    is_home = in_home and key != "data.cache_path"  # whose default is one, and which is expanded where it is used
    if "\0" not in text and not is_home:
        return text
    if "\0" in text and not is_path(key):
        raise ValueError(_NOT_PATHS)

    def value(match: re.Match[str]) -> str:
        name, comma, default = match[1].partition(",")
        if (found := os.environ.get(name, default if comma else None)) is None:
            raise ValueError(f"the environment variable {name} is not set")
        return found

    written = _MARK.sub(lambda match: f"${{oc.env:{match[1]}}}", escaped(text))
    return FromEnvironment(written if keep else os.path.expanduser(_MARK.sub(value, text)), written)


def located(text: str, key: str, base: str) -> str:
    """A text of a run's settings, as files hold it, that was written while `base` was the working directory: a relative
    path is joined to it."""
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
