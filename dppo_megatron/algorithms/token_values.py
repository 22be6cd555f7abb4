"""What each token of a completion counts, by a function of the user's own: `objective.token_values`.

Rank 0 chooses by one advantage a completion and has no tokens. So the function is asked afterwards, by the rank that
holds a completion, about those that are kept; its values go with the tokens to the ranks that train on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dppo_megatron.randomness import generator
from dppo_megatron.types import Completion, FloatArray, Grade, Group, Prompt, RolloutPrompt, TrainSample, UserError

Column: TypeAlias = npt.NDArray[np.float32]
"""[completion tokens] one 4-byte value a token."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Of the n tokens of a completion, each an array [n]; None: all have what the completion has."""

    advantages: FloatArray | None = None
    """In place of the completion's."""
    weights: FloatArray | None = None
    """Factors on the completion's weight. What a sum with them estimates is not known: `biased`."""
    probabilities: FloatArray | None = None
    """With which the trainer draws each token; one that is drawn weighs the inverse, another 0: `unbiased`."""


TokenFunction: TypeAlias = Callable[[Group, int, float], TokenValues]
"""Of a group, the place of a completion in it, and its advantage; of nothing else."""

_RANGES = {"advantages": (-1e9, 1e9), "weights": (-1e9, 1e9), "probabilities": (1e-3, 1.0)}
"""Of a token with less than 1e-3 a run draws hardly any, each with a weight above 1,000: `unbiased` in word only."""


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """A user's function, for one step."""

    function: TokenFunction
    path: str
    seed: int
    zero_carries: bool
    """Completions with advantage 0 carry gradient, so pruning leaves none out for that. Else their tokens have 0."""
    given: tuple[str, ...] = ()
    """The fields that it gave when it was tried: label and sizes of messages rest on them."""
    step: int = 0

    def columns(self, group: Group, place: int, advantage: float) -> dict[str, Column]:
        """[n] of each field that the function gives; of drawn tokens the weights.

        Raises:
            UserError: it raises, or answers what cannot be trained on.
        """
        index, count = group.selected.prompt.index, len(group.completions[place].token_ids)
        what = f"objective.token_values = '{self.path}', asked for completion {place} of prompt {index}:"
        try:
            answer = self.function(group, place, advantage)
            given = {one.name: getattr(answer, one.name) for one in fields(TokenValues)}
            found = {name: np.asarray(values, np.float64) for name, values in given.items() if values is not None}
        except Exception as error:
            raise UserError(f"{what} {type(error).__name__}: {error}; expected TokenValues") from error
        names = " and ".join(found) or "nothing"
        if self.given and tuple(found) != self.given:
            raise UserError(f"{what} returned {names}, but {' and '.join(self.given)} when it was tried")
        if not found or {"weights", "probabilities"} <= found.keys():
            raise UserError(f"{what} returned {names}; expected advantages, weights or probabilities, not the last two")
        for name, values in found.items():
            if name == "probabilities":  # float32's 1 may be a little more
                values = found[name] = np.where((values > 1.0) & (values <= 1.0 + 1e-6), 1.0, values)
            if values.shape != (count,):
                raise UserError(f"{what} returned {name} {list(values.shape)}; expected [{count}], a number a token")
            low, high = _RANGES[name]
            if (wrong := np.flatnonzero(~((values >= low) & (values <= high)))).size:  # NaN is neither
                token = int(wrong[0])
                raise UserError(f"{what} gave token {token} {name} of {values[token]}; expected [{low:g}, {high:g}]")
        if advantage == 0 and not self.zero_carries and "advantages" in found:
            found["advantages"] = np.zeros(count)  # as if dropped: the same objective however it is pruned
        if (pi := found.get("probabilities")) is not None:
            coins = generator(self.seed, "tokens", self.step, index, place).random(count)
            found["probabilities"] = np.where(coins < pi, 1.0 / pi, 0.0)
        return {name: values.astype(np.float32) for name, values in found.items()}

    def applied(self, sample: TrainSample, columns: Sequence[Column]) -> TrainSample:
        """The completion's sample, with `columns`."""
        found = dict(zip(self.given, (one.astype(np.float64) for one in columns), strict=True))
        advantage = found.pop("advantages", sample.advantage)
        return replace(sample, advantage=advantage, weight=sample.weight * next(iter(found.values()), 1.0))


def try_token_values(own: OwnTokens, prompt: Prompt) -> OwnTokens:
    """With the fields that the function gives, asked about a made-up group of this prompt before anything expensive.
    Raises UserError as `columns`, also for a function that changes what it is given, or draws by itself."""
    ids, logprobs = np.array(prompt.token_ids, np.int64), np.full(len(prompt.token_ids), -1.0, np.float32)
    rewards = np.array([1.0, 0.0])
    for one in (ids, logprobs, rewards):
        one.setflags(write=False)
    completions = tuple(Completion(ids[:n], logprobs[:n], "stop", prompt.text) for n in (len(ids), 1))
    group = Group(RolloutPrompt(prompt, 1.0, 1.0), completions, rewards, (Grade(1.0), Grade(0.0)))
    for place, advantage in ((0, 1.0), (1, -1.0), (0, 0.0)):
        first, again = (own.columns(group, place, advantage) for _ in range(2))
        own = replace(own, given=tuple(first))
        if any(not np.array_equal(first[name], again[name]) for name in first):
            raise UserError(
                f"objective.token_values = '{own.path}' answers differently when asked again; return probabilities, and"
                " the trainer draws"
            )
    as_given = replace(own, zero_carries=True).columns(group, 0, 0.0)
    if not own.zero_carries and np.any(as_given.get("advantages", 0.0)):
        raise UserError(
            f"objective.token_values = '{own.path}' returned advantages other than 0 where the completion's is 0, and"
            " pruning drops such completions; return 0, or set objective.zero_advantage_slope to about their size"
        )
    return own
