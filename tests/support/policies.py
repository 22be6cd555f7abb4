"""Policies as a user might write them: `pruning.prompt.method=support.policies:Name`, the same for completions."""

from __future__ import annotations

import os
import random
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dppo_megatron.pruning import CompletionBatch, CustomCompletionPolicy, CustomPromptPolicy, Draw, StepCost
from dppo_megatron.pruning.custom import Choice
from dppo_megatron.pruning.prompt_dppo import DppoPromptPolicy
from dppo_megatron.randomness import uniforms
from dppo_megatron.types import FloatArray, IntArray

MOST_TOKENS = 16
"""`rollout.sampling.max_completion_tokens` of the jobs of `support.job`."""


class Curious(CustomPromptPolicy):
    """Probabilities: prompts whose groups had variance always, the others the less the more often they were tried."""

    reads = ("discount",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tries: dict[str, int] = {}
        self.variance = self.history.arrays["variance"]  # once and for all, also over a resume

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        tries = np.array([self.tries.get(str(prompt), 0) for prompt in prompt_index.tolist()])
        varied = self.variance[prompt_index] > 0
        return np.where(varied, 1.0, 0.9 ** (1.0 + tries))

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        for prompt in prompt_index.tolist():
            self.tries[str(prompt)] = self.tries.get(str(prompt), 0) + 1

    def own_state(self) -> dict[str, Any]:
        return {"tries": dict(self.tries)}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.tries = dict(state["tries"])


class Visit(NamedTuple):
    """Of a type that reading a checkpoint does not know."""

    step: int
    reward: np.float64


class Hoarder(CustomPromptPolicy):
    """Hands out what it keeps itself, and not a copy: by prompts, of which there are none at the start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.visits: dict[Any, list[Visit]] = defaultdict(list)

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        known = [[reward for _, reward in self.visits.get(prompt, ())] for prompt in prompt_index]
        return np.array([0.4 + 0.5 * np.mean(rewards) if rewards else 0.95 for rewards in known])

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        for prompt, mean in zip(prompt_index, np.nan_to_num(rewards).mean(axis=1), strict=True):
            self.visits[prompt].append(Visit(step, mean))

    def own_state(self) -> dict[str, Any]:
        return self.visits

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.visits = defaultdict(list, state)


class Queued(Hoarder):
    """Keeps something that cannot be saved from its first step on."""

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        self.visits[0] = deque()  # type: ignore[assignment]


class Coins(CustomPromptPolicy):
    """A design of its own: every prompt by an independent coin of 0.7."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        pi = np.full(len(prompt_index), 0.7)
        return Draw(uniforms(self.seed, "coins", prompt_index, step, minibatch) < pi, pi, fixed_size=False)


class FirstHalf(CustomPromptPolicy):
    """A pick."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        return np.arange(len(prompt_index)) < max(len(prompt_index) // 2, 1)


class FlatScore(DppoPromptPolicy):
    """A built-in with one part replaced."""

    def _score(self, ids: IntArray, step: int) -> FloatArray:
        return np.ones(len(ids))


class Whole(CustomCompletionPolicy):
    """A design of its own: groups are kept or left out as a whole, by coins of one half."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        pi = np.full(len(batch), 0.5)
        return Draw(uniforms(self.seed, "coins", batch.prompt_index, step, minibatch) < pi, pi, fixed_size=False)


class Longer(CustomCompletionPolicy):
    """Probabilities: long completions more often."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return batch.lengths / batch.lengths.max(initial=1)


class Shortest(CustomCompletionPolicy):
    """A pick."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return batch.lengths <= np.median(batch.lengths) if len(batch) else np.zeros(0, dtype=np.bool_)


class Moody(CustomCompletionPolicy):
    """Probabilities, or a pick where there are few completions."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return np.full(len(batch), 0.5) if len(batch) > 4 else np.ones(len(batch), dtype=np.bool_)


class OneByOne(CustomCompletionPolicy):
    """A pick, made of a list: of nothing, numpy makes an array of floats."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return np.array([advantage > 0 for advantage in batch.advantages.tolist()])


class Nothing(CustomPromptPolicy):
    """Lacks `choose`."""


class Replaced(CustomPromptPolicy):
    """Would weigh and label by itself."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        return np.ones(len(prompt_index))

    def select(self, prompt_index: IntArray, *, step: int, minibatch: int = 0) -> Any:
        return None


class NoArguments(FirstHalf):
    """Takes another signature."""

    def __init__(self) -> None:
        pass


class Hard(CustomPromptPolicy):
    """Looks at the rows' levels when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hard = self.features.level > 3  # type: ignore[union-attr]

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        return np.where(self.hard[prompt_index], 1.0, 0.5)


class Many(FirstHalf):
    """Looks at the number of prompts when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert len(self.history) > 1, "a set of one"


class Tossing(FirstHalf):
    """Draws from the generators that the whole process shares, whenever it is asked or told something, and does not
    use what it drew."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        random.random()
        np.random.rand(len(prompt_index))
        return np.ones(len(prompt_index))

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        random.random()
        np.random.rand()


class ByLength(CustomPromptPolicy):
    """Keeps a table with a place for every length that a completion can have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = np.zeros(MOST_TOKENS + 1)

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        return np.ones(len(prompt_index))

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        np.add.at(self.seen, lengths, 1)


class TableOfLengths(CustomCompletionPolicy):
    """The same for completions; refuses an objective by which those without advantage carry no gradient."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        if self.zero_advantage_slope == 0:
            raise ValueError("of no use where a completion without advantage carries nothing")
        return np.linspace(0.5, 1.0, MOST_TOKENS + 1)[batch.lengths]


class Unsaved(FirstHalf):
    """Keeps what a checkpoint cannot hold."""

    def own_state(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Takes nothing over."""


class Forgetful(FirstHalf):
    """Saves what it does not take over again."""

    def own_state(self) -> dict[str, Any]:
        return {"seen": [1, 2]}


class Answers(CustomPromptPolicy):
    """Answers what `answer` is."""

    answer: Any = None

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        given: Choice = self.answer(len(prompt_index))
        return given


class Misspelt(CustomPromptPolicy):
    """Names something that is not there."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        return np.where(self.history.array["variance"][prompt_index] > 0, 1.0, 0.5)  # type: ignore[attr-defined]


class Unsigned(FirstHalf):
    """Learns with another signature."""

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray) -> None:  # type: ignore[override]
        pass


class ByLargest(CustomCompletionPolicy):
    """Of no completions there is no largest."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return np.abs(batch.advantages) / np.abs(batch.advantages).max()


class NoObject(CustomCompletionPolicy):
    """Makes something else."""

    def __new__(cls, **kwargs: Any) -> Any:
        return 3

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return np.ones(len(batch))


class Shared(CustomCompletionPolicy):
    """Draws from a generator that no checkpoint has."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return np.random.rand(len(batch))


class Roving(CustomPromptPolicy):
    """A design of its own, drawn from a generator of its own, which it does not save."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rng = np.random.default_rng(self.seed)

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        pi = np.full(len(prompt_index), 0.6)
        return Draw(self.rng.random(len(pi)) < pi, pi, fixed_size=False)


class Saving(Roving):
    """The same, saved."""

    def own_state(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class Drawn(Saving):
    """The same, but it draws when it learns what a step cost, and not when it chooses."""

    word, pi = 1, 0.6

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        pi = np.full(len(prompt_index), self.pi)
        return Draw(uniforms(self.word, "coins", prompt_index, minibatch) < pi, pi, fixed_size=False)

    def feedback(self, cost: StepCost) -> list[str]:
        self.word = int(self.rng.integers(2**31))
        return []


class Learning(Drawn):
    """The same, but it draws when it learns what was visited."""

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        super().feedback(StepCost(step + 1, 1.0, 1.0, 1.0))

    def feedback(self, cost: StepCost) -> list[str]:
        return []


def coins(*key: int, count: int, pi: float = 0.5) -> Draw:
    return Draw(np.random.default_rng(key).random(count) < pi, np.full(count, pi), fixed_size=False)


class Designed(CustomPromptPolicy):
    """By `design(prompts, step, minibatch, epoch)`."""

    design: Any = None

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        epoch = step * self.prompts_per_step // len(self.history)
        drawn: Choice = self.design(prompt_index, step, minibatch, epoch)
        return drawn


class DesignedToo(CustomCompletionPolicy):
    """The same; no completion policy knows the epoch."""

    design: Any = None

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        drawn: Choice = self.design(100 * batch.prompt_index + batch.completion_index, step, minibatch, 0)
        return drawn


class OncePerEpoch(CustomPromptPolicy):
    """A coin for each prompt and epoch."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        pi, epoch = np.full(len(prompt_index), 0.5), step * self.prompts_per_step // len(self.history)
        return Draw(uniforms(self.seed, "coins", prompt_index, epoch) < pi, pi, fixed_size=False)


class OncePerPrompt(CustomPromptPolicy):
    """The same coins in every epoch."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        pi = np.full(len(prompt_index), 0.5)
        return Draw(uniforms(self.seed, "coins", prompt_index) < pi, pi, fixed_size=False)


class OncePerStep(CustomPromptPolicy):
    """The same coins in every mini-batch of a step."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        return coins(self.seed, step, count=len(prompt_index), pi=0.9)


class OncePerStepToo(CustomCompletionPolicy):
    """The same."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return coins(self.seed, step, count=len(batch))


class OnceForAll(CustomCompletionPolicy):
    """The same coins in every step."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return coins(self.seed, minibatch, count=len(batch))


class Fresh(CustomCompletionPolicy):
    """By coins, fresh for each update."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return coins(self.seed, step, minibatch, count=len(batch))


class ByRow(CustomCompletionPolicy):
    """By coins of its rows: no row is in two mini-batches of a step."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        pi = np.full(len(batch), 0.5)
        rows = np.stack([batch.prompt_index, batch.completion_index], axis=1)
        kept = uniforms(self.seed, "coins", rows, step) < pi
        return Draw(kept, pi, fixed_size=False)


class Certain(CustomCompletionPolicy):
    """A design without chance."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Choice:
        return Draw(batch.advantages != 0, (batch.advantages != 0).astype(np.float64), fixed_size=True)


class Scheduled(CustomPromptPolicy):
    """The same by a table of the run's 100 steps."""

    calls = 0

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        type(self).calls += 1
        pi = np.full(len(prompt_index), np.ones(100)[step])
        return Draw(pi == 1, pi, fixed_size=True)


class Unpaid(FirstHalf):
    """Gives no log lines."""

    def feedback(self, cost: StepCost) -> list[str]:
        return [f"{cost.update_seconds:.1f} s"]  # type: ignore[attr-defined]


class Failing(CustomPromptPolicy):
    """Raises in step 3 of a run, in the method named by `DPPO_FAILS_IN`; its state is the number of steps it knows."""

    known = 0

    def _met(self, method: str, step: int) -> None:
        if os.environ.get("DPPO_FAILS_IN") == method and step == 3:
            raise KeyError("a rare thing")

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        self._met("choose", step + 1)
        return np.full(len(prompt_index), 0.9)

    def learn(self, prompt_index: IntArray, rewards: FloatArray, lengths: IntArray, *, step: int) -> None:
        self._met("learn", step + 1)

    def feedback(self, cost: StepCost) -> list[str]:
        self._met("feedback", cost.step)
        self.known += 1
        return []

    def own_state(self) -> dict[str, Any]:
        self._met("own_state", self.known)
        return {"known": self.known}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self.known = state["known"]


class Stateless(FirstHalf):
    """Saves what it has not made yet."""

    def own_state(self) -> dict[str, Any]:
        return {"seen": self.seen}  # type: ignore[attr-defined]

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Takes nothing over."""


class Visited(CustomPromptPolicy):
    """Right, and of no use without a history, or without what the rows say."""

    def choose(self, prompt_index: IntArray, *, step: int, minibatch: int) -> Choice:
        assert self.features is not None
        variance = self.history.arrays["variance"][prompt_index]
        return variance / variance.max() / self.features.level[prompt_index].max()


NUMBER = 3
