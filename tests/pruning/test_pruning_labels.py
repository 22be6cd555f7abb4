"""Labels are true and the same in every draw, for whatever the configuration admits.

Each case is a random configuration somewhere in a run (`label_cases`). All draws of the step are run through
`Selector.begin`, `refill` and `finish`. `support/cases.py` says how more cases are tried, and others.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from label_cases import (
    Case,
    Expected,
    accepted,
    drawn_coefficients,
    expectation,
    full_coefficients,
    is_resampled,
    make_case,
    missing_weights,
    planned_prompts,
)
from label_configs import OWN_COMPLETIONS, OWN_PROMPTS, check_sections, make_outcomes
from support.cases import Choose
from support.tables import merged_rows

from dppo_megatron.config.objective import KLConfig, ObjectiveConfig, OverlongConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import selection_settings
from dppo_megatron.data.order import PromptOrder
from dppo_megatron.pruning import StepCost
from dppo_megatron.pruning.designs import poisson, systematic
from dppo_megatron.pruning.policies import COMPLETION_POLICIES, PROMPT_POLICIES, check_methods
from dppo_megatron.pruning.weights import ESTIMATOR_WEIGHTS, largest_weight
from dppo_megatron.selection import Rollouts, Selector, TrainSelection
from dppo_megatron.types import UserError

DOCS = Path(__file__).parent.parent.parent / "docs"
ORDER = ("exact", "unbiased", "ratio", "biased")


def check(case: Case) -> str:
    """All that must hold of one case; its label, the worst of the ledger but for what is missing: that is the world's,
    and the others' labels must be true whatever it has lost (`test_missing_and_pruned` is about the sum of both)."""
    expected = expectation(case)
    assert len(expected.labels) == 1, f"the label depends on the draw: {expected.labels}"
    [ledger] = expected.labels
    updates = case.config.objective.updates_per_step
    assert expected.total == pytest.approx(updates, abs=1e-7), "the draws were not all found"
    rng = np.random.default_rng(case.step)
    for _ in range(3):
        other = make_outcomes(rng, *case.outcomes.rewards.shape, binary=True)
        found = tuple((row.name, row.label) for row in case.run(other).ledger)
        assert found == ledger, f"the label depends on the outcome: {found} and {ledger}"
    nominal = check_plan(case, expected)
    label = max((name for row, name in ledger if row != "rollout/missing"), key=ORDER.index)
    if label != "biased":
        for key, frequency in expected.frequency.items():
            assert frequency == pytest.approx(1.0, rel=3e-6), f"{key}: its probability is not that of the draws"
    if not is_resampled(case):
        check_weights(case, expected, dict(ledger))
    early, objective = case.config.pruning.early_stop.after_tokens, case.config.objective
    if not early:  # else it depends on what was stopped which completions have an advantage
        check_figures(case, expected)
    if early and (objective.advantage, objective.normalization) == ("posterior_loo", "sequence_mean"):
        return label  # what its baseline does is 0 over all answers, and not for each (test_early_stop.py)
    if label in ("exact", "unbiased"):
        check_expectation(case, expected, nominal, exact=label == "exact")
    return label


def check_plan(case: Case, expected: Expected) -> np.ndarray:
    """The nominal prompts: as many as planned, each once, the same in every draw; mini-batches are by their places."""
    count = planned_prompts(case.config)
    nominal = expected.decisions[0].offered[:count]
    assert len(set(nominal.tolist())) == count and 0 <= nominal.min() <= nominal.max() < len(case.outcomes.rewards)
    share = count // case.config.objective.updates_per_step
    place = {q: position // share for position, q in enumerate(nominal.tolist())}
    for decision in expected.decisions:
        assert (decision.offered[:count] == nominal).all()
        if not is_resampled(case):
            minibatch = [place[q] for q in decision.prompts.prompt_index.tolist()]
            size = case.config.rollout.completions_per_prompt
            assert decision.minibatch.tolist() == np.repeat(minibatch, size).tolist()
    return nominal


def check_weights(case: Case, expected: Expected, labels: dict[str, str]) -> None:
    """Where a level is not labelled biased, its weights are those of its estimator in every draw: no cap acts."""
    pruning, updates = case.config.pruning, case.config.objective.updates_per_step
    share, size = planned_prompts(case.config) // updates, case.config.rollout.completions_per_prompt
    known = {
        q: pi
        for decision in expected.decisions
        for q, pi in zip(decision.prompts.prompt_index.tolist(), decision.prompts.inclusion_prob, strict=True)
    }
    for decision in expected.decisions:
        prompts = decision.prompts
        each = np.repeat(prompts.weight * missing_weights(case)[prompts.prompt_index].max(axis=1), size)
        ends = case.counts(case.outcomes)[prompts.prompt_index].ravel()
        for minibatch in range(updates):
            if labels[f"prompt/{pruning.prompt.method}"] != "biased":
                rows = prompts.minibatch == minibatch
                nominal = decision.offered[minibatch * share : (minibatch + 1) * share].tolist()
                pi = np.array([known.get(q, 0.0) for q in nominal])
                kept = np.isin(nominal, prompts.prompt_index[rows])
                weight = dict(zip(prompts.prompt_index[rows].tolist(), prompts.weight[rows].tolist(), strict=True))
                wanted = _estimator(pruning.prompt.estimator, pi, kept)
                assert [weight.get(q, 0.0) for q in nominal] == pytest.approx(wanted.tolist(), rel=1e-9)
            if labels[f"completion/{pruning.completion.method}"] != "biased":
                rows = (decision.minibatch == minibatch) & ~np.isnan(decision.completion_prob)
                pi, kept = decision.completion_prob[rows] * ends[rows], decision.kept[rows]
                wanted = _estimator(pruning.completion.estimator, pi, kept) * each[rows] * ends[rows]
                assert decision.weight[rows].tolist() == pytest.approx(wanted.tolist(), rel=1e-6)


def _estimator(name: str, pi: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Weights [n] by the definitions of docs/pruning.md, 0 where nothing was kept."""
    inverse = np.array([1 / p if k else 0.0 for p, k in zip(pi.tolist(), kept.tolist(), strict=True)])
    if not kept.any() or name == "ht":
        return inverse
    return inverse * (pi.sum() / kept.sum() if name == "fixed_size_ht" else (pi > 0).sum() / inverse.sum())


def check_figures(case: Case, expected: Expected) -> None:
    """Figures of the policy are unbiased: over the draws each completion that carries gradient counts once, and for
    what it stands for of its group, any other not at all. Whether they are is the same in every draw; if not, all
    that is kept counts once, and is called kept."""
    [has_support] = {decision.has_support for decision in expected.decisions}
    objective, limit = case.config.objective, case.config.rollout.sampling.max_completion_tokens
    if not has_support:
        assert all((decision.figure_weight == decision.kept).all() for decision in expected.decisions)
        return
    carries_zero = objective.kl.coef + objective.entropy_coef + objective.zero_advantage_slope > 0
    size = case.config.rollout.completions_per_prompt
    advantages: dict[tuple[int, int], float] = {}
    for decision in expected.decisions:
        for k, q in enumerate(decision.prompts.prompt_index.tolist()):
            advantages |= {(q, i): float(decision.advantages[k * size + i]) for i in range(size)}
    truncated = case.outcomes.truncated if case.outcomes.truncated is not None else case.outcomes.lengths >= limit
    weight = missing_weights(case)
    for (q, i), counted in expected.counted.items():
        filtered = objective.overlong.filter and truncated[q, i]
        carries = not filtered and (carries_zero or advantages[q, i] != 0)
        assert counted == pytest.approx(carries * weight[q, i], rel=3e-6), (
            f"completion {i} of prompt {q} counts {counted}"
        )


def check_expectation(case: Case, expected: Expected, nominal: np.ndarray, *, exact: bool) -> None:
    """The mean over the draws, and where nothing is left to chance every draw, is the full batch."""
    coefficient, inverse = full_coefficients(case, nominal)
    objective = case.config.objective
    carries_zero = objective.kl.coef + objective.entropy_coef + objective.zero_advantage_slope > 0
    scale = max(abs(value) for value in [*coefficient.values(), max(inverse.values())])
    compared = [(coefficient, expected.coefficient, 0)] + ([(inverse, expected.inverse, 1)] if carries_zero else [])
    for full, mean, which in compared:
        for key in full.keys() | mean.keys():
            assert mean.get(key, 0.0) == pytest.approx(full.get(key, 0.0), rel=3e-6, abs=1e-6 * scale), key
        for decision in expected.decisions if exact else []:
            drawn = drawn_coefficients(decision)[which]
            for key in full:
                assert drawn.get(key, 0.0) == pytest.approx(full[key], rel=1e-9, abs=1e-12 * scale), key


def check_all(indices: Iterable[int]) -> Counter[str]:
    """Labels of the cases; the first that fails is named, so that it can be run alone."""
    labels: Counter[str] = Counter()
    for index in indices:
        case = None
        try:
            case = make_case(index)
            labels[check(case)] += 1
        except Exception as error:
            config = accepted(index)[2]
            raise AssertionError(
                f"case {index}, step {case.step if case else 0}: {error}\n{config.pruning}\n{config.objective}\n"
                f"{config.rollout.prompts_per_step} x {config.rollout.completions_per_prompt}"
            ) from error
    return labels


# ------------------------------------------------------------------------------ what the generator must come up with


def _settings(section: Any, prefix: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Dotted key, type, field and value of every setting in a section and those in it."""
    hints = get_type_hints(type(section))
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{prefix}.{item.name}")
        else:
            yield f"{prefix}.{item.name}", hints[item.name], item, value


def _all_settings(config: Config) -> list[tuple[str, Any, Any, Any]]:
    """But a path, which chooses nothing of the step."""
    everything = [*_settings(config.pruning, "pruning"), *_settings(config.objective, "objective")]
    return [one for one in everything if one[0] != "objective.kl.reference_path"]


def _admitted(key: str, kind: Any) -> set[Any]:
    """Every value that the schema admits for a setting; of a number that is None, if it may be that."""
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    if kind is bool:
        return {False, True}
    if key in ("objective.function", "objective.token_values"):
        return {"", "label_configs:a_loss"}
    own = {"pruning.prompt.method": OWN_PROMPTS, "pruning.completion.method": OWN_COMPLETIONS}.get(key, ())
    if kind is str:
        return _choices_of_text(key) | set(own)
    return {None} if type(None) in get_args(kind) else set()


def _choices_of_text(key: str) -> set[str]:
    """What a text may be, from the message that refuses nonsense."""
    config = Config()
    *path, name = key.split(".")
    setattr(reduce(getattr, path, config), name, "nonsense")
    with pytest.raises(UserError, match=re.escape(key)) as refusal:
        check_sections(config)
        check_methods(config.pruning)
    known = re.search(r"known: (.+?)(, or module:Class|$)", str(refusal.value))
    assert known, f"{key}: {refusal.value}"
    return set(known[1].split(", "))


def test_every_setting_is_generated() -> None:
    """Every choice that the schema admits, both values of every switch, two or more of every number, and every choice
    together with every method that reads it."""
    values: dict[str, set[Any]] = defaultdict(set)
    pairs: set[tuple[str, str, Any]] = set()
    for index in range(500):
        config = accepted(index)[2]
        for key, _, _, value in _all_settings(config):
            values[key].add(value)
            if key.startswith(("pruning.prompt.", "pruning.completion.")):
                pairs.add((getattr(config.pruning, key.split(".")[1]).method, key, value))
        for name in ("prompts_per_step", "completions_per_prompt", "async_steps"):
            values[name].add(getattr(config.rollout, name))
    policies = {"pruning.prompt": PROMPT_POLICIES, "pruning.completion": COMPLETION_POLICIES}
    missing: list[Any] = []
    for key, kind, item, default in _all_settings(Config()):
        admitted = _admitted(key, kind)
        missing += [(key, value) for value in admitted - values[key]]
        if isinstance(default, int | float) and len(values[key]) < 2:
            missing.append((key, f"another value than {values[key]}"))
        of_level = policies.get(key.rpartition(".")[0], {}).items()
        readers = [name for name, policy in of_level if item.name in policy.reads]
        missing += [(name, key, value) for name in readers for value in admitted if (name, key, value) not in pairs]
    assert not missing
    assert values["async_steps"] == {0, 1, 3}
    assert {1, 2, 3} <= values["prompts_per_step"] and {2, 3, 8} <= values["completions_per_prompt"]


@pytest.mark.slow
def test_labels_are_true_in_every_draw(cases: Choose) -> None:
    """And the generator is not idle: every label comes up often."""
    chosen = cases("case", 120)
    labels = check_all(chosen)
    assert chosen.are_few or all(labels[name] > 5 for name in ORDER), labels


# -------------------------------------------------------------------------- by Monte Carlo, where there are too many


@pytest.mark.parametrize("design", ["systematic", "poisson"])
def test_expectation_of_a_larger_step(design: str) -> None:
    """Both levels, two mini-batches of 8 x 8, a KL term, 160 draws: along each of 64 random directions the mean is
    within 5 standard errors of the full batch's (the chance of a false alarm is 4e-5)."""
    config = _config("dppo", "dppo", rate=0.5)
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 16, 8
    config.objective.updates_per_step, config.objective.kl = 2, KLConfig(coef=0.02)
    config.pruning.prompt.design = config.pruning.completion.design = design
    rng = np.random.default_rng(3)
    table = make_outcomes(rng, 16, 8, binary=True)
    drawn = np.zeros((160, 2, 16, 8))
    for seed in range(len(drawn)):
        config.seed = seed
        selector = Selector(selection_settings(config), 16, order=PromptOrder(16, 0))
        for step in (1, 2):  # the first visits every prompt
            rows = selector.begin(step).prompt_index
            decision = selector.finish(_taken(table, rows), step)
            selector.feedback(StepCost(step, 1.0, 1.0, 0.0))
        for which, values in enumerate(drawn_coefficients(decision)):
            for (prompt, completion), value in values.items():
                drawn[seed, which, prompt, completion] = value
    case = Case(config, selector, 2, selector.state_dict(), table)
    full = np.zeros(drawn.shape[1:])
    for which, values in enumerate(full_coefficients(case, decision.offered)):
        for (prompt, completion), value in values.items():
            full[which, prompt, completion] = value
    differences = (drawn - full).reshape(len(drawn), -1) @ rng.normal(size=(full.size, 64))
    z = differences.mean(axis=0) / (differences.std(axis=0) / np.sqrt(len(drawn)))
    assert 0.1 < np.abs(z).max() < 5


# ---------------------------------------------------------------------------------------- the largest weight


@given(
    st.lists(st.sampled_from([0.0, 0.05, 0.2, 1 / 3, 0.5, 0.8, 1.0]), min_size=1, max_size=7),
    st.sampled_from(["ht", "fixed_size_ht", "hajek"]),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_the_largest_weight_that_can_occur(probabilities: list[float], estimator: str) -> None:
    """Against every draw: attained by independent coins, never exceeded by a systematic draw, and known before any."""
    pi, n = np.array(probabilities), len(probabilities)
    weigh = ESTIMATOR_WEIGHTS[estimator]
    patterns = [np.array(p) for p in itertools.product((0.0, 1 - 2.0**-53), repeat=n)]
    coins = [poisson(pi, uniform=pattern) for pattern in patterns]
    assert len({largest_weight(draw, estimator) for draw in coins}) == 1
    assert largest_weight(coins[0], estimator) == pytest.approx(max(weigh(draw).max() for draw in coins))
    edges = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(pi[(pi > 0) & (pi < 1)]) % 1]))
    starts = [systematic(pi, order=np.arange(n), start=float(u)) for u in 0.5 * (edges[1:] + edges[:-1])]
    assert len({largest_weight(draw, estimator) for draw in starts}) == 1
    assert max(weigh(draw).max() for draw in starts) <= largest_weight(starts[0], estimator) * (1 + 1e-12)


# ------------------------------------------------------------------------------------------- what the docs say


def _config(prompt: str = "none", completion: str = "none", rate: float = 0.5, **changes: Any) -> Config:
    config = Config(steps=1000, objective=ObjectiveConfig(**changes.pop("objective", {})))
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 8, 4
    config.rollout.sampling.max_completion_tokens = 12
    config.pruning.prompt.method, config.pruning.completion.method = prompt, completion
    config.pruning.prompt.warmup_epochs = 0.0
    for level in (config.pruning.prompt, config.pruning.completion):
        level.rate, level.max_design_effect = rate, 1.5
        for key, value in changes.items():
            setattr(level, key, value)
    config.pruning.prompt.fixed_cost_ratio = config.pruning.completion.rollout_cost_ratio = 0.05
    return config


def _taken(table: Rollouts, rows: np.ndarray) -> Rollouts:
    return Rollouts(table.rewards[rows], table.lengths[rows], table.logit_grad_norm[rows])


def _decide(config: Config, steps: int = 8) -> TrainSelection:
    """The last of some steps in which three prompts of eight are always right."""
    rng = np.random.default_rng(0)
    rewards = np.where(np.arange(8)[:, None] < 3, 1.0, rng.integers(0, 2, (8, 4)))
    table = Rollouts(rewards, rng.integers(1, 13, (8, 4)), rng.uniform(0.5, 2, (8, 4)))
    selector = Selector(selection_settings(config), 8)
    for step in range(1, steps + 1):
        rows = selector.begin(step).prompt_index
        while (more := selector.refill(rewards[rows], step)) is not None:
            rows = np.concatenate([rows, more.prompt_index])
        decision = selector.finish(_taken(table, rows), step)
        selector.feedback(StepCost(step, 1.0, 1.0, 0.0))
    return decision


def _label(config: Config, *prefixes: str) -> str:
    """The worst label of the rows whose names begin so."""
    rows = [row for row in _decide(config).ledger if row.name.startswith(prefixes)]
    return max((row.label for row in rows), key=ORDER.index)


SETTINGS: dict[str, dict[str, Any]] = {
    "`ht`": {},
    "`fixed_size_ht`": {"estimator": "fixed_size_ht"},
    "`fixed_size_ht`, `poisson`": {"estimator": "fixed_size_ht", "design": "poisson"},
    "`hajek`": {"estimator": "hajek"},
    "`ht`, `max_weight` 1.2": {"max_weight": 1.2},
    "rate 0": {"rate": 0.0},
}


def _completion_table() -> list[str]:
    kl = {"objective": {"kl": KLConfig(coef=0.01)}}
    header = [*SETTINGS, "`ht`, KL or entropy"]
    rows = []
    for method in COMPLETION_POLICIES:
        labels = [_label(_config("none", method, **changes), "completion/") for changes in [*SETTINGS.values(), kl]]
        rows.append((f"`{method}`", " | ".join(labels)))
    return [f"| completions | {' | '.join(header)} |", "|---" * (len(header) + 1) + "|", *merged_rows(rows)]


def _prompt_table() -> list[str]:
    rows = []
    for method in PROMPT_POLICIES:
        labels = [_label(_config(method, **changes), "prompt/") for changes in SETTINGS.values()]
        unseen = [row for row in _decide(_config(method), steps=1).ledger if row.name.startswith("prompt/")]
        first = max((row.label for row in unseen), key=ORDER.index)
        rows.append((f"`{method}`", " | ".join([*labels, first])))
    return [
        f"| prompts | {' | '.join(SETTINGS)} | every π is 1 |",
        "|---" * (len(SETTINGS) + 2) + "|",
        *merged_rows(rows),
    ]


def _objective_table() -> list[str]:
    choices: dict[str, dict[str, Any]] = {
        "`loss=clip`": {"loss": "clip"},
        "`loss=clip` with `dual_clip`": {"loss": "clip", "dual_clip": 3.0},
        "`loss=gspo`": {"loss": "gspo"},
        "`loss=cispo`": {"loss": "cispo"},
        "`loss=divergence_tv`": {"loss": "divergence_tv"},
        "`kl.coef` > 0": {"kl": KLConfig(coef=0.01)},
        "`entropy_coef` > 0": {"entropy_coef": 0.01},
        "`advantage=group_std`": {"advantage": "group_std"},
        "`advantage=group_mean`": {"advantage": "group_mean"},
        "`advantage=rloo`": {"advantage": "rloo"},
        "`advantage=posterior_loo`": {"advantage": "posterior_loo"},
        "`advantage=posterior_loo`, `token_mean`": {"advantage": "posterior_loo", "normalization": "token_mean"},
        "`advantage=posterior_loo`, `updates_per_step=2`": {"advantage": "posterior_loo", "updates_per_step": 2},
        "`advantage=reinforce_baseline`": {"advantage": "reinforce_baseline"},
        "`normalization=sequence_mean`": {"normalization": "sequence_mean"},
        "`normalization=constant`": {"normalization": "constant"},
        "`normalization=token_mean`": {"normalization": "token_mean"},
        "`updates_per_step=2`": {"updates_per_step": 2},
        "`overlong.buffer_tokens` > 0": {"overlong": OverlongConfig(buffer_tokens=4)},
        "`overlong.filter`": {"overlong": OverlongConfig(filter=True)},
    }
    rows = []
    for name, objective in choices.items():
        labels = [
            _label(_config(prompt, completion, objective=objective), "")
            for prompt, completion in (("none", "none"), ("none", "dppo"), ("dppo", "dppo"))
        ]
        rows.append((name, " | ".join(labels)))
    return ["| setting | no pruning | completions | prompts and completions |", "|---|---|---|---|", *merged_rows(rows)]


@pytest.mark.parametrize(
    ("page", "table"),
    [("pruning.md", _completion_table), ("pruning.md", _prompt_table), ("objectives.md", _objective_table)],
    ids=["completions", "prompts", "objectives"],
)
def test_the_tables_of_labels_are_what_the_code_says(page: str, table: Any) -> None:
    """Made from the ledgers of real steps; on a difference the message is the table to paste."""
    lines = table()
    assert "\n".join(lines) in (DOCS / page).read_text(encoding="utf-8"), "\n" + "\n".join(lines)


def test_the_worked_example_of_the_docs() -> None:
    """docs/estimator.md: weights, expectation and labels."""
    changes = {"objective": {"advantage": "group_mean", "normalization": "constant"}, "max_design_effect": 0.0}
    table = Rollouts(np.array([[1.0, 0, 0, 0]]), np.full((1, 4), 5), np.ones((1, 4)))
    advantages, weights = np.array([0.75, -0.25, -0.25, -0.25]), {}
    for name, method, extra in (
        ("dppo", "dppo", {}), ("capped", "dppo", {"max_weight": 2.0}), ("cppo", "cppo", {}),
    ):  # fmt: skip
        config = _config("none", method, **changes, **extra)
        config.rollout.prompts_per_step, config.rollout.sampling.max_completion_tokens = 1, 10
        selector = Selector(selection_settings(config), 1)
        case = Case(config, selector, 1, selector.state_dict(), table)
        drawn = []
        for seed in range(150):
            config.seed = seed
            selector = Selector(selection_settings(config), 1)
            selector.begin(1)
            decision = selector.finish(table, 1)
            assert (decision.denominator == 40).all() and np.allclose(decision.advantages, advantages)
            drawn.append(decision.weight)
        weights[name] = np.array(drawn)
        assert {row.label for row in decision.ledger} <= {"exact", "unbiased" if name == "dppo" else "biased"}
        if name != "cppo":
            full, _ = full_coefficients(case, np.zeros(1, np.int64))
            np.testing.assert_allclose([full[0, i] for i in range(4)], advantages / 40)
            factor = np.array([1.0, 1, 1, 1]) if name == "dppo" else np.array([1, 2 / 3, 2 / 3, 2 / 3])
            mean = expectation(case).coefficient
            np.testing.assert_allclose([mean[0, i] for i in range(4)], factor * advantages / 40, rtol=1e-9)
    for name, first, other in (("dppo", 1, 3), ("capped", 1, 2), ("cppo", 2, 2)):
        assert np.allclose(weights[name][:, 0], first) and np.allclose(weights[name][:, 1:].sum(axis=1), other)
        assert (weights[name][:, 1:] > 0).sum(axis=0).min() > 25  # each in about 50 of 150 draws
