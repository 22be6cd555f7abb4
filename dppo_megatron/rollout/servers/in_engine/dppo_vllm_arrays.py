"""Completions as arrays: the answer of vLLM's /inference/v1/generate, without a JSON object for every token.

vLLM's answer takes 168 bytes per token, most of them field names; token and log-probability are written twice, as text.
Here both are four bytes, and the server creates no object per token either (vLLM's own `flat_logprobs`):

    vllm serve ... --middleware dppo_vllm_arrays.Arrays

adds two paths to the application, behind any middleware that checks keys; nothing in vLLM is patched. Of the request,
in the form of /inference/v1/generate, it reads `request_id`, `token_ids`, `sampling_params`, `data_parallel_rank` (the
replica that is to answer) and `experts` (whether to return them). The answer has the form of `dppo_arrays.py`.

GET /dppo_workers returns `dppo_model` of every worker of every replica, and in the development mode POST the answers of
`dppo_do` to the body's arguments: with --data-parallel-size, vLLM's /collective_rpc calls all replicas but returns only
the first one's answer (`DPLBAsyncMPClient.call_utility_async`).

Imports nothing of the package, because it runs in the engine's environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from dppo_arrays import FORM, packed
from dppo_vllm_guard import App, Message, Receive, Send
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm import SamplingParams, envs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

PATH = "/inference/v1/generate_arrays"
WORKERS_PATH = "/dppo_workers"


class Arrays:
    """ASGI middleware that adds the paths at the application's first event, its startup, and passes everything on."""

    def __init__(self, app: App) -> None:
        self._app, self._is_added = app, False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if not self._is_added and "app" in scope:
            self._is_added = True
            scope["app"].add_route(PATH, answer, methods=["GET", "POST"])
            methods = ["GET", "POST"] if envs.VLLM_SERVER_DEV_MODE else ["GET"]
            scope["app"].add_route(WORKERS_PATH, workers, methods=methods)
        await self._app(scope, receive, send)


async def workers(request: Request) -> Response:
    """{"replicas": [[answer per worker], ...]}."""
    core = request.app.state.engine_client.engine_core
    call = ("dppo_do", None, (), await request.json()) if request.method == "POST" else ("dppo_model", None, (), None)
    replicas = await core.call_utility_all_async("collective_rpc", *call)
    return JSONResponse({"replicas": replicas})


async def answer(request: Request) -> Response:
    """GET: the version of the answers' form. POST: a request as for vLLM's own path, answered as arrays."""
    if request.method == "GET":
        return JSONResponse(FORM)
    engine = request.app.state.engine_client
    try:
        body = await request.json()
        parameters = msgspec.convert(body["sampling_params"], SamplingParams)
        parameters.output_kind, parameters.flat_logprobs = RequestOutputKind.FINAL_ONLY, True
        max_num_seqs = engine.vllm_config.scheduler_config.max_num_seqs
        if parameters.n > max_num_seqs:
            raise ValueError(f"n = {parameters.n}; the server runs at most {max_num_seqs} sequences")
        request_id = f"generate-tokens-{body['request_id']}"
        prompt = TokensPrompt(prompt_token_ids=body["token_ids"])
        replica = body.get("data_parallel_rank")
        output = await _last(engine.generate(prompt, parameters, request_id, data_parallel_rank=replica), request)
    except (KeyError, TypeError, ValueError) as error:  # vLLM's own checks of the request raise these too
        return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)
    if output is None or any(one.finish_reason == "error" for one in output.outputs):
        return JSONResponse({"error": {"message": f"{request_id} ended without an answer"}}, 500)
    return Response(
        packed_output(body["request_id"], output, bool(body.get("experts"))), media_type="application/octet-stream"
    )


def packed_output(request_id: str, output: RequestOutput, wants_experts: bool = False) -> bytes:
    """All completions, in order of their index, in the form of `dppo_arrays.py`."""
    answers, experts = [], []
    for one in sorted(output.outputs, key=lambda one: one.index):
        spans = [{"version": s.version, "start": s.start, "end": s.end} for s in one.weight_versions or ()]
        head = {"id": f"{request_id}/{one.index}", "finish_reason": one.finish_reason, "weight_versions": spans}
        flat = one.logprobs  # at each position, the sampled token's is first
        answers.append((head, one.token_ids, [flat.logprobs[start] for start in flat.start_indices]))
        experts.append(one.routed_experts if wants_experts else None)
    return packed(answers, experts)


async def _last(outputs: AsyncIterator[RequestOutput], request: Request) -> RequestOutput | None:
    """The final output; None if the client disconnects, in which case vLLM aborts the cancelled request."""

    async def finish() -> RequestOutput | None:
        last = None
        async for output in outputs:
            last = output
        return last

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    generating, disconnecting = asyncio.ensure_future(finish()), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((generating, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        return await generating if generating.done() else None
    finally:
        generating.cancel()
        disconnecting.cancel()
