"""Runs in vLLM's environment: an engine of two workers, and calls in which the first worker fails.

python -m queued_answers

Executor and workers are vLLM's own, with lists for their queues. Prints what the executor is told of such a call, and
of the next one, with an exception and with `dppo_do`; what vLLM's older executor for Ray is told of the first; and what
our path answers of two such engines, in vLLM's development mode and outside it.
"""

from __future__ import annotations

import ast
import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dppo_vllm_arrays import WORKERS_PATH, Arrays
from dppo_vllm_extension import WorkerExtension
from starlette.applications import Starlette
from starlette.testclient import TestClient
from vllm import envs
from vllm.v1.executor import ray_utils
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc


class Queue(deque[Any]):
    """In place of one in shared memory."""

    enqueue = deque.append

    def dequeue(self, timeout: float | None = None) -> Any:
        """The oldest."""
        return self.popleft()


class Worker(WorkerExtension):
    """One that takes weights."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def update_weights(self, bucket: int) -> str:
        """Fails at the first worker, for the first bucket."""
        if (self.rank, bucket) == (0, 1):
            raise RuntimeError("no memory")
        return f"bucket {bucket}"


def engine() -> MultiprocExecutor:
    """A new one."""
    workers = []
    for rank in range(2):
        worker = WorkerProc.__new__(WorkerProc)
        worker.rank, worker.worker, worker.use_async_scheduling = rank, Worker(rank), False
        worker.worker_response_mq = Queue()
        workers.append(worker)

    class Broadcast:
        """To all workers, which do it at once."""

        def enqueue(self, request: Any) -> None:
            for worker in workers:
                worker._execute_worker_rpc(request)

    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed, executor.futures_queue, executor.rpc_broadcast_mq = False, deque(), Broadcast()
    executor.response_mqs = [worker.worker_response_mq for worker in workers]
    executor.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=False))
    return executor


def told(method: str, first: dict[str, Any], second: dict[str, Any]) -> list[Any]:
    """Of two calls, one after the other."""
    executor, answers = engine(), []
    for kwargs in (first, second):
        try:
            answers.append(executor.collective_rpc(method, kwargs=kwargs))
        except RuntimeError as error:
            answers.append(str(error).split(",")[0])
    return answers


def told_by_ray(call: dict[str, Any]) -> Any:
    """By the method through which it calls a worker's. Without Ray its class is not made, so it is taken from there."""
    nodes = ast.walk(ast.parse(Path(ray_utils.__file__).read_text()))
    [method] = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "execute_method"]
    names = dict(vars(ray_utils))
    exec(compile(ast.Module([method], []), ray_utils.__file__, "exec"), names)
    return names["execute_method"](Worker(0), "dppo_do", **call)


def posted(call: dict[str, Any], *, developing: bool) -> Any:
    """Our path's answer."""
    engines = [engine(), engine()]

    async def call_utility_all_async(method: str, *arguments: Any) -> list[Any]:
        return [getattr(one, method)(*arguments) for one in engines]

    envs.VLLM_SERVER_DEV_MODE = developing
    app = Starlette()
    app.state.engine_client = SimpleNamespace(
        engine_core=SimpleNamespace(call_utility_all_async=call_utility_all_async)
    )
    app.add_middleware(Arrays)
    with TestClient(app) as client:
        answer = client.post(WORKERS_PATH, json=call)
        return answer.json() if answer.is_success else answer.status_code


buckets: list[dict[str, Any]] = [{"bucket": 1}, {"bucket": 2}]
calls = [{"call": "update_weights", "arguments": bucket} for bucket in buckets]
found = {"raised": told("update_weights", *buckets), "did": told("dppo_do", *calls)}
found["ray"] = told_by_ray(calls[0])
found["posted"] = [posted(calls[0], developing=developing) for developing in (True, False)]
print(json.dumps(found))
