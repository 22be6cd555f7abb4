"""How requests for completions are encoded for each engine, and how its answers are decoded: bytes only, no sockets.

Decoding is typed (msgspec): unread fields are skipped, and the error for a wrong type names its position. Decoding the
same bytes into dictionaries takes 27 times the CPU time (docs/data_plane.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np

from dppo_megatron.rollout.servers.http import BadAnswer, decoded
from dppo_megatron.rollout.servers.wire import Call, GenerateRequest, Sampled, VersionSpan, as_sampled

# ----------------------------------------------------------------------------------- arrays (in_engine/dppo_arrays.py)


_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _ArraysAnswer(msgspec.Struct):
    """The header's entry for one completion."""

    id: str
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None
    experts: tuple[Literal["uint8", "uint16"], _Size, _Size, _Size] | None = None
    """Type and shape of its routed experts, which follow all log-probabilities."""


class _ArraysHeader(msgspec.Struct):
    answers: list[_ArraysAnswer]


_ARRAYS_DECODER = msgspec.json.Decoder(_ArraysHeader)


def _from_arrays(content: bytes, group: GenerateRequest) -> list[Sampled]:
    """Completions from the form of `dppo_arrays.py`: after the header all token ids, then all log-probabilities."""
    start = 4 + int.from_bytes(content[:4], "little")
    answers, body = decoded(_ARRAYS_DECODER, content[4:start]).answers, memoryview(content)[start:]
    _check_count(group.count, len(answers))
    total = sum(answer.tokens for answer in answers)
    sizes = [math.prod(one.experts[1:]) * np.dtype(one.experts[0]).itemsize if one.experts else 0 for one in answers]
    if len(body) != 8 * total + sum(sizes):
        and_experts = f" and {sum(sizes)} bytes of experts" if sum(sizes) else ""
        raise BadAnswer(f"{len(body)} bytes of arrays for {total} tokens{and_experts}")
    tokens, logprobs = np.frombuffer(body, "<i4", total), np.frombuffer(body, "<f4", total, 4 * total)
    completions, first, offset = [], 0, 8 * total
    for index, (answer, size) in enumerate(zip(answers, sizes, strict=True)):
        _check_id(answer.id, _rid(group, index))
        own, experts = slice(first, first + answer.tokens), None
        if answer.experts is not None and group.experts is not None:
            kind, *shape = answer.experts
            experts = np.frombuffer(body[offset : offset + size], np.dtype(kind).newbyteorder("<")).reshape(shape)
        spans = answer.weight_versions or ()
        completions.append(as_sampled(tokens[own], logprobs[own], answer.finish_reason, spans, experts))
        first, offset = own.stop, offset + size
    return completions


def _check_count(expected: int, count: int) -> None:
    if count != expected:
        raise BadAnswer(f"{count} completions instead of {expected}")


def _check_id(received: str, rid: str) -> None:
    if received != rid:
        raise BadAnswer(f"it answers request {received[:80]!r} instead of {rid!r}")


def _rid(group: GenerateRequest, index: int) -> str:
    return f"{group.request_id}/{index}"


# ------------------------------------------------------------------------------------------------------------ vLLM


class _VLLMToken(msgspec.Struct, gc=False):
    logprob: float


class _VLLMLogprobs(msgspec.Struct, gc=False):
    content: list[_VLLMToken] | None = None


class _VLLMChoice(msgspec.Struct):
    index: int
    token_ids: list[int] | None = None
    logprobs: _VLLMLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class _VLLMAnswer(msgspec.Struct):
    request_id: str
    choices: list[_VLLMChoice]


_VLLM_DECODER = msgspec.json.Decoder(_VLLMAnswer)
_VLLM_PREFIX = "generate-tokens-"
"""vLLM prepends this to a request's id."""


VLLM_ARRAYS_PATH = "/inference/v1/generate_arrays"
VLLM_WORKERS_PATH = "/dppo_workers"


class VLLMDialect(msgspec.Struct, frozen=True, tag="vllm"):
    """POST /inference/v1/generate, one request with n = group.count (0.32), or one per completion if these have limits
    of their own, since n completions share their parameters."""

    seeded: bool = True
    arrays: bool = False
    """The server has our path for answers as arrays (`in_engine/dppo_vllm_arrays.py`)."""

    def rounds(self, group: GenerateRequest) -> list[list[Call]]:
        path = VLLM_ARRAYS_PATH if self.arrays else "/inference/v1/generate"
        return [[Call(path, msgspec.json.encode(vllm_body(one, self.seeded))) for one in group.each()]]

    def abort_calls(self, group: GenerateRequest) -> list[Call]:
        """One call with the ids with and without vLLM's prefix: it ignores those that it does not know."""
        ids = [f"{prefix}{one.request_id}" for one in group.each() for prefix in ("", _VLLM_PREFIX)]
        return [Call("/abort_requests", msgspec.json.encode({"request_ids": ids}))]

    def read(self, answers: Sequence[bytes], group: GenerateRequest) -> list[Sampled]:
        """The completions in the order of their indices."""
        each = zip(answers, group.each(), strict=True)
        return [sampled for content, one in each for sampled in self._read_one(content, one)]

    def _read_one(self, content: bytes, group: GenerateRequest) -> list[Sampled]:
        if self.arrays:
            return _from_arrays(content, group)
        answer = decoded(_VLLM_DECODER, content)
        if answer.request_id.removeprefix(_VLLM_PREFIX) != group.request_id:
            raise BadAnswer(f"it answers request {answer.request_id[:80]!r}")
        indices = [choice.index for choice in answer.choices]
        if sorted(indices) != list(range(group.count)):
            raise BadAnswer(f"completions with the indices {indices[:8]} for a request of {group.count}")
        completions = []
        for choice in sorted(answer.choices, key=lambda choice: choice.index):
            logprobs = choice.logprobs.content if choice.logprobs is not None else None
            values = [token.logprob for token in logprobs or ()]
            tokens, spans = choice.token_ids or (), choice.weight_versions or ()
            completions.append(as_sampled(tokens, values, choice.finish_reason, spans))
        return completions


def vllm_body(group: GenerateRequest, seeded: bool) -> dict[str, Any]:
    """One request for all completions of a group. `seeded`: send a seed, of which each completion is a function."""
    # every parameter is set: vLLM takes missing ones from the served model's generation_config.json
    return {
        "request_id": group.request_id,
        "token_ids": group.prompt_ids,
        "sampling_params": {
            "n": group.count,
            "max_tokens": group.max_tokens,
            "min_tokens": 0,
            "temperature": group.temperature,
            "top_p": group.top_p,
            "top_k": group.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": group.stop_token_ids,
            "seed": group.seed if seeded else None,
            "logprobs": 0,
            "detokenize": False,
        },
        # read by our path only
        **({} if group.replica is None else {"data_parallel_rank": group.replica}),
        **({} if group.experts is None else {"experts": True}),
    }


# ---------------------------------------------------------------------------------------------------------- SGLang


class _Reason(msgspec.Struct):
    type: str


class _SGLangToken(msgspec.Struct, array_like=True, gc=False):
    """[log-probability, token, text]."""

    logprob: float
    token: int


class _SGLangMeta(msgspec.Struct):
    id: str
    finish_reason: _Reason | None = None
    output_token_logprobs: list[_SGLangToken] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    weight_versions: list[VersionSpan] | None = None
    weight_version: str | None = None


class _SGLangAnswer(msgspec.Struct):
    meta_info: _SGLangMeta
    output_ids: list[int] | None = None


_SGLANG_DECODER = msgspec.json.Decoder(list[_SGLangAnswer])


SGLANG_ARRAYS_PATH = "/generate_arrays"
SGLANG_NCCL_PATH = "/dppo_nccl"


class SGLangDialect(msgspec.Struct, frozen=True, tag="sglang"):
    """POST /generate with a batch of group.count copies of the prompt (0.5.23)."""

    vocab_size: int
    """Sent as top_k when only top_p cuts: SGLang returns log-probabilities under a cut only for a finite top_k."""
    seeded: bool = False
    arrays: bool = False
    """The server has our path for answers as arrays (`in_engine/dppo_sglang_server.py`)."""

    def rounds(self, group: GenerateRequest) -> list[list[Call]]:
        """First a request for 0 tokens, which leaves the prompt in the radix cache; then the batch."""
        path = SGLANG_ARRAYS_PATH if self.arrays else "/generate"
        batch = [Call(path, msgspec.json.encode(sglang_body(group, self.seeded, self.vocab_size)))]
        return [*_prefill(group), batch]

    def abort_calls(self, group: GenerateRequest) -> list[Call]:
        """One call per id; SGLang ignores those that it does not know."""
        rids = [_rid(group, index) for index in range(group.count)]
        if _prefill(group):
            rids.append(_prompt_rid(group))
        return [Call("/abort_request", msgspec.json.encode({"rid": rid})) for rid in rids]

    def read(self, answers: Sequence[bytes], group: GenerateRequest) -> list[Sampled]:
        [content] = answers
        if self.arrays:
            return _from_arrays(content, group)
        batch = decoded(_SGLANG_DECODER, content)
        _check_count(group.count, len(batch))
        return [_sglang_completion(answer, group, index) for index, answer in enumerate(batch)]


def _prompt_rid(group: GenerateRequest) -> str:
    return f"{group.request_id}/prompt"


def _prefill(group: GenerateRequest) -> list[list[Call]]:
    """The round that puts a group's prompt into the cache; none for a single completion, or a prompt of one token."""
    if group.count == 1 or len(group.prompt_ids) == 1:
        return []
    prefill = {
        "rid": _prompt_rid(group),
        "input_ids": group.prompt_ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        **_replica(group),
    }
    return [[Call("/generate", msgspec.json.encode(prefill))]]


def _sglang_completion(answer: _SGLangAnswer, group: GenerateRequest, index: int) -> Sampled:
    rid, meta, tokens = _rid(group, index), answer.meta_info, answer.output_ids or []
    _check_id(meta.id, rid)
    entries = meta.output_token_logprobs or ()
    values = meta.output_token_sampling_logprobs
    if values is None:
        values = [entry.logprob for entry in entries]
    if entries and [entry.token for entry in entries] != tokens:
        raise BadAnswer(f"{rid}: its log-probabilities are of other tokens than it returns")
    spans: Sequence[VersionSpan] = meta.weight_versions or ()
    if not spans and meta.weight_version is not None:
        spans = [VersionSpan(meta.weight_version, 0, len(tokens))]
    return as_sampled(tokens, values, meta.finish_reason.type if meta.finish_reason else None, spans)


def sglang_body(group: GenerateRequest, seeded: bool, vocab_size: int) -> dict[str, Any]:
    """The request to SGLang. Its usual log-probabilities are those before top_p and top_k, so it asks for others."""
    cuts = group.temperature > 0 and (group.top_p < 1 or group.top_k > 0)
    # every parameter is set: SGLang takes missing ones from the model's generation_config.json
    parameters: dict[str, Any] = {
        "n": 1,
        "min_new_tokens": 0,
        "temperature": group.temperature,
        "top_p": group.top_p,
        "top_k": group.top_k or (vocab_size if cuts else -1),
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": group.stop_token_ids,
        "ignore_eos": False,
    }
    seeds = [{"sampling_seed": group.seed + index} if seeded else {} for index in range(group.count)]
    return {
        **({} if group.experts is None else {"return_routed_experts": True}),
        "rid": [_rid(group, index) for index in range(group.count)],
        "input_ids": [group.prompt_ids] * group.count,
        "sampling_params": [
            parameters | {"max_new_tokens": group.limit(index)} | seed for index, seed in enumerate(seeds)
        ],
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_sampling_mask": cuts and group.reads_logprobs,
        "stream": False,
        **_replica(group),
    }


def _replica(group: GenerateRequest) -> dict[str, int]:
    return {} if group.replica is None else {"routed_dp_rank": group.replica}


AnyDialect = VLLMDialect | SGLangDialect
"""An engine's encoding and decoding, in the form that is sent to rollout clients. `rounds`: calls to post, one round
after the other, those of a round concurrently. `abort_calls`: calls that abort a request; its answer then has the
tokens so far, with the reason `abort`. `read` decodes the answers to the last round."""
