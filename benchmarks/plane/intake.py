"""What it costs to receive the engines' answers, from the socket to the rank's arrays.

Whole path: canned servers in a process of their own, a rollout client, the fleet, and the rank that takes the arrays
over; CPU seconds of the client and of this process, which is rank 0. With 64 servers it runs with 1,024 open files.
"""

from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection

from dppo_megatron.rollout.servers.dispatch import dispatch
from dppo_megatron.rollout.servers.wire import Expected, GenerateRequest, checked
from dppo_megatron.texts import logged
from dppo_megatron.types import ExpertChoices
from plane.canned import COUNT, Canned, request_id
from plane.clients import VOCABULARY, Intake, dialect_of
from plane.common import Bar, cpu_s

_FILES = 1024
_EXPERTS = ExpertChoices(layers=48, per_token=8, count=128)
"""Qwen3-30B-A3B's: 384 bytes a token, which memory holds in addition."""


def run(smoke: bool) -> list[Bar]:
    """The part's bars."""
    bars = []
    tokens = 300 if smoke else 3000
    for engine, most in (("vllm", 0.4), ("vllm_arrays", 0.1), ("sglang", 0.4), ("sglang_arrays", 0.1)):
        bars.append(Bar("intake", f"{engine}: decode and check", _decode(engine, tokens), most, "s/Mtok", is_time=True))
    each = 4 if smoke else 32
    forms = [
        (Canned("vllm", tokens), 8, each),
        (Canned("vllm_arrays", tokens), 8, each),
        (Canned("vllm_arrays", tokens, experts=_EXPERTS), 8, 1 if smoke else 4),
        (Canned("sglang", 30 if smoke else 375), 64, 8 if smoke else 32),
    ]
    for canned, servers, groups_each in forms:
        bars += _apart(canned, servers, groups_each)
    return bars


def _decode(engine: str, tokens: int) -> float:
    group = GenerateRequest(request_id(0), (1, 2), COUNT, 0, max_tokens=tokens)
    dialect = dialect_of(engine)
    content, spent = Canned(engine, tokens).body(request_id(0)), []
    for _ in range(7):  # the minimum counts: on a busy machine other processes evict caches, which costs CPU time too
        began = cpu_s()
        checked(dialect.read([content], group), group, Expected(VOCABULARY, 1, 1))
        spent.append(cpu_s() - began)
    return min(spent) / (COUNT * tokens / 1e6)


def _apart(canned: Canned, servers: int, groups_each: int) -> list[Bar]:
    """Measure in another process: a lowered limit on open files cannot be raised again."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_whole_path, args=(theirs, canned, servers, groups_each)
    )
    process.start()
    bars: list[Bar] = ours.recv()
    process.join()
    return bars


@logged(lambda line: print(f"          {line}"))
def _whole_path(pipe: Connection, canned: Canned, servers: int, groups_each: int) -> None:
    if servers > 8:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    intake, tokens = Intake(canned, servers, groups_each), canned.tokens
    try:
        groups = servers * groups_each
        total = groups * COUNT * tokens
        before_kb = intake.client_status("VmHWM")
        client_s, own_s = intake.client_cpu_s, cpu_s()
        for _ in dispatch(intake.fleet, intake.work(groups)):
            pass
        threads = intake.client_status("Threads")
        arrived = intake.take()
        client_s, own_s = intake.client_cpu_s - client_s, cpu_s() - own_s
        in_flight = (intake.client_status("VmHWM") - before_kb) * 1024 / total
        complete = sum(len(one.completion.token_ids) for one in arrived) / total
        name, cpu, of_rank_0, memory = canned.engine, 1.0, 0.15, 60
        if canned.experts:  # 49 times the bytes
            name, cpu, of_rank_0, memory = f"{name} with experts", 2.0, 0.5, 1000
        label = f"{name}, {servers} servers x {groups_each} groups"
        bars = [
            Bar("intake", f"{label}: all CPU", (client_s + own_s) / (total / 1e6), cpu, "s/Mtok", is_time=True),
            Bar("intake", f"{label}: of that in rank 0", own_s / (total / 1e6), of_rank_0, "s/Mtok", is_time=True),
            # the client's own size dominates when tokens are few
            Bar("intake", f"{label}: memory", in_flight, memory, "B/token", is_time=total < 5e6),
            Bar("intake", f"{label}: threads", threads, 16),
            Bar("intake", f"{label}: share that arrived", complete, 1.0, at_least=True),
        ]
    finally:
        intake.close()
    pipe.send(bars)
