"""Service discovery for servers: a file per server in a directory that inference and training nodes share.

    dppo-megatron serve (an inference node)                         trainer, rank 0
    server is ready -> NAME.json {url, key, engine} ------------->  start: waits for `min_servers` of them
    touches it every 5 s ---------------------------------------->  each weight sync: which are new, which have left
    ends -> removes it

A file holds a key, so it is readable by its owner only (0600). Only files of the same user are read, since weights are
sent to the addresses in them.

A router (sglang-router, vLLM's) lists servers too, at GET /workers. These take its place, and requests go to them
directly: a router does not know which of them have the current weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from dppo_megatron.config.paths import shown
from dppo_megatron.files import open_to_read, replacing
from dppo_megatron.rollout.servers.http import Http, Refused, Unreachable
from dppo_megatron.rollout.servers.protocol import Text
from dppo_megatron.texts import log
from dppo_megatron.types import UserError

HEARTBEAT_S = 5.0
_STALE_S = 60.0
"""Twelve heartbeats, as for the run's lock."""
_POLL_S = 1.0
_SUFFIX = ".json"
_MAX_BYTES = 65536
_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    url: str
    api_key: str = field(repr=False)
    engine: str


Addresses: TypeAlias = Callable[[], dict[str, RegistryEntry]]
"""Returns the servers that a run has now, by address. Raises UserError if they cannot be read."""


class Registration:
    """One server's file, from construction to `remove`. Raises OSError. `name`: no two servers may have the same."""

    def __init__(self, directory: Path, name: str, entry: RegistryEntry) -> None:
        self._path = directory / f"{name}{_SUFFIX}"
        with replacing(self._path, mode=0o600) as file:  # atomic: readers never see a part of it
            file.write(json.dumps(asdict(entry)).encode())

    def beat(self) -> None:
        """Send a heartbeat. Errors are ignored, as the file system may recover."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


class Directory:
    """The registered servers, as the trainer sees them. `clock`: monotonic seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._seen: dict[str, tuple[int, float]] = {}
        """File name -> (its time stamp, when `clock` first saw that one): two machines' clocks are never compared."""

    def entries(self) -> dict[str, RegistryEntry]:
        """Address -> entry, of the servers with a recent heartbeat. Of two files with one address, the newer counts.
        Raises UserError for a file that can be read by others, belongs to another user, or cannot be read."""
        found: dict[str, tuple[int, RegistryEntry]] = {}
        for path in sorted(self._path.glob(f"[!.]*{_SUFFIX}")):
            try:
                stamp, entry = _read(path)
            except FileNotFoundError:  # it has just been removed
                continue
            except OSError as error:  # another user's file, a link, a directory, a file system that hangs
                raise UserError(f"rollout.servers.registry_dir: {path} cannot be read: {error.strerror}") from None
            last, since = self._seen.get(path.name, (0, 0.0))
            if stamp != last:
                self._seen[path.name] = last, since = stamp, self._clock()
            fresh = self._clock() - since < _STALE_S
            if entry is not None and fresh and stamp > found.get(entry.url, (0, entry))[0]:
                found[entry.url] = stamp, entry
        return {url: entry for url, (_, entry) in found.items()}

    def wait_for(
        self, count: int, timeout_s: float, answers: Callable[[RegistryEntry], bool]
    ) -> dict[str, RegistryEntry]:
        """Wait until `answers` is true for at least `count` servers; returns address -> entry of these. Raises
        UserError after `timeout_s`."""
        deadline, logged_state = time.monotonic() + timeout_s, ""
        while True:
            entries = self.entries()
            ready = {url: entry for url, entry in entries.items() if answers(entry)}
            if len(ready) >= count:
                return ready
            state = f"{len(ready)} of {count} rollout servers are registered in {shown(self._path)} and ready"
            if time.monotonic() > deadline:
                silent = ", ".join(sorted(entries.keys() - ready.keys()))
                raise UserError(
                    f"rollout.servers.registry_dir = '{shown(self._path)}': after rollout.limits.start_timeout_s ="
                    f" {timeout_s:g} s only {state}{f'; no answer from {silent}' if silent else ''}. Start them with:"
                    f" dppo-megatron serve CONFIG rollout.servers.registry_dir={shlex.quote(str(self._path))}"
                )
            if state != logged_state:
                log(f"rollout: waiting for servers; {state}")
                logged_state = state
            time.sleep(_POLL_S)


def _is_ours(owner: int, directory: Path) -> bool:
    """Whether `owner` is this process's user. A file server may map that to another id, so a file is made to see it."""
    if owner == os.geteuid():
        return True
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=directory, prefix=".") as probe:
        return os.fstat(probe.fileno()).st_uid == owner
    return False


def _read(path: Path) -> tuple[int, RegistryEntry | None]:
    """Time stamp in ns, and the entry; None if the content is not one."""
    with open_to_read(path) as file:
        status = os.fstat(file.fileno())
        if status.st_mode & 0o077 or not _is_ours(status.st_uid, path.parent):
            raise UserError(
                f"rollout.servers.registry_dir: {path} must belong to you and be readable by you only (0600):"
                " it names where weights are sent, and holds a key"
            )
        content = file.read(_MAX_BYTES)
    try:
        values = json.loads(content)
        entry = RegistryEntry(str(values["url"]).rstrip("/"), str(values["api_key"]).strip(), str(values["engine"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return status.st_mtime_ns, None
    return status.st_mtime_ns, entry


class Routed(msgspec.Struct):
    url: Text


class RoutedWorkers(msgspec.Struct):
    """The answer to GET /workers of sglang-router 0.3.2 and vllm-router 0.1.17."""

    workers: Annotated[list[Routed], msgspec.Meta(max_length=4096)]


@dataclass
class Router:
    http: Http
    workers: list[str]
    """Addresses of its workers, as last listed."""


def named_workers(http: Http, timeout_s: float) -> list[str]:
    """The addresses that `GET /workers` lists. Raises as `Http.get`."""
    answer = http.get("/workers", RoutedWorkers, timeout_s=timeout_s)
    return [worker.url.rstrip("/") for worker in answer.workers]


def current_entries(
    servers: Sequence[str], routers: Sequence[Router], key: str, engine: str
) -> dict[str, RegistryEntry]:
    """Address -> entry of `servers` and of the workers that `routers` list, or listed last if they do not answer, or
    list none."""
    for router in routers:
        with contextlib.suppress(Unreachable, Refused):
            router.workers = named_workers(router.http, _ASK_S) or router.workers
    urls = [*servers, *(url for router in routers for url in router.workers)]
    return {url: RegistryEntry(url, key, engine) for url in urls}
