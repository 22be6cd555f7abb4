"""The schema: each setting is explained, read, in a range that acts, and named by a page. The configs that ship."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from support.job import REPOSITORY, settings
from support.setting_readers import readings

from dppo_megatron.config import Config, load_config, save_config
from dppo_megatron.config.load import config_values, read_config
from dppo_megatron.config.ranges import Range, check_ranges, leaves
from dppo_megatron.config.reference import Setting, all_settings, find
from dppo_megatron.config.resolved_sets import TEMPLATES, eval_set_configs, train_set_configs
from dppo_megatron.types import UserError

SETTINGS = all_settings()
LEAVES = [one for one in SETTINGS if not one.is_section]


def test_settings_of_sets_are_listed() -> None:
    """Also under names that the user chooses."""
    assert {"data.eval_sets.<name>.samples", "data.train_sets.<name>.weight"} < {one.key for one in LEAVES}


def test_every_default_is_read_back_as_the_default() -> None:
    """The printed defaults, given on the command line, change nothing."""
    given = [
        f"{one.key}={one.default}" for one in LEAVES if "<name>" not in one.key and one.default not in ("''", "{}")
    ]
    assert len(given) > 150
    assert config_values(read_config("", given)) == config_values(Config())


def test_every_setting_has_a_meaning_and_a_reader() -> None:
    """Nothing is undocumented, and nothing is a setting that no line reads. The line that is named holds the name."""
    assert not [one.key for one in SETTINGS if not one.meaning], "give these a docstring under the field"
    assert not [one.key for one in LEAVES if not readings(one.owner, one.name)], "no line reads these"
    for one in LEAVES:
        for place in readings(one.owner, one.name):
            lines = (REPOSITORY / place.file).read_text(encoding="utf-8").splitlines()
            assert one.name in lines[place.line - 1], place


def test_readers_are_found_through_what_they_are_called_there() -> None:
    """Some that were looked up by hand: a chain, a parameter of the section's type, a field of an object, a loop."""
    found = {
        key: {f"{place.file}:{place.inside}" for place in readings(find(key)[0].owner, key.rpartition(".")[2])}
        for key in ("rollout.sampling.temperature", "objective.clip_low", "guard.watchdog_s", "objective.dual_clip")
    }
    assert "dppo_megatron/steps/build.py:make_sampling" in found["rollout.sampling.temperature"]
    assert "dppo_megatron/algorithms/policy_losses.py:clip" in found["objective.clip_low"]
    assert "dppo_megatron/run.py:Run.__init__" in found["guard.watchdog_s"]
    assert not any("evaluation" in place for place in found["rollout.sampling.temperature"])  # eval.temperature's


def test_every_page_exists_and_every_section_has_one() -> None:
    own = {one.key for one in SETTINGS if one.page != Config.page}
    assert {name for name in vars(Config()) if name not in own} == {"seed", "steps", "threads_per_rank"}
    for one in SETTINGS:
        assert (REPOSITORY / "docs" / one.page).is_file()


# ---------------------------------------------------------------------------------------------------------- ranges


def _allowed(one: Setting) -> Range | None:
    return next(item.metadata.get("range") for item in fields(one.owner) if item.name == one.name)


NUMBERS = [one for one in LEAVES if "number" in one.kind]


def test_every_number_has_a_range() -> None:
    """A new setting says what is absurd for it: `ranged(default, "[1, 1000]")` in its section's class."""
    missing = sorted({one.key for one in NUMBERS if _allowed(one) is None})
    assert not missing, f"give these a range with config.ranges.ranged(default, interval): {', '.join(missing)}"
    assert len(NUMBERS) > 90


def test_defaults_are_in_range() -> None:
    """And all are seen by the walker that checks them."""
    check_ranges(Config())
    single = {one.key for one in NUMBERS if not one.kind.startswith("list") and "<name>" not in one.key}
    ranged = {key for key, _, allowed in leaves(Config()) if allowed is not None}
    assert ranged >= {one.key for one in NUMBERS if one.default != "null"} & single


@pytest.mark.parametrize("one", NUMBERS, ids=lambda one: one.key)
def test_the_ends_act(one: Setting) -> None:
    """The end belongs to the range or not, as it says; beyond it, NaN, infinity and 2**70 are refused by key."""
    allowed, whole = _allowed(one), "whole" in one.kind
    assert allowed is not None
    step = 1 if whole else max(1e-9, 1e-9 * abs(allowed.low))
    outside: list[float] = [allowed.low - step, math.nextafter(allowed.high, math.inf), 2**70, -(2**70)]
    inside = [allowed.low + step if not allowed.holds_low else allowed.low]
    if whole:
        outside[1] = int(allowed.high) + 1
        inside = [int(value) for value in inside]
        outside = [int(value) for value in outside]
    else:
        outside += [math.nan, math.inf, -math.inf]
    outside += [] if allowed.holds_low else [allowed.low]
    outside += [] if allowed.holds_high else [allowed.high]
    inside += [allowed.high] if allowed.holds_high else []
    listed = one.kind.startswith("list")
    for value in [v for v in outside if not (allowed.or_zero and v == 0)]:
        with pytest.raises(UserError, match=rf"^here\.{one.name}.* = .*must"):
            check_ranges(one.owner(**{one.name: [value] if listed else value}), "here.")
    for value in inside:
        check_ranges(one.owner(**{one.name: [value] if listed else value}), "here.")


ABSURD = ("seed=-1", "threads_per_rank=100000", "rollout.completions_per_prompt=1", "rollout.sampling.temperature=0")
ABSURD += ("rollout.completions_per_prompt=1099511627776", "rollout.prompts_per_step=99999999999999999999")
ABSURD += ("rollout.sampling.max_completion_tokens=99999999999", "rollout.sampling.stop_token_ids=[-1]")
ABSURD += ("actor.optimizer.learning_rate=101", "actor.optimizer.adam_beta1=1.0", "actor.optimizer.adam_beta2=-0.1")
ABSURD += ("actor.optimizer.adam_eps=0", "guard.watchdog_s=-1", "reward.timeout_s=1e12", "reward.processes=4096")
ABSURD += ("reward.min_self_consistency=1.1", "eval.samples=0", "eval.temperature=-1")
ABSURD += ("data.eval_sets={a: {path: x, samples: 0}}", "data.train_sets={a: {path: x, weight: 0}}")


@pytest.mark.parametrize("item", ABSURD)
def test_what_is_absurd_is_out_of_range(item: str) -> None:
    """By hand: the ranges are those that were meant."""
    with pytest.raises(UserError, match=rf"^{item.partition('=')[0]}\S* = .*must "):
        check_ranges(read_config("", [item]))


@pytest.mark.parametrize(
    ("interval", "value", "said"),
    [
        ("[1, 10]", 0, "must be at least 1"),
        ("[1, 10]", 11, "must be at most 10"),
        ("(0, 10]", 0.0, "must be greater than 0"),
        ("[0, 10]", -1, "must not be negative"),
        ("[0, 1)", 1.0, "must be in [0, 1)"),
        ("[0, 1]", 2, "must be in [0, 1]"),
        ("0 or [1, 9]", 0.5, "must be at least 1, or 0"),
        ("[1, 10]", math.inf, "must be finite, in [1, 10]"),
    ],
)
def test_the_message_says_which_end(interval: str, value: float, said: str) -> None:
    """Not only that it is wrong."""
    assert Range.parse(interval).wanted(value) == said
    assert Range.parse(interval, "so it is").wanted(value) == f"{said}; so it is"


def test_the_largest_seed() -> None:
    """Is allowed, though no float can hold it; generators take 64 bits, some of them with a sign."""
    check_ranges(Config(seed=2**63 - 1))
    with pytest.raises(UserError, match=r"^seed = 9223372036854775808: must be at most 9223372036854775807"):
        check_ranges(Config(seed=2**63))


# ----------------------------------------------------------------------------------------------- configs that ship


def _load(name: str, files: Path, tmp_path: Path) -> Config:
    path = str(REPOSITORY / "configs" / name)
    keys = ("run_dir", "model.hf_path", "data.", "sft.examples_path")
    paths = [s for s in settings(files, tmp_path / "run") if s.startswith(keys)]
    return load_config(path, ["data.eval_paths={}", "data.eval_sets={}", *paths])


CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(REPOSITORY / "configs")))
def test_shipped_configs_load_and_round_trip(files: Path, tmp_path: Path, path: Path) -> None:
    """Every config that ships passes the checks once its paths exist, and survives being written and read."""
    config = _load(str(path.relative_to(REPOSITORY / "configs")), files, tmp_path)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(str(tmp_path / "config.yaml"), []) == config


MATH = [path for path in CONFIGS if path.parent.name == "math"]


@pytest.mark.parametrize("path", [REPOSITORY / "configs" / "qwen3_4b.yaml", *MATH], ids=lambda path: path.name)
def test_a_4b_model_has_an_engine_that_can_do_the_job(files: Path, tmp_path: Path, path: Path) -> None:
    """transformers' embedded generation is for tiny models; and Qwen3 is told whether to think."""
    config = _load(str(path.relative_to(REPOSITORY / "configs")), files, tmp_path)
    assert (config.rollout.engine, config.rollout.servers.launch, config.rollout.servers.colocate) == (
        "vllm",
        "local",
        True,
    )
    template = train_set_configs(config)["train"].template
    assert "enable_thinking" in template.chat_template_kwargs and template.apply_chat_template


RECIPES = [path for path in CONFIGS if path.parent.name in ("h100", "math") or path.stem == "qwen3_4b"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_takes_the_template_that_is_named(path: Path) -> None:
    """data.template gave nothing where a recipe had the four settings themselves, which go before it."""
    config = read_config(str(path), ["data.template=chat_boxed", "data.train_path=x", "data.eval_paths.y=y"])
    sets = [*train_set_configs(config).values(), *eval_set_configs(config).values()]
    assert len(sets) > 1 and all(one.template == TEMPLATES["chat_boxed"] for one in sets)


def test_math_by_grpo_is_what_is_known_of_the_paper(files: Path, tmp_path: Path) -> None:
    """n = 5, 1,024 tokens, 15 epochs; batch 512, mini-batch 256, learning rate 1e-6, KL 0.001 (k3)."""
    config = _load("math/qwen3_4b_grpo.yaml", files, tmp_path)
    rollout, objective = config.rollout, config.objective
    assert (rollout.completions_per_prompt, rollout.sampling.max_completion_tokens) == (5, 1024)
    assert (rollout.prompts_per_step, rollout.prompts_per_step / objective.updates_per_step) == (512, 256)
    assert config.actor.optimizer.learning_rate == 1e-6
    assert (objective.kl.coef, objective.kl.estimator) == (0.001, "k3")
    assert config.steps == 15 * 7500 // 512


@pytest.mark.parametrize(
    "names", [("quickstart", "quickstart_grpo"), ("math/qwen3_4b_dppo", "math/qwen3_4b_grpo")], ids=str
)
def test_dppo_differs_from_grpo_in_pruning_only(files: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    """So that the two can be compared; of the quickstart's twins, each tuned, also in what was tuned."""
    dppo, grpo = (asdict(_load(f"{name}.yaml", files, tmp_path)) for name in names)
    if names[0] == "quickstart":
        for twin in (dppo, grpo):
            assert (twin["rollout"].pop("prompts_per_step"), twin.pop("steps")) in ((32, 240), (16, 320))
    assert [key for key in dppo if dppo[key] != grpo[key]] == ["pruning"]
    if names[0] == "quickstart":
        for level in ("prompt", "completion"):
            assert dppo["pruning"][level] | {"method": "none"} == grpo["pruning"][level]
