"""A colocated server that goes to sleep while another program takes memory of its card."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from dppo_megatron.rollout.servers.http import Http, Refused
from dppo_megatron.rollout.servers.protocol import DEVICE_MEMORY
from dppo_megatron.rollout.servers.vllm import VLLMServer


class Card:
    """What vLLM 0.32 does with its memory, read from its allocator (`device_allocator/cumem.py`), its worker
    (`v1/worker/gpu_worker.py`) and its executor (`v1/executor/abstract.py`)."""

    def __init__(self) -> None:
        self.mapped = {"weights", "kv_cache"}
        self.sleeping_tags: set[str] = set()
        """The executor's belief; it wakes nothing that it believes awake."""
        self.taken_by_others = 0
        """How many more times another program allocates while the worker goes to sleep."""

    def sleep(self, level: int) -> None:
        if "weights" in self.sleeping_tags:
            return
        if level == 2 and "weights" not in self.mapped:
            raise RuntimeError("CUDA error: an illegal memory access")  # it copies the model's buffers first
        self.mapped.clear()
        if self.taken_by_others:
            self.taken_by_others -= 1
            raise AssertionError("Memory usage increased after sleeping.")
        self.sleeping_tags = {"weights", "kv_cache"}

    def wake_up(self, tag: str) -> None:
        if tag in self.sleeping_tags:
            self.sleeping_tags.discard(tag)
            self.mapped.add(tag)


@pytest.fixture
def card() -> Card:
    return Card()


@pytest.fixture
def server(card: Card) -> Iterator[VLLMServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(asked.query).items()}
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                if asked.path == "/sleep":
                    card.sleep(int(query["level"]))
                else:
                    card.wake_up(query["tags"])
                status, said = 200, b"{}"
            except (AssertionError, RuntimeError) as error:  # the engine process lives: a call to it has failed
                status, said = 500, str(error).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        http = Http(f"http://127.0.0.1:{listening.server_port}")
        yield VLLMServer(http)
        http.close()
        listening.shutdown()
        thread.join()


def _wakes(server: VLLMServer, card: Card) -> set[str]:
    for memory in ("weights", "kv_cache"):
        server.wake(memory, timeout_s=30)
    return card.mapped


def test_it_sleeps_and_wakes(server: VLLMServer, card: Card) -> None:
    server.sleep(DEVICE_MEMORY, timeout_s=30)
    assert not card.mapped and _wakes(server, card) == DEVICE_MEMORY


def test_memory_that_another_program_takes_costs_no_server(server: VLLMServer, card: Card) -> None:
    """vLLM frees everything, then refuses because the card has less free memory than before; taken at its word, it
    would be sent weights for memory that it has not mapped again."""
    card.taken_by_others = 1
    server.sleep(DEVICE_MEMORY, timeout_s=30)
    assert not card.mapped and _wakes(server, card) == DEVICE_MEMORY


def test_one_that_refuses_twice_is_not_used(server: VLLMServer, card: Card) -> None:
    """The reason is vLLM's own."""
    card.taken_by_others = 2
    with pytest.raises(Refused, match="Memory usage increased after sleeping"):
        server.sleep(DEVICE_MEMORY, timeout_s=30)
