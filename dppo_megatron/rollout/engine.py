"""The interface of generation engines. They take and return token ids, so that text is never tokenized twice."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from torch import Tensor

from dppo_megatron.distributed import share
from dppo_megatron.progress import counted, progress
from dppo_megatron.types import Completion, Grade, Prompt
from dppo_megatron.weights.hf_files import WeightReader, check_finite

Weights: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]
"""Starts a pass over all weights that yields every (Hugging Face name, full tensor) once, on the ranks in
`Engine.receivers`. Called again for a retry; collective where the actor is sharded."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample."""

    prompt: Prompt
    completion_index: int
    step: int
    """Keys the completion's random numbers, together with the stream, the prompt index and the completion index."""
    stream: str = ""
    """The data set that the prompt index refers to: empty for the training set, else any name (`eval/aime24`). Prompts
    of two streams share neither random numbers nor request ids, whatever their indices."""
    sampling: Sampling | None = None
    """Overrides the `sampling` argument of the call; None: use that argument."""
    limit: int = 0
    """Number of tokens after which the completion is stopped early, if below the sampling's limit; 0: no such limit."""

    @property
    def purpose(self) -> str:
        """The `purpose` argument of `randomness.generator` for this completion."""
        return f"sample {self.stream}" if self.stream else "sample"

    @property
    def id(self) -> str:
        """`step-prompt-completion`, prefixed with the stream if there is one; the same on every attempt.

        Example:
            Request(prompt 7, completion_index=3, step=12).id == "12-7-3"
            Request(prompt 7, completion_index=3, step=0, stream="eval/a b").id == "eval_a_b~de6f5a03-0-7-3"
        """
        numbers = f"{self.step}-{self.prompt.index}-{self.completion_index}"
        if not self.stream:
            return numbers
        # servers accept plain ASCII ids of bounded length; the hash separates names that the plain form makes equal
        plain = re.sub(r"[^A-Za-z0-9.]", "_", self.stream)[:32]
        return f"{plain}~{hashlib.blake2b(self.stream.encode(), digest_size=4).hexdigest()}-{numbers}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; they mean the same on every engine."""

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
    """In addition to the tokenizer's end-of-sequence token."""
    reads_logprobs: bool = True
    """Whether the caller needs behaviour log-probabilities. Evaluations do not, so they may use top_p where the engine
    cannot return log-probabilities under it (SGLang returns them only for a bounded number of tokens)."""


def own_requests(requests: Sequence[Request]) -> list[int]:
    """Positions of this rank's requests when prompts, with all of their requests, are distributed evenly.

    Example: on rank 1 of 2, requests of prompts A A B B C C give [2, 3].
    """
    prompts: dict[tuple[str, int, int], int] = {}
    prompt_of = [prompts.setdefault((r.stream, r.prompt.index, r.step), len(prompts)) for r in requests]
    mine = set(share(range(len(prompts))))
    return [position for position, prompt in enumerate(prompt_of) if prompt in mine]


@dataclass(slots=True)
class RolloutStats:
    """Counts of what happened at the servers (docs/run_directory.md). None: not counted, or it did not happen."""

    retries: int | None = None
    groups_aborted: int | None = None
    """With in_flight=abort: training groups that were aborted at least once, by a weight sync or a server; else 0."""
    completions_aborted: int | None = None
    groups_resent: int | None = None
    """Training groups whose retry may have sampled other completions (`Work.resent`), without `groups_aborted`."""
    servers_live: int | None = None
    tokens_sampled: int | None = None
    """Tokens of training completions that were not aborted."""
    token_ages: int | None = None
    """Sum over those tokens of their age: the number of weight syncs since the token was sampled."""
    staleness_max: int | None = None
    """Age of the oldest token; at most `rollout.async_steps`."""
    tokens_read_again: int | None = None
    sync_s: float | None = None
    tensors_verified: int | None = None

    def add(self, **counts: int) -> None:
        for name, count in counts.items():
            setattr(self, name, (getattr(self, name) or 0) + count)

    def add_ages(self, spans: Iterable[tuple[int, int]]) -> None:
        """Count sampled tokens; `spans` are (age, number of tokens)."""
        for age, tokens in spans:
            self.add(tokens_sampled=tokens, token_ages=age * tokens)
            self.staleness_max = max(age, self.staleness_max or 0)

    def metrics(self) -> dict[str, float]:
        """The counts under their names in metrics.jsonl, with the mean age of a token in place of its two sums."""
        values = {name: float(value) for name, value in asdict(self).items() if value is not None}
        tokens, ages = values.pop("tokens_sampled", None), values.pop("token_ages", 0.0)
        if tokens is not None:
            values["staleness_mean"] = ages / max(tokens, 1.0)
        return {f"rollout/{name}": value for name, value in values.items()}


class Engine(ABC):
    """A generator whose weights follow the actor's. All calls are collective: every rank makes them.

    The default implementations suit an engine that is embedded in every rank and has no servers.
    """

    has_servers = False
    """Generation runs in other processes, whose log-probabilities and weights must be checked."""
    description: str
    """One line for the log: what generates, where, and how weights reach it."""
    weights_version: int = 0
    """Number of the last weight sync. A resumed run sets it back by one, and counts on."""
    _start_arguments: tuple[Sequence[Request], Sampling] | None = None

    @property
    def receivers(self) -> Sequence[int] | None:
        """Ranks that need the weights; None: all. The same on every rank."""
        return None

    @abstractmethod
    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        """Replace all weights and increment the weights version.

        Args:
            release: called on every rank after each pass over `weights`, when the servers have their copies. The actor
                may free its weights then; servers use that memory for their KV caches.

        Returns:
            Whether the canary is due; always False for engines without servers.
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
        """Sample a completion for each request. Yields (position in `requests`, completion) as completions arrive, for
        this rank's share only. `requests` are the same on every rank; a prompt's completions are on one rank."""

    def start(self, requests: Sequence[Request], sampling: Sampling, begun: dict[str, Any] | None = None) -> None:
        """Begin sampling, in the background where the engine can; `finish` returns the completions. `begun`: on rank 0,
        what `in_flight` has returned for these requests; it is not sampled again."""
        self._start_arguments = requests, sampling

    def in_flight(self) -> dict[int, dict[str, Any]]:
        """What was started and not finished, by step, for a checkpoint. On rank 0; empty elsewhere, and if nothing is
        sampled in the background."""
        return {}

    def finish(self) -> dict[int, Completion]:
        """This rank's completions of the last `start`, by position in its requests and in that order."""
        return dict(sorted(self.stream(*self._start_arguments))) if self._start_arguments else {}

    def take_grades(self) -> dict[int, Grade]:
        """Grades of the last `finish`, by position in its requests; empty if the engine does not grade."""
        return {}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """`start` and `finish`: this rank's completions, in the order of their requests."""
        self.start(requests, sampling)
        return list(self.finish().values())

    def sleep(self) -> None:  # noqa: B027
        """Give the device to the actor. Colocated servers generate nothing before the next `load_weights`."""

    def probe(
        self, requests: Sequence[Request], sampling: Sampling, *, alone: bool = False
    ) -> list[tuple[str, Completion]]:
        """Send the same requests to every server; returns (server, completion). Same arguments on every rank. `alone`:
        first wait until everything that was started has been generated, so the probe does not queue."""
        return []

    def health(self) -> dict[str, str]:
        """State of every server by its address: `live`, or why it is not. The same on every rank."""
        return {}

    def statistics(self) -> RolloutStats:
        """Counts since the last call."""
        return RolloutStats()

    def close(self) -> None:  # noqa: B027
        """Release servers and sockets, and drop what was started but not finished."""
