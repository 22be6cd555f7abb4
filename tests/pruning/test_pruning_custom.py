"""A user's own policy: its ledger is true in every draw, it resumes, and what is wrong is said before the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_cases import Case, small_config
from label_configs import make_outcomes
from support import policies
from support.job import job_config, read_metrics, settings, write_warm_job_files
from support.launch import run_ranks
from test_pruning_labels import check

from dppo_megatron.checkpoint.store import read_state, write_state
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.job import prepare_job
from dppo_megatron.pruning import Draw, StepCost
from dppo_megatron.pruning.policies import METHODS, method_overrides, parse_methods
from dppo_megatron.pruning.trial import try_prompt_policy
from dppo_megatron.run import Run, Stopped
from dppo_megatron.selection import Selector
from dppo_megatron.train import train
from dppo_megatron.types import PromptFeatures, UserError
from dppo_megatron.workbench.cli import main

OWN = "support.policies:"
TRIED = "tried with one prompt and no features before the data are read: look at them in choose"


def _case(config: Config, seed: int) -> Case:
    """Somewhere in a run: three steps were played."""
    rng = np.random.default_rng(seed)
    config.seed = seed
    selector = Selector(selection_settings(config), 8)
    case = Case(config, selector, 1, selector.state_dict(), make_outcomes(rng, 8, 3, binary=True))
    for step in (1, 2, 3):
        case.outcomes = make_outcomes(rng, 8, 3, binary=True)
        case.run()
        selector.feedback(StepCost(step, 1.0, 1.0, 0.1))
        case.step, case.state = step + 1, selector.state_dict()
    return case


# ------------------------------------------------------------------------------------------------- the ledger


@pytest.mark.parametrize("design", ["systematic", "poisson"])
@pytest.mark.parametrize(
    ("prompt", "completion", "label"),
    [
        (OWN + "Curious", "none", "unbiased"),
        ("none", OWN + "Longer", "unbiased"),
        (OWN + "Curious", OWN + "Longer", "unbiased"),
        (OWN + "FirstHalf", "none", "biased"),
        ("none", OWN + "Shortest", "biased"),
    ],
)
def test_the_ledger_of_a_plugged_policy_is_true(prompt: str, completion: str, label: str, design: str) -> None:
    """`check` enumerates every draw: an unbiased label is the full batch's expectation, and no draw changes a label."""
    found = set()
    for seed in range(3):
        config = small_config(prompt, completion)
        config.pruning.prompt.design = config.pruning.completion.design = design
        found.add(check(_case(config, seed)))
    assert found - {"exact"} == {label}  # every prompt of a step may have had variance: nothing is left to chance


@pytest.mark.parametrize(
    ("changes", "label"), [({"max_weight": 1.1}, "biased"), ({"estimator": "hajek"}, "ratio"), ({}, "unbiased")]
)
def test_settings_that_bend_the_weights_are_labelled(changes: dict[str, Any], label: str) -> None:
    """As for the built-in methods: the trainer makes the weights."""
    config = small_config("none", OWN + "Longer")
    for name, value in changes.items():
        setattr(config.pruning.completion, name, value)
    assert check(_case(config, 1)) == label


@pytest.mark.parametrize(("policy", "floor"), [("Longer", 0.05), ("Longer", 0.5), ("Whole", 0.05), ("Whole", 0.5)])
def test_a_cap_is_judged_by_the_floor_of_any_kind_of_answer(policy: str, floor: float) -> None:
    """No probability below the floor comes through, made here or by the policy, so a cap of 1 / floor cannot bind."""
    config = small_config("none", OWN + policy)
    own = config.pruning.completion
    for own.min_inclusion_prob, own.max_weight, label in (
        (floor, 1 / floor, "unbiased"),
        (floor, 0.9 / floor, "biased"),
    ):
        row = next(row for row in _case(config, 1).run().ledger if row.name.startswith("completion"))
        assert row.label == label and ("can bind" in row.note) <= (label == "biased")


@pytest.mark.parametrize(
    ("level", "estimator"), [("prompt", "hajek"), ("completion", "hajek"), ("completion", "fixed_size_ht")]
)
def test_a_ratio_over_a_design_of_ones_own_has_no_size(level: str, estimator: str) -> None:
    """Its mean weight rests on what is kept together, which probabilities of single rows do not say."""
    config = small_config(
        **{"prompt": "none", "completion": "none"} | {level: OWN + ("Coins" if level == "prompt" else "Whole")}
    )
    getattr(config.pruning, level).estimator = estimator
    case = _case(config, 1)
    decision = case.run()
    [row] = [row for row in decision.ledger if row.name.startswith(level)]
    assert (
        row.label == "ratio" and row.bias_estimate is None and "bias of unknown size: which rows a design" in row.note
    )
    assert "prune/bias_estimate" not in decision.metrics


def test_a_design_of_ones_own_is_unbiased_on_average() -> None:
    """Its coins are its own, so they cannot be enumerated: over 4,000 steps the mean weight of each prompt is 1, within
    5 standard errors of sqrt((1 / 0.7 - 1) / 4000) = 0.0104."""
    selector = Selector(selection_settings(small_config(OWN + "Coins")), 4)
    total = np.zeros(4)
    policy = selector._prompt_policy
    for step in range(4000):
        drawn = policy.select(np.arange(4), step=step % 300, minibatch=step // 300)
        assert drawn.ledger[0].label == "unbiased"
        total += drawn.weight
    np.testing.assert_allclose(total / 4000, 1.0, atol=5 * 0.0104)


def test_completions_are_always_chosen_in_one_kind() -> None:
    """Else a draw of other prompts would have another label: here a pick where the batch is small."""
    config = small_config("none", OWN + "Moody")
    config.objective.overlong.filter = True
    selector, rng = Selector(selection_settings(config), 4), np.random.default_rng(0)
    rollouts = replace(make_outcomes(rng, 4, 3, binary=True), truncated=np.zeros((4, 3), dtype=np.bool_))
    selector.begin(1)
    selector.finish(rollouts, 1)
    selector.feedback(StepCost(1, 1.0, 1.0, 0.0))
    selector.begin(2)
    few = np.arange(12).reshape(4, 3) > 2
    with pytest.raises(UserError, match=r"Moody\.choose returned a pick and, earlier in this run, probabilities"):
        selector.finish(replace(rollouts, truncated=few), 2)


def test_a_pick_of_nothing_is_a_pick() -> None:
    """All of a step's completions were cut off: the run goes on, and the label stays."""
    config = small_config("none", OWN + "OneByOne")
    config.objective.overlong.filter = True
    selector, rng = Selector(selection_settings(config), 4), np.random.default_rng(0)
    labels = []
    for step, truncated in ((1, False), (2, True), (3, False)):
        rollouts = replace(make_outcomes(rng, 4, 3, binary=True), truncated=np.full((4, 3), truncated))
        rollouts = replace(rollouts, rewards=np.nan_to_num(rollouts.rewards))  # none is missing
        selector.begin(step)
        labels.append([(row.name, row.label) for row in selector.finish(rollouts, step).ledger])
        selector.feedback(StepCost(step, 1.0, 1.0, 0.0))
    assert labels[0] == labels[1] == labels[2]


def test_a_completion_with_an_advantage_keeps_a_floor() -> None:
    """Whatever `choose` says, nothing with gradient has less than min_inclusion_prob, and nothing without any has a
    chance."""
    config = small_config("none", OWN + "Longer")
    config.pruning.completion.min_inclusion_prob = 0.5
    case = _case(config, 2)
    decision = case.run()
    assert (decision.weight / np.repeat(decision.missing_weight, 3)).max() <= 2.0
    assert not decision.kept[decision.advantages == 0].any()


def _play(selector: Selector, steps: range) -> list[np.ndarray]:
    """The weights of each step."""
    weights = []
    for step in steps:
        rows = selector.begin(step).prompt_index
        outcomes = make_outcomes(np.random.default_rng(step), len(rows), 3, binary=True)
        weights.append(selector.finish(outcomes, step).weight)
        selector.feedback(StepCost(step, 1.0, 1.0, 0.1))
    return weights


@pytest.mark.parametrize("name", ["Hoarder", "Curious"])
def test_what_a_policy_keeps_is_saved_as_plain_data(tmp_path: Path, name: str) -> None:
    """Else no checkpoint of the run could be written, or none be read: a defaultdict, a named tuple, numpy's scalars as
    keys and values, and keys that were not there at the start. A new selector goes on as the old one, also where the
    policy took an array of the history when it was made."""
    settings = selection_settings(small_config(OWN + name))
    whole, resumed = Selector(settings, 8), Selector(settings, 8)
    _play(whole, range(1, 4))
    write_state(tmp_path / "loop.pt", {"loop": whole.state_dict(), "generators": []})
    resumed.load_state_dict(read_state(tmp_path / "loop.pt")["loop"])
    np.testing.assert_equal(_play(resumed, range(4, 9)), _play(whole, range(4, 9)))


# ------------------------------------------------------------------------------------------------- what fails in a step


@pytest.mark.parametrize(
    ("method", "ranks", "saved", "known"),
    [("choose", 1, 2, 2), ("choose", 2, 2, 2), ("learn", 1, 3, 2), ("feedback", 2, 3, 2), ("own_state", 1, 3, 2)],
)
def test_a_policy_that_raises_in_a_step_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, ranks: int, saved: int, known: int
) -> None:
    """Of the last step whose weights the actor has, and of what the policy knew before it raised. No rank hangs, each
    ends with code 3, and the mended policy goes on from there."""
    monkeypatch.setenv("DPPO_FAILS_IN", method)
    run = tmp_path / "run"
    own = {"pruning__prompt__method": OWN + "Failing", "pruning__prompt__warmup_epochs": 0.0}
    arguments = ["train", "configs/quickstart.yaml", *settings(write_warm_job_files(tmp_path), run, **own)]
    assert run_ranks(lambda: main(arguments), ranks, timeout_s=120) == [3] * ranks
    assert sorted(path.name for path in (run / "checkpoints").glob("step_*")) == [f"step_00000{saved}"]
    assert [row["step"] for row in read_metrics(run)] == list(range(saved + 1))
    state = read_state(run / "checkpoints" / f"step_00000{saved}" / "loop.pt")["loop"]["loop"]
    assert state["selector"]["prompt"]["own"] == {"known": known}
    if method == "own_state":
        monkeypatch.delenv("DPPO_FAILS_IN")
        assert run_ranks(lambda: main(arguments), 1, timeout_s=120) == [0]
        assert read_metrics(run)[-1]["step"] == 4


def test_a_reward_out_of_range_in_a_step_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is trained on it."""
    run = tmp_path / "run"
    monkeypatch.setenv("DPPO_RUN", str(run))
    own = {"reward__function": "support.faulty:large_at_last", "reward__min_self_consistency": 0.0}
    own |= {"pruning__prompt__method": "dppo", "pruning__prompt__score": "beta"}
    arguments = ["train", "configs/quickstart.yaml", *settings(write_warm_job_files(tmp_path), run, **own)]
    assert run_ranks(lambda: main(arguments), 1, timeout_s=120) == [3]
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_000002"]


def test_a_state_that_failed_at_one_save_is_current_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails is a warning, and the run goes on: what it learns from then on must not be lost."""
    selector = Selector(selection_settings(small_config(OWN + "Failing")), 8)
    _play(selector, range(1, 2))
    with monkeypatch.context() as failing:
        failing.setattr(policies.Failing, "own_state", lambda self: [][0])
        with pytest.raises(UserError, match=r"own_state\(\): IndexError"):
            selector.state_dict()
    _play(selector, range(2, 4))
    assert selector.state_dict()["prompt"]["own"] == {"known": 3}


# ------------------------------------------------------------------------------------------------- what is refused


def test_what_cannot_be_saved_is_refused_in_the_step_that_keeps_it() -> None:
    """Its feedback, which all ranks have an error of: a save would go on without a checkpoint, as on a full disk."""
    message = r"pruning\.prompt\.method = '.*Queued': own_state\(\)\[0\] holds a deque: a checkpoint keeps numbers"
    with pytest.raises(UserError, match=message):
        _play(Selector(selection_settings(small_config(OWN + "Queued")), 8), range(1, 2))


def test_a_state_that_a_policy_does_not_take_names_it() -> None:
    """A KeyError in the user's `load_own_state`, of a checkpoint of another version of the class: as a state of another
    version, about which the trainer says what to do."""
    selector = Selector(selection_settings(small_config(OWN + "Curious")), 8)
    state = selector.state_dict()
    state["prompt"]["own"] = {}
    with pytest.raises(ValueError, match=r"Curious\.load_own_state, given what own_state kept: KeyError: 'tries'"):
        selector.load_state_dict(state)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda n: 1 / 0, r"pruning\.prompt\.method = '.*Answers': choose, given 4 rows in step 0: ZeroDivisionError"),
        (lambda n: [True] * n, r"choose returned list; expected a numpy array \[4\]"),
        (lambda n: np.ones(n + 1), r"returned float64\[5\]; expected a numpy array \[4\]"),
        (lambda n: np.ones(n, dtype=int), r"returned int64\[4\]; expected .* floats \(probabilities\)"),
        (lambda n: np.full(n, 1.5), r"returned 1.5 in row 0: probabilities are in \[0, 1\]"),
        (lambda n: np.full(n, np.nan), "returned nan in row 0"),
        (lambda n: Draw(np.ones(n, bool), np.zeros(n), True), "kept a row of probability 0"),
        (lambda n: Draw(np.zeros(n, bool), np.ones(n), True), "left out a row of probability 1"),
        (lambda n: Draw(np.zeros(n, bool), np.zeros(n), True), "gives probability 0 to a row that can carry gradient"),
        (
            lambda n: Draw(np.arange(n) > 0, np.where(np.arange(n) > 0, 1.0, 1e-300), True),
            r"gives probability 1e-300 to a row .*pruning\.prompt\.min_inclusion_prob = 0\.2: raise the one or",
        ),
    ],
)
def test_answers_that_are_none_are_named(answer: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies.Answers, "answer", staticmethod(answer))
    with pytest.raises(UserError, match=message):
        Selector(selection_settings(small_config(OWN + "Answers")), 4).begin(1)


def test_ones_that_are_rounded_up_are_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.56 + 0.34 + 0.1 is 1 and 2e-16, and float32's 1 may be 1.0000001; a floor may be rounded down."""
    floor = np.full(1, 0.7, dtype=np.float32)
    for one in (np.full(3, 0.56 + 0.34 + 0.1), np.nextafter(np.ones(3, np.float32), np.float32(2))):
        pi = np.concatenate([one, floor.astype(one.dtype)])
        config = small_config(OWN + "Answers")
        config.pruning.prompt.min_inclusion_prob = 0.7
        for answer in (pi, Draw(np.ones(4, dtype=np.bool_), pi, fixed_size=False)):
            monkeypatch.setattr(policies.Answers, "answer", staticmethod(lambda n, answer=answer: answer))
            chosen = Selector(selection_settings(config), 4).begin(1)
            assert float(pi[0]) > 1 and float(pi[3]) < 0.7 and sorted(chosen.inclusion_prob.tolist())[-3:] == [1.0] * 3


@pytest.mark.parametrize(
    ("level", "path", "message"),
    [
        ("prompt", "no_such_module:Policy", "cannot be imported: ModuleNotFoundError"),
        ("prompt", OWN + "NoSuch", "cannot be imported: AttributeError"),
        ("prompt", OWN + "NUMBER", "is not callable"),
        ("prompt", "support.job:job_config", "is no prompt policy: expected a class derived from"),
        ("prompt", OWN + "Longer", "is no prompt policy: .*; it is one of completions"),
        ("completion", OWN + "Curious", "is no completion policy: .*; it is one of prompts"),
        ("prompt", OWN + "Nothing", "has no method choose"),
        ("prompt", OWN + "Replaced", "replaces select, which is the trainer's own, .*; only choose, feedback, learn"),
        (
            "prompt",
            OWN + "FlatScore",
            "no part of a built-in method can be replaced: give its probabilities from choose",
        ),
        ("prompt", OWN + "NoArguments", r"an __init__ takes \(\*args, \*\*kwargs\)"),
        ("prompt", OWN + "Hard", rf"cannot be made: AttributeError: .*'level' \({TRIED}"),
        ("prompt", OWN + "Many", rf"cannot be made: AssertionError: a set of one \({TRIED}"),
        ("prompt", OWN + "Unsaved", r"own_state\(\)\['seen'\] holds a set: a checkpoint keeps numbers"),
        ("prompt", OWN + "Forgetful", "has no load_own_state, and so would lose what it keeps at every resume"),
        (
            "prompt",
            OWN + "Misspelt",
            r"Misspelt': choose, given \d+ rows in step \d+: AttributeError: .* no attribute 'array'",
        ),
        ("prompt", OWN + "Unsigned", "Unsigned': learn, given .* unexpected keyword argument 'step'"),
        ("completion", OWN + "ByLargest", "ByLargest': choose, given 0 rows in step 0: ValueError: zero-size array"),
        ("prompt", OWN + "Unpaid", "Unpaid': feedback of step 1: AttributeError: .* no attribute 'update_seconds'"),
        ("prompt", OWN + "Stateless", r"Stateless': own_state\(\): AttributeError: .* no attribute 'seen'"),
        ("completion", OWN + "NoObject", "cannot be made: its __new__ returns a int"),
        ("prompt", "dpo", "did you mean 'dppo'.*or module:Class for a policy of your own"),
    ],
)
def test_a_plugged_policy_that_is_none_ends_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, path: str, message: str
) -> None:
    """Exit code 2, one line, and no run directory."""
    files = write_warm_job_files(tmp_path)
    arguments = ["train", "configs/quickstart.yaml", *settings(files, tmp_path / "run")]
    assert main([*arguments, f"pruning.{level}.method={path}"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=message):
        raise UserError(said)


def test_what_a_policy_is_made_with_is_all_there_is() -> None:
    """Where the data are known nothing is tried without them: what looks at levels, or at the history, when it is made
    can be made by a `Selector`; and what chooses by them is tried with them."""
    none = np.zeros(8, dtype=np.int64)
    features = PromptFeatures(none, np.arange(8.0), none, ("",))
    selector = Selector(selection_settings(small_config(OWN + "Hard")), 8, features=features)
    try_prompt_policy(small_config(OWN + "Visited").pruning.prompt, features, 4, 3, 12, updates=2, steps=400)
    chosen = selector._prompt_policy.select(np.arange(8), step=1)
    assert chosen.inclusion_prob.tolist() == [0.5] * 4 + [1.0] * 4
    assert (
        Selector(selection_settings(small_config(OWN + "Many")), 8)
        ._prompt_policy.select(np.arange(8), step=1)
        .kept.any()
    )


def test_compare_and_simulate_know_it() -> None:
    """The level is the class's."""
    assert parse_methods(f"grpo,{OWN}Curious,{OWN}Longer") == ["grpo", OWN + "Curious", OWN + "Longer"]
    assert method_overrides(OWN + "Longer")[:2] == [
        "pruning.prompt.method=none",
        f"pruning.completion.method={OWN}Longer",
    ]
    assert set(METHODS) >= {"grpo", "dppo", "cppo_verl", "max_variance"} and METHODS["cppo"] == ("none", "cppo")
    with pytest.raises(UserError, match="no method 'gpro'"):
        parse_methods("gpro")


# ------------------------------------------------------------------------------------------------- real runs


def _run(config: Config, *, stop_after: int = 0) -> None:
    def job() -> None:
        try:
            with Run(prepare_job(config, 1)) as run:
                if stop_after:
                    save = run.save_if_due

                    def then_stop(step: int) -> None:
                        if step == stop_after:
                            run._stop_requests.received = "SIGTERM"
                        save(step)

                    run.save_if_due = then_stop  # type: ignore[method-assign]
                train(run)
        except Stopped:
            pass

    run_ranks(job, 1)


def test_a_policy_that_raised_is_named_if_a_signal_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which it does before an evaluation, with exit code 0."""
    monkeypatch.setenv("DPPO_FAILS_IN", "feedback")
    own = {"pruning__prompt__method": OWN + "Failing", "pruning__prompt__warmup_epochs": 0.0, "eval__every_steps": 1}
    _run(job_config(write_warm_job_files(tmp_path), tmp_path / "run", **own), stop_after=3)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2], "the third waits for its evaluation"
    said = "".join(capfd.readouterr())
    assert f"step 3: pruning.prompt.method = '{OWN}Failing': feedback of step 3: KeyError" in said


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["Curious", pytest.param("FirstHalf", marks=pytest.mark.long)])
def test_a_plugged_policy_trains_and_resumes(tmp_path: Path, prompt: str) -> None:
    """Stopped after step 3 and resumed: every line of metrics.jsonl as in the run that was not, the ledger included."""
    files = write_warm_job_files(tmp_path)
    methods = {
        "pruning__prompt__method": OWN + prompt,
        "pruning__completion__method": OWN + ("Longer" if prompt == "Curious" else "Shortest"),
        "steps": 6,
    }
    _run(job_config(files, tmp_path / "whole", **methods))
    _run(job_config(files, tmp_path / "torn", **methods), stop_after=3)
    assert len(read_metrics(tmp_path / "torn")) == 4
    _run(job_config(files, tmp_path / "torn", **methods))
    whole, torn = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "torn")
    assert whole == torn
    rows = {row["name"]: row["label"] for row in whole[-1]["prune/ledger"]}
    label, completion = "unbiased" if prompt == "Curious" else "biased", methods["pruning__completion__method"]
    assert rows[f"prompt/{OWN}{prompt}"] in {label, "exact"} and rows[f"completion/{completion}"] == label
