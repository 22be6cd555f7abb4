"""A small hub: the part of the Hugging Face hub's HTTP interface that `datasets` and `huggingface_hub` use.

The real client talks to it over a socket (HF_ENDPOINT), so what is tested is its own listing, redirects, etags and
errors, not our idea of them. A repository is a directory; the trade-off is that a revision is always `main`.

    client                                   this server
    GET  /api/datasets/NAME[/revision/R]  -> {id, sha, siblings}
    GET  /api/datasets/NAME/tree/R[/DIR]  -> [{type, path, size, oid}]
    POST /api/datasets/NAME/paths-info/R  -> the same, of the paths named
    HEAD /datasets/NAME/resolve/R/FILE    -> 302 to /files/..., with etag and commit; small files 200
    GET  /files/NAME/FILE                 -> the bytes, whole or a range
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/datasets/(?P<name>[\w.-]+/[\w.-]+?)(?:/(?P<what>revision|tree|paths-info)/(?P<rest>.+))?")
_RESOLVE = re.compile(r"/datasets/(?P<name>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_FILES = re.compile(r"/files/(?P<name>[\w.-]+/[\w.-]+)/(?P<path>.+)")


class Hub:
    """A server of the repositories below a directory, on a free port of this machine, from `with` to its end."""

    def __init__(self, root: Path, *, gated: str = "", dropped: str = "", cut: str = "") -> None:
        self.root = root
        self.gated = gated
        """A name that needs a login."""
        self.dropped = dropped
        """A name for which the connection ends without an answer."""
        self.cut = cut
        """A name whose files end half-way."""
        self.requests: list[str] = []
        """`METHOD /path` of every request, in order."""
        self.connections: list[socket.socket] = []
        """All that were ever accepted."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()  # from now on the port refuses connections
        for connection in self.connections:  # and those that the client has kept are ended
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            hub.connections.append(self.request)
            super().setup()

        def do_GET(self) -> None:
            self._answer(b"")

        do_HEAD = do_GET

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, body: bytes) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            path = unquote(urlsplit(self.path).path)
            match = _API.fullmatch(path) or _RESOLVE.fullmatch(path) or _FILES.fullmatch(path)
            name = match["name"] if match else ""
            if name and name == hub.dropped:
                self.close_connection = True
                self.connection.close()
            elif name and name == hub.gated:
                self._error(401, "GatedRepo", f"Access to dataset {name} is restricted. Please log in.")
            elif match is None or not (hub.root / name).is_dir():
                self._error(404, "RepoNotFound", "Repository not found")
            elif match.re is _API:
                self._api(hub.root / name, name, match["what"] or "", match["rest"] or "", body)
            else:
                self._file(hub.root / name / match["path"], name, match["path"], redirect=match.re is _RESOLVE)

        def _api(self, repository: Path, name: str, what: str, rest: str, body: bytes) -> None:
            files = sorted(path for path in repository.rglob("*") if path.is_file())
            paths = {path.relative_to(repository).as_posix(): path for path in files}
            if what == "tree":
                folder = rest.partition("/")[2]
                if folder and not (repository / folder).is_dir():
                    self._error(404, "EntryNotFound", "Entry not found")
                    return
                recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
                self._json([_entry(*item) for item in _below(paths, folder, recursive=recursive).items()])
            elif what == "paths-info":
                wanted = parse_qs(body.decode()).get("paths") or json.loads(body).get("paths", [])
                self._json([_entry(one, paths[one]) for one in wanted if one in paths])
            else:
                siblings = [{"rfilename": one} for one in paths]
                card = {"id": name, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": []}
                self._json({**card, "siblings": siblings, "lastModified": "2026-01-01T00:00:00.000Z"})

        def _file(self, file: Path, name: str, path: str, *, redirect: bool) -> None:
            if not file.is_file():
                self._error(404, "EntryNotFound", "Entry not found")
                return
            data = file.read_bytes()
            headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if redirect and path.endswith(".parquet"):  # large files are elsewhere
                headers |= {"Location": f"/files/{name}/{path}", "X-Linked-Etag": f'"{_digest(data)}"'}
                self._send(302, b"", {**headers, "X-Linked-Size": str(len(data))})
            elif asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(asked[1]), int(asked[2] or len(data) - 1)
                part = data[first : last + 1]
                self._send(206, part, {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"})
            else:
                self._send(200, data, headers, sent=len(data) // 2 if name == hub.cut and not redirect else None)

        def _json(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _error(self, status: int, code: str, message: str) -> None:
            headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}
            self._send(status, json.dumps({"error": message}).encode(), headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str], *, sent: int | None = None) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:sent])
                self.close_connection |= sent is not None

        def log_message(self, format: str, *args: object) -> None:
            """Not to stderr, which the tests read."""

    return Handler


def _below(paths: dict[str, Path], folder: str, *, recursive: bool) -> dict[str, Path]:
    """Files and directories of a folder; of all folders below it if `recursive`."""
    found: dict[str, Path] = {}
    for path, file in paths.items():
        if folder and not path.startswith(f"{folder}/"):
            continue
        parts = path.split("/")
        depth = len(folder.split("/")) if folder else 0
        for end in range(depth + 1, len(parts) if recursive else min(len(parts), depth + 2)):
            found["/".join(parts[:end])] = file.parents[len(parts) - end - 1]
        if recursive or len(parts) == depth + 1:
            found[path] = file
    return found


def _entry(path: str, place: Path) -> dict[str, Any]:
    if place.is_dir():
        return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
    data = place.read_bytes()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _digest(data)[:40]}
    if path.endswith(".parquet"):
        entry["lfs"] = {"oid": _digest(data), "size": len(data), "pointerSize": 130}
    return entry


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
