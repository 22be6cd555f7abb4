"""What is asked for in one rollout, and what has come back of it: the state that `dispatch.py` works on."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.servers.wire import Completed, Expected, GenerateRequest
from dppo_megatron.types import ExpertChoices

_TOKENS_PER_READ = 8
"""Tokens that a part of a group may generate, at least, for each of its prompt's, which its server reads for it."""


def grouped(
    requests: Sequence[Request],
    sampling: Sampling,
    size: int,
    stop_ids: tuple[int, ...] = (),
    replayed: ExpertChoices | None = None,
) -> tuple[list[GenerateRequest], list[list[int]]]:
    """Consecutive completions of one prompt as one group of at most `size`, so that they share a prefill.

    How requests are grouped changes no completion: completion i of a prompt has the prompt's seed + i.

    Args:
        stop_ids: tokens that end every completion, beside those of its sampling.
        replayed: the experts that are wanted with completions to train on.

    Returns:
        The groups, and the positions in `requests` of each one's completions.

    Example:
        completions (prompt 7: 0, 1, 2), (prompt 9: 0), size 2  ->  groups of 2, 1 and 1; places [0, 1], [2], [3]
    """
    places: list[list[int]] = []
    latest: dict[tuple[str, int, int], list[int]] = {}
    for place, request in enumerate(requests):
        prompt = request.stream, request.step, request.prompt.index
        group = latest.get(prompt)
        follows = group is not None and requests[group[-1]].completion_index + 1 == request.completion_index
        if group is not None and follows and len(group) < size:
            group.append(place)
        else:
            latest[prompt] = [place]
            places.append(latest[prompt])
    groups = []
    for members in places:
        first = requests[members[0]]
        how = first.sampling or sampling
        draw = generator(how.seed, first.purpose, first.step, first.prompt.index, 0).integers(1 << 30)
        groups.append(
            GenerateRequest(
                request_id=first.id,
                prompt_ids=first.prompt.token_ids,
                count=len(members),
                seed=int(draw) + first.completion_index,
                max_tokens=how.max_completion_tokens,
                temperature=how.temperature,
                top_p=how.top_p,
                top_k=how.top_k,
                stop_token_ids=(*stop_ids, *how.stop_token_ids),
                reads_logprobs=how.reads_logprobs,
                experts=None if first.stream else replayed,
                limits=_limits([requests[place].limit for place in members], how.max_completion_tokens),
            )
        )
    return groups, places


def _limits(limits: Sequence[int], longest: int) -> tuple[int, ...]:
    """Of the completions of a group, 0 for those without; empty if none has one before `longest`."""
    found = tuple(min(limit or longest, longest) for limit in limits)
    return found if min(found) < longest else ()


@dataclass(eq=False)
class Work:
    """The groups of one rollout and what has come back; survives a `NeedsWeights`."""

    groups: list[GenerateRequest]
    """With the other parts of each, and what was asked for again, behind them."""
    expected: Expected
    prompts: Sequence[bytes] = ()
    """For the grading hook, one a group; empty: nothing is graded."""
    places: Sequence[Sequence[int]] = ()
    """By group, the places of its completions among all requests of the rollout."""
    may_lose: bool = False
    """Completions may be missing: those of a request that fails for good or is late. Not of an evaluation, where they
    would count as wrong."""
    order: int = 0
    """The lowest comes first: a training step's number."""
    number: int = 0
    """Tells the rollouts of a run apart at its clients."""
    pending: deque[int] = field(default_factory=deque)
    """Groups to be asked for, in this order; kept by `Dispatch`."""
    finished: Future[None] = field(default_factory=Future)
    """Has a result once all is ready."""
    done: dict[int, Completed] = field(default_factory=dict)
    landed: dict[int, int] = field(default_factory=dict)
    """The ticket that brought each group's answer -> the group."""
    ready: set[int] = field(default_factory=set)
    """Groups that are decoded and graded."""
    first_asked: dict[int, float] = field(default_factory=dict)
    failures: dict[int, list[str]] = field(default_factory=dict)
    """What went wrong with each group, one line an answer."""
    aborts: dict[int, int] = field(default_factory=dict)
    """How often what is asked for under an index was aborted, as a part of its group too."""
    completions_aborted: int = 0
    """Completions that were asked for again for it."""
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """What is asked for beside a group's first part -> the group, and the position there of its first completion."""
    may_split: bool = False
    """A group may be asked for in parts, and a part again of which some are missing."""
    near: dict[int, Counter[int]] = field(default_factory=dict)
    """Groups that may be split -> how many completions of each are in flight or have landed, by client."""
    lost: dict[int, str] = field(default_factory=dict)
    """Groups that were given up whole, and why."""
    ended: set[int] = field(default_factory=set)
    """Groups that were late: the servers were told to end them where they are."""
    resent: set[int] = field(default_factory=set)
    """Groups that were lost while a server sampled them, and are other ones at the next attempt, for want of seeds or
    wholly or partly under newer weights: long ones are lost more often."""
    sampled_under: dict[int, str] = field(default_factory=dict)
    """The version under which an attempt began that was lost, by what was asked for."""
    retries: int = 0
    given_up: bool = False
    """The rest is not wanted any more: `dispatch` ends its requests."""

    def spread(self, servers: int, most: int) -> None:
        """Have each group asked for in equal parts, one for each of `servers`, or fewer: see `_TOKENS_PER_READ`. More
        where a part would be larger than `most`: vLLM refuses what it cannot run at once. What is asked for together
        shares a prefill; every completion has its own seed, so that none changes."""
        for index, group in enumerate(tuple(self.groups)):
            least = math.ceil(_TOKENS_PER_READ * len(group.prompt_ids) / group.max_tokens)
            count = min(group.count, most, max(math.ceil(group.count / max(1, servers)), least))
            self.groups[index] = group.part(0, count)
            for first in range(count, group.count, count):
                self.parts[len(self.groups)] = index, first
                self.groups.append(group.part(first, min(count, group.count - first)))

    @property
    def missing(self) -> dict[tuple[int, int], str]:
        """(group, position there) of each completion that was asked for in vain, and why."""
        parts = [(*self.part_of(index), self.groups[index].count, why) for index, why in self.lost.items()]
        return {(whole, place): why for whole, first, count, why in parts for place in range(first, first + count)}

    @property
    def homes(self) -> dict[int, int]:
        """Groups that have landed at several clients -> the one that has most of each."""
        return {whole: max(sorted(at), key=at.__getitem__) for whole, at in self.near.items() if len(at) > 1}

    def part_of(self, index: int) -> tuple[int, int]:
        """The group, and the position there of the first completion, of what is asked for under `index`."""
        return self.parts.get(index, (index, 0))

    @property
    def is_wanted(self) -> bool:
        """Neither done nor given up."""
        return not (self.finished.done() or self.given_up)

    @property
    def is_complete(self) -> bool:
        return len(self.ready) + len(self.lost) == len(self.groups)
