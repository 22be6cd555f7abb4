"""SGLang's server with a check of its key at every path, and a path for answers as arrays.

    DPPO_SERVER_KEY=... python dppo_sglang_server.py ARGUMENTS OF sglang.launch_server

SGLang takes a key only on its command line, which every user of the machine can read, and writes its arguments with the
key to its log. Here the key comes from the environment, and only a middleware that is added to the application before
SGLang starts it gets the key. POST /generate_arrays takes the same body as /generate and answers in the form of
`dppo_arrays.py`. Nothing in SGLang is patched.

Imports nothing of the package, because it runs in the engine's environment.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Sequence
from typing import Any

from dppo_arrays import FORM, packed
from dppo_vllm_guard import RequireKey

KEY_VARIABLE = "DPPO_SERVER_KEY"
ARRAYS_PATH = "/generate_arrays"
NCCL_PATH = "/dppo_nccl"
DRAFT_LENGTHS = "DPPO_DRAFT_LENGTHS"


async def generate_arrays(request: Any) -> Any:
    """A batch of completions. SGLang itself aborts them if the client disconnects."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import GenerateReqInput
    from starlette.responses import JSONResponse, Response

    if request.method == "GET":
        return JSONResponse(FORM)
    try:
        batch = GenerateReqInput(**await request.json())
        if not isinstance(batch.rid, list) or batch.stream:
            raise ValueError("expected a batch with a list of rids, not streamed")
        answers = await get_global_state().tokenizer_manager.generate_request(batch, request).__anext__()
    except (TypeError, ValueError) as error:  # SGLang's own checks of the request raise these too
        return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)
    try:
        content = packed_answers(answers, _per_token() if batch.return_routed_experts else None)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:  # the server's fault, not the request's
        return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 500)
    return Response(content, media_type="application/octet-stream")


async def nccl_settings(_: Any) -> Any:
    """NCCL's version and variables. SGLang has set this process's by now, and the schedulers inherit them."""
    from dppo_wire import nccl_settings as settings
    from starlette.responses import JSONResponse

    return JSONResponse(settings())


def _per_token() -> tuple[int, int, str]:
    """Number of layers, experts per token and layer, and the type of an expert's number."""
    from sglang.srt.entrypoints.http_server import get_global_state

    config = get_global_state().tokenizer_manager.model_config.hf_text_config
    count = getattr(config, "num_local_experts", None) or config.num_experts
    return config.num_hidden_layers, config.num_experts_per_tok, "uint8" if count <= 256 else "uint16"


def packed_answers(answers: Sequence[dict[str, Any]], per_token: tuple[int, int, str] | None = None) -> bytes:
    """The answer's bytes. Log-probabilities are those under a cut if these were requested; ValueError if they are of
    other tokens, which the arrays would not show. `per_token`: layers, experts and type of the routed experts; None:
    not requested."""
    completions, experts = [], []
    for answer in answers:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        triples = meta.get("output_token_logprobs") or []
        if triples and [token for _, token, *_ in triples] != list(tokens):
            raise ValueError(f"{meta['id']}: its log-probabilities are of other tokens than it returns")
        values = meta.get("output_token_sampling_logprobs")
        reason = (meta.get("finish_reason") or {}).get("type")
        spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}]
        head = {"id": meta["id"], "finish_reason": reason, "weight_versions": spans}
        completions.append((head, tokens, [triple[0] for triple in triples] if values is None else values))
        encoded = meta.get("routed_experts")
        experts.append(None if per_token is None or encoded is None else _routed(encoded, *per_token))
    return packed(completions, experts)


def _routed(encoded: str, layers: int, k: int, kind: str) -> Any:
    """[tokens, layers, k] from SGLang's int32 in base64. Raises ValueError for values that `kind` cannot hold: a cast
    could turn -1 or 300 into an expert of the model."""
    import numpy

    whole = numpy.frombuffer(base64.b64decode(encoded), "<i4").reshape(-1, layers, k)
    if whole.size and not 0 <= whole.min() <= whole.max() <= numpy.iinfo(kind).max:
        raise ValueError(f"routed experts from {whole.min()} to {whole.max()}")
    return whole.astype(kind)


def _adaptive(lengths: str) -> list[str]:
    """Arguments with the file from which all of SGLang's processes read draft lengths by concurrency."""
    if not lengths:
        return []
    file = os.memfd_create("draft lengths")  # in memory: it ends with this process
    os.write(file, lengths.encode())
    return ["--speculative-adaptive", "--speculative-adaptive-config", f"/proc/{os.getpid()}/fd/{file}"]


def main() -> None:
    """As `sglang.launch_server`, with the check and the added paths."""
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    arguments = prepare_server_args([*sys.argv[1:], *_adaptive(os.environ.get(DRAFT_LENGTHS, ""))])
    if getattr(arguments, "tokenizer_worker_num", 1) > 1:
        # each of its workers imports the application anew, without the check
        raise SystemExit("dppo_sglang_server: --tokenizer-worker-num above 1 would leave the server without its key")
    http_server.app.add_route(ARRAYS_PATH, generate_arrays, methods=["GET", "POST"])
    http_server.app.add_route(NCCL_PATH, nccl_settings, methods=["GET"])
    http_server.app.add_middleware(RequireKey, variable=KEY_VARIABLE)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
