"""Runs in vLLM's environment: an engine of two workers, and calls in which the first worker fails.

python -m queued_answers

Executor and workers are vLLM's own, with lists for their queues. Prints what the executor is told of such a call, and
of the next one, with an exception and with `dppo_do`.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from dppo_vllm_extension import WorkerExtension
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


def told(method: str, first: dict[str, Any], second: dict[str, Any]) -> list[Any]:
    """Of two calls, one after the other, to a new engine."""
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
    answers: list[Any] = []
    for kwargs in (first, second):
        try:
            answers.append(executor.collective_rpc(method, kwargs=kwargs))
        except RuntimeError as error:
            answers.append(str(error).split(",")[0])
    return answers


buckets: list[dict[str, Any]] = [{"bucket": 1}, {"bucket": 2}]
calls = [{"method": "update_weights", "arguments": bucket} for bucket in buckets]
print(json.dumps({"raised": told("update_weights", *buckets), "did": told("dppo_do", *calls)}))
