"""Adapters: PEFT on transformers computes what the actor computes, and what a run leaves behind is PEFT's to load.

Log-probabilities here have sizes up to 10, in float32: two ways to add 48 numbers differ by 1e-6.
"""

from __future__ import annotations

import functools
import json
import resource
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.job import job_config, read_metrics, write_warm_job_files
from support.killing import Kill, run_killed, run_whole
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, hf_logprobs, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.algorithms.objectives import supervised
from dppo_megatron.checkpoint.store import CheckpointStore, describe, load_checkpoint
from dppo_megatron.config.schema import ActorConfig, LoraConfig
from dppo_megatron.convert import megatron_to_hf
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import PROJECTIONS, Lora, read_architecture
from dppo_megatron.weights.hf_files import write_adapter
from dppo_megatron.weights.pipeline import LAYOUT

pytestmark = pytest.mark.slow

ODD = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "hidden_size": 42, "intermediate_size": 66}
MODELS: dict[str, tuple[dict[str, Any], LoraConfig]] = {
    "qwen3": (ODD, LoraConfig(rank=3, alpha=5.0)),
    "qwen2": (
        {"family": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
        LoraConfig(rank=5, alpha=3.0, targets=["v_proj", "q_proj", "down_proj", "up_proj"]),
    ),
    "one": ({"num_key_value_heads": 4}, LoraConfig(rank=1, targets=["k_proj"])),
    "moe": (
        {"family": "qwen3_moe", "moe_intermediate_size": 18, **ODD},
        LoraConfig(rank=3, alpha=4.0, experts=True),
    ),
    "moe_attention": ({"family": "qwen3_moe"}, LoraConfig(rank=2)),
    "moe_whole": ({"family": "qwen3_moe"}, LoraConfig()),
    "glm_4": (
        {"family": "glm4", **ODD, "head_dim": 12},
        LoraConfig(rank=3, targets=["q_proj", "v_proj", "o_proj", "down_proj"]),
    ),
    "gemma": ({"family": "gemma3", **ODD}, LoraConfig(rank=3, alpha=4.0)),
    "glm_attention": ({"family": "glm4_moe", "num_experts_per_tok": 6}, LoraConfig(rank=2)),  # no choice that may flip
    "glm_experts": ({"family": "glm4_moe", "num_experts_per_tok": 6}, LoraConfig(rank=3, alpha=4.0, experts=True)),
    "deepseek": (
        {"family": "deepseek_v3", "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "num_attention_heads": 4},
        LoraConfig(rank=3, alpha=4.0, experts=True),
    ),
    "moonlight_attention": (
        {"family": "deepseek_v3", "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
        LoraConfig(rank=2, targets=["q_proj", "kv_a_proj_with_mqa", "kv_b_proj"]),
    ),
    "qwen1.5_attention": ({"family": "qwen2_moe", "num_experts_per_tok": 6}, LoraConfig(rank=2)),
}
ONE = Parallel()
CASES = [
    *(("qwen3", parallel) for parallel in (ONE, Parallel(tp=2), Parallel(tp=2, sequence_parallel=False))),
    ("qwen3", Parallel(pp=2)),
    ("qwen3", Parallel(tp=2, pp=2, vpp=2, recompute=True)),
    ("qwen3", Parallel(cp=2, dp=2, distributed_optimizer=True)),
    ("qwen3", Parallel(pp=4, uneven=((LAYOUT, "Et|tt|t|L"),))),
    ("qwen3", Parallel(pp=2, uneven=((LAYOUT, "Et|tttL"),), distributed_optimizer=True)),
    ("qwen2", ONE),
    ("qwen2", Parallel(tp=2, distributed_optimizer=True)),
    ("qwen2", Parallel(pp=2, distributed_optimizer=True)),  # frozen tied embeddings on both stages
    ("one", Parallel(tp=2)),
    ("moe", ONE),
    ("moe", Parallel(ep=2, dp=2)),
    ("moe", Parallel(ep=2, dp=2, distributed_optimizer=True)),
    ("moe", Parallel(tp=2, etp=2)),
    ("moe", Parallel(tp=2, ep=2, etp=1, pp=2)),
    ("moe_attention", Parallel(tp=2, ep=2, etp=1)),
    ("glm_attention", Parallel(tp=2, ep=2, etp=1)),
    ("glm_experts", Parallel(tp=2, ep=2, etp=1)),
    ("glm_experts", Parallel(pp=2, dp=2, distributed_optimizer=True)),
    *(("deepseek", parallel) for parallel in (ONE, Parallel(tp=2, ep=2, etp=1), Parallel(tp=2, etp=2))),
    ("deepseek", Parallel(pp=2, recompute=True)),
    ("moonlight_attention", Parallel(tp=2)),
    ("glm_4", Parallel(tp=2)),
    ("qwen1.5_attention", Parallel(tp=2, ep=2, etp=1)),
    ("gemma", ONE),
    ("gemma", Parallel(tp=2, pp=2, recompute=True)),
]
STEPS = 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp(name), **sizes) for name, (sizes, _) in MODELS.items()}


def _frozen(actor: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in actor._chunks for p in chunk.parameters() if not p.requires_grad]


def _train(path: Path, parallel: Parallel, lora: LoraConfig, out: Path) -> dict[str, Any]:
    """Updates, after which nothing frozen has moved; the adapter in `out`; log-probabilities, and gradients by name."""
    actor = build_actor(path, parallel, lora=lora)
    samples, before = random_samples(12, 37), _frozen(actor)
    plan = plan_for(samples, parallel)
    first = {name: tensor.clone() for name, tensor in actor.adapters()}
    actor.freeze_reference()
    norms = [actor.update(samples, plan, supervised()).grad_norm for _ in range(STEPS)]
    assert all(torch.equal(*pair) for pair in zip(before, _frozen(actor), strict=True))
    for chunk in actor._chunks:
        assert all(p.requires_grad == ("lora_" in name) for name, p in chunk.named_parameters())
        assert all(p.grad is None and not hasattr(p, "main_grad") for p in chunk.parameters() if not p.requires_grad)
    adapters, weights = dict(actor.adapters()), dict(actor.weights())
    if actor.layout.rank == 0:
        held = read_architecture(path).with_adapters(lora).lora
        assert held is not None
        write_adapter(out, adapters, held, str(path))
    result = {"first": first, "logprobs": actor.logprobs(samples, plan), "weights": weights, "norms": norms}
    with actor.reference_weights():
        result["reference"] = actor.logprobs(samples, plan)
    if not parallel.distributed_optimizer:  # which leaves a rank a share of the gradient
        actor.accumulate(samples, plan, supervised())
        result["gradients"] = {name: tensor.clone() for name, tensor in actor.gradients()}
    return result


def _base(path: Path) -> Any:
    """Experts one by one: torch's grouped product refuses odd sizes."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()


def _peft(path: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(_base(path), adapter, is_trainable=True).eval()


def _peft_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of A and B by the names in PEFT's files, for the supervised loss of the samples."""
    loss = torch.zeros(())
    for sample in random_samples(12, 37):
        ids = torch.from_numpy(sample.token_ids)
        logprobs = model(ids[None]).logits[0, sample.num_prompt_tokens - 1 : -1].log_softmax(-1)
        picked = logprobs.gather(1, ids[sample.num_prompt_tokens :, None]).sum()
        loss = loss - sample.weight / sample.denominator * picked
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found |= _unfused(name.replace(".default", ""), parameter.grad, model.config)
    return found


def _unfused(name: str, grad: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """transformers holds all experts' gate and up projections in one tensor, to which PEFT gives one adapter of twice
    the rank: A by expert, then by projection; B with a column for each number of the rank and expert, by rank first."""
    if ".experts." not in name:
        return {name: grad}
    where, _, rest = name.partition(".experts.")
    count, half, projections = (
        getattr(config, "num_experts", 0) or config.n_routed_experts,
        rest.split(".")[-2],
        ["down_proj"],
    )
    if rest.startswith("base_layer."):
        projections = ["gate_proj", "up_proj"]
    each = (
        grad.view(count, -1, grad.shape[1]) if half == "lora_A" else grad.T.unflatten(0, (-1, count)).permute(1, 2, 0)
    )
    rank = each.shape[1 if half == "lora_A" else 2] // len(projections)
    out = each.shape[1] // len(projections)
    found = {}
    for number, projection in enumerate(projections):
        columns = slice(number * rank, (number + 1) * rank)
        for expert in range(count):
            mine = (
                each[expert, columns] if half == "lora_A" else each[expert, number * out : (number + 1) * out, columns]
            )
            found[f"{where}.experts.{expert}.{projection}.{half}.weight"] = mine
    return found


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """One process's result."""

    @functools.cache
    def train(name: str) -> dict[str, Any]:
        return run_ranks(_train, 1, models[name], ONE, MODELS[name][1], tmp_path_factory.mktemp("alone"))[0]

    return train


def _differ(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm().clamp(min=1e-12))


@pytest.mark.parametrize(("name", "parallel"), CASES, ids=str)
def test_equals_peft(
    models: dict[str, Path], alone: Callable[[str], dict[str, Any]], tmp_path: Path, name: str, parallel: Parallel
) -> None:
    """Log-probabilities to 2e-6, gradients of every A and B to 1e-4 of their norm, merged weights to 1e-6; adapters
    begin alike at every layout; without them the policy is the base model."""
    result = run_ranks(_train, parallel.world_size, models[name], parallel, MODELS[name][1], tmp_path)[0]
    samples, model = random_samples(12, 37), _peft(models[name], tmp_path)
    for mine, theirs in zip(result["logprobs"], hf_logprobs(model, samples), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)
    if "gradients" in result:
        theirs = _peft_gradients(model)
        assert result["gradients"].keys() == theirs.keys() == load_file(tmp_path / "adapter_model.safetensors").keys()
        assert any(value.norm() > 0 for key, value in theirs.items() if "lora_A" in key)
        for key, value in theirs.items():
            assert _differ(result["gradients"][key], value) < 1e-4, key
    assert result["norms"] == pytest.approx(alone(name)["norms"], rel=1e-5)
    for key, value in alone(name)["first"].items():
        assert torch.equal(result["first"][key], value), key
        bound = value.shape[1] ** -0.5
        assert not value.any() if "lora_B" in key else 0.5 * bound < value.abs().max() <= bound
    before = hf_logprobs(_base(models[name]), samples)
    for mine, theirs, other in zip(result["reference"], before, result["logprobs"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
        assert np.abs(other - theirs).max() > 1e-3
    merged = tmp_path / "merged"
    model.merge_and_unload().save_pretrained(merged)
    for key, value in load_file(merged / "model.safetensors").items():
        assert _differ(result["weights"][key], value) < 1e-6, key


def _exact(path: Path, parallel: Parallel, lora: LoraConfig, out: Path) -> list[np.ndarray] | None:
    """In float64, which has no optimizer: B as drawn here, alike on ranks that hold the same; the adapter in `out`."""
    actor, samples = build_actor(path, parallel, lora=lora), random_samples(12, 37)
    for chunk in actor._chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("lora_b"):
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.data.copy_(drawn / 16)
    adapters = dict(actor.adapters())
    if actor.layout.rank == 0:
        held = read_architecture(path).with_adapters(lora).lora
        assert held is not None
        write_adapter(out, adapters, held, str(path))
    return actor.logprobs(samples, plan_for(samples, parallel))


@pytest.mark.parametrize(
    ("name", "parallel"),
    [("qwen3", Parallel(tp=2, dtype=torch.float64)), ("moe", Parallel(ep=2, dp=2, dtype=torch.float64))],
    ids=str,
)
def test_equals_peft_to_1e_6(models: dict[str, Path], tmp_path: Path, name: str, parallel: Parallel) -> None:
    """Without float32's rounding but in transformers' norms, which know no other type; the adapter moves
    log-probabilities by more than 0.1."""
    mine = run_ranks(_exact, parallel.world_size, models[name], parallel, MODELS[name][1], tmp_path)[0]
    samples, model = random_samples(12, 37), _peft(models[name], tmp_path).double()
    assert mine is not None
    before = hf_logprobs(_base(models[name]).double(), samples)
    for one, theirs in zip(mine, hf_logprobs(model, samples), strict=True):
        np.testing.assert_allclose(one, theirs, rtol=0, atol=1e-6)
    assert max(np.abs(one - without).max() for one, without in zip(mine, before, strict=True)) > 0.1


@pytest.mark.parametrize(
    ("name", "lora", "said"),
    [
        ("qwen3", LoraConfig(rank=2, targets=["q_proj", "qproj"]), "qproj: must be one of q_proj, k_proj"),
        (
            "deepseek",
            LoraConfig(rank=2, targets=["k_proj"]),
            "k_proj: must be one of q_a_proj, q_b_proj, kv",
        ),
        ("qwen3", LoraConfig(rank=2, experts=True), "actor.lora.experts = true: Qwen3ForCausalLM has no experts"),
        ("moe", LoraConfig(rank=2, targets=["up_proj"]), "up_proj belongs to experts here; set actor.lora.ex"),
        ("moe", LoraConfig(rank=2, targets=["up_proj"], experts=True), "are one tensor in transformers; name both"),
        ("glm_4", LoraConfig(rank=2), "gate_proj and up_proj are one tensor in Glm4ForCausalLM; name other"),
        ("moe", LoraConfig(rank=2, targets=[]), "names no projection; use all-linear"),
    ],
)
def test_refused(models: dict[str, Path], name: str, lora: LoraConfig, said: str) -> None:
    """With the setting and what would be right."""
    with pytest.raises(UserError, match=said):
        read_architecture(models[name]).with_adapters(lora)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mixtral", "true: PEFT does not find the experts of MixtralForCausalLM"),
        ("qwen2_moe", "true: PEFT does not find the experts of Qwen2MoeForCausalLM"),
    ],
)
def test_some_experts_are_refused(tmp_path: Path, family: str, why: str) -> None:
    """PEFT converts the targets of the families that transformers lists beside these two, and not of the two;
    adapters on attention alone are as of any mixture."""
    architecture = read_architecture(write_model(tmp_path, family=family))
    with pytest.raises(UserError, match=f"actor.lora.experts = {why}"):
        architecture.with_adapters(LoraConfig(rank=2, experts=True))
    lora = architecture.with_adapters(LoraConfig(rank=2)).lora
    assert lora is not None and lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_another_reference_is_refused(tmp_path: Path) -> None:
    """It would need a second copy of the frozen weights."""
    model = write_model(tmp_path / "model")
    extra = {"actor__lora__rank": 2, "objective__kl__coef": 0.1, "objective__kl__reference_path": model}
    with pytest.raises(UserError, match=r"objective.kl.reference_path: with actor.lora the reference is the model"):
        job_config(write_warm_job_files(tmp_path / "files"), tmp_path / "run", **extra)


def test_a_disk_that_refuses_the_adapter(tmp_path: Path) -> None:
    """safetensors' own error is neither an OSError nor a RuntimeError, and ended a run as a crash."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
    try:
        with pytest.raises(UserError, match=r"adapter_model\.safetensors' cannot be written: .*File too large"):
            write_adapter(tmp_path, {"a": torch.zeros(1000)}, Lora(1, 1.0, ("q_proj",)), "base")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))


# ------------------------------------------------------------------------------------------------ whole runs

RUN = {"sft__steps": 0, "sft__examples_path": "", "actor__lora__rank": 8, "actor__optimizer__learning_rate": 3e-3}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_warm_job_files(tmp_path_factory.mktemp("job"))


def _same_files(mine: Path, theirs: Path) -> None:
    for part in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (mine / part).read_bytes() == (theirs / part).read_bytes(), part


def _base_of(directory: Path) -> str:
    return str(json.loads((directory / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"])


def test_a_run_learns_and_leaves_an_adapter(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real rewards of the quickstart's task: they rise. hf/ is the base model with the adapter that lies beside it, and
    a checkpoint of the run converts to the same bytes, with the path of the base model as the environment has it; where
    it is not set, as it was written."""
    monkeypatch.setenv("MODELS", str(files))
    run_dir = tmp_path / "run"
    run_whole(files, run_dir, 1, RUN | {"steps": 40, "model__hf_path": "${oc.env:MODELS}/model"})
    rewards = [row["reward/mean"] for row in read_metrics(run_dir)[1:]]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.1, rewards
    samples = random_samples(6, 14)
    merged, adapted = _base(run_dir / "hf"), _peft(files / "model", run_dir / "hf" / "adapter")
    assert adapted.peft_config["default"].target_modules == set(PROJECTIONS)
    for mine, theirs in zip(*(hf_logprobs(one, samples) for one in (merged, adapted)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    megatron_to_hf(run_dir / "checkpoints" / "latest", tmp_path / "converted", verify=True)
    _same_files(tmp_path / "converted", run_dir / "hf")
    assert _base_of(tmp_path / "converted") == str(files / "model")
    monkeypatch.delenv("MODELS")
    megatron_to_hf(run_dir / "checkpoints" / "latest", tmp_path / "elsewhere")
    assert _base_of(tmp_path / "elsewhere") == "${oc.env:MODELS}/model"
    manifest = json.loads((run_dir / "checkpoints" / "latest" / "manifest.json").read_text())
    assert manifest["config"]["actor"]["lora"] == asdict(ActorConfig().lora) | {"rank": 8}


def _saved(path: Path, parallel: Parallel, lora: LoraConfig, directory: Path) -> dict[str, torch.Tensor]:
    """Two updates, a checkpoint between them; the weights after the second."""
    actor, samples = build_actor(path, parallel, lora=lora), random_samples(12, 37)
    actor.freeze_reference()
    for update in range(2):
        if update:
            store = CheckpointStore(directory, assets=path, run="r", keep=1, async_save=False)
            store.save(actor, {}, describe(1, {}, run="r"))
            store.finalize(blocking=True)
        actor.update(samples, plan_for(samples, parallel), supervised())
    return dict(actor.weights())


def _resumed(path: Path, parallel: Parallel, lora: LoraConfig, directory: Path) -> dict[str, torch.Tensor]:
    """An actor of other numbers takes the checkpoint, and the second update."""
    actor, samples = build_actor(path, parallel, lora=lora), random_samples(12, 37)
    actor.freeze_reference()
    for parameter in (p for chunk in actor._chunks for p in chunk.parameters()):
        parameter.data.zero_()
    load_checkpoint(directory, actor)
    actor.update(samples, plan_for(samples, parallel), supervised())
    return dict(actor.weights())


MOVES = [
    ("qwen3", Parallel(pp=4, uneven=((LAYOUT, "Et|tt|t|L"),)), Parallel(pp=2)),  # the last trains nothing
    ("qwen3", Parallel(tp=2, pp=2, distributed_optimizer=True), Parallel(distributed_optimizer=True)),
    ("qwen2", Parallel(distributed_optimizer=True), Parallel(tp=2, distributed_optimizer=True)),
    (
        "moe",
        Parallel(tp=2, ep=2, etp=1, distributed_optimizer=True),
        Parallel(tp=2, etp=2, distributed_optimizer=True),
    ),
    (
        "moe_whole",
        Parallel(dp=2, distributed_optimizer=True),
        Parallel(tp=2, ep=2, etp=1, distributed_optimizer=True),
    ),
    ("moe_whole", Parallel(), Parallel(dp=2, ep=2)),
    ("moe_whole", Parallel(dp=2, ep=2), Parallel()),
]


@pytest.mark.parametrize(("name", "before", "after"), MOVES, ids=str)
def test_resumed_at_another_layout(
    models: dict[str, Path], tmp_path: Path, name: str, before: Parallel, after: Parallel
) -> None:
    """Adapters, moments and frozen weights, by the weights after the next update: Adam's first steps enlarge rounding,
    a lost moment would change weights by some 1e-3. Megatron gives experts that are split over ranks an optimizer of
    their own, others not; the last has no adapters."""
    common = MODELS[name][1], tmp_path / "checkpoints"
    went_on = run_ranks(_saved, before.world_size, models[name], before, *common)[0]
    moved = run_ranks(_resumed, after.world_size, models[name], after, common[0], common[1] / "step_000001")[0]
    assert moved.keys() == went_on.keys()
    for key, value in went_on.items():
        torch.testing.assert_close(moved[key], value, rtol=0, atol=3e-4, msg=key)


def _passed_on(path: Path, parallel: Parallel, taken: Path, directory: Path) -> dict[str, torch.Tensor]:
    """An actor takes a checkpoint and saves it again: what is in that one."""
    actor = build_actor(path, parallel)
    actor.freeze_reference()
    load_checkpoint(taken, actor)
    store = CheckpointStore(directory, assets=path, run="r", keep=1, async_save=False)
    store.save(actor, {}, describe(1, {}, run="r"))
    store.finalize(blocking=True)
    return _held(directory / "step_000001")


def _held(checkpoint: Path) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    tensors = dist_checkpointing.load_plain_tensors(str(checkpoint))
    saved = tensors.pop("actor")["optimizer"]  # what is no tensor
    parts = [saved[key] for key in (0, 1) if key in saved] or [saved]
    return tensors | {"steps": torch.tensor([part["optimizer"]["state"]["common_step"] for part in parts]).unique()}


def test_16_bit_state_without_the_distributed_optimizer(models: dict[str, Path], tmp_path: Path) -> None:
    """Its parts have another form than those of float32. To expert-parallel ranks and back, every bit is kept; updates
    would not show it, as 16-bit gradients differ between layouts."""
    whole, split = Parallel(dtype=torch.bfloat16), Parallel(dp=2, ep=2, dtype=torch.bfloat16)
    path, at = models["moe_whole"], [tmp_path / name for name in ("first", "split", "whole")]
    run_ranks(_saved, 1, path, whole, LoraConfig(), at[0])
    held = [run_ranks(_held, 1, at[0] / "step_000001")[0]]
    for parallel, taken, written in ((split, at[0], at[1]), (whole, at[1], at[2])):
        held += run_ranks(_passed_on, parallel.world_size, path, parallel, taken / "step_000001", written)[:1]
    assert held[0]["steps"].tolist() == [1] and any("exp_avg_sq" in key for key in held[0])
    for other in held[1:]:
        assert other.keys() == held[0].keys()
        assert [key for key, value in held[0].items() if not torch.equal(other[key], value)] == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_killed_and_resumed(files: Path, tmp_path: Path, world_size: int) -> None:
    """With a reference policy, alone and at TP2: the run that was not interrupted, bit for bit."""
    extra = RUN | {"steps": 3, "checkpoint__every_steps": 1, "rollout__prompts_per_step": 8}
    extra |= {"objective__kl__coef": 0.1, "actor__layout__tensor_parallel": world_size, "checkpoint__keep": 0}
    run_whole(files, tmp_path / "whole", world_size, extra)
    assert run_killed(files, tmp_path / "run", world_size, extra, Kill("update", 3))
    run_whole(files, tmp_path / "run", world_size, extra)
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")
    assert read_metrics(tmp_path / "run")[-1]["train/kl"] > 0
    _same_files(tmp_path / "run" / "hf", tmp_path / "whole" / "hf")
