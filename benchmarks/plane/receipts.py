"""Receipts and requests to servers, with one server and with eight: none may take longer with more servers.

Servers are receivers in processes of their own that wait before they answer. So the figures show whether requests run
in parallel, not how fast this machine hashes.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import torch
from receivers import PipeServer

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.rollout.servers.dialects import VLLMDialect
from dppo_megatron.rollout.servers.fleet import Fleet
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest
from dppo_megatron.rollout.sync.broadcast import BroadcastChannel
from dppo_megatron.rollout.sync.receipts import ask_for_canary
from dppo_megatron.rollout.sync.weight_sync import WeightSync
from plane.common import NO_ROLLOUTS, Bar

PROBE_TIMEOUT_S = 2.0


class _Answering(PipeServer):
    """Generates one canned token, after a while."""

    dialect = VLLMDialect()

    def __init__(self, number: int, answer_s: float) -> None:
        super().__init__(number, answer_s=answer_s)
        self._answer_s = answer_s
        self.http.exchange = self._exchange

    def _exchange(self, path: str, body: bytes, *, timeout_s: float, max_bytes: int) -> bytes:
        self._call("healthy", timeout_s)  # a process that hangs does not generate
        time.sleep(self._answer_s)
        spans = [{"version": "1", "start": 0, "end": 1}]
        choice = {"index": 0, "token_ids": [1], "finish_reason": "stop", "weight_versions": spans}
        choice["logprobs"] = {"content": [{"token": "token_id:1", "logprob": -0.5}]}
        return json.dumps({"request_id": json.loads(body)["request_id"], "choices": [choice]}).encode()


def _times(count: int, hung: int, answer_s: float) -> dict[str, float]:
    """Seconds of each request to `count` servers that answer after `answer_s`, of which the last `hung` hang later."""
    servers = [_Answering(i, answer_s) for i in range(count)]
    config = RolloutConfig(engine="vllm")
    config.sync.verify_every, config.limits.probe_timeout_s = 1, PROBE_TIMEOUT_S
    weights = [("t", torch.randn(1000))]
    try:
        for server in servers:
            server.healthy(timeout_s=120)
        fleet = Fleet(servers, config, NO_ROLLOUTS)  # type: ignore[arg-type]
        sync = WeightSync(config, BroadcastChannel(fleet, "gloo", 1 << 20, 60.0), fleet)
        sync.to(lambda: weights)
        group = GenerateRequest("0-0-0", (1, 2), 1, 0, 4, stop_token_ids=(1,))
        expected = Expected(10, 1, 2)
        found = {
            "checksums": _seconds(lambda: sync.to(lambda: weights)),
            "canary": _seconds(lambda: ask_for_canary(fleet, [group], expected, 30.0)),
        }
        for server in servers[count - hung :]:
            os.kill(server.process.pid, signal.SIGSTOP)
        found["canary, some hung"] = _seconds(lambda: ask_for_canary(fleet, [group], expected, PROBE_TIMEOUT_S))
        answered = len(ask_for_canary(fleet, [group], expected, PROBE_TIMEOUT_S))
        assert answered == count - hung and len(fleet.live) == count, "a server without an answer must stay live"
        for member in fleet.members[count - hung :]:
            fleet.mark_out(member, "hangs")
        found["revive"] = _seconds(fleet.revive)
        return found
    finally:
        for server in servers:
            server.stop()


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def run(smoke: bool) -> list[Bar]:
    """One server against eight (smoke: two)."""
    count, answer_s = (2, 0.1) if smoke else (8, 1.0)
    one, many = _times(1, 0, answer_s), _times(count, count // 2, answer_s)
    bars = [
        Bar("receipts", f"{name}: {count} servers over 1", many[name] / one[name], 1.5, is_time=True)
        for name in ("checksums", "canary")
    ]
    return bars + [
        Bar("receipts", f"{name}, {count // 2} hung: probe time-outs", many[key] / PROBE_TIMEOUT_S, 1.25, is_time=True)
        for name, key in (("canary", "canary, some hung"), ("revive", "revive"))
    ]
