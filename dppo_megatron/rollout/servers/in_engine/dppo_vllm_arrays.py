"""Completions as arrays: what vLLM's /inference/v1/generate gives, without a JSON object for every token.

vLLM's answer takes 168 bytes a token, most of them names: token and log-probability are written twice, as text. Here
both are four bytes, and the server builds no object for a token either (vLLM's own `flat_logprobs`):

    vllm serve ... --middleware dppo_vllm_arrays.Arrays

adds two paths to the application, behind whatever checks keys there; nothing of vLLM is patched. The body is that of
/inference/v1/generate, of which `request_id`, `token_ids`, `sampling_params` are read, `data_parallel_rank`: the
replica that is to answer, and `experts`: whether the answer is to have the routed ones. It has the form of
`dppo_arrays.py`.

GET /dppo_workers gives `dppo_model` of every worker of every replica: with --data-parallel-size, vLLM's /collective_rpc
calls all replicas and returns the answer of the first one only (`DPLBAsyncMPClient.call_utility_async`).

Imports nothing of the package, because it runs in the engine's environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from dppo_arrays import FORM, packed
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

PATH = "/inference/v1/generate_arrays"
WORKERS_PATH = "/dppo_workers"
Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Arrays:
    """ASGI middleware that only uses its place: with the application's first event, its start, the paths are added."""

    def __init__(self, app: App) -> None:
        self._app, self._is_added = app, False

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if not self._is_added and "app" in scope:
            self._is_added = True
            scope["app"].add_route(PATH, answer, methods=["GET", "POST"])
            scope["app"].add_route(WORKERS_PATH, workers, methods=["GET"])
        await self._app(scope, receive, send)


async def workers(request: Request) -> Response:
    """{"replicas": [[one of `dppo_model`'s answers a worker], ...]}."""
    core = request.app.state.engine_client.engine_core
    replicas = await core.call_utility_all_async("collective_rpc", "dppo_model", None, (), None)
    return JSONResponse({"replicas": replicas})


async def answer(request: Request) -> Response:
    """GET: the form of the answers. POST: a request as vLLM's own path takes it, answered as arrays."""
    if request.method == "GET":
        return JSONResponse(FORM)
    engine = request.app.state.engine_client
    try:
        body = await request.json()
        parameters = msgspec.convert(body["sampling_params"], SamplingParams)
        parameters.output_kind, parameters.flat_logprobs = RequestOutputKind.FINAL_ONLY, True
        most = engine.vllm_config.scheduler_config.max_num_seqs
        if parameters.n > most:
            raise ValueError(f"n = {parameters.n}; the server runs at most {most} sequences")
        request_id = f"generate-tokens-{body['request_id']}"
        prompt = TokensPrompt(prompt_token_ids=body["token_ids"])
        replica = body.get("data_parallel_rank")
        output = await _last(engine.generate(prompt, parameters, request_id, data_parallel_rank=replica), request)
    except (KeyError, TypeError, ValueError) as error:  # also vLLM's checks of a request
        return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)
    if output is None or any(one.finish_reason == "error" for one in output.outputs):
        return JSONResponse({"error": {"message": f"{request_id} ended without an answer"}}, 500)
    return Response(
        packed_output(body["request_id"], output, bool(body.get("experts"))), media_type="application/octet-stream"
    )


def packed_output(request_id: str, output: RequestOutput, wants_experts: bool = False) -> bytes:
    """Bytes of all completions in order of their index: head, token ids, log-probabilities, experts."""
    found, experts = [], []
    for one in sorted(output.outputs, key=lambda one: one.index):
        spans = [{"version": s.version, "start": s.start, "end": s.end} for s in one.weight_versions or ()]
        head = {"id": f"{request_id}/{one.index}", "finish_reason": one.finish_reason, "weight_versions": spans}
        flat = one.logprobs  # of each position the sampled token's comes first
        found.append((head, one.token_ids, [flat.logprobs[start] for start in flat.start_indices]))
        experts.append(one.routed_experts if wants_experts else None)
    return packed(found, experts)


async def _last(outputs: AsyncIterator[RequestOutput], request: Request) -> RequestOutput | None:
    """The final output. A client that goes takes its request with it: vLLM aborts what is cancelled."""

    async def finish() -> RequestOutput | None:
        last = None
        async for output in outputs:
            last = output
        return last

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    generating, leaving = asyncio.ensure_future(finish()), asyncio.ensure_future(left())
    try:
        await asyncio.wait((generating, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await generating if generating.done() else None
    finally:
        generating.cancel()
        leaving.cancel()
