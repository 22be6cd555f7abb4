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
from dppo_megatron.types import (
    Completion,
    FloatArray,
    Grade,
    Group,
    Label,
    Prompt,
    RolloutPrompt,
    TrainSample,
    UserError,
)

Column: TypeAlias = npt.NDArray[np.float32]


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

_RANGES = {"advantages": (-1e9, 1e9), "weights": (-1e9, 1e9), "probabilities": (1e-9, 1.0)}


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """A user's function, for one step."""

    function: TokenFunction
    path: str
    seed: int
    zero_carries: bool
    """Completions with advantage 0 carry gradient, so pruning leaves none out for that."""
    given: tuple[str, ...] = ()
    """The fields that it gave when it was tried: the label and the sizes of messages rest on them."""
    step: int = 0

    @property
    def label(self) -> Label | None:
        """Of its selection of tokens; None: it makes none."""
        return "biased" if "weights" in self.given else "unbiased" if "probabilities" in self.given else None

    def values(self, group: Group, place: int, advantage: float) -> dict[str, FloatArray]:
        """The fields [n] that the function gives.

        Raises:
            UserError: it raises, or answers what cannot be trained on.
        """
        index, count = group.selected.prompt.index, len(group.completions[place].token_ids)
        what = f"objective.token_values = '{self.path}', asked for completion {place} of prompt {index}:"
        try:
            answer = self.function(group, place, advantage)
        except Exception as error:
            raise UserError(f"{what} raised {type(error).__name__}: {error}") from error
        found = _fields_of(answer, count, what)
        if self.given and tuple(found) != self.given:
            now, before = (" and ".join(names) for names in (found, self.given))
            raise UserError(f"{what} returned {now}, but {before} when it was tried; return the same fields always")
        if advantage == 0 and not self.zero_carries and np.any(found.get("advantages", 0.0)):
            raise UserError(
                f"{what} returned advantages other than 0 where the completion's is 0, and pruning drops such"
                " completions as if they had no gradient; return 0 there, or set objective.zero_advantage_slope to"
                " about their size"
            )
        return found

    def columns(self, group: Group, place: int, advantage: float) -> list[Column]:
        """[n] of each of `given`, of drawn tokens the weights. Raises UserError as `values`."""
        found = self.values(group, place, advantage)
        if (pi := found.get("probabilities")) is not None:
            coins = generator(self.seed, "tokens", self.step, group.selected.prompt.index, place).random(len(pi))
            found["probabilities"] = np.where(coins < pi, 1.0 / pi, 0.0)
        return [values.astype(np.float32) for values in found.values()]

    def applied(self, sample: TrainSample, columns: Sequence[Column]) -> TrainSample:
        """The completion's sample, with `columns`."""
        found = dict(zip(self.given, (one.astype(np.float64) for one in columns), strict=True))
        advantage = found.pop("advantages", sample.advantage)
        return replace(sample, advantage=advantage, weight=sample.weight * next(iter(found.values()), 1.0))


def try_token_values(own: OwnTokens, prompt: Prompt) -> OwnTokens:
    """With the fields that the function gives, asked about a made-up group of this prompt before anything expensive.
    Raises UserError as `values`; a function that changes what it is given raises here too."""
    ids, logprobs = np.array(prompt.token_ids, np.int64), np.full(len(prompt.token_ids), -1.0, np.float32)
    rewards = np.array([1.0, 0.0])
    for one in (ids, logprobs, rewards):
        one.setflags(write=False)
    completions = tuple(Completion(ids[:n], logprobs[:n], "stop", prompt.text) for n in (len(ids), 1))
    group = Group(RolloutPrompt(prompt, 1.0, 1.0), completions, rewards, (Grade(1.0), Grade(0.0)))
    for place, advantage in ((0, 1.0), (1, -1.0), (0, 0.0)):
        first, again = (own.values(group, place, advantage) for _ in range(2))
        own = replace(own, given=tuple(first))
        if any(not np.array_equal(first[name], again[name]) for name in first):
            raise UserError(
                f"objective.token_values = '{own.path}' answers differently when asked again; return probabilities, and"
                " the trainer draws"
            )
    return own


def _fields_of(answer: object, count: int, what: str) -> dict[str, FloatArray]:
    """Those that are given, by name."""
    if not isinstance(answer, TokenValues):
        raise UserError(f"{what} returned {type(answer).__name__}, expected TokenValues")
    given = {one.name: getattr(answer, one.name) for one in fields(TokenValues)}
    found = {name: array for name, array in given.items() if array is not None}
    if not found or len(found.keys() - {"advantages"}) == 2:
        names = " and ".join(found) or "nothing"
        raise UserError(f"{what} returned {names}; expected advantages, and at most one of weights and probabilities")
    for name, array in found.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf" or array.shape != (count,):
            got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise UserError(f"{what} returned {name} {got}, expected a numpy array [{count}], a number a token")
        low, high = _RANGES[name]
        if (wrong := np.flatnonzero(~((array >= low) & (array <= high)))).size:  # NaN is neither
            place = int(wrong[0])
            raise UserError(f"{what} returned {name} of {array[place]} at token {place}, expected [{low:g}, {high:g}]")
    return found
