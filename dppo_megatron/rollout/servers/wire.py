"""Requests for completions, the check that every answer must pass, and the messages between rank 0 and its clients.

Without sockets and torch, so that the rollout clients start fast and stay small. `checked` compares an answer that came
with status 200 to its request; a contradiction is a `BadAnswer`: a failure of that server, never data to train on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from dppo_megatron.randomness import generator
from dppo_megatron.rollout.servers.http import BadAnswer
from dppo_megatron.types import ExpertArray, ExpertChoices, FinishReason

_HIGHEST_LOGPROB = 1e-3
"""Rounding of a log-softmax in bfloat16 may put a token of probability 1 slightly above 0."""
_LOWEST_LOGPROB = -104.0
"""Below log(2**-149): a probability that float32 cannot hold was never drawn. vLLM writes -9999 for NaN and for a token
without a log-probability."""
_MAX_CERTAIN = 64
"""A completion of up to this many tokens may have only log-probabilities of 0: in float32, log(1 - 6e-8) is 0."""
_EXPERT_ROWS = 256
"""About this many tokens of a completion are checked for any expert that occurs twice."""
_ANSWER_BYTES = 1 << 20
_TOKEN_BYTES = 512
"""Upper bound for one token of an answer; vLLM's JSON takes 168 bytes, SGLang's 46."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """Completions of one prompt, in one request so that they share its prefill."""

    request_id: str
    prompt_ids: tuple[int, ...]
    count: int
    seed: int
    """Completion i samples with seed + i where the engine honours seeds."""
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Including the end-of-sequence token."""
    reads_logprobs: bool = True
    replica: int | None = None
    """Which of the server's data-parallel replicas is to answer; None: the engine chooses."""
    experts: ExpertChoices | None = None
    """Form in which to return the experts that tokens were routed to; None: not wanted."""
    limits: tuple[int, ...] = ()
    """[count] tokens at which each completion is stopped, at most `max_tokens`; empty: all at `max_tokens`."""

    def part(self, first: int, count: int) -> GenerateRequest:
        """A request for `count` of its completions, from `first` on, with the same ids and seeds."""
        stem, _, number = self.request_id.rpartition("-")
        name, seed = f"{stem}-{int(number) + first}", self.seed + first
        limits = self.limits[first : first + count]
        limits = limits if min(limits, default=self.max_tokens) < self.max_tokens else ()
        return msgspec.structs.replace(self, request_id=name, count=count, seed=seed, limits=limits)

    def rest(self, index: int, begun: Sampled) -> GenerateRequest:
        """A request for what completion `index` lacks after its first tokens, `begun`. Its seed is another one: the
        completion's own would draw those tokens' random numbers again."""
        one, done = self.part(index, 1), len(begun.token_ids)
        if not done:
            return one
        prompt = (*self.prompt_ids, *begun.token_ids.tolist())
        seed = int(generator(one.seed, "rest", done).integers(1 << 30))
        return msgspec.structs.replace(one, prompt_ids=prompt, seed=seed, max_tokens=one.limit(0) - done, limits=())

    def limit(self, index: int) -> int:
        return self.limits[index] if self.limits else self.max_tokens

    def each(self) -> list[GenerateRequest]:
        """Split into requests with one limit each, for engines that take one per request; [self] if it has one."""
        if not self.limits:
            return [self]
        one = msgspec.structs.replace(self, count=1, limits=())
        return [
            msgspec.structs.replace(
                one, request_id=f"{self.request_id}.{index}", seed=self.seed + index, max_tokens=limit
            )
            for index, limit in enumerate(self.limits)
        ]

    @property
    def sockets(self) -> int:
        """Maximum sockets that it takes: one per completion where each is requested alone (`each`)."""
        return self.count if self.limits else 1

    @property
    def cost(self) -> int:
        """Maximum tokens of prompt and completions."""
        return len(self.prompt_ids) + (sum(self.limits) or self.count * self.max_tokens)

    @property
    def answer_bytes(self) -> int:
        """Upper bound for the bytes of a valid answer."""
        mask = 12 * self.top_k if self.reads_logprobs else 0  # SGLang lists the tokens kept by top_k per position
        experts = self.experts.bytes_per_token * (len(self.prompt_ids) + self.max_tokens) if self.experts else 0
        return _ANSWER_BYTES + self.count * (self.max_tokens * (_TOKEN_BYTES + mask) + experts)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion as received."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    weights_versions: tuple[tuple[str, int, int], ...]
    """(version, start, end): tokens [start, end) were sampled under `version`."""
    experts: ExpertArray | None = None
    """[prompt and completion tokens - 1, layers, k]; None: not sent."""


class Expected(msgspec.Struct, frozen=True):
    """What an answer must agree with, besides its request."""

    vocab_size: int
    oldest_version: int
    newest_version: int
    """Weights versions that tokens may have: that of the rollout's start, up to the newest that a sync may bring."""
    run: str = ""
    """Prefix of this run's version names; see `version_name`."""


def version_name(run: str, number: int) -> str:
    """The name of a weights version at the servers. Versions of every run count from 1; the prefix distinguishes those
    of another run with the same server, or of an earlier one whose worker a router still lists.

    Example:
        version_name("3f9a01c2", 7) == "3f9a01c2.7"
    """
    return f"{run}.{number}" if run else str(number)


def version_number(name: str) -> int:
    """7 for "3f9a01c2.7"; -1 for a name that does not end in a number."""
    digits = name.rpartition(".")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 19 else -1


class Call(NamedTuple):
    path: str
    body: bytes


def checked(sampled: Sequence[Sampled], group: GenerateRequest, expected: Expected) -> list[Sampled]:
    """`sampled` with corrected finish reasons, after checking that it can be the answer to `group`. Raises BadAnswer.

    An abort may hit a completion at its last token; the completion is then complete, not aborted. In an engine that
    drafts, it may hit before tokens drafted beyond the end are removed (SGLang 0.5.23): that completion stays aborted.
    """
    for index, one in enumerate(sampled):
        _raise_if_wrong(one, group, group.limit(index), expected)
    if group.temperature > 0 and group.reads_logprobs:
        _raise_if_falsely_certain(sampled, group)
    corrected = [_with_true_end(one, group, group.limit(index)) for index, one in enumerate(sampled)]
    for one in corrected:
        # completions with these reasons are never trained on, and engines may have recorded fewer experts of them
        if group.experts is not None and one.finish_reason not in ("abort", "early"):
            _raise_if_experts_wrong(one, group, group.experts)
    return corrected


def _raise_if_wrong(one: Sampled, group: GenerateRequest, limit: int, expected: Expected) -> None:
    count, is_aborted = len(one.token_ids), one.finish_reason == "abort"
    if is_aborted and not count:
        return
    if not count:
        raise BadAnswer("a completion without tokens that was not aborted")
    if count > limit and not is_aborted:
        raise BadAnswer(f"{count} tokens for a limit of {limit}")
    if one.finish_reason == "length" and count < limit:
        raise BadAnswer(f"finish reason `length` after {count} of {limit} tokens")
    if len(one.logprobs) != count:
        raise BadAnswer(f"{len(one.logprobs)} log-probabilities for {count} tokens")
    lowest, highest = int(one.token_ids.min()), int(one.token_ids.max())
    if lowest < 0 or highest >= expected.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise BadAnswer(f"token {wrong} with a vocabulary of {expected.vocab_size}")
    if not is_aborted and _continues_after_stop(one, group):
        raise BadAnswer("a completion goes on after a token that ends it")
    last = int(one.token_ids[-1])
    if one.finish_reason == "stop" and last not in group.stop_token_ids:
        raise BadAnswer(f"it stopped at token {last}, which ends no completion (rollout.sampling.stop_token_ids)")
    worst, best = float(one.logprobs.min()), float(one.logprobs.max())
    if not (worst >= _LOWEST_LOGPROB and best <= _HIGHEST_LOGPROB):  # written so that NaN fails
        raise BadAnswer(f"a log-probability of {best if best > _HIGHEST_LOGPROB else worst:g}")
    _raise_if_versions_wrong(one, expected)


def _continues_after_stop(one: Sampled, group: GenerateRequest) -> bool:
    return any(bool((one.token_ids[:-1] == stop).any()) for stop in group.stop_token_ids)


def _raise_if_falsely_certain(sampled: Sequence[Sampled], group: GenerateRequest) -> None:
    """Raise for log-probabilities that are all exactly 0 and cannot be true: if each token had probability 1, all
    completions of the prompt agree (as with top_k = 1, or a collapsed model), and without a cut they are short."""
    most = _MAX_CERTAIN if group.top_p == 1 and group.top_k == 0 else group.max_tokens
    for one in sampled:
        count = len(one.token_ids)
        if count and not one.logprobs.any() and (count > most or any(_differ(one, other) for other in sampled)):
            raise BadAnswer(f"all log-probabilities of {count} sampled tokens are exactly 0")


def _differ(one: Sampled, other: Sampled) -> bool:
    common = min(len(one.token_ids), len(other.token_ids))  # an aborted completion may be a prefix of another
    return not np.array_equal(one.token_ids[:common], other.token_ids[:common])


def _raise_if_versions_wrong(one: Sampled, expected: Expected) -> None:
    covered = 0
    for version, start, end in one.weights_versions:
        if start != covered or end < start:
            raise BadAnswer(f"weights versions for tokens [{start}, {end}) instead of [{covered}, ...)")
        number = version_number(version)
        is_of_run = version == version_name(expected.run, number)
        if not (is_of_run and expected.oldest_version <= number <= expected.newest_version):
            raise BadAnswer(f"it generated with weights {version[:80]!r}, which are not this rollout's")
        covered = end
    if covered != len(one.token_ids):
        raise BadAnswer(f"weights versions for {covered} of {len(one.token_ids)} tokens")


def _raise_if_experts_wrong(one: Sampled, group: GenerateRequest, wanted: ExpertChoices) -> None:
    if one.experts is None:
        raise BadAnswer("no routed experts; the server must be started with --enable-return-routed-experts")
    shape = len(group.prompt_ids) + len(one.token_ids) - 1, wanted.layers, wanted.per_token
    if one.experts.shape != shape:
        raise BadAnswer(f"routed experts of shape {one.experts.shape} instead of {shape}")
    if one.experts.size and int(one.experts.max()) >= wanted.count:
        raise BadAnswer(f"expert {int(one.experts.max())} of a model with {wanted.count}")
    # Tokens that an engine did not record are all 0, which the first two experts show. Other repetitions are searched
    # for in a sample: sorting a million tokens would take seconds.
    recorded = one.experts[:, wanted.dense_layers :]
    rows = np.sort(recorded[:: max(1, shape[0] // _EXPERT_ROWS)], axis=-1)
    twice = (recorded[..., :1] == recorded[..., 1:2]).any() or (rows[..., 1:] == rows[..., :-1]).any()
    if wanted.per_token > 1 and twice:
        raise BadAnswer("a token that was routed to one expert twice: the server did not record it")


def _with_true_end(one: Sampled, group: GenerateRequest, limit: int) -> Sampled:
    at_limit: FinishReason = "length" if limit == group.max_tokens else "early"
    if one.finish_reason == "length" and at_limit == "length":
        return one
    if one.finish_reason == "stop" or not len(one.token_ids):
        return one
    if len(one.token_ids) > limit or _continues_after_stop(one, group):  # aborted, and never trained on
        return one
    # a stop token at the limit is an end, also if the engine checks the limit first: the completion's weight needs that
    if int(one.token_ids[-1]) in group.stop_token_ids:
        return replace(one, finish_reason="stop")
    if len(one.token_ids) == limit:
        return replace(one, finish_reason=at_limit)
    return one


def until_end(one: Sampled, group: GenerateRequest, index: int) -> Sampled:
    """`one`, an aborted answer for completion `index`, without the tokens drafted beyond its end (see `checked`)."""
    limit, ends = group.limit(index), np.flatnonzero(np.isin(one.token_ids, group.stop_token_ids))
    count = min(limit, int(ends[0]) + 1) if len(ends) else limit
    if len(one.token_ids) <= count:
        return one
    versions = tuple((version, start, min(end, count)) for version, start, end in one.weights_versions if start < count)
    experts = None if one.experts is None else one.experts[: len(group.prompt_ids) + count - 1]
    cut = Sampled(one.token_ids[:count], one.logprobs[:count], one.finish_reason, versions, experts)
    return _with_true_end(cut, group, limit)


def joined(begun: Sampled, rest: Sampled, group: GenerateRequest, index: int) -> Sampled:
    """Completion `index` of a group from its first tokens and the answer to `group.rest(index, begun)`."""
    done, versions = len(begun.token_ids), list(begun.weights_versions)
    for version, start, end in rest.weights_versions:
        if versions and versions[-1][0] == version:
            start = versions.pop()[1] - done
        versions.append((version, start + done, end + done))
    reason, routed = rest.finish_reason, len(group.prompt_ids) + done - 1
    if reason == "length" and group.limit(index) < group.max_tokens:
        reason = "early"
    experts = begun.experts if rest.experts is None else rest.experts
    if rest.experts is not None and begun.experts is not None and len(begun.experts) == routed:
        experts = np.concatenate([begun.experts, rest.experts[routed:]])
    tokens = np.concatenate([begun.token_ids, rest.token_ids])
    logprobs = np.concatenate([begun.logprobs, rest.logprobs])
    return Sampled(tokens, logprobs, reason, tuple(versions), experts)


class VersionSpan(msgspec.Struct, gc=False):
    """Tokens [start, end) of a completion were sampled under `version`. Both engines use this form."""

    version: str
    start: int
    end: int


NOT_BEGUN = Sampled(np.empty(0, np.int32), np.empty(0, np.float32), "abort", ())


def as_sampled(
    tokens: Sequence[int] | npt.NDArray[np.int32],
    logprobs: Sequence[float] | npt.NDArray[np.float32],
    reason: str | None,
    spans: Sequence[VersionSpan],
    experts: ExpertArray | None = None,
) -> Sampled:
    """A completion from an answer's lists. Raises BadAnswer for an unknown finish reason or a token beyond int32."""
    if reason not in ("stop", "length", "abort"):
        raise BadAnswer(f"a completion with finish reason {str(reason)[:80]!r}")
    try:
        token_ids = np.array(tokens, dtype=np.int32).reshape(-1)
    except OverflowError:
        raise BadAnswer("a token beyond every vocabulary") from None
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, which `checked` refuses
        values = np.array(logprobs, dtype=np.float32).reshape(-1)
    versions = tuple((span.version, span.start, span.end) for span in spans if span.start != span.end)
    return Sampled(token_ids, values, cast(Any, reason), versions, experts)


# ------------------------------------------------------- messages between rank 0 and the clients: they carry no tokens
# A ticket is one attempt at one group and is used once. Answers whose ticket is no longer wanted are discarded, so a
# group has exactly one answer.


class Submit(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    index: int
    """The group's index in its rollout."""
    server: str
    group: GenerateRequest
    expected: Expected
    timeout_s: float
    """For the whole attempt, to its last byte."""
    prompt: bytes = b""
    """Passed to the grading hook with the texts (a pickled `Prompt`); empty: the client does not grade."""
    rollout: int = 0
    first: int = 0
    """Position in its group of the first requested completion: a request may be for a part of a group."""


class Completed(msgspec.Struct, frozen=True, tag=True):
    """A group was answered, and the answer has passed `checked`."""

    ticket: int
    lengths: list[int]
    """[count] tokens of each completion."""
    reasons: list[str]
    """[count] of `types.FinishReason`."""
    spans: list[tuple[int, int]]
    """(weights version, tokens sampled under it), summed over all completions that were not aborted."""
    read_again: int = 0
    """Prompt and completion tokens before each change of weights within a completion: the engine read them again."""


class Graded(msgspec.Struct, frozen=True, tag=True):
    """A group that has landed is decoded, and graded if requested."""

    ticket: int


class AttemptFailed(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    kind: Literal["unreachable", "refused", "bad", "ours"]
    """No answer; a status other than 2xx; a contradictory answer; this machine lacks files, memory or ports."""
    text: str
    status: int = 0
    retry_after_s: float | None = None


Event = Completed | Graded | AttemptFailed


class RolloutClients(Protocol):
    """The rollout clients, which send requests to servers and keep the completions; one client per node."""

    def client_of(self, server: str) -> int:
        """The client that sends the requests for `server`."""

    def room(self, server: str) -> int:
        """Maximum sockets of its client that groups in flight on `server` may use."""

    def gone(self, servers: Collection[str]) -> None:
        """These have left: their clients' sockets are shared among the other servers."""

    def ask(self, ask: Submit) -> None:
        """Begin one attempt; its outcome is among the `events`."""

    def keep(self, server: str, key: tuple[int, int, int], sampled: Sampled) -> None:
        """Give its client what was sampled of a completion before: (rollout, group, position in it). An attempt at that
        completion, which comes next, asks only for the rest."""

    def end(self, tickets: Sequence[int]) -> None:
        """Have the servers abort these attempts now; the tokens so far are returned, with the reason `abort`."""

    def cancel(self, tickets: Sequence[int]) -> None:
        """Close the connections of these attempts and discard their completions."""

    def events(self, timeout_s: float) -> list[Event]:
        """New events, waiting up to `timeout_s` for the first. Raises RunAborted if a client itself is lost."""
