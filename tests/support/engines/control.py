"""Answers to all that is no request for completions: a row for each question or command, and how an answer is damaged.

A row's `good` is what an honest server of that engine answers. `reads` are the values in it that the trainer uses, each
with the damages that are harmless there: a value may honestly be missing or null. What else is damaged must be found.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from support.engines.stub import Asked, Behaviour

Phase = Literal["described", "disk", "ipc", "gloo", "probed", "routed"]
"""When it is asked: a server is new or back; in a weight sync over a channel; a health probe, of a server or router."""
Damage = tuple[str, Behaviour]
OPTIONAL = frozenset(("missing", "null"))
_NOTHING = frozenset(("empty", "null", "an empty object", "204 without an answer", "an unknown field"))
"""What a command may be answered with: none of it says no."""


@dataclass(frozen=True)
class Row:
    engine: str
    path: str
    phase: Phase
    good: Any = field(default_factory=dict)
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By its place in `good` ("data/0/id"), the damages that are harmless."""
    accepts: frozenset[str] = _NOTHING
    """Damages of the whole answer that are none for this row."""

    @property
    def name(self) -> str:
        return f"{self.engine} /{self.path} {self.phase}"

    def damages(self) -> list[tuple[str, Behaviour, bool]]:
        """(name, answer, whether it must be found)."""
        text = json.dumps(self.good)
        found = [(name, behave, name not in self.accepts) for name, behave in _whole(text).items()]
        for place, harmless in self.reads.items():
            for name, change in _values(_at(self.good, place)).items():
                damaged = json.dumps(change(copy.deepcopy(self.good), place))
                found.append((f"{place}: {name}", _page(damaged), name not in harmless))
        return found


def _at(answer: Any, place: str) -> Any:
    for step in place.split("/"):
        answer = answer[int(step) if isinstance(answer, list) else step]
    return answer


def _put(value: Any) -> Callable[[Any, str], Any]:
    def change(answer: Any, place: str) -> Any:
        before, _, last = place.rpartition("/")
        inner = _at(answer, before) if before else answer
        inner[int(last) if isinstance(inner, list) else last] = value
        return answer

    return change


def _drop(answer: Any, place: str) -> Any:
    before, _, last = place.rpartition("/")
    inner = _at(answer, before) if before else answer
    del inner[int(last) if isinstance(inner, list) else last]
    return answer


def _values(good: Any) -> dict[str, Callable[[Any, str], Any]]:
    """Ways in which one value can be wrong, by what it should be."""
    wrong: dict[str, Any] = {
        "null": None,
        "true": True,
        "a list": [good],
        "nested": {"value": good},
        "NaN": float("nan"),
    }
    if isinstance(good, str):
        wrong |= {"a number": 7, "negative": -7, "a fraction": 0.5, "long": "9" * 5000}
    elif isinstance(good, bool):
        del wrong["true"]
        wrong |= {"a number": 1, "text": "true"} | ({"false": False} if good else {})
    elif isinstance(good, int):
        wrong |= {"text": "many", "a number as text": str(good), "a fraction": 0.5, "negative": -1, "huge": 10**30}
        wrong |= {"as a float": float(good), "beyond any server": 1 << 40}
    else:  # an object or a list
        wrong |= {"a number": 7, "text": json.dumps(good)}
    return {"missing": _drop} | {name: _put(value) for name, value in wrong.items()}


def _page(content: str | bytes, status: str = "200 OK", headers: str = "") -> Behaviour:
    async def behave(asked: Asked) -> None:
        await asked.reply(content, status, headers)

    return behave


def _raw(content: bytes) -> Behaviour:
    async def behave(asked: Asked) -> None:
        await asked.raw(content)
        raise ConnectionError

    return behave


_LIST_OF_10_MB = b"[" + b"0," * (5 << 20) + b"0]"


def _whole(text: str) -> dict[str, Behaviour]:
    """Ways in which an answer as a whole can be wrong, of a good one's text."""
    content = text.encode()
    texts: dict[str, str | bytes] = {
        "empty": "",
        "null": "null",
        "an empty object": "{}",
        "an unknown field": '{"unknown": 7}',
        "white space and a letter": " \n x",
        "html": "<html><body>502 Bad Gateway</body></html>",
        "words": "OK",
        "text": '"done"',
        "a number": "7",
        "a huge number": "9" * 400,
        "minus infinity": "-Infinity",
        "NaN": "NaN",
        "true": "true",
        "false": "false",
        "an empty list": "[]",
        "in a list": f"[{text}]",
        "not UTF-8": b"\xff\xfe\x00\xd8",
        "UTF-16": text.encode("utf-16"),
        "with a byte order mark": b"\xef\xbb\xbf" + content,
        "truncated": content[:-1],
        "twice": content * 2,
        "and a brace": content + b"}",
        "python's repr": f"{{'a': {json.loads(text)!r}}}",
        "keys without quotes": "{ok: true}",
        "a control character": b'{"a": "\x00"}',
        "brackets": "[" * 100_000,
        "nested deeply": '{"a":' * 100_000 + "1" + "}" * 100_000,
        "10 MB of zeros": _LIST_OF_10_MB,
        "100 kB of text": b'"' + b"x" * 100_000 + b'"',
        "an error with status 200": '{"error": {"message": "out of memory"}}',
    }
    return {name: _page(value) for name, value in texts.items()} | {
        "204 without an answer": _page("", "204 No Content"),
        "302 to itself": _page(text, "302 Found", "Location: /\r\n"),
        "307 elsewhere": _page(text, "307 Temporary Redirect", "Location: http://127.0.0.1:1/\r\n"),
        "304": _page("", "304 Not Modified"),
        "400": _page('{"error": "no"}', "400 Bad Request"),
        "401": _page('{"error": "no key"}', "401 Unauthorized"),
        "404": _page("not found", "404 Not Found"),
        "500 with a good answer": _page(text, "500 Internal Server Error"),
        "502 in html": _page("<html>" * 1000, "502 Bad Gateway"),
        "503": _page('{"detail": {"message": "busy"}}', "503 Service Unavailable"),
        "compressed": _page(b"\x1f\x8b\x08\x00" + b"\x00" * 20, headers="Content-Encoding: gzip\r\n"),
    }


_REFUSALS = frozenset(("302 to itself", "307 elsewhere", "304", "400", "401", "404", "500 with a good answer"))
_REFUSALS |= {"502 in html", "503"}
NO_ANSWERS: dict[str, Behaviour] = {
    "closes at once": _raw(b""),
    "no HTTP": _raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a header without a colon": _raw(b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n{"),
    "half of it": _raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n{"),
}
"""Of which a new server is not told apart from one that has not started yet."""

_SAYS_NO = {"success": frozenset(("missing",))}
_FOUND: frozenset[str] = frozenset()
_WORKER = {
    "architecture": "Qwen3ForCausalLM",
    "vocab_size": 19,
    "place": 0,
    "device": "cpu",
    "nccl": {"version": "2.28"},
}
_WORKER_READS = {name: OPTIONAL & {"null"} for name in ("architecture", "vocab_size")}
_WORKER_READS |= {"device": _FOUND, "place": frozenset(("missing",)), "nccl": frozenset(("missing",))}
_WORKER_READS |= {"nccl/version": frozenset(("missing",))}
_DID = {"results": [{"problem": ""}]}
_DID_READS = {"results": _FOUND, "results/0": _FOUND, "results/0/problem": _FOUND}
_DIGESTS = {"dp0:pp0:pcp0:tp0:other": "ab" * 32}


def _command(engine: str, phase: Phase, *paths: str) -> list[Row]:
    return [Row(engine, path, phase, {"success": True}, _SAYS_NO) for path in paths]


def _under(place: str, reads: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    return {f"{place}/{name}": harmless for name, harmless in reads.items()}


VLLM_SETTINGS = {
    "model_config": {"logprobs_mode": "processed_logprobs"},
    "weight_transfer_config": {"backend": "dppo"},
    "parallel_config": {"worker_extension_cls": "dppo_vllm_extension.WorkerExtension", "data_parallel_size": 1},
    "scheduler_config": {"enable_chunked_prefill": False},
    "device_config": {"device": "cpu"},
    "aux_output_config": {"enable_return_routed_experts": False},
    "speculative_config": {"method": "ngram"},
}
_MISSING = frozenset(("missing",))
ROWS = [
    Row("vllm", "health", "probed"),
    Row("vllm", "version", "described", {"version": "0.32.0"}, {"version": _FOUND}, _FOUND),
    Row(
        "vllm",
        "v1/models",
        "described",
        {"data": [{"id": "policy", "root": "/no/such/model", "max_model_len": 4096}]},
        {"data": _FOUND, "data/0/id": _FOUND, "data/0/root": OPTIONAL, "data/0/max_model_len": OPTIONAL},
        _FOUND,
    ),
    Row(
        "vllm",
        "server_info",
        "described",
        {"vllm_config": VLLM_SETTINGS},
        {
            "vllm_config": _FOUND,
            "vllm_config/model_config": frozenset(("nested",)),
            "vllm_config/model_config/logprobs_mode": _MISSING,
            "vllm_config/weight_transfer_config": OPTIONAL | {"nested"},
            "vllm_config/parallel_config/worker_extension_cls": _MISSING,
            "vllm_config/parallel_config/data_parallel_size": _MISSING,
            "vllm_config/scheduler_config/enable_chunked_prefill": _MISSING,
            "vllm_config/device_config/device": _MISSING,
            "vllm_config/aux_output_config/enable_return_routed_experts": _MISSING,
            "vllm_config/speculative_config": OPTIONAL | {"nested"},
        },
        _FOUND,
    ),
    Row("vllm", "weight_info", "described", {"weight_version": "default"}, {"weight_version": _FOUND}, _FOUND),
    Row(
        "vllm",
        "inference/v1/generate_arrays",
        "described",
        {"form": 2},
        {"form": frozenset(("missing", "negative", "huge", "beyond any server"))},
        _NOTHING | {"404"},
    ),
    Row("vllm", "get_world_size", "described", {"world_size": 1}, {"world_size": _FOUND}, _FOUND),
    Row(
        "vllm",
        "dppo_workers",
        "described",
        {"replicas": [[_WORKER]]},
        {"replicas": _FOUND, "replicas/0": _FOUND, "replicas/0/0": _FOUND, **_under("replicas/0/0", _WORKER_READS)},
        _FOUND,
    ),
    Row(
        "vllm",
        "collective_rpc",
        "described",
        {"results": [_WORKER]},
        {"results": _FOUND, "results/0": _FOUND, **_under("results/0", _WORKER_READS)},
        _FOUND,
    ),
    *_command("vllm", "disk", "sleep", "wake_up", "pause", "resume", "reset_prefix_cache", "update_weight_version"),
    Row("vllm", "collective_rpc", "disk", _DID, _DID_READS, _FOUND),
    Row("vllm", "collective_rpc", "ipc", _DID, _DID_READS, _FOUND),
    Row("vllm", "collective_rpc", "gloo", _DID, _DID_READS, _FOUND),
    Row("vllm", "weight_info", "disk", {"weight_version": "1"}, {"weight_version": _FOUND}, _FOUND),
    Row(
        "vllm",
        "weight_checker",
        "disk",
        {"checksums": _DIGESTS},
        {"checksums": _FOUND, f"checksums/{next(iter(_DIGESTS))}": _MISSING},
        _FOUND,
    ),
    Row("sglang", "server_info", "probed", accepts=_NOTHING | {"404"}),
    Row(
        "sglang",
        "server_info",
        "described",
        {
            "version": "0.5.23",
            "model_path": "/no/such/model",
            "enable_deterministic_inference": False,
            "speculative_algorithm": "NGRAM",
            "device": "cpu",
            "tp_size": 1,
            "dp_size": 1,
            "attn_dp_size": 1,
            "pp_size": 1,
            "context_length": 4096,
            "max_req_input_len": 4090,
            "speculative_eagle_topk": 1,
            "speculative_num_steps": 1,
            "speculative_num_draft_tokens": 5,
            "sampling_mask_max_tokens": 19,
        },
        {
            "version": _FOUND,
            "model_path": _MISSING,
            "tp_size": _MISSING,
            "dp_size": _MISSING,
            "attn_dp_size": _MISSING,
            "pp_size": _MISSING,
            **dict.fromkeys(("enable_deterministic_inference", "speculative_algorithm", "device"), OPTIONAL),
            **dict.fromkeys(("context_length", "max_req_input_len", "sampling_mask_max_tokens"), OPTIONAL),
            **dict.fromkeys(("speculative_eagle_topk", "speculative_num_steps"), OPTIONAL),
            "speculative_num_draft_tokens": OPTIONAL,
        },
        _FOUND,
    ),
    Row(
        "sglang",
        "model_info",
        "described",
        {"model_path": "/no/such/model", "architectures": ["Qwen3ForCausalLM"]},
        {"model_path": _MISSING, "architectures": OPTIONAL},
        _NOTHING | {"an error with status 200"},
    ),
    Row(
        "sglang",
        "generate_arrays",
        "described",
        {"form": 2},
        {"form": frozenset(("missing", "negative", "huge", "beyond any server"))},
        _NOTHING | {"404"},
    ),
    Row(
        "sglang",
        "dppo_nccl",
        "described",
        {"version": "2.28.9"},
        {"version": _MISSING},
        _NOTHING - {"an unknown field"} | {"404"},
    ),
    *_command("sglang", "disk", "pause_generation", "continue_generation", "update_weights_from_disk"),
    *_command("sglang", "disk", "release_memory_occupation", "resume_memory_occupation"),
    *_command("sglang", "ipc", "begin_weight_update", "update_weights_from_tensor", "end_weight_update"),
    *_command("sglang", "ipc", "update_weight_version"),
    *_command("sglang", "gloo", "init_weights_update_group"),
    Row(  # it may have been started again since, and has no group to leave
        "sglang",
        "destroy_weights_update_group",
        "gloo",
        {"success": True},
        {"success": frozenset(("missing", "false"))},
        _NOTHING | _REFUSALS | {"an error with status 200"},
    ),
    *_command("sglang", "gloo", "update_weights_from_distributed"),
    Row("sglang", "model_info", "disk", {"weight_version": "1"}, {"weight_version": _FOUND}, _FOUND),
    Row(
        "sglang",
        "weights_checker",
        "disk",
        {"success": True, "ranks": [{"checksums": {"other": "ab" * 8}}]},
        {"ranks": _FOUND, "ranks/0": _MISSING, "ranks/0/checksums": _FOUND, "ranks/0/checksums/other": _MISSING},
        _FOUND,
    ),
    Row(
        "vllm",
        "workers",
        "routed",
        {"workers": [{"url": "http://127.0.0.1:8000"}]},
        {"workers": _FOUND, "workers/0": _FOUND, "workers/0/url": _FOUND},
        _FOUND,
    ),
]
