"""The configs that ship, and the schema's own promises."""

from __future__ import annotations

import ast
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path

import pytest
from support.job import REPOSITORY, settings, write_job_files

from dppo_megatron.config import Config, load_config, save_config
from dppo_megatron.config.reference import all_keys


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_files(tmp_path_factory.mktemp("task"))


def _load(name: str, files: Path, tmp_path: Path) -> Config:
    path = str(REPOSITORY / "configs" / name)
    keys = ("run_dir", "model.hf_path", "data.", "warm_start.examples_path")
    paths = [s for s in settings(files, tmp_path / "run") if s.startswith(keys)]
    return load_config(path, ["data.eval_paths={}", "data.eval_sets={}", *paths])


def test_grpo_twin_differs_in_pruning_only(files: Path, tmp_path: Path) -> None:
    """quickstart_grpo.yaml is the quickstart with both methods off."""
    dppo, grpo = (asdict(_load(f"{name}.yaml", files, tmp_path)) for name in ("quickstart", "quickstart_grpo"))
    assert [key for key in dppo if dppo[key] != grpo[key]] == ["pruning"]
    for level in ("prompt", "completion"):
        assert dppo["pruning"][level] | {"method": "none"} == grpo["pruning"][level]


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
    assert "enable_thinking" in config.data.chat_template_kwargs and config.data.apply_chat_template


def test_math_by_grpo_is_what_is_known_of_the_paper(files: Path, tmp_path: Path) -> None:
    """n = 5, 1,024 tokens, 15 epochs; batch 512, mini-batch 256, learning rate 1e-6, KL 0.001 (k3)."""
    config = _load("math/qwen3_4b_grpo.yaml", files, tmp_path)
    rollout, objective = config.rollout, config.objective
    assert (rollout.completions_per_prompt, rollout.sampling.max_completion_tokens) == (5, 1024)
    assert (rollout.prompts_per_step, rollout.prompts_per_step / objective.updates_per_step) == (512, 256)
    assert config.actor.optimizer.learning_rate == 1e-6
    assert (objective.kl.coef, objective.kl.estimator) == (0.001, "k3")
    assert config.steps == 15 * 7500 // 512


def test_dppo_differs_from_grpo_in_pruning_only(files: Path, tmp_path: Path) -> None:
    """So that the two can be compared."""
    dppo, grpo = (asdict(_load(f"math/qwen3_4b_{name}.yaml", files, tmp_path)) for name in ("dppo", "grpo"))
    assert [key for key in dppo if dppo[key] != grpo[key]] == ["pruning"]


def test_every_field_is_explained() -> None:
    """Each setting has a docstring under it, in every file of settings."""
    seen = set()
    for path in sorted((REPOSITORY / "dppo_megatron" / "config").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
                continue
            for item, following in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(item, ast.AnnAssign):
                    seen.add(ast.unparse(item.target))
                    explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                    assert explained, f"{path.name}: {node.name}.{ast.unparse(item.target)} has no docstring"
    assert {key.rpartition(".")[2] for key in all_keys()} <= seen


def test_no_two_settings_share_a_section_and_name() -> None:
    """Dotted keys are unique and plain: what the unknown-key hint relies on."""

    def keys(schema: type, prefix: str) -> list[str]:
        found = []
        for item in fields(schema):
            found.append(prefix + item.name)
            if is_dataclass(item.default_factory):
                found += keys(item.default_factory, f"{prefix}{item.name}.")  # type: ignore[arg-type]
        return found

    everything = keys(Config, "")
    assert len(everything) == len(set(everything)) and all(key.islower() for key in everything)
