"""Another user's program that has taken a server's port first, and keeps everything that it is sent."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

WAYS: dict[str, Callable[[bytes], bytes]] = {
    "closes": lambda asked: b"",
    "agrees": lambda asked: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "says 204": lambda asked: b"HTTP/1.1 204 No Content\r\n\r\n",
    "guesses": lambda asked: b"HTTP/1.1 204 No Content\r\ndppo-proof: " + b"0" * 64 + b"\r\n\r\n",
    "mirrors": lambda asked: b"HTTP/1.1 204 No Content\r\ndppo-proof: " + asked[16:80] + b"\r\n\r\n",
    "is no server": lambda asked: b"SSH-2.0-OpenSSH_9.6\r\n" + b"\0" * 70000,
}
"""What it answers to whatever it is sent; `asked` begins `GET /dppo_proof?` and the nonce."""


class Impostor:
    """Listens on a port of loopback until it is closed; waits for the port if it is taken.

    Args:
        relay: where it passes everything on to, and whose answers it gives; else it answers as `way` says.
    """

    def __init__(self, port: int = 0, way: str = "agrees", relay: str = "") -> None:
        self._way, self._relay, self.got = WAYS[way], relay, b""
        deadline = time.monotonic() + 30
        while True:
            try:
                self._listener = socket.create_server(("127.0.0.1", port))
                break
            except OSError:
                assert time.monotonic() < deadline, f"port {port} does not become free"
                time.sleep(0.02)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def assert_it_got_questions_only(self, *, was_asked: bool = True) -> None:
        """No key, no header of ours, no request: heads of questions, of which there was one if it `was_asked`."""
        lines = self.got.split(b"\r\n")
        assert lines[-1] == b"" and (len(lines) > 1 or not was_asked)
        assert all(line.startswith(b"GET /dppo_proof?") or line in (b"Host: server", b"") for line in lines), self.got

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=(self._listener.accept()[0],), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            while asked := peer.recv(65536):
                self.got += asked
                if not self._relay:
                    answer = self._way(asked)
                    if not answer:
                        return
                    peer.sendall(answer)
                    continue
                parts = urlsplit(self._relay)
                with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as onward:
                    onward.sendall(asked)
                    peer.sendall(onward.recv(65536))
