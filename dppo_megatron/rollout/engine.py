"""What the loop asks of a generation engine. Token ids in, token ids out: text is never tokenized twice."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from torch import Tensor

from dppo_megatron.distributed import share
from dppo_megatron.progress import counted, progress
from dppo_megatron.types import Completion, Grade, Prompt
from dppo_megatron.weights.hf_files import WeightReader, check_finite

Weights: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]
"""Starts a pass over all weights: every (Hugging Face name, full tensor) once, given to the ranks in
`Engine.receivers`. Called again for a retry; collective where the actor is sharded."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample."""

    prompt: Prompt
    completion_index: int
    step: int
    """With the stream, the prompt and the completion index, the key of the random numbers that it consumes."""
    stream: str = ""
    """What the prompt's index counts in: empty for the training set, else any name (`eval/aime24`). Prompts of two
    streams share neither random numbers nor request ids, whatever their indices."""
    sampling: Sampling | None = None
    """How this one is sampled; None: with the sampling of the call."""
    limit: int = 0
    """Tokens at which it is stopped early, if that is before the sampling's limit; 0: it is not."""

    @property
    def purpose(self) -> str:
        """The purpose of its random numbers (see `randomness.generator`)."""
        return f"sample {self.stream}" if self.stream else "sample"

    @property
    def id(self) -> str:
        """`step-prompt-completion`, behind the name of its stream if it has one: the same on every attempt, so that a
        repeated request is recognised.

        Example:
            Request(prompt 7, completion_index=3, step=12).id == "12-7-3"
            Request(prompt 7, completion_index=3, step=0, stream="eval/a b").id == "eval_a_b~de6f5a03-0-7-3"
        """
        own = f"{self.step}-{self.prompt.index}-{self.completion_index}"
        if not self.stream:
            return own
        # servers take plain ASCII ids of bounded length; the hash keeps apart what the plain form makes equal
        plain = re.sub(r"[^A-Za-z0-9.]", "_", self.stream)[:32]
        return f"{plain}~{hashlib.blake2b(self.stream.encode(), digest_size=4).hexdigest()}-{own}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample; the same meaning on every engine."""

    max_completion_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int
    top_p: float = 1.0
    """Truncates the distribution to the smallest set of tokens with this probability; behaviour log-probabilities are
    those of the truncated, renormalized distribution."""
    top_k: int = 0
    """Truncates to the k most likely tokens; 0: all."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the tokenizer's end of sequence."""
    reads_logprobs: bool = True
    """Whether the behaviour log-probabilities are read. Evaluations do not, and so may use top_p where an engine has no
    log-probabilities under it (SGLang: only for a bounded number of tokens)."""


def own_requests(requests: Sequence[Request]) -> list[int]:
    """Positions of the requests that this rank holds where ranks share evenly: a prompt's stay together.

    Example: on rank 1 of 2, requests of prompts A A B B C C give [2, 3].
    """
    prompts: dict[tuple[str, int, int], int] = {}
    own = [prompts.setdefault((r.stream, r.prompt.index, r.step), len(prompts)) for r in requests]
    mine = set(share(range(len(prompts))))
    return [position for position, prompt in enumerate(own) if prompt in mine]


@dataclass(slots=True)
class RolloutStats:
    """What happened at the servers; None: nothing of the kind."""

    retries: int | None = None
    """Groups that were asked for again."""
    groups_aborted: int | None = None
    """Training groups that a weight sync, or a server unasked, has ended at least once."""
    completions_aborted: int | None = None
    """Completions that were sampled again for it."""
    groups_resent: int | None = None
    """Training groups that were lost while a server sampled them, and sampled otherwise then (`Work.resent`); without
    those above."""
    servers_live: int | None = None
    tokens_sampled: int | None = None
    """Of completions of training, but for those that were aborted."""
    token_ages: int | None = None
    """Weight syncs between each of those tokens and the present weights, added up."""
    staleness_max: int | None = None
    """The same of the oldest token; at most `rollout.async_steps`."""
    tokens_read_again: int | None = None
    """Of prompts and completions whose generation a weight sync has interrupted: their cached prefixes were dropped."""
    sync_s: float | None = None
    tensors_verified: int | None = None

    def add(self, **counts: int) -> None:
        """Count up those of these names."""
        for name, count in counts.items():
            setattr(self, name, (getattr(self, name) or 0) + count)

    def add_ages(self, spans: Iterable[tuple[int, int]]) -> None:
        """Count tokens: ages, and how many tokens have each."""
        for age, tokens in spans:
            self.add(tokens_sampled=tokens, token_ages=age * tokens)
            self.staleness_max = max(age, self.staleness_max or 0)

    def metrics(self) -> dict[str, float]:
        """Under their names in metrics.jsonl; of the ages of tokens their mean."""
        found = {name: float(value) for name, value in asdict(self).items() if value is not None}
        tokens, ages = found.pop("tokens_sampled", None), found.pop("token_ages", 0.0)
        if tokens is not None:
            found["staleness_mean"] = ages / max(tokens, 1.0)
        return {f"rollout/{name}": value for name, value in found.items()}


class Engine(ABC):
    """A generator whose weights follow the actor's. All calls are collective: every rank makes them.

    What is not abstract is right for an engine in every rank, without servers.
    """

    has_servers = False
    """Generates in other processes, whose log-probabilities and weights are to be checked."""
    description: str
    """One line for the log: what generates, where, and how weights reach it."""
    _asked: tuple[Sequence[Request], Sampling] | None = None

    @property
    def receivers(self) -> Sequence[int] | None:
        """Ranks that must be given the weights; None: all. The same on every rank."""
        return None

    @abstractmethod
    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Replace all weights and count the weights version up by one.

        Args:
            release: called on every rank after each pass over `weights`, when the servers have copies: the actor may
                give their memory up, which servers then take for their caches.

        Returns:
            Whether the canary is due: engines without servers never ask for one.
        """

    def load_checkpoint(self, checkpoint: WeightReader) -> None:
        """Load weights without an actor, for scoring a model. Raises UserError for a tensor with NaN or infinity."""

        def finite() -> Iterator[tuple[str, Tensor]]:
            for name in counted(checkpoint.names, advance):
                tensor = checkpoint.get(name)
                check_finite(name, tensor)
                yield name, tensor

        with progress("loading the weights", len(checkpoint.names), "tensors") as advance:
            self.load_weights(finite)

    @abstractmethod
    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Sample a completion for each request: (position in the requests, completion) as they come, of those that this
        rank holds. Every request is held by exactly one rank, and a prompt's completions by the same one.

        Args:
            requests: all of the job's, the same on every rank; the engine distributes them.
        """

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Begin the same, in the background where the engine can; the caller may do something else before `finish`."""
        self._asked = requests, sampling

    def finish(self) -> dict[int, Completion]:
        """All that `stream` would have given since the last `start`, in the order of the requests."""
        return dict(sorted(self.stream(*self._asked))) if self._asked is not None else {}

    def take_grades(self) -> dict[int, Grade]:
        """Position in the requests of the last `finish` -> grade, of what was graded where it arrived; else nothing."""
        return {}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """`start` and `finish`: this rank's completions, in the order of their requests."""
        self.start(requests, sampling)
        return list(self.finish().values())

    def rest(self) -> None:  # noqa: B027
        """The actor computes now. Where it needs the engine's device memory, nothing is generated before the next
        `load_weights`."""

    def probe(
        self, requests: Sequence[Request], sampling: Sampling, *, alone: bool = False
    ) -> list[tuple[str, Completion]]:
        """(server, completion) of the same requests from every server. The requests are the same on every rank.

        Args:
            alone: asked when all that was started has been generated, so that nothing of this run is before them.
        """
        return []

    def health(self) -> dict[str, str]:
        """State of every server by its address: live, or why not. The same on every rank."""
        return {}

    def statistics(self) -> RolloutStats:
        """What happened since the last call."""
        return RolloutStats()

    def close(self) -> None:  # noqa: B027
        """Release servers and sockets; what `start` began and nobody has finished is given up."""
