"""The requests of one rollout and the answers to them so far: the state that `dispatch.py` works on."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.servers.wire import Completed, Expected, GenerateRequest, Sampled
from dppo_megatron.types import ExpertChoices

_TOKENS_PER_READ = 8
"""Parts of a group are made large enough to generate this many tokens per prompt token, as each costs a prefill."""


def grouped(
    requests: Sequence[Request],
    sampling: Sampling,
    size: int,
    stop_ids: tuple[int, ...] = (),
    replayed: ExpertChoices | None = None,
) -> tuple[list[GenerateRequest], list[list[int]]]:
    """Consecutive completions of one prompt as one group of at most `size`, so that they share a prefill.

    Grouping changes no completion: completion i of a prompt has the prompt's seed + i.

    Args:
        stop_ids: tokens that end every completion, in addition to those of its sampling.
        replayed: the experts to return with completions that are trained on.

    Returns the groups, and the positions in `requests` of each one's completions.

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
        longest = how.max_completion_tokens
        limits = tuple(min(requests[place].limit or longest, longest) for place in members)
        draw = generator(how.seed, first.purpose, first.step, first.prompt.index, 0).integers(1 << 30)
        groups.append(
            GenerateRequest(
                request_id=first.id,
                prompt_ids=first.prompt.token_ids,
                count=len(members),
                seed=int(draw) + first.completion_index,
                max_tokens=longest,
                temperature=how.temperature,
                top_p=how.top_p,
                top_k=how.top_k,
                stop_token_ids=(*stop_ids, *how.stop_token_ids),
                reads_logprobs=how.reads_logprobs,
                experts=None if first.stream else replayed,
                limits=limits if min(limits) < longest else (),
            )
        )
    return groups, places


@dataclass(eq=False)
class Work:
    """The requests of one rollout and their answers; kept across a `NeedsWeights`. A request is identified by its index
    in `groups`, and asks for a whole group or for a part of one (`part_of`)."""

    groups: list[GenerateRequest]
    """First one request per group (its first part), then the other parts and what was requested again."""
    expected: Expected
    prompts: Sequence[bytes] = ()
    """For the grading hook, one per group; empty: nothing is graded."""
    places: Sequence[Sequence[int]] = ()
    """Per group, the positions of its completions among all requests of the rollout."""
    may_lose: bool = False
    """The rollout may end without the completions of a request that fails or is late. Not in an evaluation:
    they would count as wrong."""
    order: int = 0
    """Priority, lowest first: a training step's number."""
    number: int = 0
    """Distinguishes the rollouts of a run at its clients."""
    pending: deque[int] = field(default_factory=deque)
    """Requests to be sent, in this order; kept by `Dispatch`."""
    finished: Future[None] = field(default_factory=Future)
    """Has a result once every request is ready or lost."""
    done: dict[int, Completed] = field(default_factory=dict)
    landed: dict[int, int] = field(default_factory=dict)
    """Ticket of the attempt that was answered -> its request."""
    ready: set[int] = field(default_factory=set)
    """Requests whose completions are decoded and graded."""
    first_asked: dict[int, float] = field(default_factory=dict)
    failures: dict[int, list[str]] = field(default_factory=dict)
    """Request -> what went wrong, one line per failed answer."""
    aborts: dict[int, int] = field(default_factory=dict)
    """Request -> how often it was aborted, counting the aborts of the request that it is a part of."""
    completions_aborted: int = 0
    """Completions that were aborted and requested again."""
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Request, unless it is a group's first part -> its group, and the position there of its first completion."""
    may_split: bool = False
    """A group may be requested in parts, and aborted completions of a request without its others."""
    near: dict[int, Counter[int]] = field(default_factory=dict)
    """Group that may be split -> how many of its completions are in flight at each client or have landed there."""
    lost: dict[int, str] = field(default_factory=dict)
    """Request that was given up -> why."""
    ended: set[int] = field(default_factory=set)
    """Requests that were late, so that servers were asked to abort them and keep their tokens so far."""
    resent: set[int] = field(default_factory=set)
    """Groups that lost an attempt during sampling and whose retry samples other completions, without seeds, under newer
    weights or through a save (wholly or in part). Long ones are lost more often, so retries favour short ones."""
    lost_under: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    """(group, position there) of a completion -> the weights version and the client of its last lost attempt."""
    was_seen: bool = False
    """A checkpoint has interrupted its requests: each completion goes on in a request of its own, from the tokens that
    its client alone has."""
    digest: str = ""
    """Of the requests, see `in_flight`; empty: no checkpoint holds what is in flight of them."""
    kept: dict[tuple[int, int], Sampled] = field(default_factory=dict)
    """(group, position there) -> what a checkpoint has of that completion."""
    retries: int = 0
    given_up: bool = False
    """The remaining completions are no longer wanted: `dispatch` ends its requests."""

    def spread(self, servers: int, most: int) -> None:
        """Split each group into equal parts, one per server, or fewer (see `_TOKENS_PER_READ`); more where a part would
        exceed `most`, since vLLM refuses a request that it cannot run at once. The completions of a part share a
        prefill. Each has its own seed, so splitting changes none."""
        for index, group in enumerate(tuple(self.groups)):
            least = math.ceil(_TOKENS_PER_READ * len(group.prompt_ids) / group.max_tokens)
            count = min(group.count, most, max(math.ceil(group.count / max(1, servers)), least))
            self.groups[index] = group.part(0, count)
            for first in range(count, group.count, count):
                self.parts[len(self.groups)] = index, first
                self.groups.append(group.part(first, min(count, group.count - first)))

    @property
    def missing(self) -> dict[tuple[int, int], str]:
        """(group, position there) of each completion that was given up, and why."""
        return {one: why for index, why in self.lost.items() for one in self.completions_of(index)}

    @property
    def homes(self) -> dict[int, int]:
        """Group whose parts landed at several clients -> the client that has most of its completions."""
        return {whole: max(sorted(at), key=at.__getitem__) for whole, at in self.near.items() if len(at) > 1}

    def part_of(self, index: int) -> tuple[int, int]:
        """The group of request `index`, and the position there of its first completion."""
        return self.parts.get(index, (index, 0))

    def completions_of(self, index: int) -> list[tuple[int, int]]:
        """(group, position there) of each completion of request `index`."""
        whole, first = self.part_of(index)
        return [(whole, place) for place in range(first, first + self.groups[index].count)]

    @property
    def is_wanted(self) -> bool:
        return not (self.finished.done() or self.given_up)

    @property
    def is_complete(self) -> bool:
        return len(self.ready) + len(self.lost) == len(self.groups)
