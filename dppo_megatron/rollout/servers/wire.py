"""A request for completions and its answer as bytes: one dialect for each engine, and one check of every answer.

Pure: no socket and no torch, so that the rollout clients, which do nothing else all day, start fast and stay small.
Decoding is typed (msgspec): fields that nobody reads are skipped, and a wrong type is an error with its place. Into
dictionaries the same bytes cost 16 times the CPU time (docs/data_plane.md).

An answer with status 200 is a claim. `checked` holds it against what was asked; what does not hold is a `BadAnswer`:
a failure of that server, never something to train on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from dppo_megatron.rollout.servers.http import BadAnswer, brief

_HIGHEST_LOGPROB = 1e-3
"""Rounding of a log-softmax in bfloat16 may lift a certain token a little above 0."""
_LOWEST_LOGPROB = -104.0
"""Below log(2**-149): a probability that float32 cannot hold was never drawn. vLLM writes -9999 for NaN and for a token
without a log-probability."""
_ANSWER_BYTES = 1 << 20
_TOKEN_BYTES = 512
"""Room for one token of an answer; vLLM's form takes 168, SGLang's 46."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """Completions of one prompt, asked for in one request so that they share its prefill."""

    request_id: str
    prompt_ids: tuple[int, ...]
    count: int
    seed: int
    """Completion i samples with seed + i where the engine honours seeds."""
    max_tokens: int
    """Of one completion."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """With the end of sequence."""
    reads_logprobs: bool = True

    @property
    def cost(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt_ids) + self.count * self.max_tokens

    @property
    def answer_bytes(self) -> int:
        """More than an answer to it can honestly have. SGLang lists the kept tokens of a cut for every position."""
        mask = 12 * self.top_k if self.reads_logprobs else 0
        return _ANSWER_BYTES + self.count * self.max_tokens * (_TOKEN_BYTES + mask)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion as it came over the wire."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: Literal["stop", "length", "abort"]
    weights_versions: tuple[tuple[str, int, int], ...]
    """(version, start, end): tokens [start, end) were sampled under `version`."""


class Expected(msgspec.Struct, frozen=True):
    """What every good answer agrees with, beside its request."""

    vocab_size: int
    oldest_version: int
    newest_version: int
    """Weights versions that tokens may have: that of the rollout's start, and the next where a sync comes between."""


class Call(NamedTuple):
    """One POST."""

    path: str
    body: bytes


class Dialect(Protocol):
    """How one engine is asked. Picklable: it goes to the rollout clients."""

    def rounds(self, group: GenerateRequest) -> list[list[Call]]:
        """What is posted: one round after the other, the calls of a round at the same time. The answers to the last
        round have the completions."""

    def abort_calls(self, group: GenerateRequest) -> list[Call]:
        """What ends the request now; its answer then holds what there is, as `abort`."""

    def carries(self, group: GenerateRequest) -> bool:
        """Whether all of the request reaches the engine this way."""

    def read(self, answers: Sequence[bytes], group: GenerateRequest) -> list[Sampled]:
        """The completions in the order of their indices, from the answers to the last round. Raises BadAnswer."""


# ------------------------------------------------------------------------------------------------------------ vLLM


class _VLLMToken(msgspec.Struct, gc=False):
    logprob: float


class _VLLMLogprobs(msgspec.Struct, gc=False):
    content: list[_VLLMToken] | None = None


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _VLLMChoice(msgspec.Struct):
    index: int
    token_ids: list[int] | None = None
    logprobs: _VLLMLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _VLLMAnswer(msgspec.Struct):
    request_id: str
    choices: list[_VLLMChoice]


_VLLM_DECODER = msgspec.json.Decoder(_VLLMAnswer)
_VLLM_PREFIX = "generate-tokens-"
"""The server puts it before a request's id."""


class VLLMDialect(msgspec.Struct, frozen=True, tag="vllm"):
    """POST /inference/v1/generate, one request with n = group.count (0.32)."""

    seeded: bool = True

    def rounds(self, group: GenerateRequest) -> list[list[Call]]:
        """Every parameter is given: what is left out would come from the served model's generation_config.json."""
        return [[Call("/inference/v1/generate", msgspec.json.encode(vllm_body(group, self.seeded)))]]

    def abort_calls(self, group: GenerateRequest) -> list[Call]:
        """Both forms of the id are named; unknown ones are ignored."""
        ids = [f"{prefix}{group.request_id}" for prefix in ("", _VLLM_PREFIX)]
        return [Call("/abort_requests", msgspec.json.encode({"request_ids": ids}))]

    def carries(self, group: GenerateRequest) -> bool:
        """All, through vLLM's router too: it passes the body on as it is."""
        return True

    def read(self, answers: Sequence[bytes], group: GenerateRequest) -> list[Sampled]:
        """See `Dialect.read`."""
        [content] = answers
        answer = cast(_VLLMAnswer, _decoded(_VLLM_DECODER, content))
        if answer.request_id.removeprefix(_VLLM_PREFIX) != group.request_id:
            raise BadAnswer(f"it answers request {answer.request_id[:80]!r}")
        if sorted(choice.index for choice in answer.choices) != list(range(group.count)):
            raise BadAnswer(f"completions {[choice.index for choice in answer.choices][:8]} for {group.count} asked")
        found = []
        for choice in sorted(answer.choices, key=lambda choice: choice.index):
            logprobs = choice.logprobs.content if choice.logprobs is not None else None
            values = [token.logprob for token in logprobs or ()]
            found.append(_sampled(choice.token_ids or (), values, choice.finish_reason, choice.weight_versions or ()))
        return found


def vllm_body(group: GenerateRequest, seeded: bool) -> dict[str, Any]:
    """What vLLM is sent."""
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
    weight_versions: list[_Span] | None = None
    weight_version: str | None = None


class _SGLangAnswer(msgspec.Struct):
    meta_info: _SGLangMeta
    output_ids: list[int] | None = None


_SGLANG_DECODER = msgspec.json.Decoder(list[_SGLangAnswer])
_SGLANG_ONE_DECODER = msgspec.json.Decoder(_SGLangAnswer)


class SGLangDialect(msgspec.Struct, frozen=True, tag="sglang"):
    """POST /generate with a batch of group.count copies of the prompt (0.5.23)."""

    vocab_size: int
    """The top_k that cuts nothing, for top_p alone: SGLang gives log-probabilities of a cut only for a finite top_k."""
    seeded: bool = False

    def rounds(self, group: GenerateRequest) -> list[list[Call]]:
        """The batch, after a request for no token that leaves the prompt in the radix cache."""
        batch = [Call("/generate", msgspec.json.encode(sglang_body(group, self.seeded, self.vocab_size)))]
        return [*_prefill(group), batch]

    def abort_calls(self, group: GenerateRequest) -> list[Call]:
        """One id a call; SGLang ignores those that it does not know."""
        rids = [_rid(group, index) for index in range(group.count)]
        return [Call("/abort_request", msgspec.json.encode({"rid": rid})) for rid in rids]

    def carries(self, group: GenerateRequest) -> bool:
        """All."""
        return True

    def read(self, answers: Sequence[bytes], group: GenerateRequest) -> list[Sampled]:
        """See `Dialect.read`. The batch's answers come in its order, each with its own id."""
        [content] = answers
        found = cast(list[_SGLangAnswer], _decoded(_SGLANG_DECODER, content))
        if len(found) != group.count:
            raise BadAnswer(f"{len(found)} completions for {group.count} asked")
        return [_sglang_completion(answer, _rid(group, index)) for index, answer in enumerate(found)]


class SGLangRouterDialect(msgspec.Struct, frozen=True, tag="sglang-router"):
    """POST /generate as sglang-router lets it through (0.3.2): one completion a request, since it takes one id a
    request and n > 1 would have SGLang give ids of its own."""

    vocab_size: int
    seeded: bool = False

    def rounds(self, group: GenerateRequest) -> list[list[Call]]:
        """A request for no token first: by the router's tree of prefixes the others then go to the same worker, whose
        cache has the prompt."""
        batch = sglang_body(group, self.seeded, self.vocab_size)
        each = zip(batch["rid"], batch["input_ids"], batch["sampling_params"], strict=True)
        bodies = [batch | {"rid": rid, "input_ids": ids, "sampling_params": how} for rid, ids, how in each]
        return [*_prefill(group), [Call("/generate", msgspec.json.encode(body)) for body in bodies]]

    def abort_calls(self, group: GenerateRequest) -> list[Call]:
        """For the workers, one id a call: the router has no such path."""
        return SGLangDialect(self.vocab_size).abort_calls(group)

    def carries(self, group: GenerateRequest) -> bool:
        """Not `return_sampling_mask`: the router drops what it does not know, and the answer would have the
        log-probabilities before the cut, without a word."""
        return not (_cuts(group) and group.reads_logprobs)

    def read(self, answers: Sequence[bytes], group: GenerateRequest) -> list[Sampled]:
        """See `Dialect.read`."""
        found = [cast(_SGLangAnswer, _decoded(_SGLANG_ONE_DECODER, content)) for content in answers]
        return [_sglang_completion(answer, _rid(group, index)) for index, answer in enumerate(found)]


def _prefill(group: GenerateRequest) -> list[list[Call]]:
    """The round that leaves a group's prompt in the cache; none where nobody would find it there."""
    if group.count == 1 or len(group.prompt_ids) == 1:
        return []
    prefill = {
        "rid": f"{group.request_id}/prompt",
        "input_ids": group.prompt_ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
    }
    return [[Call("/generate", msgspec.json.encode(prefill))]]


def _sglang_completion(answer: _SGLangAnswer, rid: str) -> Sampled:
    meta, tokens = answer.meta_info, answer.output_ids or []
    if meta.id != rid:
        raise BadAnswer(f"it answers request {meta.id[:80]!r} where {rid!r} belongs")
    entries = meta.output_token_logprobs or ()
    values = meta.output_token_sampling_logprobs
    if values is None:
        values = [entry.logprob for entry in entries]
    if entries and [entry.token for entry in entries] != tokens:
        raise BadAnswer(f"{rid}: its log-probabilities are of other tokens than it returns")
    spans: Sequence[_Span] = meta.weight_versions or ()
    if not spans and meta.weight_version is not None:
        spans = [_Span(meta.weight_version, 0, len(tokens))]
    return _sampled(tokens, values, meta.finish_reason.type if meta.finish_reason else None, spans)


def sglang_body(group: GenerateRequest, seeded: bool, vocab_size: int) -> dict[str, Any]:
    """What SGLang is sent. Every parameter is given: the server fills what is left out from the model's
    generation_config.json. With a cut, the log-probabilities under the cut distribution are asked for: the plain ones
    are those before it."""
    cuts = _cuts(group)
    parameters: dict[str, Any] = {
        "n": 1,
        "max_new_tokens": group.max_tokens,
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
        "rid": [_rid(group, index) for index in range(group.count)],
        "input_ids": [group.prompt_ids] * group.count,
        "sampling_params": [parameters | seed for seed in seeds],
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_sampling_mask": cuts and group.reads_logprobs,
        "stream": False,
    }


def _cuts(group: GenerateRequest) -> bool:
    return group.temperature > 0 and (group.top_p < 1 or group.top_k > 0)


def _rid(group: GenerateRequest, index: int) -> str:
    return f"{group.request_id}/{index}"


# ------------------------------------------------------------------------------------------------------- the check


def checked(sampled: Sequence[Sampled], group: GenerateRequest, expected: Expected) -> list[Sampled]:
    """`sampled` as it ended, if it can be what was asked for.

    An abort can meet a completion at its last token, and is then no abort.

    Raises:
        BadAnswer: with the first thing that is wrong.
    """
    for one in sampled:
        _raise_if_wrong(one, group, expected)
    return [_as_it_ended(one, group) for one in sampled]


def _raise_if_wrong(one: Sampled, group: GenerateRequest, expected: Expected) -> None:
    count = len(one.token_ids)
    if one.finish_reason == "abort" and not count:
        return
    if not count:
        raise BadAnswer("a completion without tokens that was not aborted")
    if count > group.max_tokens:
        raise BadAnswer(f"{count} tokens for a limit of {group.max_tokens}")
    if one.finish_reason == "length" and count < group.max_tokens:
        raise BadAnswer(f"it says `length` after {count} of {group.max_tokens} tokens")
    if len(one.logprobs) != count:
        raise BadAnswer(f"{len(one.logprobs)} log-probabilities for {count} tokens")
    lowest, highest = int(one.token_ids.min()), int(one.token_ids.max())
    if lowest < 0 or highest >= expected.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise BadAnswer(f"token {wrong} with a vocabulary of {expected.vocab_size}")
    if any(bool((one.token_ids[:-1] == stop).any()) for stop in group.stop_token_ids):
        raise BadAnswer("it goes on after a token that ends a completion")
    worst, best = float(one.logprobs.min()), float(one.logprobs.max())
    if not (worst >= _LOWEST_LOGPROB and best <= _HIGHEST_LOGPROB):  # NaN is neither
        raise BadAnswer(f"a log-probability of {best if best > _HIGHEST_LOGPROB else worst:g}")
    _raise_if_versions_wrong(one, expected)


def _raise_if_versions_wrong(one: Sampled, expected: Expected) -> None:
    at = 0
    for version, start, end in one.weights_versions:
        if start != at or end < start:
            raise BadAnswer(f"weights versions for tokens [{start}, {end}) where [{at}, ...) belongs")
        number = int(version) if version.isascii() and version.isdecimal() and len(version) < 19 else -1
        if str(number) != version or not expected.oldest_version <= number <= expected.newest_version:
            raise BadAnswer(f"it generated with weights {version[:80]!r}, which are not this rollout's")
        at = end
    if at != len(one.token_ids):
        raise BadAnswer(f"weights versions for {at} of {len(one.token_ids)} tokens")


def _as_it_ended(one: Sampled, group: GenerateRequest) -> Sampled:
    if one.finish_reason != "abort" or not len(one.token_ids):
        return one
    if int(one.token_ids[-1]) in group.stop_token_ids:
        return Sampled(one.token_ids, one.logprobs, "stop", one.weights_versions)
    if len(one.token_ids) == group.max_tokens:
        return Sampled(one.token_ids, one.logprobs, "length", one.weights_versions)
    return one


def _sampled(tokens: Sequence[int], logprobs: Sequence[float], reason: str | None, spans: Sequence[_Span]) -> Sampled:
    if reason not in ("stop", "length", "abort"):
        raise BadAnswer(f"a completion that ended by {str(reason)[:80]!r}")
    try:
        token_ids = np.array(tokens, dtype=np.int32).reshape(-1)
    except OverflowError:
        raise BadAnswer("a token beyond every vocabulary") from None
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
        values = np.array(logprobs, dtype=np.float32).reshape(-1)
    versions = tuple((span.version, span.start, span.end) for span in spans if span.start != span.end)
    return Sampled(token_ids, values, cast(Any, reason), versions)


def _decoded(decoder: msgspec.json.Decoder[Any], content: bytes) -> Any:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"its answer cannot be read: {brief(error)}") from None


AnyDialect = VLLMDialect | SGLangDialect | SGLangRouterDialect
"""As it travels."""
