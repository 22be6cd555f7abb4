"""A wrong setting fails before the run, and the message says where, what, and what would be right."""

from __future__ import annotations

import dataclasses
import runpy

import pytest
from omegaconf import OmegaConf
from support.job import REPOSITORY
from support.tiny import write_model

from dppo_megatron.config.data import DataConfig
from dppo_megatron.config.objective import ObjectiveConfig
from dppo_megatron.config.pruning import CompletionPruningConfig, PromptPruningConfig, PruningConfig
from dppo_megatron.config.ranges import check_ranges
from dppo_megatron.config.schema import Config
from dppo_megatron.config.selection import SelectionSettings
from dppo_megatron.job import check_settings
from dppo_megatron.platform.capabilities import this_machine
from dppo_megatron.pruning import make_completion_policy, make_prompt_policy
from dppo_megatron.pruning.policies import COMPLETION_POLICIES, PROMPT_POLICIES, check_methods
from dppo_megatron.selection import Selector
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture


def load(*overrides):
    merged = OmegaConf.merge(OmegaConf.structured(PruningConfig), OmegaConf.from_dotlist(list(overrides)))
    return OmegaConf.to_object(merged)


def check(config):
    """As a job does: the settings, then the methods."""
    check_ranges(config, "pruning.")
    return check_methods(config)


def test_the_defaults_are_valid_and_survive_omegaconf():
    config = load()
    check_ranges(config, "pruning.")
    assert config == PruningConfig()
    assert (config.prompt.method, config.completion.method) == ("dppo", "dppo")
    assert (config.prompt.rate, config.prompt.min_inclusion_prob, config.completion.rate) == (0.3, 0.2, None)


@pytest.mark.parametrize("method", PROMPT_POLICIES)
def test_every_prompt_method_is_constructible(method):
    config = load(f"prompt.method={method}")
    check_ranges(config, "pruning.")
    policy = make_prompt_policy(
        config.prompt, num_prompts=10, completions_per_prompt=4, prompts_per_step=5, total_steps=10, seed=0
    )
    assert policy.state_dict()["method"] == method


@pytest.mark.parametrize("method", COMPLETION_POLICIES)
def test_every_completion_method_is_constructible(method):
    config = load(f"completion.method={method}")
    check_ranges(config, "pruning.")
    assert make_completion_policy(config.completion, seed=0, total_steps=10).state_dict()["method"] == method


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompt.rate=1.0", r"pruning.prompt.rate = 1.0: must be in \[0, 1\); 1 would drop everything"),
        ("completion.rate=1.0", r"pruning.completion.rate = 1.0: must be in \[0, 1\)"),
        ("completion.rate=-0.1", r"pruning.completion.rate = -0.1: must be in \[0, 1\)"),
        ("prompt.rate=.nan", r"pruning.prompt.rate = nan: must be in"),
        (
            "prompt.method=dpo",
            r"pruning.prompt.method = 'dpo': no such choice; did you mean 'dppo'\? known: none, dppo,",
        ),
        ("completion.method=cpo", r"did you mean 'cppo'"),
        ("prompt.min_inclusion_prob=0", r"pruning.prompt.min_inclusion_prob = 0.0: must be in \(0, 1\]"),
        ("prompt.min_inclusion_prob=0.8", r"pruning.prompt.min_inclusion_prob = 0.8: must be at most 1 - rate = 0.7"),
        (
            "completion.min_inclusion_prob=0",
            r"pruning.completion.min_inclusion_prob = 0: must be in \(0, 1\]; .* biased",
        ),
        ("prompt.discount=0", r"pruning.prompt.discount = 0.0: must be in \(0, 1\]"),
        ("prompt.anneal_fraction=1.5", r"pruning.prompt.anneal_fraction = 1.5: must be in \[0, 1\]"),
        ("completion.max_weight=0.5", r"pruning.completion.max_weight = 0.5: must be at least 1"),
        (
            "prompt.method=greso prompt.greso.smallest_refill_prompts=400",
            r"greso.largest_refill_prompts = 384: must be at least smallest_refill_prompts = 400",
        ),
        ("completion.allocation=true", r"pruning.completion.allocation = true: method=dppo has no rate"),
        ("prompt.refill.max_rounds=0", r"pruning.prompt.refill.max_rounds = 0: must be at least 1"),
    ],
)
def test_wrong_values_are_explained(override, message):
    with pytest.raises(UserError, match=message):
        check(load(*override.split()))


def test_settings_that_contradict_each_other_are_explained():
    with pytest.raises(UserError, match="use estimator=ht"):
        check(load("completion.cost_aware=true", "completion.estimator=fixed_size_ht"))


def test_the_factories_check_too():
    with pytest.raises(UserError, match=r"pruning.prompt.rate"):
        make_prompt_policy(
            PromptPruningConfig(rate=1.0),
            num_prompts=4,
            completions_per_prompt=2,
            prompts_per_step=2,
            total_steps=1,
            seed=0,
        )
    with pytest.raises(UserError, match=r"pruning.completion.method"):
        make_completion_policy(CompletionPruningConfig(method="all"), seed=0, total_steps=1)
    with pytest.raises(ValueError, match="num_prompts = 0"):
        make_prompt_policy(
            PromptPruningConfig(), num_prompts=0, completions_per_prompt=2, prompts_per_step=2, total_steps=1, seed=0
        )


def test_settings_that_a_method_does_not_read_are_named():
    """Only those that were changed: methods are compared by changing one word of a config."""
    assert check(load()) == []
    assert check(load("prompt.method=none", "completion.method=none")) == []
    said = check(
        load("prompt.method=greso", "prompt.rate=0.4", "prompt.min_inclusion_prob=0.1", "completion.method=none")
    )
    assert said == ["pruning.prompt.method = greso does not read rate, min_inclusion_prob"]
    said = check(load("prompt.method=dppo_auto", "prompt.rate=0.1", "completion.rollout_cost_ratio=0.1"))
    assert said == [
        "pruning.prompt.method = dppo_auto does not read rate",
        "pruning.completion.method = dppo does not read rollout_cost_ratio",
    ]


def test_what_the_trainer_reads_for_a_policy_of_ones_own_is_read():
    """Floor, draw, weights and warm-up, whatever the class says that it reads; `rate` and `prior` mean nothing here."""
    own = "prompt.method=examples.custom_policy:Varied", "completion.method=examples.custom_policy:Cheap"
    here = "min_inclusion_prob=0.3", "design=poisson", "estimator=hajek", "max_weight=3", "anneal_fraction=0.5"
    acting = [f"{level}.{setting}" for level in ("prompt", "completion") for setting in here]
    acting += ["prompt.warmup_epochs=2", "prompt.discount=0.5", "completion.warmup_steps=7"]
    assert check(load(*own, *acting)) == []
    assert check(load(*own, "prompt.prior=2", "completion.rate=0.4")) == [
        "pruning.prompt.method = examples.custom_policy:Varied does not read prior",
        "pruning.completion.method = examples.custom_policy:Cheap does not read rate",
    ]


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, False),
        ({"objective": ObjectiveConfig(advantage="posterior_loo")}, True),
        ({"data": DataConfig(order="easy_first", order_by="pass_rate")}, True),
        ({"data": DataConfig(order="file", order_by="pass_rate")}, False),
        ({"data": DataConfig(order="hard_first")}, False),
    ],
)
@pytest.mark.parametrize("method", ["none", "dppo", "greso"])
def test_what_pass_rates_depend_on_is_read_by_an_advantage_and_an_order(method, changes, read, tmp_path):
    """Whatever the method of the prompts reads: the line at the start of a job does not name it."""
    config = Config(pruning=load(f"prompt.method={method}", "prompt.prior=4", "prompt.discount=0.9"), **changes)
    architecture = read_architecture(write_model(tmp_path, family="qwen3", max_position_embeddings=4096))
    said = "".join(check_settings(config, architecture, 1, this_machine()))
    names = "prior" if method == "dppo" else "discount, prior"
    assert (f"pruning.prompt.method = {method} does not read {names}" in said) == (not read)
    assert read or names in said


@pytest.mark.parametrize("level", ["prompt", "completion"])
def test_what_a_class_says_it_reads_are_settings(level):
    """And each is read where it is said to be: a setting in nobody's list would be reported for every method."""
    policies = {"prompt": PROMPT_POLICIES, "completion": COMPLETION_POLICIES}[level]
    settings = {item.name for item in dataclasses.fields(getattr(PruningConfig(), level))} - {"method"}
    read = {name for policy in policies.values() for name in policy.reads}
    assert read == settings


@pytest.mark.parametrize(
    ("level", "setting", "readers"),
    [
        ("prompt", "rate", "dppo, dppo_paper, infobatch"),
        ("prompt", "refill", "greso, dynamic_sampling"),
        ("completion", "fill_slack", "dppo, dppo_auto"),
        ("completion", "allocation", "cppo, cppo_trl, cppo_verl"),
    ],
)
def test_the_page_shows_which_method_reads_a_setting(level, setting, readers):
    """As the site has it; the rows come from the classes, these four from hand."""
    hook = runpy.run_path(str(REPOSITORY / "tools" / "docs_hook.py"))
    page = (REPOSITORY / "docs" / "pruning.md").read_text(encoding="utf-8")
    shown = hook["on_page_markdown"](page, None, None, None)
    row = f"| `{setting}` | " + ", ".join(f"`{name}`" for name in readers.split(", ")) + " |"
    assert row in shown.partition(f"| `pruning.{level}.` | read by |")[2].partition("\n\n")[0].splitlines()


def _settings_of(**objective):
    objective = ObjectiveConfig(**objective)
    sizes = {"prompts_per_step": 4, "completions_per_prompt": 4, "total_steps": 9, "max_completion_tokens": 20}
    return SelectionSettings(**sizes, objective=objective)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Selector(_settings_of(advantage="grpo"), 8), r"objective\.advantage = 'grpo': .*advantage=group_std"),
        (lambda: Selector(_settings_of(normalization="mean"), 8), r"objective\.normalization = 'mean': no such choice"),
        (
            lambda: make_completion_policy(CompletionPruningConfig(estimator="HT"), seed=0, total_steps=9),
            r"pruning\.completion\.estimator = 'HT': no such choice; known: ht, fixed_size_ht, hajek",
        ),
    ],
)
def test_choices_of_a_librarys_user_are_checked(make, message):
    """No file is read, where they would be: `grpo` was group_mean, `mean` sequence_mean, both labelled exact."""
    with pytest.raises(UserError, match=message):
        make()
