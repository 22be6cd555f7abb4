"""Predictions of `simulate` against what a real run then does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import Choose
from support.job import REPOSITORY, job_config, read_metrics, write_warm_job_files
from support.launch import run_ranks

from dppo_megatron.config.data import TrainSetConfig
from dppo_megatron.config.load import read_config
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.order import make_order
from dppo_megatron.job import prepare_job
from dppo_megatron.observe.json_lines import rewind
from dppo_megatron.observe.run_directory import FEATURES
from dppo_megatron.pruning.interface import StepCost
from dppo_megatron.pruning.policies import METHODS, with_method
from dppo_megatron.pruning.variance import StepVariance
from dppo_megatron.run import Run
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.steps import trace as steps_trace
from dppo_megatron.steps.rollout_cost import RolloutCost
from dppo_megatron.steps.trace import changed_since, trace_header, write_features
from dppo_megatron.train import train
from dppo_megatron.types import FloatArray, PromptFeatures, UserError
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.runs.trace import Trace, TracedStep, read_trace
from dppo_megatron.workbench.simulate import (
    Prediction,
    StepTimeModel,
    _NearestRollouts,
    capacity_of,
    fit_costs,
    like_for_like,
    limits,
    simulate,
)

pytestmark = pytest.mark.slow

COSTS = StepTimeModel(RolloutCost.proportional(2.0), update_s_per_1k_tokens=5.0, fixed_s=0.5)
STEPS = 9  # three epochs of three steps
CAP = 256
"""Of a micro-batch: a tenth of a step's tokens or so, for there to be room in the last one."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_warm_job_files(tmp_path_factory.mktemp("task"))


def _run(files: Path, run_dir: Path, method: str, learning_rate: float) -> list[dict[str, Any]]:
    prompt, completion = METHODS[method]
    extra = {
        "steps": STEPS,
        "actor__optimizer__learning_rate": learning_rate,
        "packing__max_tokens_per_microbatch": CAP,
        "pruning__completion__fill_slack": True,
        "pruning__prompt__method": prompt,
        "pruning__completion__method": completion,
    }

    def job() -> None:
        with Run(prepare_job(job_config(files, run_dir, **extra), 1)) as run:
            train(run)

    run_ranks(job, 1)
    return read_metrics(run_dir)[1:]


@pytest.fixture(scope="module")
def still(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpruned run whose policy does not move, so that a replay knows everything."""
    run_dir = tmp_path_factory.mktemp("runs") / "still"
    _run(files, run_dir, "grpo", 1e-12)
    return run_dir


MEASURED = {
    "prompts_generated": "prune/prompts_generated",
    "completions_generated": "prune/completions_generated",
    "completions_trained": "prune/completions_trained",
    "tokens_generated": "tokens/generated",
    "tokens_trained": "tokens/trained",
}


@pytest.mark.parametrize("method", ["dppo", "cppo", "greso_ht", "infobatch", "dppo_paper"])
def test_prediction_is_what_a_real_run_does(files: Path, still: Path, tmp_path: Path, method: str) -> None:
    """With a policy that stands still the replay is exact: every count, of every step's mean, and the predicted growth
    of the variance. `dppo` fills its micro-batches: without their capacity it would be another selection."""
    trace = read_trace(str(still / "trace.jsonl"))
    prediction = simulate(trace, method, COSTS, capacity_of(trace))
    rows = _run(files, tmp_path / method, method, 1e-12)
    if method == "dppo":
        assert sum(row["prune/completion_slack_filled_tokens"] for row in rows) > 0
        assert simulate(trace, method, COSTS).tokens_trained < prediction.tokens_trained
    if prediction.label != "biased":
        measured = np.mean([row["prune/design_effect"] for row in rows])
        assert prediction.predicted_variance == pytest.approx(measured, rel=1e-3)  # norms of four digits
    for name, key in MEASURED.items():
        assert getattr(prediction, name) == pytest.approx(sum(row[key] for row in rows) / STEPS, rel=1e-12), name
    assert prediction.imputed_share == 0
    expected_s = 0.5 + 2e-3 * prediction.tokens_generated + 5e-3 * prediction.tokens_trained
    assert prediction.step_s == pytest.approx(expected_s)


def test_prediction_for_a_policy_that_learns(files: Path, tmp_path: Path) -> None:
    """From a trace of GRPO to a run of DPPO, both learning slowly: within 15 %, as the policies differ by then."""
    _run(files, tmp_path / "grpo", "grpo", 1e-4)
    prediction = simulate(read_trace(str(tmp_path / "grpo" / "trace.jsonl")), "dppo", COSTS)
    rows = _run(files, tmp_path / "dppo", "dppo", 1e-4)
    for name, key in MEASURED.items():
        assert getattr(prediction, name) == pytest.approx(sum(row[key] for row in rows) / STEPS, rel=0.15), name


def test_variance_ratio_and_labels(still: Path) -> None:
    """An unpruned replay changes nothing; a method's label is the worst of its ledger."""
    trace = read_trace(str(still / "trace.jsonl"))
    full = simulate(trace, "grpo", COSTS)
    assert (full.label, full.variance_ratio, full.scale) == ("exact", pytest.approx(1.0), pytest.approx(1.0))
    assert simulate(trace, "dppo", COSTS).label == "unbiased"
    assert simulate(trace, "cppo", COSTS).label == "biased"


def test_what_an_objective_does_by_itself_is_no_method_s_label(still: Path) -> None:
    """Truncated completions are left out with and without pruning, and a baseline of earlier steps is the same off
    policy: the methods are compared as before, beside a full batch that has neither."""
    trace = read_trace(str(still / "trace.jsonl"))
    trace.config.objective.overlong.filter, trace.config.rollout.async_steps = True, 1
    trace.config.objective.advantage = "posterior_loo"
    trace.config.rollout.sampling.max_completion_tokens = int(max(step.rollouts.lengths.max() for step in trace.steps))
    full, dppo, cppo = (simulate(trace, method, COSTS) for method in ("grpo", "dppo", "cppo"))
    assert (full.label, dppo.label, cppo.label) == ("exact", "unbiased", "biased")
    assert full.tokens_trained < full.tokens_generated and full.scale == pytest.approx(1.0)
    assert "of a step of grpo is rollout" in limits([full], COSTS)[0]


def test_a_trace_that_has_lost_its_first_steps(still: Path) -> None:
    """The replay begins with the prompts of the first step that is left: all of their outcomes are known. It goes on so
    after a line that was lost."""
    trace = read_trace(str(still / "trace.jsonl"))
    assert simulate(replace(trace, steps=trace.steps[-2:]), "grpo", COSTS).imputed_share == 0
    assert simulate(replace(trace, steps=trace.steps[:3] + trace.steps[4:]), "grpo", COSTS).imputed_share == 0


class _Counted(list[tuple[int, int, int]]):
    looks = 0

    def __getitem__(self, place: Any) -> Any:
        self.looks += 1
        return super().__getitem__(place)


def test_the_nearest_visit_is_found_without_looking_at_all(still: Path) -> None:
    """The same as by looking at all of them, the earlier of two as near, and the first row of a step with several."""
    trace = read_trace(str(still / "trace.jsonl"))
    rng, nearest = np.random.default_rng(0), _NearestRollouts(trace)
    for count in (1, 2, 7, 1000):
        steps = np.sort(rng.integers(1, 3 * count, count)).tolist()
        visits = _Counted((step, step, row) for row, step in enumerate(steps))
        nearest._visits[0] = visits
        for step in rng.integers(0, 3 * count + 2, 40).tolist():
            visits.looks = 0
            assert nearest._nearest(0, step) == min(list(visits), key=lambda one: abs(one[0] - step))
            assert visits.looks <= 2 * (count.bit_length() + 1) + 3


def test_a_run_that_was_extended_at_a_resume_prunes_to_its_end(still: Path, tmp_path: Path) -> None:
    """The first line of its trace still has the steps that it began with, beyond which no method prunes."""
    head, *steps = (still / "trace.jsonl").read_text().splitlines()
    began = json.loads(head)
    began["config"]["steps"] = 3
    extended = tmp_path / "trace.jsonl"
    extended.write_text("\n".join([json.dumps(began), *steps]))
    as_one, resumed = (simulate(read_trace(str(path)), "dppo", COSTS) for path in (still / "trace.jsonl", extended))
    assert resumed == as_one and as_one.completions_trained < as_one.completions_generated


def test_steps_before_and_after_a_change_are_not_replayed_together(files: Path, tmp_path: Path) -> None:
    """The first line keeps the settings that the run began with. What the selection does not depend on may change."""

    def run(**extra: Any) -> None:
        def job() -> None:
            with Run(prepare_job(job_config(files, tmp_path / "run", **extra), 1)) as run:
                train(run)

        run_ranks(job, 1)

    path, may = tmp_path / "run" / "trace.jsonl", "[rollout.prompts_per_step,actor.optimizer,pruning,objective]"
    other = {"checkpoint__may_change": may, "actor__optimizer__learning_rate": 1e-5, "objective__clip_high": 0.28}
    run(steps=1)
    run(steps=2, **other)
    before = job_config(files, tmp_path / "run").rollout.prompts_per_step
    run(steps=3, **other, rollout__prompts_per_step=before // 2, pruning__prompt__rate=0.125)
    changed = [json.loads(line).get("changed") for line in path.read_text().splitlines()]
    assert changed == [None, None, None, {"prompts_per_step": before // 2, "pruning.prompt.rate": 0.125}]
    told = rf"trace\.jsonl:4: step 3 .* prompts_per_step = {before // 2}, pruning\.prompt\.rate = 0\.125"
    with pytest.raises(UserError, match=told):
        read_trace(str(path))
    head, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([head, *lines[:2]]))
    assert [one.step for one in read_trace(str(path)).steps] == [1, 2]
    path.write_text(head + lines[2])
    with pytest.raises(UserError, match=r"cannot be replayed together, and no earlier step is left$"):
        read_trace(str(path))


def test_a_setting_that_only_one_line_has_is_a_change(tmp_path: Path) -> None:
    """Weights of the sets, which are one set without them; what the loss alone reads is none, but for its slope."""
    config, path = read_config(str(REPOSITORY / "configs" / "quickstart.yaml"), []), tmp_path / "trace.jsonl"
    features = PromptFeatures(np.full(200, 5), np.zeros(200), np.zeros(200, np.int64), ("",))
    config.data.train_path = ""
    one_set = trace_header(config, {"": 200}, features)
    config.data.mixing = "weighted"
    config.data.train_sets = {"a": TrainSetConfig(path="a", weight=3.0)}
    weighted = trace_header(config, {"": 200}, features)
    config.objective.kl.coef, config.objective.kl.estimator, config.objective.dual_clip = 0.5, "k2", 3.0
    config.rollout.sampling.top_p, config.rollout.quantization = 0.9, "fp8"
    sloped = trace_header(config, {"": 200}, features)
    for first, then, changed in (
        (one_set, weighted, {"set_weights": None, "set_weights.a": 3.0}),
        (weighted, one_set, {"set_weights.a": None, "set_weights": None}),
        (weighted, sloped, {"slope at advantage 0": 0.5}),
    ):
        path.write_text(json.dumps(first) + "\n")
        assert changed_since(path, then) == {"changed": changed}


def test_a_predicted_divisor_shortens_the_gradient_once() -> None:
    """Answers that get longer, of which T0 tokens are predicted where there are T, and a method that drops only what
    has no gradient: each coefficient is W T / T0 of the full batch's. The gradient is as long, and no noisier."""
    config, count, size = Config(steps=100), 4, 8
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = count, size
    config.objective.normalization, config.pruning.prompt.rate = "token_mean", 0.5
    config.pruning.completion.rate, config.pruning.prompt.warmup_epochs = 0.0, 1.0
    trace = Trace(config, count, {"": count}, None, [])
    rewards = np.zeros((count, size))
    rewards[: count // 2, ::2] = 1.0
    for step in range(1, STEPS + 1):
        table = Rollouts(rewards, np.full((count, size), 10 * 2**step), np.ones((count, size)))
        seconds = dict.fromkeys(("rollout", "update", "other"), 1.0)
        trace.steps.append(TracedStep(step, np.arange(count), table, np.ones(count * size, np.bool_), seconds))
    selector, factors = Selector(selection_settings(with_method(trace.config, "dppo_paper")), count), []
    for step, traced in enumerate(trace.steps, 1):
        index = selector.begin(step).prompt_index
        table = Rollouts(*(getattr(traced.rollouts, name)[index] for name in ("rewards", "lengths", "logit_grad_norm")))
        decision = selector.finish(table, step)
        kept = decision.kept & (decision.advantages != 0)
        assert kept.sum() == count * size // 2
        [factor] = set((decision.weight / decision.denominator)[kept] * traced.rollouts.lengths.sum())
        factors.append(factor)
        selector.feedback(StepCost(step, 1.0, 1.0, 0.1))
    found = simulate(trace, "dppo_paper", COSTS)
    assert found.label == "biased" and max(factors) > 1.5 * min(factors)
    assert found.scale == pytest.approx(np.mean(factors))
    assert found.variance_ratio == pytest.approx(np.mean(np.square(factors)) / np.mean(factors) ** 2)


def test_each_step_s_growth_counts_alike(still: Path) -> None:
    """A first step whose gradients are a thousand times the others' has no larger part in the mean; its epoch skips
    nothing, and what skipping comes to is shown apart."""
    trace = read_trace(str(still / "trace.jsonl"))
    first = trace.steps[0]
    loud = replace(first.rollouts, logit_grad_norm=1000.0 * first.rollouts.logit_grad_norm)
    one = simulate(replace(trace, steps=[replace(first, rollouts=loud), *trace.steps[1:]]), "greso_ht", COSTS)
    other = simulate(trace, "greso_ht", COSTS)
    assert one.variance_ratio == pytest.approx(other.variance_ratio, rel=1e-9) and other.variance_ratio > 1.001
    assert other.variance_skipping > other.variance_ratio


def test_what_skipping_does_is_right_on_average_over_draws(still: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 draws: sum W^2 s^2 of what they train on, over the full batch's sum s^2, has the mean that a replay gives
    for each of them, within three standard errors. The growth that the few kept groups show has a lower one."""
    trace, accounts, finish = read_trace(str(still / "trace.jsonl")), list[StepVariance](), Selector.finish
    order = make_order({"": trace.num_prompts}, {}, trace.config.seed, trace.config.rollout.prompts_per_step)

    def spy(selector: Selector, *given: Any) -> TrainSelection:
        decision = finish(selector, *given)
        accounts.append(decision.variance)
        return decision

    def replay(method: str, seed: int) -> tuple[float, FloatArray, float]:
        config = deepcopy(trace.config)
        config.seed, config.pruning.prompt.rate = seed, 0.5
        accounts.clear()
        found = simulate(replace(trace, config=config), method, COSTS, order=order).variance_ratio
        realised = float(np.mean([one.growth.realised for one in accounts]))
        return found, np.array([one.kept for one in accounts]), realised

    monkeypatch.setattr(Selector, "finish", spy)
    _, full, _ = replay("grpo", 0)
    found, kept, shown = zip(*(replay("infobatch", seed) for seed in range(100)), strict=True)
    growths = np.mean(np.stack(kept) / full, axis=1)
    assert np.mean(found) == pytest.approx(np.mean(growths), abs=3 * np.std(growths) / 10) and np.std(growths) < 0.5
    assert 1.05 < np.mean(shown) < np.mean(found)


def test_costs_are_fitted_from_the_trace(still: Path) -> None:
    """The fitted model gives the trace's own mean step back."""
    trace = read_trace(str(still / "trace.jsonl"))
    mean = sum(sum(step.seconds.values()) for step in trace.steps) / len(trace.steps)
    assert simulate(trace, "grpo", fit_costs(trace, None, None)).step_s == pytest.approx(mean, rel=0.05)


def test_a_run_that_generated_ahead_costs_no_less_than_its_rollouts(still: Path) -> None:
    """Its trace has the wait alone, which says nothing about what a smaller update saves: all that was generated
    beside the update is still waited for then."""
    trace = read_trace(str(still / "trace.jsonl"))
    seconds = {"rollout": 1.0, "update": 6.0, "other": 1.0}
    trace.config.rollout.async_steps = 1
    trace = replace(trace, steps=[replace(step, seconds=seconds) for step in trace.steps])
    costs = fit_costs(trace, None, None)
    base, nonzero = (simulate(trace, method, costs) for method in ("grpo", "cppo"))
    assert base.step_s == pytest.approx(8.0, rel=0.02) and nonzero.step_s == pytest.approx(8.0, rel=0.02)
    assert nonzero.tokens_trained < 0.8 * base.tokens_trained
    assert "100% of a step of grpo" in limits([base, nonzero], costs)[0]


def test_simulate_command(still: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a row a method and writes the same figures; bad input is one clear line."""
    trace, out = str(still / "trace.jsonl"), tmp_path / "out.json"
    assert main(["simulate", trace, "--methods", "grpo,dppo", "--rollout-cost", "1", "--json", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:4]] == ["method", "grpo", "dppo"]
    assert "of a step of grpo is rollout" in said[4]
    # nine steps with two evaluations show no noise
    assert [row["like_for_like"] for row in json.loads(out.read_text())["methods"]] == [None, None]
    assert [row["method"] for row in json.loads(out.read_text())["methods"]] == ["grpo", "dppo"]
    header, *rows = Path(trace).read_text().splitlines()
    greedy = json.loads(header)
    greedy["config"]["pruning"]["completion"]["rate"] = 0.95
    high = tmp_path / "trace.jsonl"
    high.write_text("\n".join([json.dumps(greedy), *rows]) + "\n")
    assert main(["simulate", str(high)]) == 0
    assert "cppo: not with these settings: " in capsys.readouterr().out
    for arguments, expected in (
        ([str(tmp_path / "none.jsonl")], "no such file"),
        ([str(high), "--methods", "grpo,cppo"], "method=cppo would keep none of"),
        ([str(still / "metrics.jsonl")], "does not begin with a line of format"),
        ([trace, "--methods", "grpo,dpo"], "no method 'dpo'"),
        ([trace, "--update-cost", "-1"], "must not be negative"),
    ):
        assert main(["simulate", *arguments]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("case", ["an allocation", "rewards of -1"])
def test_methods_that_a_trace_does_not_allow_are_left_out(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base too, and those that count successes. They are named with the reason, which several may share."""
    settings = {
        "an allocation": [
            "pruning.completion.method=cppo",
            "pruning.completion.allocation=true",
            "pruning.completion.rate=0.25",
            "rollout.prompts_per_step=48",
            "objective.updates_per_step=32",
        ],
        "rewards of -1": ["pruning.prompt.method=none", "pruning.prompt.score=beta"],
    }
    config, path = (
        read_config(str(REPOSITORY / "configs" / "quickstart.yaml"), settings[case]),
        tmp_path / "trace.jsonl",
    )
    features = PromptFeatures(np.full(200, 5), np.zeros(200), np.zeros(200, np.int64), ("",))
    reward = 1 if case == "an allocation" else -1
    _begin_trace(path, trace_header(config, {"": 200}, features), [reward, *[1] * 3])
    assert main(["simulate", str(path), "--json", str(tmp_path / "out.json")]) == 0
    said, found = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    [line] = [one for one in said.splitlines() if "not with these settings: " in one]
    names, _, why = line.partition(": not with these settings: ")
    assert list(found["refused"]) == names.split(", ") and set(found["refused"].values()) == {why}
    if case == "an allocation":
        assert found["methods"][0]["method"] == "cppo" and "grpo" in found["refused"] and "divide" in why
    else:
        assert names == "dppo, dppo_auto" and why.startswith("the trace has a reward of -1, and pruning.prompt.score")


def test_a_trace_without_trained_tokens_has_no_cost_for_them(still: Path) -> None:
    """Its update seconds over nothing would be some 1e9 seconds a token: the cost is asked for, and taken if given."""
    trace = read_trace(str(still / "trace.jsonl"))
    steps = [replace(step, kept=np.zeros_like(step.kept)) for step in trace.steps]
    empty = replace(trace, steps=steps)
    with pytest.raises(UserError, match=r"nothing was trained in this trace.*give --update-cost"):
        fit_costs(empty, None, None)
    assert fit_costs(empty, None, 5.0).update_s_per_1k_tokens == 5.0


def test_broken_trace_is_named(still: Path, tmp_path: Path) -> None:
    """A torn line is an error with its number."""
    lines = (still / "trace.jsonl").read_text().splitlines()
    torn = tmp_path / "trace.jsonl"
    torn.write_text("\n".join([*lines[:2], lines[2][:50]]))
    with pytest.raises(UserError, match=r"trace\.jsonl:3: not valid JSON"):
        read_trace(str(torn))


@pytest.mark.parametrize("lost", [0, 1], ids=["no prompt", "no completion"])
def test_a_trace_without_outcomes_is_refused(
    still: Path, tmp_path: Path, lost: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of which nothing was generated say nothing of lengths or seconds."""
    head, *steps = (still / "trace.jsonl").read_text().splitlines()
    rows = [json.loads(step) for step in steps]
    size = len(rows[0]["lengths"][0])
    for row in rows:
        zeros = [[0] * size] * lost
        row |= {"prompts": row["prompts"][:lost], "kept": [], "lengths": zeros, "logit_grad_norm": zeros}
        row["rewards"] = [[None] * size] * lost
    empty = tmp_path / "trace.jsonl"
    empty.write_text("\n".join([head, *map(json.dumps, rows)]))
    for command in (["simulate", str(empty)], ["plan", "h100/qwen3_8b_8gpus_dppo", "--trace", str(empty)]):
        assert main(command) == 2
        assert "trace.jsonl': holds no outcomes" in capsys.readouterr().err


def _begin_trace(path: Path, header: dict[str, Any], rewards: Sequence[float] = (1,) * 4) -> int:
    """With one step of one group; returns the bytes of the header."""
    row = {"step": 1, "prompts": [0], "kept": [0], "seconds": dict.fromkeys(("rollout", "update", "other"), 1)}
    row |= {"rewards": [rewards], "lengths": [[1] * 4], "logit_grad_norm": [[1] * 4]}
    rewind(path, 1, None, header)
    size = path.stat().st_size
    with path.open("a") as file:
        file.write(json.dumps(row))
    return size


def test_rows_of_any_set_are_read_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: Choose
) -> None:
    """In the header, or of a larger set in the file beside it: which of the two makes no difference to a reader, and
    the header that names the file does not grow with the set."""
    config, chosen = (
        read_config(str(REPOSITORY / "configs" / "quickstart.yaml"), []),
        cases("rows", 40),
    )
    sizes: dict[int, set[int]] = {0: set(), 10_000: set()}
    for case in chosen:
        rng, path = np.random.default_rng(case), tmp_path / str(case) / "trace.jsonl"
        path.parent.mkdir()
        count, sources = 200 + 7 * case, ("", "a b", "é", "\u4e2d")[: rng.integers(1, 5)]
        level = np.where(rng.random(count) < rng.choice([0, 0.5, 1]), np.nan, rng.integers(0, 9, count) / 2)
        tokens, source = rng.integers(0, 2**40, count), rng.integers(0, len(sources), count)
        features = PromptFeatures(tokens, level, source, sources)
        for most in sizes:
            monkeypatch.setattr(steps_trace, "MOST_IN_HEADER", most)
            header = trace_header(config, {"": count}, features, 3)
            write_features(path.parent, features)
            assert (path.parent / FEATURES).exists() == (most == 0)
            path.unlink(missing_ok=True)
            sizes[most].add(_begin_trace(path, header))
            read = read_trace(str(path))
            assert read.ranks == 3 and read.features is not None and read.features.sources == sources
            for name in ("prompt_tokens", "level", "source"):
                np.testing.assert_array_equal(getattr(read.features, name), getattr(features, name))
            (path.parent / FEATURES).unlink(missing_ok=True)
    assert chosen.are_few or (len(sizes[0]) < len(sizes[10_000]) / 10), sizes


@pytest.mark.parametrize("damage", ["lost", "empty", "no zip", "an array", "too few", "negative", "a hole", "objects"])
def test_rows_that_cannot_be_read_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(steps_trace, "MOST_IN_HEADER", 0)
    config = read_config(str(REPOSITORY / "configs" / "quickstart.yaml"), [])
    few, count = damage == "too few", 200
    features = PromptFeatures(np.full(count, 5), np.zeros(count), np.zeros(count, np.int64), ("",))
    _begin_trace(tmp_path / "trace.jsonl", trace_header(config, {"": count}, features))
    write_features(tmp_path, replace(features, source=features.source[few:] - (damage == "negative")))
    path = tmp_path / FEATURES
    if damage in ("lost", "empty", "no zip"):
        path.unlink() if damage == "lost" else path.write_bytes(b"" if damage == "empty" else b"zip?" * 99)
    elif damage in ("an array", "a hole", "objects"):
        with path.open("wb") as file:
            if damage == "an array":
                np.save(file, np.zeros(3))
            else:
                level = np.array([{}] * count) if damage == "objects" else np.zeros(count)
                np.savez(file, prompt_tokens=level, level=level, **({} if damage == "a hole" else {"source": level}))
    with pytest.raises(UserError, match=r"trace_prompts\.npz") as error:
        read_trace(str(tmp_path / "trace.jsonl"))
    assert "\n" not in str(error.value)


def _prediction(**changes: Any) -> Prediction:
    values: dict[str, Any] = {
        "method": "grpo",
        "label": "exact",
        "prompts_generated": 8.0,
        "completions_generated": 64.0,
        "completions_trained": 64.0,
        "tokens_generated": 1000.0,
        "tokens_trained": 1000.0,
        "step_s": 10.0,
        "scale": 1.0,
        "variance_ratio": 1.0,
        "variance_skipping": 1.0,
        "predicted_variance": 1.0,
        "imputed_share": 0.0,
        "without_gradient": 0.5,
        "prompt_effect": None,
    }
    return Prediction(**(values | changes))


def test_like_for_like_is_between_noise_limits_all_and_nothing() -> None:
    """The docstring's example; a biased method gets elsewhere, and less variance promises no fewer steps."""
    base = _prediction()
    assert like_for_like(_prediction(step_s=4.0, variance_ratio=1.25), base) == (2.0, 2.5)
    assert like_for_like(_prediction(step_s=4.0, variance_ratio=0.9), base) == (2.5, 2.5)
    assert like_for_like(_prediction(step_s=4.0, label="biased"), base, 0.5) is None
    assert like_for_like(_prediction(step_s=4.0), _prediction(label="biased")) is None
    pair = like_for_like(_prediction(step_s=4.0, variance_ratio=1.25), base, 0.5)
    assert pair == (pytest.approx(1.21, abs=0.01), pytest.approx(4.12, abs=0.01))


def test_what_bounds_the_gain_is_said() -> None:
    """COSTS: 2 s of rollout, 5 s of update and 0.5 s fixed, half of the tokens without gradient: 7.5 / 2.5 and
    7.5 / 5 at most. Skipping that measures no better than a smaller batch is named as that."""
    base = _prediction()
    helps = _prediction(method="a", prompts_generated=6.0, prompt_effect=(1.1, 0.02, 1.3))
    no_help = _prediction(method="b", prompts_generated=6.0, prompt_effect=(1.29, 0.02, 1.3))
    first, second, third = limits([base, helps, no_help], COSTS)
    assert first.startswith("33% of a step of grpo is rollout and what is fixed")
    assert "at most 3.00x" in first and "50% of the tokens have no gradient" in first and "is 1.50x" in first
    assert second.endswith("the score helps") and "does not help here, a smaller batch would do as well" in third
    slow = StepTimeModel(RolloutCost.proportional(200.0), COSTS.update_s_per_1k_tokens, COSTS.fixed_s)
    assert limits([base], slow)[1].startswith("pruning completions cannot help here")
    [warned] = limits([_prediction(method="dppo", tokens_trained=1000.0)], COSTS)
    assert "begin --methods with grpo" in warned
    # 200 tokens without a reward are not trained on, pruned or not: 4 s of update, of which 1.5 are without gradient
    [lost] = limits([_prediction(tokens_trained=800.0)], COSTS)
    assert lost.startswith("38% of a step of grpo") and "is 1.30x" in lost
