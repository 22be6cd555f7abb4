"""What the trainer launches in place of vLLM: a process with vLLM's command line, key and endpoints, without a model.

Its completions are those of `stub.py`, a function of the seed. Weights are taken by every channel and forgotten; their
version is remembered, and in every answer. `fake_python` makes the interpreter that starts it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "dppo_megatron" / "rollout" / "servers" / "in_engine"))
from dppo_vllm_guard import PROOF_HEADER, PROOF_PATH, proof


class FakeVLLM(ThreadingHTTPServer):
    """One server; serves from `serve_forever`, and as a context manager from a thread."""

    daemon_threads = True

    def __init__(self, host: str, port: int, key: str) -> None:
        super().__init__((host, port), _Handler)
        self.key, self.version = key, "default"
        self.asked = 0
        """Requests for completions so far."""
        self.trouble = 0
        """If not 0, the status of every answer."""
        self.told: list[str] = []
        """The commands so far: paths, and methods of the workers."""
        self.did: list[tuple[str, list[Any]]] = []
        """The next calls of the workers' methods, and what each worker answers; where it is empty: all is well."""
        self.instead: dict[str, Any] = {}
        """By path, what is answered in place of what would be right."""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> FakeVLLM:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Asks for the key everywhere, as the guarded vLLM does."""

    protocol_version = "HTTP/1.1"
    server: FakeVLLM

    def do_GET(self) -> None:
        path, _, nonce = self.path.partition("?")
        if path == PROOF_PATH:
            self.send_response(204)
            own: Any = self.connection.getsockname()[:2]
            self.send_header(PROOF_HEADER.decode(), proof(self.server.key, nonce.encode(), own).decode())
            return self.end_headers()
        self._answer(None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(content) if content else {}
        self.server.told.append(body.get("kwargs", body).get("call") or self.path)
        self._answer(body)

    def _answer(self, body: Any) -> None:
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self._send({"error": "no key"}, 401)
        if path == "/workers" or self.server.trouble:
            return self._send({}, self.server.trouble or 404)
        if path == "/update_weight_version":
            self.server.version = body["new_version"]
        self._send(self._about(path, body))

    def _about(self, path: str, body: Any) -> Any:
        if path == "/inference/v1/generate":
            from support.engines.stub import answer_to  # numpy: not before a server is asked for completions

            self.server.asked += 1
            return answer_to(body, self.server.version)
        settings = {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": {"backend": "dppo"},
            "parallel_config": {"worker_extension_cls": "dppo_vllm_extension.WorkerExtension"},
        }
        model = {"architecture": None, "vocab_size": None, "device": "cpu"}
        answers = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "policy", "root": "", "max_model_len": 4096}]},
            "/server_info": {"vllm_config": settings},
            "/weight_info": {"weight_version": self.server.version},
            "/get_world_size": {"world_size": 1},
            "/collective_rpc": {"results": [model]},
            "/weight_checker": {"checksums": {}},
        }
        known = answers | self.server.instead
        if path == "/dppo_workers" and body is not None:
            return {"replicas": [[answer] for answer in self._did(body, known)]}
        if path == "/collective_rpc" and body.get("method") == "dppo_do":
            return {"results": self._did(body["kwargs"], known)}
        return known.get(path, {})

    def _did(self, call: dict[str, Any], known: dict[str, Any]) -> list[Any]:
        """Of all workers; a call that is not the expected one is answered by nobody."""
        if not self.server.did:
            return [{"problem": ""}] * int(known["/get_world_size"]["world_size"])
        expected, answers = self.server.did.pop(0)
        return answers if call["call"] == expected else []

    def _send(self, answer: Any, status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        if __name__ == "__main__":
            print(format % arguments, flush=True)


def fake_python(directory: Path) -> Path:
    """An executable that starts this server whatever module it is asked to run; for `rollout.servers.python`."""
    script = directory / "fake_python"
    file = Path(__file__).resolve()
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{file.parents[2]}" exec "{sys.executable}" "{file}" "$@"\n')
    script.chmod(0o755)
    return script


if __name__ == "__main__":
    given = dict(zip(sys.argv, sys.argv[1:], strict=False))
    FakeVLLM(given["--host"], int(given["--port"]), os.environ["VLLM_API_KEY"]).serve_forever()
