"""A plug-in that tries to make the ledger lie is refused, or fails to: policies, losses, and declared probabilities.

Policies override every name that the bases have (from `dir`, so a new one is included) with hostile behaviour, alone
and in pairs; what is accepted is enumerated over every draw, by `check`. Losses are made of parts that are known to be
local or not; what is accepted is enumerated over every keep pattern.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from label_cases import small_config
from label_configs import make_outcomes
from support.cases import Choose
from test_pruning_custom import _case
from test_pruning_labels import check
from torch import Tensor

from dppo_megatron.algorithms.objectives import check_policy_loss
from dppo_megatron.algorithms.policy_losses import cispo, clip, divergence_tv, gspo
from dppo_megatron.algorithms.tokens import PolicyLoss, TokenBatch, TokenLoss, sequence_sums
from dppo_megatron.config.objective import ObjectiveConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.pruning import (
    CompletionBatch,
    CompletionPolicy,
    CustomCompletionPolicy,
    CustomPromptPolicy,
    Draw,
    PromptPolicy,
    StepCost,
)
from dppo_megatron.pruning.designs import poisson, systematic
from dppo_megatron.pruning.interface import Selection, keep_all
from dppo_megatron.pruning.monitors import DeclaredTest, deviations
from dppo_megatron.pruning.weights import weigh
from dppo_megatron.selection import Selector
from dppo_megatron.types import UserError

# ------------------------------------------------------------------------------------------------ policies


class Bug(Exception):
    """A user's own, which ends the run."""


class Keeps:
    """Something to save and to take over: whoever replaces one of the two has the other all the same."""

    kept = 1

    def own_state(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_own_state(self, state: Any) -> None:
        self.kept = state["kept"]


class Prompts(Keeps, CustomPromptPolicy):
    """Honest: known probabilities by index."""

    def choose(self, prompt_index: Any, *, step: int, minibatch: int) -> Any:
        return np.where(prompt_index % 2 == 0, 0.4, 1.0)


class Completions(Keeps, CustomCompletionPolicy):
    """Honest: known probabilities by length."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Any:
        return np.where(batch.lengths > 4, 0.4, 1.0)


LEVELS: dict[str, tuple[type, tuple[type, ...]]] = {
    "prompt": (Prompts, (PromptPolicy, CustomPromptPolicy)),
    "completion": (Completions, (CompletionPolicy, CustomCompletionPolicy)),
}
USED = {"choose", "learn", "feedback", "own_state", "load_own_state", "reads"}


def _names(level: str) -> list[str]:
    """Public and protected, of methods, properties and attributes."""
    of = {name for cls in LEVELS[level][1] for name in dir(cls) if not name.startswith("__")}
    return sorted(of | (USED if level == "prompt" else USED - {"learn"}))


def _half(count: int) -> Selection:
    """What drops half without a weight and calls it exact."""
    kept = np.arange(count) % 2 == 0
    return replace(keep_all(count, "prompt/x"), kept=kept, weight=kept.astype(float))


def _spoilt(value: Any) -> Any:
    """The answer of a base's function, bent towards a lie."""
    if isinstance(value, Selection):
        return replace(value, weight=np.minimum(value.weight, 1.0))
    if isinstance(value, np.ndarray):
        return value * 0.5
    if isinstance(value, dict):
        return value | {"method": "none", "history": {}, "kind": "a pick", "own": {}}
    return {int: 7, bool: True, str: "exact", list: [3]}.get(type(value), value)


def _spoil_arguments(given: tuple[Any, ...]) -> None:
    for array in [a for one in given for a in (one.arrays().values() if isinstance(one, CompletionBatch) else [one])]:
        if isinstance(array, np.ndarray) and array.flags.writeable:
            array[...] = array[::-1] if array.dtype.kind == "i" else 0


def _behaviours(base: type, name: str) -> dict[str, Any]:
    """Hostile values of an attribute of this name."""
    original = getattr(base, name, None)

    def bent(self: Any, *given: Any, **named: Any) -> Any:
        return _spoilt(original(self, *given, **named))  # type: ignore[misc]

    def spoils(self: Any, *given: Any, **named: Any) -> Any:
        answer = original(self, *given, **named)  # type: ignore[misc]
        _spoil_arguments((*given, *named.values()))
        if hasattr(self, "history"):
            self.history.arrays["visits"][:] = 99
        self.config.estimator, self.config.min_inclusion_prob, self.config.max_weight = "hajek", 1e-9, 1.01
        return answer

    def halves(self: Any, *given: Any, **named: Any) -> Any:
        return _half(len(given[0])) if given and hasattr(given[0], "__len__") else 7

    def raises(self: Any, *given: Any, **named: Any) -> Any:
        raise Bug

    def nothing(self: Any, *given: Any, **named: Any) -> Any:
        return None

    made = {
        "halves": halves,
        "raises": raises,
        "nothing": nothing,
        "text": "exact",
        "true": property(lambda self: True),
    }
    return made | ({"bent": bent, "spoils": spoils} if callable(original) else {})


def _hostile(level: str, chosen: list[tuple[str, str]]) -> Config:
    """The configuration of a user's class that overrides these names with these behaviours."""
    base = LEVELS[level][0]
    globals()["Generated"] = type("Generated", (base,), {name: _behaviours(base, name)[how] for name, how in chosen})
    own = f"{__name__}:Generated"
    return small_config(own if level == "prompt" else "none", own if level == "completion" else "none")


def _verdict(level: str, chosen: list[tuple[str, str]], seed: int) -> str:
    """`refused`, or the label, which is then true in every draw."""
    try:
        return check(_case(_hostile(level, chosen), seed))
    except UserError as refusal:
        if not {name for name, _ in chosen} <= USED:
            assert any(f"replaces {name}," in str(refusal) for name, _ in chosen if name not in USED), refusal
        return "refused"
    except (Bug, ValueError) as error:  # of load_own_state, as of a state that does not fit
        assert isinstance(error, Bug) or (isinstance(error.__cause__, Bug) and "load_own_state" in str(error))
        assert "raises" in {how for _, how in chosen}
        return "ended"


@pytest.mark.parametrize("level", list(LEVELS))
def test_no_single_override_makes_a_label_lie(level: str) -> None:
    """What is none of the used names is refused by name, whatever it does; the others can end the run or not matter."""
    found: dict[str, Counter[str]] = {name: Counter() for name in _names(level)}
    for name, counts in found.items():
        counts.update(_verdict(level, [(name, how)], 1) for how in _behaviours(LEVELS[level][0], name))
    used = {name for name in found if name in USED}
    assert used == (USED if level == "prompt" else USED - {"learn"}) and len(found) > 20
    for name in found.keys() - used:
        assert set(found[name]) == {"refused"}, name
    assert all(found[name]["unbiased"] for name in used - {"reads"}), found


def test_no_pair_of_overrides_makes_a_label_lie(cases: Choose) -> None:
    """Half of the pairs are of used names alone, or nearly all would be refused for the other."""
    labels: Counter[str] = Counter()
    chosen = cases("overrides", 100)
    for number in chosen:
        rng = np.random.default_rng((20261123, number))
        level = str(rng.choice(list(LEVELS)))
        names = [name for name in _names(level) if number % 2 or name in USED - {"reads"}]
        pair = rng.choice(names, 2, replace=False)
        plain = () if number % 2 else ("text", "true", "halves", "nothing")  # refused whatever the other does
        overrides = []
        for name in pair.tolist():
            kinds = [kind for kind in _behaviours(LEVELS[level][0], name) if kind not in plain]
            overrides.append((name, str(rng.choice(kinds))))
        try:
            labels[_verdict(level, overrides, number)] += 1
        except Exception as error:
            raise AssertionError(f"overrides {number}: {level} {overrides}: {error}") from error
    assert chosen.are_few or (labels["refused"] > 20 and labels["unbiased"] > 5), labels


def test_an_object_of_the_user_with_a_taken_name_is_refused() -> None:
    """It would be ignored, which is not what was meant."""

    class Sets(Prompts):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.keep_groups = lambda rewards, step: _half(len(rewards))

    globals()["Generated"] = Sets
    with pytest.raises(UserError, match="its objects have keep_groups, which is the trainer's own"):
        Selector(selection_settings(small_config(f"{__name__}:Generated")), 8)


def test_groups_that_are_left_out_are_in_the_ledger() -> None:
    """Whichever policy leaves them out, also one that does not say that it resamples."""
    selector = Selector(selection_settings(small_config()), 8)
    selector._prompt_policy.keep_groups = lambda rewards, step: _half(len(rewards))  # type: ignore[method-assign]
    rows = selector.begin(1).prompt_index
    decision = selector.finish(make_outcomes(np.random.default_rng(0), len(rows), 3, binary=True), 1)
    assert "prompt/x" in {row.name for row in decision.ledger}


def test_the_kind_of_answers_is_resumed() -> None:
    """A policy that chose by probabilities may not pick after a resume: its label would have changed with a restart."""

    class Kind(Completions):
        pick: ClassVar[bool] = False

        def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Any:
            return batch.lengths > 4 if self.pick else np.full(len(batch), 0.5)

    globals()["Generated"] = Kind
    case = _case(small_config("none", f"{__name__}:Generated"), 3)
    resumed = Selector(selection_settings(case.config), 8)
    Kind.pick = True
    with pytest.raises(UserError, match="returned a pick and, earlier in this run, probabilities"):
        replace(case, selector=resumed).run()


# -------------------------------------------------------------------------------- declared probabilities


def test_the_mean_deviation_of_a_true_design_is_zero(cases: Choose) -> None:
    """Over every draw of coins, of a systematic design and of one coin for all rows: so every bet is a fair game, which
    is all that the bound on false alarms needs. And no draw deviates by more than 1, so no bet loses everything."""
    for number in cases("design", 60):
        rng = np.random.default_rng(number)
        n = int(rng.integers(1, 7))
        pi = rng.choice([0.05, 0.2, 0.5, 0.9, 1.0], n)
        known = {"a": rng.normal(size=n), "b": rng.integers(0, 2, n), "earlier": rng.integers(0, 2, n) - pi}
        order = rng.permutation(n)
        edges = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(pi[order][pi[order] < 1]) % 1]))
        starts = [(b - a, systematic(pi, order=order, start=(a + b) / 2)) for a, b in itertools.pairwise(edges)]
        patterns = [np.array(one) for one in itertools.product([False, True], repeat=n)]
        coins = [(float(np.prod(np.where(kept, pi, 1 - pi))), Draw(kept, pi, False)) for kept in patterns]
        alike = np.full(n, 0.3)
        cluster = [(0.3, Draw(np.ones(n, bool), alike, False)), (0.7, Draw(np.zeros(n, bool), alike, False))]
        for design in (starts, coins, cluster):
            found = [(p, deviations(weigh(draw, name="x"), known)) for p, draw in design if p > 0]
            assert len({tuple(one) for _, one in found}) == 1
            for name in found[0][1]:
                assert sum(p * one[name] for p, one in found) == pytest.approx(0.0, abs=1e-9)
                assert max(abs(one[name]) for _, one in found) <= 1 + 1e-12


Rows = tuple[Draw, dict[str, Any]]


def _found_after(make: Callable[[np.random.Generator], Rows], draws: int, seed: int) -> int:
    """Draws until the test refutes; 0: it does not."""
    rng, test = np.random.default_rng(seed), DeclaredTest()
    for number in range(1, draws + 1):
        drawn, known = make(rng)
        test.observe(deviations(weigh(drawn, name="x"), known))
        if test.refuted:
            return number
    return 0


def _too_few(rng: np.random.Generator) -> Rows:
    return Draw(rng.random(32) < 0.25, np.full(32, 0.5), False), {"a": rng.normal(size=32)}


def _upper_half(rng: np.random.Generator) -> Rows:
    values = rng.normal(size=32)
    return Draw(values > np.median(values), np.full(32, 0.5), True), {"a": values}


def _leans(rng: np.random.Generator) -> Rows:
    values = rng.normal(size=32)
    return Draw(rng.random(32) < 0.5 + 0.1 * np.sign(values), np.full(32, 0.5), False), {"a": values}


def _all_or_none(rng: np.random.Generator) -> Rows:
    pi = float(rng.choice([0.02, 0.3, 0.5]))
    return Draw(np.full(32, rng.random() < pi), np.full(32, pi), False), {"a": rng.normal(size=32)}


def _coins(rng: np.random.Generator) -> Rows:
    pi, values = rng.uniform(0.05, 1, 32), rng.normal(size=32)
    return poisson(pi, uniform=rng.random(32)), {"a": values}


@pytest.mark.parametrize(("make", "most"), [(_too_few, 60), (_upper_half, 40), (_leans, 250)])
def test_a_lie_is_found(make: Any, most: int) -> None:
    """A count that is too small, a pick called a design (whose count is always right), a lean of 0.1; see the docs."""
    assert all(_found_after(make, most, seed) for seed in range(3))


@pytest.mark.parametrize("make", [_coins, _all_or_none])
def test_a_true_design_is_believed(make: Any) -> None:
    """At a false alarm in 100,000 runs; rows that are kept together or not at all make no difference."""
    assert not any(_found_after(make, 300, seed) for seed in range(8))


class Liar(CustomCompletionPolicy):
    """Keeps a quarter and declares a half."""

    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Any:
        rng = np.random.default_rng((self.seed, step, minibatch))
        return Draw(rng.random(len(batch)) < 0.25, np.full(len(batch), 0.5), fixed_size=False)


def _favoured(prompt_index: np.ndarray) -> Draw:
    """Half of the prompts always and the others never, by no figure of theirs; declares a half. Of all prompts the
    number is right."""
    return Draw(np.isin(prompt_index, (0, 3, 5, 6)), np.full(len(prompt_index), 0.5), fixed_size=False)


class FavouredPrompts(CustomPromptPolicy):
    def choose(self, prompt_index: Any, *, step: int, minibatch: int) -> Any:
        return _favoured(prompt_index)


class FavouredCompletions(CustomCompletionPolicy):
    def choose(self, batch: CompletionBatch, *, step: int, minibatch: int) -> Any:
        return _favoured(batch.prompt_index)


def _labels(selector: Selector, steps: range, level: str = "completion") -> list[tuple[str, str]]:
    """(label, note) of this level in each step."""
    found = []
    for step in steps:
        rng = np.random.default_rng(step)
        rows = selector.begin(step).prompt_index
        outcomes = make_outcomes(rng, len(rows), 3, binary=True)
        ledger = selector.finish(replace(outcomes, truncated=None), step).ledger
        found += [(row.label, row.note) for row in ledger if row.name.startswith(f"{level}/")]
        selector.feedback(StepCost(step, 1.0, 1.0, 0.0))
    return found


@pytest.mark.parametrize(
    ("level", "name"), [("completion", "Liar"), ("completion", "FavouredCompletions"), ("prompt", "FavouredPrompts")]
)
def test_a_refuted_design_is_biased_from_then_on(level: str, name: str) -> None:
    """Through the selector; a resume at any step continues the test where it was."""
    config = small_config(**{"prompt": "none", "completion": "none"} | {level: f"{__name__}:{name}"})
    config.pruning.prompt.anneal_fraction = 1.0
    whole = _labels(Selector(selection_settings(config), 8), range(1, 91), level)
    labels = [label for label, _ in whole]
    first = labels.index("biased")
    assert 20 < first < 80 and set(labels[:first]) == {"unbiased"} and set(labels[first:]) == {"biased"}
    assert "refutes its probabilities" in whole[first][1]
    for stop in (10, first + 1):
        torn = Selector(selection_settings(config), 8)
        before = _labels(torn, range(1, stop + 1), level)
        resumed = Selector(selection_settings(config), 8)
        resumed.load_state_dict(torn.state_dict())
        assert before + _labels(resumed, range(stop + 1, 91), level) == whole


def test_built_in_methods_are_tested_too() -> None:
    """Their draws are recorded, and believed."""
    selector = Selector(selection_settings(small_config("dppo", "dppo")), 8)
    assert {label for label, _ in _labels(selector, range(1, 301))} == {"unbiased"}
    assert all("its prompt's earlier draws" in test.gains and test.earlier.any() for test in selector._declared[:2])
    assert selector._declared[1].draws > 30 and not any(test.refuted for test in selector._declared)


# ------------------------------------------------------------------------------------------------- losses


def _reinforce(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    return TokenLoss(-batch.advantages * batch.logprobs)


def _mean_ratio(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """A ratio for the whole sequence, times a token's own."""
    length = sequence_sums(torch.ones_like(batch.mask), batch).clamp_min(1)
    mean = (sequence_sums(batch.logprobs - batch.old_logprobs, batch) / length).exp()
    return TokenLoss(-mean * (batch.logprobs - batch.old_logprobs).exp() * batch.advantages)


def _gated_entropy(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    return TokenLoss(-batch.advantages * (batch.logprobs + 0.1 * torch.sigmoid(batch.entropy)))


def _loop(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
    """Sequence by sequence: log-probabilities summed up to each token."""
    parts = [
        -batch.advantages[rows] * torch.cumsum(batch.logprobs[rows], 0).exp()
        for rows in (batch.sequence == one for one in range(int(batch.sequence.max()) + 1))
    ]
    return TokenLoss(torch.cat(parts))


LOCAL: list[PolicyLoss] = [clip, gspo, cispo, divergence_tv, _reinforce, _mean_ratio, _gated_entropy, _loop]


def _kept(batch: TokenBatch, values: Tensor) -> Tensor:
    return values[batch.mask > 0]


def _with(advantages: Callable[[TokenBatch], Tensor]) -> Callable[[PolicyLoss], PolicyLoss]:
    """A loss on other advantages."""
    return lambda loss: lambda batch, config: loss(replace(batch, advantages=advantages(batch) * batch.mask), config)


def _after(change: Callable[[Tensor, TokenBatch], Tensor]) -> Callable[[PolicyLoss], PolicyLoss]:
    """A loss, changed."""
    return lambda loss: lambda batch, config: TokenLoss(change(loss(batch, config).loss, batch))


def _share(batch: TokenBatch) -> Tensor:
    """Of the pack's tokens; 1 without any."""
    return batch.mask.sum().clamp_min(1)


def _count(batch: TokenBatch) -> int:
    return int(batch.sequence.max()) + 1


def _same(loss: PolicyLoss) -> PolicyLoss:
    return loss


def _stateful(loss: PolicyLoss) -> PolicyLoss:
    calls = itertools.count()
    return lambda batch, config: TokenLoss(loss(batch, config).loss * (1 + next(calls) % 7))


def _late(loss: PolicyLoss) -> PolicyLoss:
    """Another one after thirty calls."""
    calls = itertools.count()
    return lambda batch, config: TokenLoss(loss(batch, config).loss * (1 + (next(calls) > 30)))


def _of_the_last(loss: PolicyLoss) -> PolicyLoss:
    """Scaled by the batch before."""
    seen = [1.0]

    def scaled(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
        before, seen[0] = seen[0], float(batch.advantages.abs().sum())
        return TokenLoss(loss(batch, config).loss * (1 + before))

    return scaled


def _in_place(loss: PolicyLoss) -> PolicyLoss:
    def changed(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
        batch.advantages.mul_(0.5)
        return loss(batch, config)

    return changed


def _hooked(change: Callable[[Tensor, TokenBatch], Tensor]) -> Callable[[PolicyLoss], PolicyLoss]:
    """A loss whose gradient, and with it the weight in it, is changed on its way to the log-probabilities."""

    def hooked(loss: PolicyLoss) -> PolicyLoss:
        def with_hook(batch: TokenBatch, config: ObjectiveConfig) -> TokenLoss:
            logprobs = batch.logprobs.clone()
            logprobs.register_hook(lambda gradient: change(gradient, batch))
            return loss(replace(batch, logprobs=logprobs), config)

        return with_hook

    return hooked


NOT_LOCAL: dict[str, Callable[[PolicyLoss], PolicyLoss]] = {
    "centred": _with(lambda b: b.advantages - b.advantages.sum() / _share(b)),
    "scaled": _with(lambda b: b.advantages / (b.advantages.square().sum() + 1e-6).sqrt()),
    "by the largest": _with(lambda b: b.advantages / (b.advantages.abs().max() + 1e-6)),
    "ranked": _with(lambda b: b.advantages * (1 + b.advantages.argsort().argsort())),
    "of the neighbour": _with(lambda b: b.advantages + 0.3 * torch.roll(b.advantages, 3)),
    "divided by tokens": _after(lambda loss, b: loss / _share(b)),
    "divided by slots": _after(lambda loss, b: loss / len(loss)),
    "times sequences": _after(lambda loss, b: loss * _count(b)),
    "by place": _after(lambda loss, b: loss * (1 + b.sequence)),
    "by position": _after(lambda loss, b: loss * (1 + 0.1 * torch.arange(len(loss)))),
    "softmax": _after(lambda loss, b: loss * torch.softmax(b.logprobs.detach() * b.mask, 0)),
    "running sum": _after(lambda loss, b: loss + 0.1 * torch.cumsum(loss * b.mask, 0)),
    "neighbour's loss": _after(lambda loss, b: loss + 0.1 * torch.roll(loss * b.mask, 2)),
    "gradient to all": _after(lambda loss, b: loss + 0.1 * ((loss * b.mask).sum() - (loss * b.mask).sum().detach())),
    "gradient scaled": _after(lambda loss, b: loss.detach() + (loss - loss.detach()) * b.advantages.abs().sum()),
    "from the third": _after(lambda loss, b: loss * (1 + (_count(b) > 2))),
    "from the twentieth": _after(lambda loss, b: loss * (1 + (_count(b) >= 20))),
    "in long packs": _after(lambda loss, b: loss * (1 + (len(loss) > 900))),
    "where one is negative": _after(lambda loss, b: loss * (1 + (b.advantages < 0).any())),
    "where two are large": _after(lambda loss, b: loss * (1 + ((b.advantages.abs() > 5).sum() > 9))),
    "with padding": _after(lambda loss, b: loss * torch.bincount(b.sequence)[b.sequence]),
    "noisy": _after(lambda loss, b: loss * (1 + 0.1 * torch.rand(len(loss)))),
    "dropped": _after(lambda loss, b: loss * (torch.rand(len(loss)) < 0.9)),
    "counting calls": _stateful,
    "other after a while": _late,
    "of the last batch": _of_the_last,
    "in place": _in_place,
    "gradient clipped": _hooked(lambda g, b: g.clamp(-0.3, 0.3)),
    "gradient's sign": _hooked(lambda g, b: g.sign()),
    "gradient of length one": _hooked(lambda g, b: g / (sequence_sums(g.square(), b).sqrt() + 1e-9)),
}


def _true_in_every_draw(loss: PolicyLoss) -> bool:
    """Whether the expected weighted gradient over all keep patterns of five sequences, packed together, is that of all
    of them, packed together or alone."""
    generator = torch.Generator().manual_seed(5)
    lengths, pi = [3, 4, 2, 5, 3], torch.tensor([0.3, 0.5, 0.9, 0.4, 0.7], dtype=torch.float64)
    features = [torch.randn(length, 4, generator=generator, dtype=torch.float64) for length in lengths]
    noise = [0.3 * torch.randn(length, generator=generator, dtype=torch.float64) for length in lengths]
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5, 0.7], dtype=torch.float64)

    def gradient(members: list[int], weight: Tensor) -> Tensor:
        theta = torch.full((4,), 0.2, dtype=torch.float64, requires_grad=True)
        if not members:
            return torch.zeros(4, dtype=torch.float64)
        scores = torch.cat([features[one] for one in members]) @ theta
        sequence = torch.cat([torch.full((lengths[one],), place) for place, one in enumerate(members)])
        logprobs = -torch.nn.functional.softplus(scores)
        old = logprobs.detach() + torch.cat([noise[one] for one in members])
        of = torch.tensor(members)[sequence]
        ones = torch.ones_like(old)
        batch = TokenBatch(logprobs, torch.sigmoid(scores), old, old, old, advantages[of].clone(), ones, sequence)
        total = loss(batch, ObjectiveConfig()).loss @ weight[of]
        return torch.autograd.grad(total, theta)[0]

    ones = torch.ones(5, dtype=torch.float64)
    together = gradient([0, 1, 2, 3, 4], ones)
    alone = torch.stack([gradient([one], ones) for one in range(5)]).sum(0)
    expected = torch.zeros(4, dtype=torch.float64)
    for pattern in itertools.product([False, True], repeat=5):
        kept = torch.tensor(pattern)
        expected += torch.where(kept, pi, 1 - pi).prod() * gradient(torch.nonzero(kept).flatten().tolist(), 1 / pi)
    return torch.allclose(expected, together, rtol=1e-9) and torch.allclose(alone, together, rtol=1e-9)


@pytest.mark.slow
def test_a_loss_is_local_or_refused(cases: Choose) -> None:
    """Every way of looking elsewhere, on every local loss in turn; the local ones are accepted and enumerated."""
    ways: list[tuple[str, Callable[[PolicyLoss], PolicyLoss]]] = [*NOT_LOCAL.items()]
    told: Counter[str] = Counter()
    chosen = cases("loss", 80)
    for number in chosen:
        place, base = divmod(number, len(LOCAL))
        name, way = ("local", _same) if place == 0 else ways[(number * 7 + place) % len(ways)]
        try:
            check_policy_loss(way(LOCAL[base]), ObjectiveConfig(function=f"mine:{name}"))
        except UserError as refusal:
            assert name != "local", refusal
            told[name] += 1
            told["false"] += not _true_in_every_draw(way(LOCAL[base]))
            continue
        assert name == "local", f"loss {number}: '{name}' of {LOCAL[base]} is accepted"
        assert _true_in_every_draw(way(LOCAL[base])), f"loss {number}: {LOCAL[base]}"
        told["local"] += 1
    if not chosen.are_few:
        assert told["local"] == len(LOCAL) and all(told[name] for name in NOT_LOCAL), told
        assert told["false"] > 40, "the enumeration finds what the trial refuses"
