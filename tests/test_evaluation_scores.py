"""The arithmetic of evaluation against brute force and simulation: pass@k, maj@k, standard errors, the bootstrap."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.evaluation.bootstrap import bootstrap_over_seeds, paired_bootstrap
from dppo_megatron.evaluation.eval_samples import problem_ids
from dppo_megatron.evaluation.eval_scores import (
    EvalSample,
    ballot,
    doublings,
    maj_at_k,
    mean,
    pass_at_k,
    score,
    students_t,
)
from dppo_megatron.evaluation.standalone import by_level, level_lines, table
from dppo_megatron.types import Prompt

samples_of_a_problem = st.lists(
    st.one_of(st.just((True, "right")), st.sampled_from([(False, name) for name in "abc"]), st.just((False, None))),
    min_size=1,
    max_size=7,
)
"""(correct, the answer it gave); all correct ones gave one answer, None is no answer."""


def _judged(
    problem: int,
    correct: bool | None,
    vote: str | None,
    truncated: bool,
    unparsed: bool | None,
    tokens: int,
    reward: float | None = None,
) -> EvalSample:
    ended = "length" if truncated else "stop"
    given = {"reward": reward, "correct": correct, "vote": vote, "unparsed": unparsed}
    return EvalSample("set", str(problem), problem, 0, "", "", "", tokens, ended, **cast(Any, given))


def _outcomes(samples: list[tuple[bool, str | None]], problem: int = 0) -> list[EvalSample]:
    return [_judged(problem, correct, vote, False, vote is None, 5) for correct, vote in samples]


@settings(deadline=None)
@given(samples_of_a_problem, st.data())
def test_pass_and_maj_are_means_over_all_subsets(samples: list[tuple[bool, str | None]], data: st.DataObject) -> None:
    """By enumeration: of all choices of k of the n samples, the share that holds a correct one, and the share in which
    the correct answer wins the vote, ties by lot."""
    k = data.draw(st.integers(1, len(samples)))
    passed = won = 0.0
    subsets = list(itertools.combinations(samples, k))
    for subset in subsets:
        passed += any(correct for correct, _ in subset)
        votes = Counter(vote for _, vote in subset if vote is not None)
        if votes and votes["right"] == max(votes.values()):
            won += 1 / list(votes.values()).count(votes["right"])
    correct = sum(c for c, _ in samples)
    assert pass_at_k(len(samples), correct, k) == pytest.approx(passed / len(subsets), abs=1e-12)
    assert maj_at_k(*ballot(_outcomes(samples)), k) == pytest.approx(won / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased_and_the_plug_in_is_not() -> None:
    """Over every outcome of n = 6 tosses at p = .3, weighted by its chance, pass@4 is 1 - .7^4; 1 - (1 - c/n)^4 is
    not."""
    p, n, k = 0.3, 6, 4
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert expected == pytest.approx(1 - 0.7**4, abs=1e-12)
    plug_in = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    assert abs(plug_in - (1 - 0.7**4)) > 0.03


def test_many_samples_neither_overflow_nor_lose_digits() -> None:
    """n = 512, the most for which subsets are counted: exact fractions agree."""
    assert pass_at_k(2048, 1, 1024) == pytest.approx(0.5, rel=1e-12)
    n, c, k = 512, 200, 3  # one wrong answer against the right one: the majority of three
    exact = (math.comb(c, 3) + math.comb(c, 2) * (n - c)) / math.comb(n, 3)
    assert maj_at_k(c, (n - c,), 0, k) == pytest.approx(exact, rel=1e-12)
    assert math.isfinite(maj_at_k(256, (128, 64, 32), 32, 256))


def test_standard_error_is_the_spread_of_repeated_evaluations() -> None:
    """600 evaluations of 40 problems drawn at random with 4 samples each: the mean of the squared standard errors is
    the variance of pass@1 and of pass@2 (17 % is three standard deviations of this check). Errors that took samples
    for independent would be more than a third too small here."""
    rng = np.random.default_rng(0)
    found: dict[str, list[tuple[float, float]]] = {"avg": [], "pass": []}
    naive = []
    for _ in range(600):
        hardness = rng.beta(0.4, 0.6, size=40)
        correct = rng.random((40, 4)) < hardness[:, None]
        outcomes = [o for i, row in enumerate(correct) for o in _outcomes([(bool(c), "x") for c in row], i)]
        scores = score("set", 40, 4, outcomes)
        for name, estimate in (("avg", scores.avg), ("pass", scores.pass_at[2])):
            assert estimate.value is not None and estimate.se is not None
            found[name].append((estimate.value, estimate.se))
        naive.append(math.sqrt(correct.mean() * (1 - correct.mean()) / correct.size))
    for pairs in found.values():
        values, errors = np.array(pairs).T
        assert np.mean(errors**2) == pytest.approx(values.var(ddof=1), rel=0.17)
    assert np.mean(naive) < 0.65 * np.array(found["avg"])[:, 0].std(ddof=1)


def test_the_interval_is_students_and_covers() -> None:
    """Quantiles as scipy has them; and of 4,000 evaluations of 30 problems x 4 and x 32, of the difficulty
    that they have for a model of middling strength, 94 - 96 % hold the truth (the simulation's error is .35 %)."""
    from scipy.stats import t

    assert all(students_t(n) == pytest.approx(t.ppf(0.975, n), rel=1e-9) for n in (*range(1, 99), 500, 10**6))
    draw = np.random.default_rng(0)
    for a, b, samples in ((0.5, 0.5, 4), (0.5, 0.5, 32), (1, 2, 4), (1, 2, 32)):
        chances = draw.beta(a, b, size=(4000, 30))
        found = [mean(row) for row in draw.binomial(samples, chances) / samples]
        covers = np.mean([one.low <= a / (a + b) <= one.high for one in found])  # type: ignore[operator]
        assert 0.94 <= covers <= 0.96, (a, b, samples, covers)
    alike = mean([0.1] * 30)  # no spread is no certainty
    assert (alike.value, alike.low, alike.high) == (pytest.approx(0.1), None, None)


def test_failures_count_nowhere_but_among_failures() -> None:
    """Two problems, one with a failed grading: avg over what was graded, pass@k where k were, null over nothing."""
    graded = [(True, "right"), (False, "a"), (False, "a")]
    failed = [_judged(0, None, None, True, None, 9)]
    scores = score("set", 2, 4, _outcomes(graded) + failed + _outcomes([(True, "right")] * 4, 1))
    assert scores.avg.value == pytest.approx((1 / 3 + 1) / 2) and scores.avg.problems == 2
    assert scores.pass_at[2].value == pytest.approx((2 / 3 + 1) / 2)
    assert (scores.pass_at[4].value, scores.pass_at[4].se, scores.pass_at[4].problems) == (1.0, None, 1)
    assert scores.failed == 1 and scores.truncated_share == 1 / 8
    metrics = score("set", 1, 2, failed * 2).metrics()
    assert metrics["eval/set/pass@1"] is None and metrics["eval/set/pass@2"] is None
    assert metrics["eval/set/failed"] == 2.0


def test_a_grader_without_answers_has_no_majority() -> None:
    """Completions that no answer is known of, correct or not: nothing is said, rather than 0. Where it is said that
    there is no answer, nobody votes: 0."""
    wrong = _judged(0, False, None, False, None, 1)
    for outcomes in ([_judged(0, True, None, False, None, 1), wrong], [wrong, wrong]):
        scores = score("set", 1, 2, outcomes)
        assert not scores.maj_at and scores.unparsed_share is None
        assert not {key for key in scores.metrics() if "maj" in key or "unparsed" in key}
    assert score("set", 1, 2, [_judged(0, False, None, False, True, 1)] * 2).maj_at[2].value == 0.0
    assert score("set", 1, 2, [_judged(0, None, None, False, None, 1)] * 2).maj_at[2].value is None


@given(st.integers(1, 300))
def test_budgets(samples: int) -> None:
    """1, the powers of two below n, and n: ascending, without repetition."""
    ks = doublings(samples)
    assert ks[0] == 1 and ks[-1] == samples and ks == sorted(set(ks))
    assert all(k & (k - 1) == 0 for k in ks[:-1])


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_mean_is_numpys(values: list[float]) -> None:
    """Against numpy, digit for digit."""
    estimate = mean(values)
    assert estimate.value == pytest.approx(np.mean(values), abs=1e-12)
    assert estimate.se == pytest.approx(np.std(values, ddof=1) / np.sqrt(len(values)), abs=1e-12)


def test_bootstrap_against_numpy_and_the_normal_limit() -> None:
    """An independent bootstrap with other draws, and the textbook interval of a paired difference, agree within the
    noise of 10,000 resamples; the same input gives the same rows."""
    rng = np.random.default_rng(1)
    a = rng.binomial(4, 0.5, 300) / 4
    b = np.clip(a + rng.choice([-0.25, 0, 0.25], 300, p=[0.1, 0.7, 0.2]), 0, 1)
    [row] = paired_bootstrap({"set": (a, b)})
    assert paired_bootstrap({"set": (a, b)}) == [row]
    difference = b - a
    drawn = np.array([rng.choice(difference, 300).mean() for _ in range(4000)])
    low, high = np.quantile(drawn, (0.025, 0.975))
    half = 1.96 * difference.std(ddof=1) / np.sqrt(300)
    width = high - low
    assert row.difference == pytest.approx(difference.mean())
    assert row.low == pytest.approx(low, abs=0.05 * width) and row.high == pytest.approx(high, abs=0.05 * width)
    assert row.low == pytest.approx(difference.mean() - half, abs=0.05 * width)
    z = abs(difference.mean()) / (difference.std(ddof=1) / np.sqrt(300))
    assert row.p == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.5, abs=1e-3)


def test_bootstrap_finds_noise_in_noise() -> None:
    """Of 200 pairs without a difference, 5 % are called different (1 to 9 % with 99.7 % confidence); of equal ones
    none, and one problem says nothing."""
    rng = np.random.default_rng(2)
    called = 0
    for _ in range(200):
        a, b = (rng.binomial(2, 0.5, 60) / 2 for _ in range(2))
        [row] = paired_bootstrap({"set": (a, b)}, resamples=800)
        called += not row.within_noise
    assert 2 <= called <= 20
    same = rng.random(20)
    [row] = paired_bootstrap({"set": (same, same.copy())})
    assert row.within_noise and row.p == 1.0
    [row] = paired_bootstrap({"set": (np.array([0.0]), np.array([1.0]))})
    assert row.within_noise and row.p is None and row.low is None


def test_all_sets_weigh_the_same() -> None:
    """The row `all` is the mean of the sets' differences; its variance the mean of theirs over the number of sets."""
    rng = np.random.default_rng(3)
    sets = {name: (rng.random(size), rng.random(size)) for name, size in (("small/@1", 30), ("large", 400))}
    rows = paired_bootstrap(sets)
    assert [row.name for row in rows] == ["small/@1", "large", "all"]
    assert rows[2].difference == pytest.approx((rows[0].difference + rows[1].difference) / 2)
    assert rows[2].problems == 430
    variances = [np.var(b - a, ddof=1) / len(a) for a, b in sets.values()]
    assert rows[2].low is not None and rows[2].high is not None
    assert rows[2].high - rows[2].low == pytest.approx(2 * 1.96 * math.sqrt(sum(variances)) / 2, rel=0.08)


def _sample(of: str, problem: int, correct: bool, level: float | None) -> EvalSample:
    given = (0, "p", "r", "t", 5, "stop", float(correct), correct, None, None, False)
    return EvalSample(of, str(problem), problem, *given, level=level)


def test_levels_are_means_over_their_problems() -> None:
    """In rising order; a set of one level, of none, or of a measure has none."""
    samples = [_sample("math", i, i % 3 == 0, [10.0, 2.0, 2.0][i % 3]) for i in range(9)]
    samples += [_sample("rating", i, True, [20240101, 20240102.0][i % 2]) for i in range(4)]
    samples += [_sample("one", i, True, 1) for i in range(3)]
    samples += [_sample("none", i, True, None) for i in range(3)]
    samples += [_sample("measure", i, True, i / 100) for i in range(100)]
    found = by_level(samples)
    assert {name: {level: (of.value, of.problems) for level, of in each.items()} for name, each in found.items()} == {
        "math": {"2": (0.0, 6), "10": (1.0, 3)},
        "rating": {"20240101": (1.0, 2), "20240102": (1.0, 2)},
    }
    assert level_lines(found)[:1] == ["math by level: 2 0.0 % ± 0.0 (6), 10 100.0 % ± 0.0 (3)"]


def test_the_interval_over_seeds_has_the_noise_of_problems_and_of_runs() -> None:
    """Against the variance in closed form, of a mean of S seeds of P problems each that are all drawn with putting
    back: between the seeds' means over S, plus within them over S P. Problems alone see half of the
    width."""
    rng = np.random.default_rng(4)
    moved = rng.normal(0.0, 0.2, 12)  # what a run's own noise does to its end
    pairs = [(np.zeros(90), rng.choice([-0.5, 0.0, 0.5], 90) + by) for by in moved]
    row = bootstrap_over_seeds(pairs)
    assert bootstrap_over_seeds(pairs) == row
    ends = [b.mean() for _, b in pairs]
    within = np.mean([np.var(b) / 90 for _, b in pairs]) / 12
    assert (row.difference, row.problems) == (pytest.approx(np.mean(ends)), 12 * 90)
    assert row.low is not None and row.high is not None
    assert row.high - row.low == pytest.approx(2 * 1.96 * math.sqrt(np.var(ends) / 12 + within), rel=0.05)
    [alone] = paired_bootstrap({"all": tuple(np.concatenate(part) for part in zip(*pairs, strict=True))})
    assert alone.low is not None and alone.high is not None
    assert alone.high - alone.low < 0.6 * (row.high - row.low)


def test_problems_that_all_seeds_share_do_not_average_out() -> None:
    """A method that is better on half of the problems, on each of ten seeds alike: the interval is as wide as with one
    seed. With problems drawn for each seed anew it would be a third of that."""
    gain = np.tile([0.0, 1.0], 50)
    pairs = [(np.zeros(100), gain)] * 10
    [problems] = paired_bootstrap({"all": pairs[0]})
    shared, apart = (bootstrap_over_seeds(pairs, same_problems=same) for same in (True, False))
    widths = [row.high - row.low for row in (problems, shared, apart)]  # type: ignore[operator]
    assert widths[1] == pytest.approx(widths[0], rel=0.05) and widths[2] < 0.4 * widths[0]


def test_the_interval_over_one_seed_is_that_over_problems() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.random((2, 200))
    [problems] = paired_bootstrap({"all": (a, b)})
    seed = bootstrap_over_seeds([(a, b)])
    assert seed.low is not None and problems.low is not None
    assert seed.low == pytest.approx(problems.low, abs=0.005) and seed.difference == pytest.approx(b.mean() - a.mean())
    assert bootstrap_over_seeds([(a[:1], b[:1])]).low is None, "one problem says nothing"


def test_no_two_problems_have_one_id() -> None:
    """In every small set of ids, places and what looks like either; an id that nothing else looks like stays."""
    for size in range(1, 5):
        for ids in itertools.product(["", "0", "1", 1, "b", "b#0", "b#1", "b#1#0"], repeat=size):
            rows = [{"id": name} if name else {} for name in ids]
            found = problem_ids([Prompt(at, "", (), "", "", row=row) for at, row in enumerate(rows)])
            assert len({*found}) == size, ids
            if ids.count("b") == 1:
                assert found[ids.index("b")] == "b"
    assert problem_ids([Prompt(at, "", (), "", "", row={"id": 1} if at == 0 else {}) for at in (0, 1)]) == ["1#0", "1"]


def test_the_mean_reward_of_a_grader_that_never_says_right() -> None:
    """A judge's marks below reward.correct_from are all 0 to pass@1. By hand: (mean of .2, .6, and .9 alone) / 2; the
    failed grading counts nowhere."""
    marks = [(0, 0.2), (0, 0.6), (1, 0.9)]
    outcomes = [_judged(problem, False, None, False, None, 5, reward) for problem, reward in marks]
    scores = score("set", 2, 2, [*outcomes, _judged(1, None, None, False, None, 5)])
    assert scores.metrics()["eval/set/reward_mean"] == pytest.approx(0.65, abs=1e-12)
    assert scores.metrics()["eval/set/pass@1"] == 0
    assert scores.line().endswith("reward 0.650, 1 gradings failed") and "0.650" in table([scores])[-1]
    right = score("set", 1, 1, [_judged(0, True, None, False, None, 5, 1.0)])
    assert right.metrics()["eval/set/reward_mean"] == 1.0 and "reward" not in right.line()
    assert score("set", 1, 1, [_judged(0, None, None, False, None, 5)]).reward_mean is None
