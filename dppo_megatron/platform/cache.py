"""Rewritten code objects on disk, so that only the first process pays for parsing and rewriting megatron-core.

Python's own `.pyc` files cannot be used: they would mix rewritten code with the plain code of the same file. Every
test run and every rank of a CPU job imports megatron-core, and without a cache each would parse some 120 files again.

Entries hold marshalled code, which is run as it is, so the directory is trusted like a directory of programs: it and
every entry must belong to the current user and be writable by no other, or it is not used. An entry that is damaged,
or was made from another source, by other rules or by another Python, is a miss and is written anew. Whatever is wrong
with the cache, the import works without it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import marshal
import os
import stat
import sys
from pathlib import Path
from types import CodeType

from dppo_megatron.files import open_to_read, replacing

logger = logging.getLogger(__name__)

_MAGIC = b"DPPOCPU1"
_HEADER_BYTES = len(_MAGIC) + 2 * hashlib.sha256().digest_size


def default_root() -> Path | None:
    """`$DPPO_CACHE_DIR`, else `$XDG_CACHE_HOME/dppo-megatron`, else `~/.cache/dppo-megatron`; None without a home."""
    if chosen := os.environ.get("DPPO_CACHE_DIR"):
        return Path(chosen).absolute() / "platform"
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification: a relative path is to be ignored
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base) / "dppo-megatron" / "platform"


def _only_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


class CodeCache:
    """A directory of code objects. Where `root` or `rules` is None, or the directory is unsafe, it stays empty."""

    def __init__(self, root: Path | None, rules: bytes | None) -> None:
        self._root = root if root is not None and rules is not None and self._usable(root) else None
        # Asserts are compiled away under -O, so code of the two modes must not be exchanged.
        runtime = importlib.util.MAGIC_NUMBER + bytes([sys.flags.optimize])
        self._base_key = hashlib.sha256(runtime + (rules or b"")).digest()

    @property
    def active(self) -> bool:
        """Whether entries can be read."""
        return self._root is not None

    @staticmethod
    def _usable(root: Path) -> bool:
        if not hasattr(os, "geteuid"):  # no owner to check
            return False
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _only_ours(root.stat()):
                return True
        except OSError as error:
            logger.debug("no code cache: %s", error)
            return False
        logger.warning(
            "%s is not used as a cache: it holds code, so it must belong to the current user and be writable by nobody "
            "else (chmod go-w, or set DPPO_CACHE_DIR)",
            root,
        )
        return False

    def _file(self, name: str, path: str) -> Path:
        # One file for each module and place, and the key inside it: a changed source replaces its entry, none pile up.
        assert self._root is not None
        runtime = f"{sys.implementation.cache_tag}-{sys.flags.optimize}"
        place = hashlib.sha256(os.fsencode(path) + b"\0" + runtime.encode()).hexdigest()
        return self._root / f"{name}-{place[:16]}.code"

    def _key(self, path: str, source: bytes) -> bytes:
        # The path too: it is inside the code object, and tracebacks show it.
        return hashlib.sha256(self._base_key + os.fsencode(path) + b"\0" + source).digest()

    def load(self, name: str, path: str, source: bytes) -> CodeType | None:
        """The code made earlier from exactly this source, or None."""
        if self._root is None:
            return None
        try:
            with open_to_read(self._file(name, path)) as file:
                if not _only_ours(os.fstat(file.fileno())):
                    return None
                entry = file.read()
        except OSError:
            return None
        header, payload = entry[:_HEADER_BYTES], entry[_HEADER_BYTES:]
        # marshal may crash the interpreter on damaged bytes, so nothing is unmarshalled whose digest is wrong.
        if header != self._header(self._key(path, source), payload):
            return None
        code = marshal.loads(payload)
        return code if isinstance(code, CodeType) else None

    def store(self, name: str, path: str, source: bytes, code: CodeType) -> None:
        """Keep `code` for later processes. Two writers at once are fine: each replaces the entry as a whole."""
        if self._root is None:
            return
        payload = marshal.dumps(code)
        try:
            with replacing(self._file(name, path), mode=0o600) as file:
                file.write(self._header(self._key(path, source), payload) + payload)
        except OSError as error:  # read-only or full: the next process rewrites again
            logger.debug("code of %s was not cached: %s", name, error)

    @staticmethod
    def _header(key: bytes, payload: bytes) -> bytes:
        return _MAGIC + key + hashlib.sha256(payload).digest()
