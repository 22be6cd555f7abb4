"""Per-token advantages, weights or probabilities from a user's function: `objective.token_values`.

Rank 0 has no tokens. So the function is called after its selection, for each kept completion on the rank that holds it.
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
"""[completion tokens], one 4-byte value per token."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of the n tokens of a completion, each an array [n]; None: every token has the completion's value."""

    advantages: FloatArray | None = None
    """Replace the completion's advantage."""
    weights: FloatArray | None = None
    """Factors on the completion's weight. What a sum with them estimates is unknown: `biased`."""
    probabilities: FloatArray | None = None
    """Probability with which the trainer draws each token; its weight is then the inverse, otherwise 0: `unbiased`."""


TokenFunction: TypeAlias = Callable[[Group, int, float], TokenValues]
"""A function of a group, the place of a completion in it, and its advantage, and of nothing else."""

_RANGES = {"advantages": (-1e9, 1e9), "weights": (-1e9, 1e9), "probabilities": (1e-3, 1.0)}
"""Below 1e-3 a run would draw hardly any of these tokens, each with a weight above 1,000: unbiased in theory only."""


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """A user's function, for one step."""

    function: TokenFunction
    path: str
    seed: int
    zero_carries: bool
    """Completions with advantage 0 carry gradient, so pruning drops none for that. If False, their tokens get 0."""
    given: tuple[str, ...] = ()
    """The fields that the function returned when it was tried; the label and the sizes of messages depend on them."""
    step: int = 0

    def columns(self, group: Group, place: int, advantage: float) -> dict[str, Column]:
        """[n] for each field that the function returns; for probabilities, the weights of the drawn tokens.

        Raises:
            UserError: it raises, or returns values that cannot be trained on.
        """
        index, count = group.selected.prompt.index, len(group.completions[place].token_ids)
        call = f"objective.token_values = '{self.path}', called for completion {place} of prompt {index}:"
        try:
            answer = self.function(group, place, advantage)
            every = {one.name: getattr(answer, one.name) for one in fields(TokenValues)}
            arrays = {name: np.asarray(values, np.float64) for name, values in every.items() if values is not None}
        except Exception as error:
            raise UserError(f"{call} {type(error).__name__}: {error}; expected TokenValues") from error
        names = " and ".join(arrays) or "nothing"
        if self.given and tuple(arrays) != self.given:
            raise UserError(f"{call} returned {names}, but {' and '.join(self.given)} when it was tried")
        if not arrays or {"weights", "probabilities"} <= arrays.keys():
            raise UserError(f"{call} returned {names}; expected advantages, weights or probabilities, not the last two")
        for name, values in arrays.items():
            if name == "probabilities":  # a 1 computed in float32 may be slightly larger
                values = arrays[name] = np.where((values > 1.0) & (values <= 1.0 + 1e-6), 1.0, values)
            if values.shape != (count,):
                raise UserError(f"{call} returned {name} {list(values.shape)}; expected [{count}], a number a token")
            low, high = _RANGES[name]
            if (wrong := np.flatnonzero(~((values >= low) & (values <= high)))).size:  # NaN counts as wrong
                token = int(wrong[0])
                raise UserError(f"{call} gave token {token} {name} of {values[token]}; expected [{low:g}, {high:g}]")
        if advantage == 0 and not self.zero_carries and "advantages" in arrays:
            arrays["advantages"] = np.zeros(count)  # as if dropped, so that pruning does not change the objective
        if (pi := arrays.get("probabilities")) is not None:
            coins = generator(self.seed, "tokens", self.step, index, place).random(count)
            arrays["probabilities"] = np.where(coins < pi, 1.0 / pi, 0.0)
        return {name: values.astype(np.float32) for name, values in arrays.items()}

    def applied(self, sample: TrainSample, columns: Sequence[Column]) -> TrainSample:
        """The completion's sample, with these columns applied."""
        values = dict(zip(self.given, (column.astype(np.float64) for column in columns), strict=True))
        advantage = values.pop("advantages", sample.advantage)
        return replace(sample, advantage=advantage, weight=sample.weight * next(iter(values.values()), 1.0))


def try_token_values(own: OwnTokens, prompt: Prompt) -> OwnTokens:
    """Call the function on a made-up group of this prompt before anything expensive; returns `own` with `given` set.
    Raises UserError as `columns` does, and for a function that changes its arguments or draws by itself."""
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
                f"objective.token_values = '{own.path}' gives different results when called again; return"
                " probabilities, and the trainer draws"
            )
    at_zero = replace(own, zero_carries=True).columns(group, 0, 0.0)
    if not own.zero_carries and np.any(at_zero.get("advantages", 0.0)):
        raise UserError(
            f"objective.token_values = '{own.path}' returned advantages other than 0 where the completion's is 0, and"
            " pruning drops such completions; return 0, or set objective.zero_advantage_slope to about their size"
        )
    return own
