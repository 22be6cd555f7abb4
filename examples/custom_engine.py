"""The smallest rollout engine: every token drawn uniformly from the vocabulary, no model at all.

It learns nothing from the weights, but it keeps the whole contract of `rollout/engine.py`: the ranks share the
requests, a prompt's completions stay together, tokens depend on (seed, step, prompt, completion) alone, and the
log-probabilities are those of the distribution that was sampled from. Start from this and replace `_sample`.

No setting plugs in an engine: add a branch to `dppo_megatron/steps/build.py` and a name to `RolloutConfig.engine`
(docs/extending.md).
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from dppo_megatron.randomness import generator
from dppo_megatron.rollout.engine import Engine, Request, Sampling, Weights, own_requests
from dppo_megatron.types import Completion


class UniformEngine(Engine):
    """Samples without a model."""

    description = "rollout: uniform tokens"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def load_weights(self, weights: Weights, release: Callable[[], None] = lambda: None) -> bool:
        for _name, _tensor in weights():  # every rank must take part: the stream is collective
            pass
        release()  # the actor may take its weights off the device
        return False  # no canary: there is no server whose weights could differ

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        for position in own_requests(requests):  # `requests` are all of the job's: take this rank's share
            request = requests[position]
            yield position, self._sample(request, request.sampling or sampling)

    def _sample(self, request: Request, sampling: Sampling) -> Completion:
        size, end = len(self._tokenizer), self._tokenizer.eos_token_id
        prompt, index = request.prompt.index, request.completion_index
        draws = generator(sampling.seed, request.purpose, request.step, prompt, index)
        longest = sampling.max_completion_tokens
        limit = min(request.limit or longest, longest)  # below `longest` only with pruning.early_stop
        tokens = draws.integers(size, size=longest)[:limit]
        ends = np.flatnonzero(np.isin(tokens, [end, *sampling.stop_token_ids]))
        tokens = tokens[: ends[0] + 1] if len(ends) else tokens
        return Completion(
            token_ids=tokens,
            logprobs=np.full(len(tokens), -math.log(size), np.float32),
            finish_reason="stop" if len(ends) else "length" if limit == longest else "early",
            text=self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True),
        )
