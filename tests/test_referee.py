"""benchmarks/referee: every selection is what its source says, and bias and variance come out where they are known."""

from __future__ import annotations

import argparse
import json
import re
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from referee import learn, methods, replay
from referee.bound import readings
from referee.measure import judge
from referee.record import sequence_masks
from referee.replay import GROUP, PROMPTS, ROWS, Outcome, World, uniform_prompts, weighted

from dppo_megatron.config.load import read_config

# ------------------------------------------------------------------------------------------------- the definitions


def test_survivors() -> None:
    rewards = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    assert (methods.divide_by_survivors(rewards) == 1.5).all()


def test_cost_aware() -> None:
    """p = |A| / sqrt(length) over its sum: 1, 1, 0, 1/2 over 5/2. One draw has weight 1 / p: 1 on average."""
    advantages, lengths = np.array([2.0, -1.0, 0.0, 1.0]), np.array([4, 1, 9, 4])
    draws = [methods.cost_aware(advantages, lengths, 1, np.random.default_rng(seed)) for seed in range(50)]
    found = {tuple(one.round(9)) for one in draws}
    assert found == {(2.5, 0.0, 0.0, 0.0), (0.0, 2.5, 0.0, 0.0), (0.0, 0.0, 0.0, 5.0)}
    many = methods.cost_aware(advantages, lengths, 10**7, np.random.default_rng(0))
    np.testing.assert_allclose(many, [1, 1, 0, 1], atol=0.01)
    assert not methods.cost_aware(np.zeros(3), np.ones(3, np.int64), 5, np.random.default_rng(0)).any()


@pytest.mark.parametrize(("right", "kept_right"), [(4, 2), (2, 2), (1, 1), (7, 3), (0, 0), (8, 4)])
def test_pods(right: int, kept_right: int) -> None:
    """4 of 8 with the largest variance: as near to half and half as there are, by the subset's own mean and spread."""
    rewards = np.array([1.0] * right + [0.0] * (8 - right))
    kept, advantages = methods.pods(rewards, 4, np.random.default_rng(0))
    assert kept.sum() == 4 and rewards[kept].sum() == kept_right
    best = max(rewards[list(rows)].var() for rows in combinations(range(8), 4))
    assert rewards[kept].var() == pytest.approx(best)
    if 0 < right < 8:
        assert (advantages[kept] ** 2).sum() == pytest.approx(4, rel=1e-4)
    assert not advantages[~kept].any()


def test_vip() -> None:
    """sqrt(p (1 - p)) = 0.5, 0.3: 16 rollouts go 10 : 6; what cannot be solved gets the least."""
    assert methods.vip_allocation(np.array([0.5, 0.1]), 16, 2, 16).tolist() == [10, 6]
    assert methods.vip_allocation(np.array([0.5, 0.5, 0.0, 1.0]), 16, 2, 16).tolist() == [6, 6, 2, 2]
    assert methods.vip_allocation(np.array([0.5, 0.5, 0.0, 1.0]), 16, 2, 5).sum() == 14 + 2


def test_vip_is_the_best_whole_allocation() -> None:
    """Against all of them, for three prompts."""
    variance = np.array([0.25, 0.16, 0.04])
    rate = (1 - np.sqrt(1 - 4 * variance)) / 2
    found = methods.vip_allocation(rate, 12, 1, 8)
    every = [(a, b, 12 - a - b) for a in range(1, 9) for b in range(1, 9) if 1 <= 12 - a - b <= 8]
    assert (variance / found).sum() == pytest.approx(min((variance / np.array(one)).sum() for one in every))


def test_duet() -> None:
    """spread / sqrt(length) = 1 : 1/2 : 1, within 56 tokens 8 + 4 + 8 rollouts; the weight of below the mean."""
    count, weight = methods.duet_allocation(np.array([2.0, 1.0, 1.0]), np.array([4.0, 4.0, 1.0]), 56.0, 16)
    assert count.tolist() == [8, 4, 8]
    np.testing.assert_allclose(weight, [1, 20 / 3 / 4, 1])


def test_duet_stops_what_has_no_answer_in_time() -> None:
    marker, lengths = np.array([3, -1, 40, 29]), np.array([10, 56, 56, 33])
    rng = np.random.default_rng(0)
    aborted, _ = methods.duet_abort(marker, lengths, 30.0, 1e-12, rng)
    assert aborted.tolist() == [False, True, True, False]
    draws = [methods.duet_abort(marker, lengths, 30.0, 0.05, rng) for _ in range(4000)]
    assert np.mean([~one for one, _ in draws], axis=0)[1] == pytest.approx(0.05, abs=0.015)
    assert {round(float(w[1]), 9) for one, w in draws if not one[1]} == {20.0}


def test_speed() -> None:
    rewards = np.array([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1.0]])
    assert methods.speed_screen(rewards, 4).tolist() == [True, False, False]
    assert methods.speed_screen(rewards, 6).all()


def test_nat() -> None:
    """Cuts after 2, 3, 4 tokens alike; each token's weight is 1 on average, at every length."""
    cut, inclusion = methods.nat_prefix(4, 2)
    np.testing.assert_allclose(cut, [0, 1 / 3, 1 / 3, 1 / 3])
    np.testing.assert_allclose(inclusion, [1, 1, 2 / 3, 1 / 3])
    for length in range(1, 60):
        cut, inclusion = methods.nat_prefix(length, max(length // 4, 1))
        kept = np.tril(np.ones((length, length)))  # row: the cut, column: the token
        np.testing.assert_allclose(cut @ (kept / inclusion), 1.0)


def test_masks() -> None:
    """The first half and the fifth of most entropy, over the full length; padding in none."""
    entropies = torch.tensor([[0.1, 3.0, 0.2, 2.0, 0.3, 9.0, 9.0]])
    masks = sequence_masks([5], entropies)[0] * 5
    assert masks.round().int().tolist() == [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]]


# ------------------------------------------------------------------------------------------------- the machine


def _world(seed: int = 0, prompts: int = 512, completions: int = GROUP, size: int = 5) -> World:
    """Random gradients with a common part; pass rates from never to always."""
    rng = np.random.default_rng(seed)
    shape = prompts, completions
    rewards = (rng.random(shape) < rng.random((prompts, 1))).astype(np.float64)
    lengths = rng.integers(5, 40, shape)
    sketches = rng.normal(size=(*shape, size)) + (2 * rewards - 1)[..., None]
    return World(
        rewards,
        lengths,
        logit_grad_norm=np.sqrt(lengths) * rng.uniform(0.1, 0.6, shape),
        logprob=-0.2 * lengths,
        marker=lengths - 3,
        gradients={kind: sketches.astype(np.float32) for kind in ("unit", "first_half", "entropy")},
    )


def test_the_expectation_is_that_over_every_group() -> None:
    world = _world(prompts=6, completions=5)
    groups = [np.array(rows) for rows in combinations(range(5), 3)]
    total = np.zeros(5)
    for rows in groups:
        advantages = methods.advantages_of(world.rewards[:, rows])
        total += np.einsum("qg,qgs->s", advantages, world.gradients["unit"][:, rows]) / advantages.size
    np.testing.assert_allclose(world.expected(size=3), total / len(groups), rtol=1e-6)


def _judged(row: replay.Replay, world: World, replays: int = 80) -> dict[str, float]:
    exact = world.expected()
    found = judge([list(row(world, [world], seed)) for seed in range(replays)], exact)
    for name in ("variance_ratio", "variance_ratio_error"):
        part = "variance_error" if name.endswith("error") else "variance"
        found[name] = found[part] / found["variance_full"] / found["scale"] ** 2
    return found


@pytest.mark.parametrize("rate", [0.5, 0.75])
def test_uniform_sampling_has_its_closed_form(rate: float) -> None:
    """K of N of Q prompts without replacement, groups fixed: the variance is S^2 (1 / K - 1 / Q), the full batch's
    S^2 (1 / N - 1 / Q). 80 replays; four standard errors, which are below 5 %."""
    world = _world()
    found = _judged(uniform_prompts(rate), world)
    keep, total = PROMPTS * (1 - rate), len(world.rewards)
    closed = (1 / keep - 1 / total) / (1 / PROMPTS - 1 / total)
    assert found["variance_ratio_error"] < 0.05 * closed
    assert found["variance_ratio"] == pytest.approx(closed, abs=4 * found["variance_ratio_error"])
    assert found["bias"] < 3 * found["bias_error"] + 1e-9 and found["generated"] == 1 - rate


def test_another_length_is_scale_and_another_direction_is_not() -> None:
    world = _world()
    twice = _judged(weighted(lambda rewards, *_: np.full(rewards.shape, 2.0)), world, 20)
    assert twice["scale"] == pytest.approx(2.0, abs=0.2) and twice["bias"] == pytest.approx(1.0, abs=0.2)
    assert twice["cos"] > 0.99 and twice["variance_ratio"] == pytest.approx(1.0, abs=0.05)
    only_right = _judged(weighted(lambda rewards, *_: 2.0 * rewards), world, 20)
    assert only_right["cos"] < 0.99 or only_right["variance_ratio"] > 1.1


def test_the_full_batch_is_itself() -> None:
    """The package's Selector without pruning: the same gradient, to rounding."""
    world = _world()
    for outcome in replay.package("grpo")(world, [world], 0):
        np.testing.assert_allclose(outcome.gradient, outcome.full, rtol=1e-6, atol=1e-9)
        assert outcome.generated == outcome.trained == 1.0


@pytest.mark.parametrize("row", ROWS)
def test_every_row_can_be_repeated(row: str) -> None:
    """An epoch after one of history, on made-up outcomes: finite gradients, and costs within what there is."""
    world = _world(completions=2 * GROUP)
    outcomes: list[Outcome] = list(ROWS[row](world, [_world(1, completions=2 * GROUP)], 0))
    assert outcomes and all(np.isfinite(one.gradient).all() for one in outcomes)
    # made-up lengths are no prediction of others: what is planned in tokens may miss by a fifth
    most = 4.0 if any(name in row for name in ("dynamic", "greso", "speed")) else 1.2
    assert all(0 < one.generated <= most and 0 < one.trained <= most for one in outcomes)


def test_a_learned_row_is_its_ends_at_the_step_size_that_two_other_seeds_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the lines that its runs leave; none is run again. The last two evaluations are an end, as in `compare`."""
    arguments, lines = argparse.Namespace(row="prompts, speed", steps=40, out=tmp_path, overrides=[]), list[str]()
    for row, best, above, cost in (("grpo", 5e-4, 0.0, 8), ("prompts, speed", 1e-3, 0.02, 6)):
        for rate in learn.RATES:
            for seed in learn.TUNED_ON if rate != best else (*learn.TUNED_ON, *learn.SEEDS):
                end = 0.0 if rate == 1.4e-3 else 0.5 + (rate == best) / 4 + seed / 1000 + above
                curve = {"accuracy": [9.0, end - 0.1, end + 0.1], "generated": [9.0, cost], "trained": [2 * cost]}
                given = {"row": row, "seed": seed, "lr": rate, "steps": 40, "overrides": []}
                lines.append(json.dumps(given | curve) + "\n")
    (tmp_path / learn.RESULTS).write_text("".join(lines))
    learn.report(arguments)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("prompts, speed: lr 0.001, ends at 77.5 % (77.0, 77.1,")
    assert second == (
        "minus grpo's (lr 0.0005), same seeds: +2.0 +- 0.0 points; tokens generated 75%, trained 75% of grpo's"
    )


def test_every_learned_row_is_a_run_of_the_sizes_on_the_page() -> None:
    """Whatever the quickstart's file has become."""
    run = learn.Learned("grpo", 0, 1e-3, 40, [])
    rollout = read_config(learn.CONFIG, run.settings).rollout
    assert (rollout.prompts_per_step, rollout.completions_per_prompt) == (PROMPTS, GROUP) == (64, 8)


# ------------------------------------------------------------------------------------------------- the bound, the page


@pytest.mark.parametrize("rate", [0.5, 0.7])
def test_readings_of_a_rate_where_all_are_alike(rate: float) -> None:
    """With equal moments every design of that many kept has the bound, and the lower half half of its growth."""
    found = readings(np.ones(200), np.ones(200), rate, 0.0)
    for name in ("all", "score", "best"):
        assert found[name] == pytest.approx(1 / (1 - rate)) == pytest.approx(found["bound"])
    assert found["lower"] == pytest.approx(0.5 + 0.5 / (1 - rate))
    # a score that is wrong about the moment is worse than none, which the bound does not cover
    wrong = readings(np.array([1.0, 100.0] * 100), np.array([1.0, 0.2] * 100), rate, 0.05)
    assert wrong["score"] > wrong["bound"]


def test_the_page_names_rows_that_there_are() -> None:
    page = (Path(__file__).parents[1] / "docs" / "referee.md").read_text(encoding="utf-8")
    named = set(re.findall(r'--rows "([^"]+)"', page))
    assert named and named <= set(ROWS)
    shown = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    assert shown >= set(ROWS), set(ROWS) - shown
