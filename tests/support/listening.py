"""Who listens where, as the kernel says (/proc), for a process and everything that it has started."""

from __future__ import annotations

import contextlib
import socket
from ipaddress import ip_address
from pathlib import Path


def beyond_loopback(pid: int) -> dict[str, list[str]]:
    """Command line -> addresses on which its process takes TCP connections from other machines, for `pid` and its
    descendants; empty: none of them does."""
    listening = _listening()
    found: dict[str, list[str]] = {}
    for process in _tree(pid):
        addresses = sorted({listening[inode] for inode in _sockets(process) if inode in listening})
        outside = [one for one in addresses if not ip_address(one.rpartition(":")[0]).is_loopback]
        if outside:
            found[(process / "cmdline").read_text().replace("\0", " ")] = outside
    return found


def _tree(pid: int) -> list[Path]:
    found = [Path(f"/proc/{pid}")]
    for process in found:
        for children in process.glob("task/*/children"):
            with contextlib.suppress(OSError):
                found += [Path(f"/proc/{child}") for child in children.read_text().split()]
    return found


def _sockets(process: Path) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _listening() -> dict[str, str]:
    """Inode -> address:port of every listening TCP socket of this network namespace."""
    found = {}
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                host, _, port = fields[1].partition(":")
                if fields[3] == "0A":  # LISTEN
                    words = (bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
                    found[fields[9]] = f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}"
    return found
