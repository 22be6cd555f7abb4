"""The order of prompts over several sets: exact shares, whole epochs, no repeats in a step, any position by itself."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dppo_megatron.config.data import DataConfig
from dppo_megatron.config.resolved_sets import check_data
from dppo_megatron.config.schema import Config
from dppo_megatron.data.order import PromptOrder, WeightedOrder, make_order, order_key, whole_epochs
from dppo_megatron.steps.loop import Loop
from dppo_megatron.types import TrainSample, UserError

WEIGHTS = st.sampled_from([1.0, 2.0, 3.0, 0.5, 0.1, 0.7, 7.0, 7473.0])
SETS = st.lists(st.tuples(st.integers(1, 40), WEIGHTS), min_size=2, max_size=4)


def _order(sets: list[tuple[int, float]], seed: int, per_take: int) -> WeightedOrder:
    names = [f"s{i}" for i in range(len(sets))]
    sizes = dict(zip(names, (size for size, _ in sets), strict=True))
    weights = dict(zip(names, (weight for _, weight in sets), strict=True))
    try:
        return WeightedOrder(sizes, weights, seed, per_take)
    except UserError:
        assume(False)
        raise


def _of_set(stream: list[int], sets: list[tuple[int, float]], s: int) -> list[int]:
    first = sum(size for size, _ in sets[:s])
    return [index for index in stream if first <= index < first + sets[s][0]]


@given(SETS, st.integers(0, 3), st.integers(1, 24))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_weighted_steps(sets: list[tuple[int, float]], seed: int, per_step: int) -> None:
    """Sixty steps: none holds a prompt twice, every epoch of every set holds each of its problems once, each set is
    always within a few prompts of its share and exactly at it whenever the pattern of sets closes."""
    order = _order(sets, seed, per_step)
    stream: list[int] = []
    position = 0
    total = sum(Fraction(str(weight)) for _, weight in sets)
    for _ in range(60):
        taken, position = order.take(position, per_step)
        assert len(set(taken.tolist())) == len(taken) == per_step
        stream += taken.tolist()
        for s, (_, weight) in enumerate(sets):
            share = Fraction(str(weight)) / total
            assert abs(len(_of_set(stream, sets, s)) - share * position) <= Fraction(1, 2) + share * len(sets) / 2
    for s, (size, weight) in enumerate(sets):
        mine, share = _of_set(stream, sets, s), Fraction(str(weight)) / total
        assert len(mine) == order.taken(position)[s]
        for start in range(0, len(mine) - size + 1, size):
            assert len(set(mine[start : start + size])) == size
        assert order.taken(len(order._pattern) * 3)[s] == share * len(order._pattern) * 3


@given(SETS, st.integers(1, 24), st.integers(0, 900), st.integers(1, 24))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_position_by_itself(sets: list[tuple[int, float]], per_step: int, start: int, count: int) -> None:
    """A resumed run needs the position only: what comes next is what came next, in steps of any size."""
    whole = _order(sets, 5, max(per_step, count))
    stream: list[int] = []
    position = 0
    while position < start + count:
        taken, position = whole.take(position, 1)
        stream += taken.tolist()
    alone, behind = _order(sets, 5, max(per_step, count)).take(start, count)
    assert alone.tolist() == stream[start : start + count] and behind == start + count
    assert whole.take(start, count)[0].tolist() == alone.tolist()  # going back is as good as going on


def test_epochs_are_shuffled() -> None:
    """Each anew, another seed otherwise, and evenly: every problem is first about as often as any other."""
    order = WeightedOrder({"a": 6, "b": 60}, {"a": 1, "b": 10}, 0, 11)
    stream = order.take(0, 66 * 400)[0]  # more than per_take: repeats are left out
    assert len(stream) == 66
    firsts = np.zeros(6)
    for epoch in range(1500):
        taken = order.take(epoch * 66, 66)[0]
        firsts[next(index for index in taken if index < 6)] += 1
    assert (abs(firsts - 250) < 5 * np.sqrt(250)).all()
    other = WeightedOrder({"a": 6, "b": 60}, {"a": 1, "b": 10}, 1, 11)
    assert order.take(0, 66)[0].tolist() != other.take(0, 66)[0].tolist()


def test_one_set_is_today_s_order() -> None:
    """Bit for bit, whatever its weight, and so are several sets that are shuffled together."""
    plain = PromptOrder(50, 3)
    for order in (
        make_order({"a": 50}, {"a": 0.3}, 3, 8),
        make_order({"a": 50}, None, 3, 8),
        make_order({"a": 20, "b": 30}, None, 3, 8),
    ):
        position = mine = 0
        for _ in range(30):
            expected, position = plain.take(position, 8)
            found, mine = order.take(mine, 8)
            assert found.tolist() == expected.tolist() and mine == position


def test_sft_takes_every_example_before_any_comes_again() -> None:
    """100 examples in steps of 64: the epoch's other 36 are in the next step, which has none twice."""
    config, taken = Config(), list[list[str]]()
    config.sft.steps, config.sft.examples_per_step = 25, 64
    examples = [TrainSample(str(i), np.arange(3), 1, np.zeros(2, np.float32), 0.0, 1.0, 1.0) for i in range(100)]

    def update(batch: list[TrainSample], *_: object) -> SimpleNamespace:
        taken.append([one.id for one in batch])
        return SimpleNamespace(is_skipped=False)

    actor = SimpleNamespace(update=update, start_phase=lambda *_: None)
    job = SimpleNamespace(config=config, sft_examples=examples)
    Loop.sft(cast("Loop", SimpleNamespace(job=job, actor=actor, pack=lambda _: None)))
    stream = [name for step in taken for name in step]
    assert all(len(set(step)) == 64 for step in taken)
    assert all(len(set(stream[start : start + 100])) == 100 for start in range(0, 1600, 100))
    assert whole_epochs(128, 3, 64) == PromptOrder(128, 3)


def test_impossible_shares_are_refused_by_name() -> None:
    """Before a step finds out: a share above the set's size, exactly where it is, and a weight next to nothing."""
    sizes, weights = {"big": 100, "small": 4}, {"big": 1.0, "small": 1.0}
    make_order(sizes, weights, 0, 8)
    with pytest.raises(UserError, match=r"data.train_sets.small.weight: a step of 9 prompts takes up to 5 of 'small'"):
        make_order(sizes, weights, 0, 9)
    with pytest.raises(UserError, match=r"data.train_sets.small.weight: less than a millionth"):
        make_order(sizes, {"big": 1.0, "small": 1e-9}, 0, 4)


def test_weights_that_are_no_fractions() -> None:
    """Rounded to parts in a million: a third and two thirds as a computer writes them are still 1 to 2, nearly."""
    order = WeightedOrder({"a": 50, "b": 50}, {"a": 1 / 3, "b": 0.6180339887498949}, 0, 10)
    share = order.taken(10**9)[0] / 10**9
    assert share == pytest.approx((1 / 3) / (1 / 3 + 0.6180339887498949), abs=1e-6)


def test_a_key_without_an_order_is_refused() -> None:
    for order in ("shuffled", "file"):
        config = Config(data=DataConfig(order=order, order_by="pass_rate"))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=f"data.order_by = pass_rate has no effect while data.order = {order}"):
            check_data(config)


def _key(size: int, *, order: str, by: str = "level", level: np.ndarray | None = None) -> np.ndarray:
    key = order_key(order, by, size, level, lambda: np.linspace(0.0, 1.0, size))  # type: ignore[arg-type]
    assert key is not None
    return key()


def test_what_is_sorted_by() -> None:
    level = np.array([3.0, np.nan, 1.0])
    assert _key(3, order="file").tolist() == [0.0, 1.0, 2.0]
    np.testing.assert_equal(_key(3, order="easy_first", level=level), level)
    np.testing.assert_equal(_key(3, order="hard_first", level=level), -level)
    assert _key(3, order="easy_first", by="pass_rate").tolist() == [0.0, -0.5, -1.0]
    assert order_key("shuffled", "level", 3, level, lambda: level) is None
    for none in (None, np.full(3, np.nan)):
        with pytest.raises(UserError, match=r"data.order = hard_first: no problem has a level; name its field"):
            _key(3, order="hard_first", level=none)


@given(SETS, st.booleans(), st.integers(1, 24), st.integers(0, 99))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_sorted_epochs(sets: list[tuple[int, float]], weighted: bool, per_step: int, seed: int) -> None:
    """With ties and missing keys, of one set or several: no step holds a prompt twice, every epoch holds every problem
    once, its first one in the order of the key, and the position alone decides what comes."""
    rng = np.random.default_rng(seed)
    sizes = {f"s{i}": size for i, (size, _) in enumerate(sets)}
    values = rng.choice([1.0, 2.0, 3.0, np.nan], sum(sizes.values()))
    weights = {f"s{i}": weight for i, (_, weight) in enumerate(sets)} if weighted else None
    assume(per_step <= len(values))
    try:
        order, again = (make_order(sizes, weights, seed, per_step, lambda: values) for _ in range(2))
    except UserError:
        assume(False)
        raise
    stream: list[int] = []
    position, starts = 0, list[int]()
    for _ in range(3 * len(values) // per_step + 2):
        starts.append(position)
        taken, position = order.take(position, per_step)
        assert len(set(taken.tolist())) == len(taken) == per_step
        stream += taken.tolist()
    assert again.take(starts[-1], per_step)[0].tolist() == stream[-per_step:]
    for s, (size, _) in enumerate(sets if weighted else [(len(values), 1.0)]):
        mine = _of_set(stream, sets if weighted else [(len(values), 1.0)], s)
        for start in range(0, len(mine) - size + 1, size):
            assert len(set(mine[start : start + size])) == size
        seen = values[mine[:size]]
        np.testing.assert_equal(seen, np.sort(seen))  # NaN last


def test_a_key_that_changes_is_read_when_an_epoch_begins() -> None:
    """And what it said then is in the state: an epoch does not change while it is under way."""
    keys = {"now": np.zeros(12)}
    order, other = (make_order({"a": 12}, None, 0, 1, lambda: keys["now"]) for _ in range(2))
    assert isinstance(order, WeightedOrder) and isinstance(other, WeightedOrder)
    first, position = order.take(0, 8)
    other.load_state_dict(order.state_dict())
    keys["now"] = -np.arange(12.0)
    for one in (order, other):
        rest, after = one.take(position, 4)
        assert sorted([*first, *rest]) == list(range(12))
        assert one.take(after, 12)[0].tolist() == list(range(12))[::-1]
