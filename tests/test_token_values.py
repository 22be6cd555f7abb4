"""Values of each token by a function of the user's own: what training makes of them, the ledger's row, and what is
refused. How they travel: test_exchange.py; the gradient: test_unbiased_actor.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.job import QUICK, job_config, read_metrics, write_job_files
from support.launch import run_ranks

from dppo_megatron.algorithms.token_values import OwnTokens, TokenFunction, TokenValues, try_token_values
from dppo_megatron.distributed import rank
from dppo_megatron.job import prepare_job
from dppo_megatron.run import Run
from dppo_megatron.selection.coefficients import is_of_method
from dppo_megatron.train import train
from dppo_megatron.types import Completion, Group, Prompt, RolloutPrompt, RunAborted, UserError
from examples.custom_tokens import repeats, survivors


def _length(group: Group, place: int) -> int:
    return len(group.completions[place].token_ids)


def constant(group: Group, place: int, advantage: float) -> TokenValues:
    return TokenValues(advantages=np.full(_length(group, place), advantage))


def ones(group: Group, place: int, advantage: float) -> TokenValues:
    return TokenValues(weights=np.ones(_length(group, place)))


def odd_ids(group: Group, place: int, advantage: float) -> TokenValues:
    return TokenValues(weights=group.completions[place].token_ids % 2 == 1)


def shifted(group: Group, place: int, advantage: float) -> TokenValues:
    """0 where the completion's advantage is 0 when it is tried, on two completions; not in a step."""
    return TokenValues(advantages=np.full(_length(group, place), advantage + (len(group.completions) > 2)))


def shifted_or_0(group: Group, place: int, advantage: float) -> TokenValues:
    return (shifted if advantage else constant)(group, place, advantage)


def half(group: Group, place: int, advantage: float) -> TokenValues:
    return TokenValues(probabilities=np.full(_length(group, place), 0.5))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_files(tmp_path_factory.mktemp("job"))


def _train(files: Path, run_dir: Path, ranks: int, extra: dict[str, Any]) -> None:
    with Run(prepare_job(job_config(files, run_dir, steps=3, **QUICK | extra), ranks)) as run:
        train(run)


def _rows(files: Path, run_dir: Path, function: str = "", ranks: int = 1, **extra: Any) -> list[dict[str, Any]]:
    """The lines of three steps, and in each the function's own row of the ledger apart from the others."""
    extra |= {"objective__token_values": f"test_token_values:{function}"} if function else {}
    run_ranks(_train, ranks, files, run_dir, ranks, extra)
    rows = read_metrics(run_dir)[1:]
    assert len(rows) == 3 and all(row["train/grad_norm"] > 0 for row in rows)
    for row in rows:
        row["own"] = [one for one in row["prune/ledger"] if one["name"] == "completion/token_values"]
        row["prune/ledger"] = [one for one in row["prune/ledger"] if one not in row["own"]]
    return rows


@pytest.fixture(scope="module")
def plain(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _rows(files, tmp_path_factory.mktemp("runs") / "plain")


def test_what_is_the_same_for_all_tokens_changes_nothing(
    files: Path, tmp_path: Path, plain: list[dict[str, Any]]
) -> None:
    """Bit for bit the run without, pruned; advantages are the objective's and have no row, weights have one."""
    assert _rows(files, tmp_path / "constant", "constant") == plain
    for row, other in zip(_rows(files, tmp_path / "ones", "ones"), plain, strict=True):
        [mine] = row.pop("own")
        assert (mine["label"], mine["kept_fraction"], mine["bias_estimate"]) == ("biased", 1.0, None)
        assert "test_token_values:ones" in mine["note"] and "of unknown size" in mine["note"]
        assert row.pop("prune/biased_selections") == other["prune/biased_selections"] + 1
        assert "prune/bias_estimate" not in row and not is_of_method(mine["name"])
        ess = row.pop("kept/product_ess")  # of each completion's mean weight, which a mean rounds
        assert ess == pytest.approx(other["kept/product_ess"], rel=1e-12)
        assert row == {key: value for key, value in other.items() if key in row}
    assert any(row["prune/completions_trained"] < row["prune/completions_generated"] for row in plain)


@pytest.mark.parametrize(("function", "label"), [("half", "unbiased"), ("odd_ids", "biased")])
def test_the_ledger_says_what_a_selection_of_tokens_is(
    files: Path, tmp_path: Path, plain: list[dict[str, Any]], function: str, label: str
) -> None:
    """On one rank as on two, which hold and train on a half each: the same tokens are drawn, and counted."""
    one, two = (_rows(files, tmp_path / str(ranks), function, ranks) for ranks in (1, 2))
    assert one[0]["train/grad_norm"] != plain[0]["train/grad_norm"]
    for row, other in zip(one, two, strict=True):
        [mine] = row["own"]
        assert row["own"] == other["own"] and mine["label"] == label and 0.3 < mine["kept_fraction"] < 0.7
        # tokens drawn with 1/2 about double the variance, which the growth by the other draws does not say
        totals = {"prune/design_effect", "prune/realised_design_effect"}
        assert totals & row.keys() == (set() if function == "half" else totals)
        assert "prune/completion_design_effect" in row
        for key in ("train/loss", "train/grad_norm", "tokens/trained"):
            assert other[key] == pytest.approx(row[key], rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("method", ["none", "dppo"])
def test_a_completion_that_pruning_would_drop_counts_nothing(files: Path, tmp_path: Path, method: str) -> None:
    """Where the completion's advantage is 0 its tokens' is, also where nothing is pruned: dppo is unbiased for that."""
    methods: dict[str, Any] = {"pruning__prompt__method": method, "pruning__completion__method": method}
    rows = _rows(files, tmp_path / "shifted", "shifted", **methods)
    assert rows == _rows(files, tmp_path / "0", "shifted_or_0", **methods)
    pruned = any(row["prune/completions_trained"] < row["prune/completions_generated"] for row in rows)
    assert pruned == (method == "dppo")


def _group() -> Group:
    selected = RolloutPrompt(Prompt(9, "ab", (1, 2), "", ""), 1.0, 1.0)
    ids = np.array([5, 6, 7, 8, 5, 6, 7, 8, 5])
    return Group(selected, (Completion(ids, -np.ones(9, np.float32), "stop", ""),), np.ones(1))


def test_drawn_tokens_count_once_in_the_mean() -> None:
    """Another draw in each step, the same again if it is repeated; every token's weight is 1 on average."""
    pi = np.linspace(0.2, 1.0, 9)
    own = OwnTokens(lambda *_: TokenValues(probabilities=pi), "mine", 3, True)
    drawn = np.stack([replace(own, step=step).columns(_group(), 0, 1.0)["probabilities"] for step in range(4000)])
    assert np.isclose(drawn, 1 / pi).sum() + (drawn == 0).sum() == drawn.size and len(np.unique(drawn, axis=0)) > 100
    np.testing.assert_allclose(drawn.mean(axis=0), 1.0, atol=5 * np.sqrt(4.0 / 4000))
    np.testing.assert_array_equal(drawn[7], replace(own, step=7).columns(_group(), 0, 1.0)["probabilities"])


def test_the_example() -> None:
    """Tokens 8 and 9 end four that have come before."""
    for advantage, less in ((2.0, 1.0), (-2.0, -3.0), (0.0, 0.0)):
        found = repeats(_group(), 0, advantage).advantages
        assert found is not None and found.tolist() == [advantage] * 7 + [less] * 2


def test_ones_that_are_rounded_up_are_ones() -> None:
    """0.56 + 0.34 + 0.1 is 1 and 2e-16, and float32's 1 may be 1.0000001."""
    for one in (0.56 + 0.34 + 0.1, float(np.nextafter(np.float32(1), np.float32(2)))):
        own = OwnTokens(_values(probabilities=lambda n, one=one: np.full(n, one)), "mine", 0, False)
        assert one > 1 and own.columns(_group(), 0, 1.0)["probabilities"].tolist() == [1.0] * _length(_group(), 0)


def _drawing() -> TokenFunction:
    rng = np.random.default_rng(0)
    return lambda group, place, advantage: TokenValues(weights=rng.random(_length(group, place)))


def _changing(group: Group, place: int, advantage: float) -> TokenValues:
    group.completions[place].token_ids[0] = 0
    return ones(group, place, advantage)


def _values(**wrong: Callable[[int], Any]) -> TokenFunction:
    """Answers with these fields of n tokens."""
    return lambda group, place, advantage: TokenValues(
        **{name: value(_length(group, place)) for name, value in wrong.items()}
    )


WRONG: dict[str, tuple[TokenFunction, str]] = {
    "a list": (lambda *_: [1.0], "AttributeError: 'list' object has no attribute 'advantages'; expected TokenValues"),
    "nothing": (_values(), "returned nothing; expected advantages, weights or probabilities"),
    "both": (_values(weights=np.ones, probabilities=np.ones), "returned weights and probabilities; expected"),
    "too short": (
        _values(weights=lambda n: np.ones(n - 1)),
        r"returned weights \[3\]; expected \[4\], a number a token",
    ),
    "a number": (_values(weights=lambda n: 1.0), r"returned weights \[\]; expected \[4\]"),
    "text": (
        _values(weights=lambda n: np.array(["a"] * n)),
        "could not convert string to float: .*; expected TokenValues",
    ),
    "NaN": (
        _values(weights=lambda n: np.where(np.arange(n) == 2, np.nan, 1.0)),
        r"gave token 2 weights of nan; expected \[-1e\+09, 1e\+09\]",
    ),
    "never": (_values(probabilities=np.zeros), r"gave token 0 probabilities of 0.0; expected \[0.001, 1\]"),
    "hardly ever": (
        _values(probabilities=lambda n: np.full(n, 1e-6)),
        r"gave token 0 probabilities of 1e-06; expected",
    ),
    "raises": (lambda group, *_: TokenValues(group.tokens), "of prompt 3: AttributeError: 'Group' object has no"),
    "at 0": (_values(advantages=np.ones), "where the completion's is 0, .* set objective.zero_advantage_slope"),
    "draws": (_drawing(), "gives different results when called again; return probabilities"),
    "changes": (_changing, "ValueError: assignment destination is read-only"),
    "by outcome": (
        lambda group, place, advantage: (ones if advantage > 0 else half)(group, place, advantage),
        "returned probabilities, but weights when it was tried",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_when_it_is_tried(name: str) -> None:
    """What, where, and what would be right."""
    function, said = WRONG[name]
    prompt = Prompt(3, "text", (1, 2, 3, 4), "", "")
    with pytest.raises(UserError, match=rf"objective\.token_values = 'mine'.*{said}"):
        try_token_values(OwnTokens(function, "mine", 0, False), prompt)


@pytest.mark.parametrize("of_ends", [[1.0, 1.0, 0.0, 0.0], [1.0, 0.5, 0.5, 0.0]])
def test_a_baseline_of_survivors_takes_nothing_from_the_gradient(of_ends: list[float]) -> None:
    """Over all groups of three answers that stop at each token with probability 0.3, at the fourth for certain; longer
    ones are worse. Less noise than the mean of all mates, on average over the groups."""
    stop, rewards = 0.3, np.array(of_ends)
    chances = np.array([(1 - stop) ** n * stop for n in range(3)] + [(1 - stop) ** 3])
    scores = [np.array([-stop] * n + ([1 - stop] if n < 3 else [0.0])) for n in range(4)]
    gradients = []
    for ends in itertools.product(range(4), repeat=3):
        ids = [Completion(np.zeros(n + 1, np.int64), np.zeros(n + 1, np.float32), "stop", "") for n in ends]
        group = Group(RolloutPrompt(Prompt(0, "", (1,), "", ""), 1.0, 1.0), tuple(ids), rewards[list(ends)])
        plain = group.rewards[0] - group.rewards[1:].mean()
        found = survivors(group, 0, plain).advantages
        assert found is not None
        score = scores[ends[0]]
        gradients.append((np.prod(chances[list(ends)]), score @ found, score.sum() * plain))
    chance, ours, usual = np.array(gradients).T
    assert chance @ ours == pytest.approx(chance @ usual, rel=1e-12) and abs(chance @ usual) > 0.05
    assert chance @ np.square(ours) < chance @ np.square(usual)


def _refused(files: Path, run_dir: Path) -> str:
    """The function answers NaN in the second step, on rank 1 alone."""
    job = prepare_job(job_config(files, run_dir, **QUICK, objective__token_values="test_token_values:ones"), 2)
    assert job.token_values is not None

    def wrong(group: Group, place: int, advantage: float) -> TokenValues:
        is_wrong = rank() == 1 and run.loop.last_complete_step == 1
        return TokenValues(weights=np.full(_length(group, place), np.nan if is_wrong else 1.0))

    own = replace(job.token_values, function=wrong)
    with pytest.raises(RunAborted) as stop, Run(replace(job, token_values=own)) as run:
        train(run)
    return str(stop.value)


def test_what_is_refused_in_a_step(files: Path, tmp_path: Path) -> None:
    """Checked in each answer, naming the completion; all ranks end, with the last step saved. A start reads the
    setting, and finds a slope of use with it."""
    [said, again] = run_ranks(_refused, 2, files, tmp_path / "run")
    assert said.startswith("step 2: objective.token_values = 'test_token_values:ones', called for completion")
    assert said == again and "gave token 0 weights of nan" in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_000001"]
    settings = {"objective__token_values": "test_token_values:constant", "objective__zero_advantage_slope": 0.5}
    job = prepare_job(job_config(files, tmp_path / "run", **settings), 1)
    assert job.token_values is not None and job.token_values.given == ("advantages",) and job.token_values.zero_carries
    with pytest.raises(UserError, match=r"objective\.token_values = 'nowhere:f' cannot be imported"):
        prepare_job(job_config(files, tmp_path / "run", objective__token_values="nowhere:f"), 1)
