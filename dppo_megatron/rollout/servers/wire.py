"""A request for completions and what a good answer to it is: one check of every answer, whichever engine gave it.

Pure: no socket and no torch, so that the rollout clients start fast and stay small. `checked` compares an answer with
status 200 with its request; a contradiction is a `BadAnswer`: a failure of that server, never something to train on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt

from dppo_megatron.rollout.servers.http import BadAnswer
from dppo_megatron.types import ExpertArray, ExpertChoices, FinishReason

_HIGHEST_LOGPROB = 1e-3
"""Rounding of a log-softmax in bfloat16 may lift a certain token a little above 0."""
_LOWEST_LOGPROB = -104.0
"""Below log(2**-149): a probability that float32 cannot hold was never drawn. vLLM writes -9999 for NaN and for a token
without a log-probability."""
_MOST_CERTAIN = 64
"""Tokens in a row of which each may be the only likely one: float32 has 0 for the log of 1 - 6e-8."""
_EXPERT_ROWS = 256
"""About so many tokens of a completion are searched for any expert that occurs twice."""
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
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """With the end of sequence."""
    reads_logprobs: bool = True
    replica: int | None = None
    """Which of the server's data-parallel replicas is to answer; None: the engine balances."""
    experts: ExpertChoices | None = None
    """The experts that tokens are sent to are wanted, in this form."""
    limits: tuple[int, ...] = ()
    """[count] tokens at which each completion is stopped, at most `max_tokens`; empty: all at that."""

    def part(self, first: int, count: int) -> GenerateRequest:
        """`count` of its completions, with the ids and seeds that they have in it."""
        stem, _, number = self.request_id.rpartition("-")
        name, seed = f"{stem}-{int(number) + first}", self.seed + first
        limits = self.limits[first : first + count]
        limits = limits if min(limits, default=self.max_tokens) < self.max_tokens else ()
        return msgspec.structs.replace(self, request_id=name, count=count, seed=seed, limits=limits)

    def limit(self, index: int) -> int:
        """Most tokens of a completion."""
        return self.limits[index] if self.limits else self.max_tokens

    def each(self) -> list[GenerateRequest]:
        """As requests that have one limit each, for engines that know no other; itself where it has one."""
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
        """It may take, one for each completion where these are asked for alone."""
        return self.count if self.limits else 1

    @property
    def cost(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt_ids) + (sum(self.limits) or self.count * self.max_tokens)

    @property
    def answer_bytes(self) -> int:
        """More than a right answer can have. SGLang lists the tokens kept by top_k for every position."""
        mask = 12 * self.top_k if self.reads_logprobs else 0
        experts = self.experts.bytes_per_token * (len(self.prompt_ids) + self.max_tokens) if self.experts else 0
        return _ANSWER_BYTES + self.count * (self.max_tokens * (_TOKEN_BYTES + mask) + experts)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion as it came over the wire."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    weights_versions: tuple[tuple[str, int, int], ...]
    """(version, start, end): tokens [start, end) were sampled under `version`."""
    experts: ExpertArray | None = None
    """[prompt and completion tokens - 1, layers, k]; None: not sent."""


class Expected(msgspec.Struct, frozen=True):
    """What every good answer agrees with, besides its request."""

    vocab_size: int
    oldest_version: int
    newest_version: int
    """Weights versions that tokens may have: that of the rollout's start, and the next where a sync comes between."""
    run: str = ""
    """Prefix of this run's version names; see `version_name`."""


def version_name(run: str, number: int) -> str:
    """The name of weights at the servers. Another run with the same server, and an earlier one whose worker a router
    still has, count from 1 too: the prefix keeps them apart.

    Example:
        version_name("3f9a01c2", 7) == "3f9a01c2.7"
    """
    return f"{run}.{number}" if run else str(number)


def version_number(name: str) -> int:
    """7 for 3f9a01c2.7; -1 for what is not such a name."""
    digits = name.rpartition(".")[2]
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 19 else -1


Ints: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
Floats: TypeAlias = Sequence[float] | npt.NDArray[np.float32]


class Call(NamedTuple):
    path: str
    body: bytes


def checked(sampled: Sequence[Sampled], group: GenerateRequest, expected: Expected) -> list[Sampled]:
    """`sampled` as it ended, if it can be what was asked for.

    An abort can meet a completion at its last token, and is then no abort. It can meet one of an engine that drafts
    before the engine has cut off what it drafted behind the end (SGLang 0.5.23): that one stays aborted.

    Raises:
        BadAnswer: with the first thing that is wrong.
    """
    for index, one in enumerate(sampled):
        _raise_if_wrong(one, group, group.limit(index), expected)
    if group.temperature > 0 and group.reads_logprobs:
        _raise_if_falsely_certain(sampled, group)
    ended = [_as_it_ended(one, group, group.limit(index)) for index, one in enumerate(sampled)]
    for one in ended:
        # an aborted one is never trained on, and engines may have recorded less of it
        if group.experts is not None and one.finish_reason not in ("abort", "early"):
            _raise_if_experts_wrong(one, group, group.experts)
    return ended


def _raise_if_wrong(one: Sampled, group: GenerateRequest, limit: int, expected: Expected) -> None:
    count, is_aborted = len(one.token_ids), one.finish_reason == "abort"
    if is_aborted and not count:
        return
    if not count:
        raise BadAnswer("a completion without tokens that was not aborted")
    if count > limit and not is_aborted:
        raise BadAnswer(f"{count} tokens for a limit of {limit}")
    if one.finish_reason == "length" and count < limit:
        raise BadAnswer(f"it says `length` after {count} of {limit} tokens")
    if len(one.logprobs) != count:
        raise BadAnswer(f"{len(one.logprobs)} log-probabilities for {count} tokens")
    lowest, highest = int(one.token_ids.min()), int(one.token_ids.max())
    if lowest < 0 or highest >= expected.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise BadAnswer(f"token {wrong} with a vocabulary of {expected.vocab_size}")
    if not is_aborted and _goes_on(one, group):
        raise BadAnswer("it goes on after a token that ends a completion")
    last = int(one.token_ids[-1])
    if one.finish_reason == "stop" and last not in group.stop_token_ids:
        raise BadAnswer(f"it stopped at token {last}, which ends no completion (rollout.sampling.stop_token_ids)")
    worst, best = float(one.logprobs.min()), float(one.logprobs.max())
    if not (worst >= _LOWEST_LOGPROB and best <= _HIGHEST_LOGPROB):  # NaN is neither
        raise BadAnswer(f"a log-probability of {best if best > _HIGHEST_LOGPROB else worst:g}")
    _raise_if_versions_wrong(one, expected)


def _goes_on(one: Sampled, group: GenerateRequest) -> bool:
    """After a token that ends a completion."""
    return any(bool((one.token_ids[:-1] == stop).any()) for stop in group.stop_token_ids)


def _raise_if_falsely_certain(sampled: Sequence[Sampled], group: GenerateRequest) -> None:
    """Log-probabilities that are all exactly 0: where each token had probability 1, no other completion of the prompt
    can have taken another one. Right ones of this kind are alike (top_k = 1, a model that has collapsed) or short."""
    most = _MOST_CERTAIN if group.top_p == 1 and group.top_k == 0 else group.max_tokens
    for one in sampled:
        count = len(one.token_ids)
        if count and not one.logprobs.any() and (count > most or any(_differ(one, other) for other in sampled)):
            raise BadAnswer(f"all log-probabilities of {count} sampled tokens are exactly 0")


def _differ(one: Sampled, other: Sampled) -> bool:
    both = min(len(one.token_ids), len(other.token_ids))  # one that was aborted is the beginning of another
    return not np.array_equal(one.token_ids[:both], other.token_ids[:both])


def _raise_if_versions_wrong(one: Sampled, expected: Expected) -> None:
    at = 0
    for version, start, end in one.weights_versions:
        if start != at or end < start:
            raise BadAnswer(f"weights versions for tokens [{start}, {end}) where [{at}, ...) belongs")
        number = version_number(version)
        named_so = version == version_name(expected.run, number)
        if not (named_so and expected.oldest_version <= number <= expected.newest_version):
            raise BadAnswer(f"it generated with weights {version[:80]!r}, which are not this rollout's")
        at = end
    if at != len(one.token_ids):
        raise BadAnswer(f"weights versions for {at} of {len(one.token_ids)} tokens")


def _raise_if_experts_wrong(one: Sampled, group: GenerateRequest, wanted: ExpertChoices) -> None:
    if one.experts is None:
        raise BadAnswer("no routed experts; the server must be started with --enable-return-routed-experts")
    shape = len(group.prompt_ids) + len(one.token_ids) - 1, wanted.layers, wanted.per_token
    if one.experts.shape != shape:
        raise BadAnswer(f"routed experts of shape {one.experts.shape} where {shape} belongs")
    if one.experts.size and int(one.experts.max()) >= wanted.count:
        raise BadAnswer(f"expert {int(one.experts.max())} of a model with {wanted.count}")
    # to sort all of them would take seconds for a million tokens; what an engine has not recorded is all 0
    recorded = one.experts[:, wanted.dense_layers :]
    rows = np.sort(recorded[:: max(1, shape[0] // _EXPERT_ROWS)], axis=-1)
    twice = (recorded[..., :1] == recorded[..., 1:2]).any() or (rows[..., 1:] == rows[..., :-1]).any()
    if wanted.per_token > 1 and twice:
        raise BadAnswer("a token that was routed to one expert twice: the server did not record it")


def _as_it_ended(one: Sampled, group: GenerateRequest, limit: int) -> Sampled:
    at_limit: FinishReason = "length" if limit == group.max_tokens else "early"
    if one.finish_reason == "length" and at_limit == "length":
        return one
    if one.finish_reason == "stop" or not len(one.token_ids):
        return one
    if len(one.token_ids) > limit or _goes_on(one, group):  # aborted, and never trained on
        return one
    # also where an engine looks at the limit first: a stop token there is an end, as the completion's weight has it
    if int(one.token_ids[-1]) in group.stop_token_ids:
        return replace(one, finish_reason="stop")
    if len(one.token_ids) == limit:
        return replace(one, finish_reason=at_limit)
    return one


class VersionSpan(msgspec.Struct, gc=False):
    """Tokens [start, end) of a completion were sampled under `version`; both engines' form."""

    version: str
    start: int
    end: int


def as_sampled(
    tokens: Ints,
    logprobs: Floats,
    reason: str | None,
    spans: Sequence[VersionSpan],
    experts: ExpertArray | None = None,
) -> Sampled:
    """A completion from its lists. Raises BadAnswer for what no array can hold."""
    if reason not in ("stop", "length", "abort"):
        raise BadAnswer(f"a completion that ended by {str(reason)[:80]!r}")
    try:
        token_ids = np.array(tokens, dtype=np.int32).reshape(-1)
    except OverflowError:
        raise BadAnswer("a token beyond every vocabulary") from None
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
        values = np.array(logprobs, dtype=np.float32).reshape(-1)
    versions = tuple((span.version, span.start, span.end) for span in spans if span.start != span.end)
    return Sampled(token_ids, values, cast(Any, reason), versions, experts)


# ------------------------------------------------------------------------- what rank 0 tells and hears: never a token
# A ticket is one attempt at one group, and is used once, so an answer whose ticket is no longer wanted is dropped, and
# a group has exactly one answer.


class Submit(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    index: int
    """Of the group in its rollout."""
    server: str
    group: GenerateRequest
    expected: Expected
    timeout_s: float
    """For the whole attempt, to its last byte."""
    prompt: bytes = b""
    """What the grading hook is given with the texts (a pickled `Prompt`); empty: not graded there."""
    rollout: int = 0
    first: int = 0
    """Position in its group of the first completion asked for: what was aborted of a group is asked for alone."""


class Completed(msgspec.Struct, frozen=True, tag=True):
    """A group was answered, and the answer is what was asked for."""

    ticket: int
    lengths: list[int]
    """[count] tokens of each completion."""
    reasons: list[str]
    """[count] as of `types.FinishReason`."""
    spans: list[tuple[int, int]]
    """(weights version, tokens sampled under it), of all completions together that were not aborted."""
    read_again: int = 0
    """Tokens of prompts and completions that went on under other weights, each time that they did."""


class Graded(msgspec.Struct, frozen=True, tag=True):
    """A group that has landed is decoded, and graded if that was wanted."""

    ticket: int


class AttemptFailed(msgspec.Struct, frozen=True, tag=True):
    """An attempt came to nothing."""

    ticket: int
    kind: Literal["unreachable", "refused", "bad", "ours"]
    """No answer; a status other than 2xx; an answer that cannot be right; this machine lacks files, memory or ports."""
    text: str
    status: int = 0
    retry_after_s: float | None = None


Event = Completed | Graded | AttemptFailed


class RolloutClients(Protocol):
    """Takes in completions and keeps them."""

    def client_of(self, server: str) -> int:
        """The one that asks it."""

    def room(self, server: str) -> int:
        """Sockets that groups in flight on `server` may hold of its client."""

    def gone(self, servers: Collection[str]) -> None:
        """These have left: the room of their clients is for the others."""

    def ask(self, ask: Submit) -> None:
        """Begin one attempt; what becomes of it is among the `events`."""

    def end(self, tickets: Sequence[int]) -> None:
        """Have the servers end these now: what they have so far lands, as `abort`."""

    def cancel(self, tickets: Sequence[int]) -> None:
        """Close the connections of these, and drop what they have brought."""

    def events(self, timeout_s: float) -> list[Event]:
        """What has happened, waiting for it up to `timeout_s`. Raises RunAborted if a client itself is lost."""
