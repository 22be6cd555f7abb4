"""SGLang's server with a check of its key at every path, and a path for answers as arrays.

    DPPO_SERVER_KEY=... python dppo_sglang_server.py ARGUMENTS OF sglang.launch_server

SGLang takes a key on its command line only, where every user of the machine can read it, and writes its arguments, the
key among them, to its log. Here the key comes from the environment and goes to a middleware of the application's
alone, before SGLang starts it. POST /generate_arrays takes what /generate takes, and answers in the form of
`dppo_arrays.py`. Nothing of SGLang is patched.

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
    """A batch of completions; SGLang itself ends those whose client has gone."""
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
    except (TypeError, ValueError) as error:  # also SGLang's checks of a request
        return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)
    try:
        content = packed_answers(answers, _per_token() if batch.return_routed_experts else None)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:  # the server's fault, not the request's
        return JSONResponse({"error": {"message": f"{type(error).__name__}: {error}"}}, 500)
    return Response(content, media_type="application/octet-stream")


async def nccl_settings(_: Any) -> Any:
    """NCCL's version and variables: the schedulers inherit this process's, which SGLang has set by then."""
    from dppo_wire import nccl_settings as settings
    from starlette.responses import JSONResponse

    return JSONResponse(settings())


def _per_token() -> tuple[int, int, str]:
    """Layers of the model, experts that a token visits in one, and the type that holds the number of each."""
    from sglang.srt.entrypoints.http_server import get_global_state

    config = get_global_state().tokenizer_manager.model_config.hf_text_config
    count = getattr(config, "num_local_experts", None) or config.num_experts
    return config.num_hidden_layers, config.num_experts_per_tok, "uint8" if count <= 256 else "uint16"


def packed_answers(answers: Sequence[dict[str, Any]], per_token: tuple[int, int, str] | None = None) -> bytes:
    """The answer's bytes. Log-probabilities are those under a cut where they were asked for.

    Args:
        per_token: layers, experts and type of the routed experts; None: they were not asked for.

    Raises:
        ValueError: log-probabilities of other tokens than are returned, which the arrays would not show.
    """
    found, experts = [], []
    for answer in answers:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        triples = meta.get("output_token_logprobs") or []
        if triples and [token for _, token, *_ in triples] != list(tokens):
            raise ValueError(f"{meta['id']}: its log-probabilities are of other tokens than it returns")
        values = meta.get("output_token_sampling_logprobs")
        reason = (meta.get("finish_reason") or {}).get("type")
        spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}]
        head = {"id": meta["id"], "finish_reason": reason, "weight_versions": spans}
        found.append((head, tokens, [triple[0] for triple in triples] if values is None else values))
        encoded = meta.get("routed_experts")
        experts.append(None if per_token is None or encoded is None else _routed(encoded, *per_token))
    return packed(found, experts)


def _routed(encoded: str, layers: int, k: int, kind: str) -> Any:
    """[tokens, layers, k] of SGLang's int32 in base64. Raises ValueError for what the type cannot hold: made to fit,
    -1 or 300 could be an expert of the model."""
    import numpy

    whole = numpy.frombuffer(base64.b64decode(encoded), "<i4").reshape(-1, layers, k)
    if whole.size and not 0 <= whole.min() <= whole.max() <= numpy.iinfo(kind).max:
        raise ValueError(f"routed experts from {whole.min()} to {whole.max()}")
    return whole.astype(kind)


def _adaptive(lengths: str) -> list[str]:
    """SGLang reads draft lengths by concurrency from a file, in all its processes: one in memory, that ends with this
    one."""
    if not lengths:
        return []
    file = os.memfd_create("draft lengths")
    os.write(file, lengths.encode())
    return ["--speculative-adaptive", "--speculative-adaptive-config", f"/proc/{os.getpid()}/fd/{file}"]


def main() -> None:
    """What `sglang.launch_server` does, behind the check."""
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    arguments = prepare_server_args([*sys.argv[1:], *_adaptive(os.environ.get(DRAFT_LENGTHS, ""))])
    if getattr(arguments, "tokenizer_worker_num", 1) > 1:
        # its workers import the application afresh, without the check
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
