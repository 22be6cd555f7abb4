"""Families that a class of mbridge describes: they equal transformers, and what describes them wrongly is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from support.engines.servers import local_settings, needs
from support.job import QUICK, job_config, read_metrics, settings
from support.launch import run_ranks
from support.tiny import PROVIDERS, Parallel, model_config, write_model
from test_conversion import _assert_byte_equal, _convert
from test_gemma import _check_equal, _expected, _measure
from transformers import AutoModelForCausalLM

from dppo_megatron.config.schema import ModelConfig
from dppo_megatron.evaluation.standalone import EngineAndGraders
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.decoder import Decoder
from dppo_megatron.run import Run
from dppo_megatron.steps.first_layers import _depth, compare
from dppo_megatron.train import train
from dppo_megatron.types import UserError
from dppo_megatron.weights import provider
from dppo_megatron.weights.architecture import Architecture, read_architecture
from dppo_megatron.weights.mapping import table
from dppo_megatron.weights.provider import check_first_layers, model_architecture
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.quickstart.tiny_model import VOCABULARY, make_tokenizer

# nothing is a power of two
ODD = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "hidden_size": 42, "intermediate_size": 66}
ODD |= {"pad_token_id": None}
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
LAYOUTS = [
    *(("seed_oss", one) for one in (Parallel(**DOUBLE), Parallel(tp=2, pp=2, **DOUBLE), Parallel(cp=2, **DOUBLE))),
    *(("dots1", one) for one in (Parallel(**DOUBLE), Parallel(tp=2, pp=2, ep=2, etp=1, **DOUBLE))),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_model(tmp_path_factory.mktemp(family), family=family, **ODD) for family in PROVIDERS}


@pytest.mark.parametrize(("family", "parallel"), LAYOUTS, ids=str)
def test_equals_transformers(paths: dict[str, Path], family: str, parallel: Parallel) -> None:
    """Log-probabilities within 1e-5, the gradient of each parameter within 1e-5 of its norm."""
    logprobs, gradients = run_ranks(_measure, parallel.world_size, paths[family], parallel)[0]
    expected, theirs = _expected(paths[family], experts_implementation="eager")
    _check_equal((logprobs, gradients), (expected, _apart(theirs)))


def _apart(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the names of the files: transformers keeps a layer's experts in two tensors."""
    found = {}
    for name, tensor in gradients.items():
        base, _, last = name.rpartition("experts.")
        if not base.endswith("mlp.") or tensor.ndim != 3:
            found[name] = tensor
            continue
        for expert, one in enumerate(tensor):
            parts = zip(("gate", "up"), one.chunk(2), strict=True) if last == "gate_up_proj" else [("down", one)]
            found |= {f"{base}experts.{expert}.{part}_proj.weight": value for part, value in parts}
    return found


@pytest.fixture
def found_by_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of these tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.slow
@pytest.mark.usefixtures("found_by_children")
@pytest.mark.parametrize(("family", "wrong"), [("seed_oss", ["SEED_KEYS_VALUES"]), ("dots1", [])])
def test_round_trip_of_a_conversion(
    paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, wrong: list[str]
) -> None:
    """Each way begins with the comparison; after one that fails nothing is written."""
    into = ("to-megatron", "--hf", paths[family], "--out", tmp_path / "megatron")
    back = ("to-hf", "--checkpoint", tmp_path / "megatron", "--out", tmp_path / "hf")
    for command in (into, back):
        for name in wrong:
            assert _convert(*command, "--provider", f"support.bridges:{name}") == 2
            assert not Path(command[-1]).exists()
            assert f"--provider support.bridges:{name}: log-probabilities after" in capsys.readouterr().err
        assert _convert(*command, "--provider", PROVIDERS[family], "--verify") == 0
        assert f"model.provider = {PROVIDERS[family]}: the first" in capsys.readouterr().out
    _assert_byte_equal(tmp_path / "hf", paths[family])


def _killed(*_: Any, variables: Any = None, **options: Any) -> subprocess.Popen[str]:
    """A comparison for which there is no memory."""
    return subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], **options)


def test_a_conversion_goes_on_where_nothing_can_be_compared(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It moves tensors, both ways, and says what it lacks; what computes with the layers is refused."""
    monkeypatch.setattr(provider, "start_python", _killed)
    model, said = (
        paths["seed_oss"],
        "could not be compared with transformers': the child process was killed by signal 9",
    )
    into = ("to-megatron", "--hf", model, "--out", tmp_path / "megatron")
    back = ("to-hf", "--checkpoint", tmp_path / "megatron", "--out", tmp_path / "hf")
    for command in (into, back):
        assert _convert(*command, "--provider", PROVIDERS["seed_oss"]) == 0
        out = capsys.readouterr().out
        assert "warning: model.provider = " in out and said in out
    _assert_byte_equal(tmp_path / "hf", model)
    with pytest.raises(UserError, match=said):
        check_first_layers(ModelConfig(str(model), PROVIDERS["seed_oss"]))


def test_an_evaluation_by_servers_compares_nothing(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They compute with layers of their own; the embedded engine's are refused where no process can compare them."""
    monkeypatch.setattr(provider, "start_python", _killed)
    of_model = {"model__hf_path": _model(tmp_path / "model", "seed_oss"), "model__provider": PROVIDERS["seed_oss"]}
    for engine in ("vllm", "sglang"):
        served = {"rollout__engine": engine, "rollout__servers__endpoints": "[http://127.0.0.1:9]"}
        with closing(EngineAndGraders(job_config(files, tmp_path, **QUICK | of_model | served), tmp_path, ())):
            pass
    with pytest.raises(UserError, match="could not be compared"):
        EngineAndGraders(job_config(files, tmp_path, **QUICK | of_model), tmp_path, ())


def _plain(architecture: Architecture) -> Architecture:
    """Without names: the table has them."""
    experts = architecture.experts
    if experts is not None:
        experts = replace(experts, module="", shared_module="", projections=("", "", ""))
    return replace(architecture, provided_names=(), experts=experts)


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("llama3", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("glm4_moe", {"n_shared_experts": 1}),  # mbridge's class reads no other number
        ("deepseek_v3", {"n_group": 8, "topk_group": 4, "n_routed_experts": 32, "num_experts_per_tok": 8}),
    ],
)
def test_our_rows_are_what_mbridge_says(tmp_path: Path, family: str, others: dict[str, Any]) -> None:
    """Sizes and names of families that both have, two readings of one config.json."""
    path = write_model(tmp_path, family=family, **others)
    ours, theirs = read_architecture(path), model_architecture(ModelConfig(str(path), "mbridge"))
    if family == "deepseek_v3":  # the class knows no groups; the comparison of the first layers refuses it
        assert ours.experts is not None
        ours = replace(ours, experts=replace(ours.experts, groups=1, groups_per_token=1))
    assert _plain(theirs) == _plain(ours)
    assert table(theirs) == table(ours)


WRONG = {
    "EPSILON": "dots1",
    "NO_HEAD_NORMS": "dots1",
    "SCALE": "dots1",
    "TOP_2": "dots1",
    "ALL_MIXTURES": "dots1",
    "SOFTMAX": "dots1",
    "NO_SHARED": "dots1",
    "GATE_UP": "dots1",
    "SHARED_GATE_UP": "dots1",
    "KEYS_VALUES": "dots1",
    "SEED_KEYS_VALUES": "seed_oss",
}


def _differences(models: list[ModelConfig], embedded: bool = False, scale: float = 1.0) -> list[float | str]:
    """What the comparison finds for each, or the error.

    Args:
        scale: of every norm of the embedded engine.
    """
    found: list[float | str] = []
    normed = Decoder._normed
    Decoder._normed = lambda *given: scale * normed(*given)  # type: ignore[method-assign]
    for model in models:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        try:
            found.append(compare(model, embedded)["difference"])
        except UserError as error:
            found.append(str(error))
    return found


def test_a_wrong_class_is_refused(paths: dict[str, Path]) -> None:
    """Each way to be wrong moves log-probabilities by more than ten times the tolerance, or names are not the files';
    the right classes stay a hundred times below it."""
    right = [ModelConfig(str(paths[family]), provider) for family, provider in PROVIDERS.items()]
    wrong = [ModelConfig(str(paths[family]), f"support.bridges:{name}") for name, family in WRONG.items()]
    same, found = (lambda all_: (all_[:2], all_[2:]))(run_ranks(_differences, 1, right + wrong, timeout_s=300)[0])
    assert all(isinstance(one, float) and one < 1e-6 for one in same)
    for name, difference in zip(WRONG, found, strict=True):
        if isinstance(difference, str):
            assert re.match(r"model.provider = .*: by its names, transformers' model (lacks|has unknown)", difference)
        else:
            assert difference > 1e-3, name
    assert sum(isinstance(one, str) for one in found) <= 4  # most have nothing but numbers against them


@pytest.mark.parametrize(
    ("embedded", "scale", "least", "most"), [(True, 1.0, 0.0, 1e-5), (True, 1.01, 1e-3, 1.0), (False, 1.01, 0.0, 1e-6)]
)
def test_the_embedded_engine_is_compared_where_it_generates(
    paths: dict[str, Path], embedded: bool, scale: float, least: float, most: float
) -> None:
    """One whose norms are 1 % off is found, beside an actor that has nothing wrong."""
    right = [ModelConfig(str(paths[family]), provider) for family, provider in PROVIDERS.items()]
    for found in run_ranks(_differences, 1, right, embedded, scale, timeout_s=300)[0]:
        assert isinstance(found, float) and least <= found < most


MBRIDGES_OWN = {
    "mixtral": ({}, "after the first layer differ by up to"),  # leaves the experts' shares unnormalized
    "qwen2_moe": ({}, "shared_expert_gate.weight"),  # has no gate on the shared expert
    "deepseek_v3": (  # chooses among all experts
        {"n_group": 8, "topk_group": 4, "n_routed_experts": 32, "num_experts_per_tok": 8},
        "after the first 2 of 4 layers differ by up to",
    ),
}


@pytest.mark.parametrize("family", MBRIDGES_OWN)
def test_classes_that_mbridge_has_wrong_are_refused(tmp_path: Path, family: str) -> None:
    others, said = MBRIDGES_OWN[family]
    path = write_model(tmp_path, family=family, **others)
    with pytest.raises(UserError, match=said):
        check_first_layers(ModelConfig(str(path), "mbridge"))


def test_as_deep_as_to_the_first_layer_of_each_kind(tmp_path: Path) -> None:
    """Three dense layers of five; a layer with a setting of its own counts as a kind."""
    path = write_model(tmp_path, family="dots1", first_k_dense_replace=3, num_hidden_layers=5)
    model, architecture = AutoModelForCausalLM.from_pretrained(path), model_architecture(model_config(path))
    assert _depth(model, architecture) == 4
    model.model.layers[4].self_attn.scaling = 0.5
    assert _depth(model, architecture) == 5


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no_such": ("mbrigde", {}, "must be mbridge, or module:Class"),
    "no_module": ("nowhere:Bridge", {}, "cannot be imported"),
    "no_bridge": ("json:JSONDecoder", {}, "is not a subclass of mbridge.core.LLMBridge"),
    "not_registered": ("mbridge", {}, "mbridge has no class for model_type dots1, only for deepseek_v3"),
    "remote_code": ("mbridge", {"model_type": "mimo"}, 'transformers has no model_type "mimo"'),
    "images": ("mbridge", {"model_type": "qwen2_5_vl"}, "not a text-only model with rotary positions"),
    "two_names": ("mbridge", {"architectures": ["A", "B"]}, "must be a list of one name"),
    "unread": (PROVIDERS["dots1"], {"attention_multiplier": 2.0}, "class does not read this key, which may change"),
    "windows": (
        PROVIDERS["dots1"],
        {"layer_types": ["sliding_attention"] * 4},
        "every token sees all tokens before it",
    ),
    "fixed": (PROVIDERS["dots1"], {"quantization_config": {"bits": 4}}, "dequantize the checkpoint first"),
    "dropout": (PROVIDERS["dots1"], {"attention_dropout": 0.1}, "name the key in model.ignore_config_keys"),
    "every_other": ("support.bridges:EVERY_OTHER", {}, "only the first layers may be dense here"),
    "fails": (PROVIDERS["dots1"], {"n_group": 2}, "DotsBridge fails with AssertionError"),
    "exits": ("support.bridges:EXITS", {}, "EXITS fails with SystemExit"),
    "window": ("support.bridges:WINDOW", {}, "has window_size = (127, 0), which layers here do not have"),
    "clamp": ("support.bridges:CLAMP", {}, "has activation_func_clamp_value = 7.0, which layers here do not have"),
    "bias_name": ("support.bridges:OTHER_BIAS", {}, "names that end in gate.e_score_correction_bias stay in float32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_once(paths: dict[str, Path], tmp_path: Path, case: str) -> None:
    provider, others, said = REFUSED[case]
    raw = json.loads((paths["dots1"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | others))
    with pytest.raises(UserError) as caught:
        model_architecture(ModelConfig(str(tmp_path), provider))
    assert said in str(caught.value)


def test_an_unread_key_that_switches_something_off_is_refused(tmp_path: Path) -> None:
    """transformers has it on."""
    groups = {"n_group": 8, "topk_group": 4, "n_routed_experts": 32, "num_experts_per_tok": 8}
    path = write_model(tmp_path, family="deepseek_v3", rope_interleave=False, **groups)
    with pytest.raises(UserError, match=r"rope_interleave = false is not supported: model.provider's class does not"):
        model_architecture(ModelConfig(str(path), "mbridge"))


def test_a_dropout_that_is_named_is_left_out(paths: dict[str, Path], tmp_path: Path) -> None:
    raw = json.loads((paths["dots1"] / "config.json").read_text()) | {"attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert model_architecture(ModelConfig(str(tmp_path), PROVIDERS["dots1"], ["attention_dropout"])).num_layers == 4


@pytest.mark.parametrize(
    ("key", "names"),
    [("linear_fc1", ("gate_up_proj",)), ("linear_fc2", ("down_proj.0", "down_proj.1", "down_proj.2"))],
)
def test_the_embedded_engine_wants_tensors_divided_as_here(
    paths: dict[str, Path], key: str, names: tuple[str, ...]
) -> None:
    theirs = tuple(f"model.layers.{{layer}}.mlp.{name}.weight" for name in names)
    architecture = model_architecture(model_config(paths["seed_oss"]))
    architecture = replace(architecture, provided_names=((f"decoder.layers.mlp.{key}.weight", theirs),))
    with pytest.raises(UserError, match=rf"rollout.engine = hf: has .*_proj.weight and not .*{names[-1]}.weight; use"):
        Decoder(architecture, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.slow
def test_a_run_without_a_provider_needs_none_of_its_packages() -> None:
    """Neither mbridge nor einops is there where nobody asks for them."""
    without = "import sys; sys.modules |= dict.fromkeys(('einops', 'mbridge')); import dppo_megatron.run"
    subprocess.run([sys.executable, "-c", without], check=True)


def _model(directory: Path, family: str, **others: Any) -> Path:
    tokenizer = make_tokenizer()
    own = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    write_model(directory, family=family, vocab_size=len(VOCABULARY), tie_word_embeddings=True, **own | others)
    tokenizer.save_pretrained(directory)
    return directory


def _train(files: Path, run_dir: Path, model: Path, provider: str, world_size: int, extra: dict[str, Any]) -> None:
    given = {"model__hf_path": model, "model__provider": provider, "sft__steps": 5, "steps": 2} | extra
    with Run(prepare_job(job_config(files, run_dir, **QUICK | given), world_size)) as run:
        train(run)


@pytest.mark.slow
@pytest.mark.usefixtures("found_by_children")
def test_a_run_logs_what_was_compared(files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Embedded engine and actor stay together over updates, on two ranks with half of the experts each, and in a third
    step that one rank makes from their checkpoint."""
    model = _model(tmp_path / "model", "dots1")
    layout = {"actor__layout__expert_parallel": 2, "actor__layout__expert_tensor_parallel": 1}
    run_ranks(_train, 2, files, tmp_path / "run", model, PROVIDERS["dots1"], 2, layout, timeout_s=200)
    run_ranks(_train, 1, files, tmp_path / "run", model, PROVIDERS["dots1"], 1, {"steps": 3}, timeout_s=200)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-4 and row["train/grad_norm"] > 0
    said = f"model.provider = {PROVIDERS['dots1']}: the first 2 of 4 layers compared with transformers'"
    assert said in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("found_by_children")
def test_a_dry_run_and_an_evaluation_compare_too(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _model(tmp_path / "model", "seed_oss")
    given = settings(files, tmp_path / "run", **QUICK | {"model__hf_path": model})
    command = ["train", "configs/quickstart.yaml", "--dry-run", *given]
    assert main([*command, "model.provider=support.bridges:SEED_KEYS_VALUES"]) == 2
    assert "log-probabilities after the first layer differ by up to" in capsys.readouterr().err
    assert main(["eval", *command[1:2], *given, "model.provider=support.bridges:SEED_KEYS_VALUES"]) == 2
    assert "log-probabilities after the first layer differ by up to" in capsys.readouterr().err
    assert main([*command, f"model.provider={PROVIDERS['seed_oss']}"]) == 0
    assert "the first layer compared with transformers'" in capsys.readouterr().out
    assert main(["plan", *command[1:2], *given, f"model.provider={PROVIDERS['seed_oss']}", "--gpus", "1"]) == 0
    assert "parameters" in capsys.readouterr().out


@needs("vllm")
@pytest.mark.long
def test_trains_through_vllm(files: Path, tmp_path: Path, forked_vllm: Path) -> None:
    """vLLM runs this family on transformers' modules: its values are another program's."""
    model = _model(tmp_path / "model", "seed_oss", head_dim=32)
    served = local_settings("vllm") | {"rollout__servers__python": str(forked_vllm), "rollout__sync__verify_every": 1}
    run_ranks(_train, 1, files, tmp_path / "run", model, PROVIDERS["seed_oss"], 1, served, timeout_s=400)
    for row in read_metrics(tmp_path / "run")[1:]:
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-4 and row["rollout/completion_tokens_mean"] > 7
