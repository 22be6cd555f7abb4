"""The smallest rollout engine: every token drawn uniformly from the vocabulary, no model at all.

It learns nothing from the weights, but it keeps the whole contract of `rollout/engine.py`: the ranks share the
requests, a prompt's completions stay together, tokens depend on (seed, step, prompt, completion) alone, and the
log-probabilities are those of the distribution that was sampled from. Start from this and replace `_sample`.

An engine has no setting of its own to be plugged in by: it is a branch in `dppo_megatron/steps/build.py` and a name in
`RolloutConfig.engine` (docs/extending.md).
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Request, RolloutStats, Sampling, Weights, own_requests
from dppo_megatron.types import Completion, Grade


class UniformEngine:
    """Samples without a model; satisfies `dppo_megatron.rollout.engine.Engine`."""

    has_servers = False
    description = "rollout: uniform tokens"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._started: tuple[Sequence[Request], Sampling] | None = None

    @property
    def receivers(self) -> None:
        return None  # every rank is given the weights

    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        for _name, _tensor in weights():  # every rank must take part: the stream is collective
            pass
        release()  # the actor may take its weights off the device
        return False  # no canary: there is no server whose weights could differ

    def start(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._started = requests, sampling

    def finish(self) -> dict[int, Completion]:
        assert self._started is not None
        return dict(self.stream(*self._started))

    def take_grades(self) -> dict[int, Grade]:
        return {}  # the ranks grade; an engine that grades what it takes in says so here

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return [completion for _, completion in self.stream(requests, sampling)]

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        for position in own_requests(requests):  # all of the job's are given; this rank's share is taken
            request = requests[position]
            yield position, self._sample(request, request.sampling or sampling)

    def _sample(self, request: Request, sampling: Sampling) -> Completion:
        size, end = len(self._tokenizer), self._tokenizer.eos_token_id
        prompt, index = request.prompt.index, request.completion_index
        draws = generator(sampling.seed, request.purpose, request.step, prompt, index)
        tokens = draws.integers(size, size=sampling.max_completion_tokens)
        ends = np.flatnonzero(np.isin(tokens, [end, *sampling.stop_token_ids]))
        tokens = tokens[: ends[0] + 1] if len(ends) else tokens
        return Completion(
            token_ids=tokens,
            logprobs=np.full(len(tokens), -math.log(size), np.float32),
            finish_reason="stop" if len(ends) else "length",
            text=self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True),
        )

    # What an engine without servers has nothing to do for.

    def abort(self) -> None:
        self._started = None

    def rest(self) -> None: ...

    def close(self) -> None: ...

    def probe(self, requests: Sequence[Request], sampling: Sampling) -> list[tuple[str, Completion]]:
        return []

    def health(self) -> dict[str, str]:
        return {}

    def statistics(self) -> RolloutStats:
        return RolloutStats()
