"""The Megatron model computes what transformers computes, and its weights go back to the same bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, hf_logprobs, plan_for, random_samples, write_model
from transformers import AutoModelForCausalLM

from dppo_megatron.actor import model as megatron_model
from dppo_megatron.actor.model import output_weight
from dppo_megatron.algorithms.objectives import make_objective, supervised
from dppo_megatron.config.objective import KLConfig, ObjectiveConfig
from dppo_megatron.config.schema import ActorConfig, LayoutConfig
from dppo_megatron.types import TrainSample, UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader, write_checkpoint
from dppo_megatron.weights.mapping import CORRECTION_BIAS

ONE, FOUR = Parallel(), Parallel(tp=2, pp=2)
TEMPERATURES = (1.0, 0.7)
CASES: dict[str, tuple[dict[str, Any], list[Parallel]]] = {
    # 37 and 41 do not divide by 2 or 3, so the vocabulary is padded wherever it is split
    "untied": ({"vocab_size": 37}, [ONE, FOUR]),
    "tied": ({"vocab_size": 41, "tie_word_embeddings": True}, [ONE, FOUR, Parallel(pp=2, vpp=2)]),
    # Megatron wants key-value heads that divide by TP or the reverse: 6/3 heads split by 3, 6/2 heads by 2
    "gqa_6_3": (
        {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 66},
        [ONE, Parallel(tp=3, pp=2)],
    ),
    "gqa_6_2": ({"num_attention_heads": 6, "num_key_value_heads": 2}, [FOUR]),
    "qwen2.5": ({"family": "qwen2", "tie_word_embeddings": True}, [ONE, FOUR]),
    "llama3": ({"family": "llama3"}, [ONE, Parallel(cp=2)]),
    "moe": ({"family": "qwen3_moe"}, [ONE, Parallel(tp=2, pp=2, ep=2, etp=1), Parallel(tp=2, ep=2, etp=1)]),
    "glm_4": (
        {"family": "glm4", "num_attention_heads": 6, "head_dim": 12, "hidden_size": 42, "intermediate_size": 66}
        | {"partial_rotary_factor": 1 / 3},
        [ONE, FOUR, Parallel(tp=2, sequence_parallel=False), Parallel(pp=2, vpp=2), Parallel(cp=2)],
    ),
    "glm": ({"family": "glm4_moe"}, [ONE, Parallel(tp=2, pp=2, ep=2, etp=1), Parallel(cp=2)]),
    "deepseek": ({"family": "deepseek_v3"}, [ONE, Parallel(tp=2, pp=2, ep=2, etp=1), Parallel(cp=2)]),
    "moonlight": (
        {"family": "deepseek_v3", "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
        [ONE, Parallel(tp=2, pp=2)],
    ),
    "qwen1.5_moe": (
        {"family": "qwen2_moe"},
        [ONE, Parallel(tp=2, pp=2, ep=2, etp=1), Parallel(pp=2, vpp=2), Parallel(cp=2, ep=2)],
    ),
    "mistral": ({"family": "mistral", "head_dim": 10, "hidden_size": 70}, [ONE, FOUR]),
    "mixtral": ({"family": "mixtral", "intermediate_size": 36}, [ONE, Parallel(tp=2, pp=2, ep=2, etp=1)]),
    "gemma": (
        {"family": "gemma3", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "hidden_size": 42}
        | {"intermediate_size": 66, "num_hidden_layers": 8, "tie_word_embeddings": True},
        [ONE, FOUR, Parallel(tp=2, sequence_parallel=False), Parallel(pp=2, vpp=2), Parallel(cp=2)],
    ),
    # nothing is a power of two; one key-value head, so every query head shares it
    "odd": (
        {
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "num_hidden_layers": 5,
            "vocab_size": 1009,
        },
        [ONE, Parallel(pp=5)],
    ),
    "odd_qwen2.5": ({"family": "qwen2", "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 24}, [ONE]),
    "odd_llama3": (
        {"family": "llama3", "hidden_size": 70, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": None}
        | {"vocab_size": 1009, "num_hidden_layers": 5, "intermediate_size": 61},
        [ONE],
    ),
    "moe_all_experts": (
        {"family": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 6, "vocab_size": 1009, "num_hidden_layers": 5},
        [ONE, Parallel(ep=2, dp=2)],
    ),
    "moe_top_1": ({"family": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": False}, [ONE]),
    "moe_raw_weights": ({"family": "qwen3_moe", "norm_topk_prob": False}, [ONE]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp(name), **sizes) for name, (sizes, _) in CASES.items()}


def _samples(vocab_size: int) -> list[TrainSample]:
    """Of varied length, and the shortest there are: the model sees 1, 2 and 3 tokens of them."""
    samples = random_samples(12, vocab_size)
    for prompt, completion in ((1, 1), (1, 2), (2, 1), (2, 2)):
        ids = np.arange(3, 3 + prompt + completion)
        nothing = np.zeros(completion, np.float32)
        samples.append(TrainSample(f"{prompt}:{completion}", ids, prompt, nothing, 1.0, 1.0, 1.0))
    return samples


def _check(model_path: Path, other: Path, parallel: Parallel, out: Path) -> tuple[list[Any], float]:
    """Log-probabilities at two temperatures and of another model as the reference, the KL to it, and a written
    checkpoint."""
    actor, architecture = build_actor(model_path, parallel), read_architecture(model_path)
    samples = _samples(architecture.vocab_size)
    plan = plan_for(samples, parallel)
    computed = [actor.logprobs(samples, plan, temperature=temperature) for temperature in TEMPERATURES]
    actor.freeze_reference(CheckpointReader(other, architecture).get)
    with actor.reference_weights():
        computed.append(actor.logprobs(samples, plan))
        reference = actor.own_logprobs(samples, plan)
    objective = make_objective(ObjectiveConfig(kl=KLConfig(coef=1.0, estimator="k2")))
    sums = actor.accumulate(reference.as_reference(dict(enumerate(samples))), plan, objective)
    assert not any("reference" in key for key in actor.sharded_state())
    write_checkpoint(out, model_path, architecture, actor.weights(), write=actor.layout.rank == 0)
    return computed, sums["kl"] / sums["tokens"]


def test_whole_projections_are_no_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's Linear marks every weight as a shard, and Megatron's latent attention has two of which each
    rank has the whole: the gradient's norm would count them once a rank."""

    def make(self: Any, rows: int) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(q_lora_rank=6, kv_lora_rank=4, qk_pos_emb_head_dim=2)
        for name in ("linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj"):
            linear = torch.nn.Linear(3, rows)
            linear.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            self.add_module(name, linear)

    monkeypatch.setattr(megatron_model.MLASelfAttention, "__init__", make)
    for rows in (6, 3):
        made = megatron_model.LatentAttention(rows)
        marks = {name.split(".")[0]: one.tensor_model_parallel for name, one in made.named_parameters() if one.ndim > 1}
        is_shard = rows == 3
        assert marks == {"linear_q_down_proj": is_shard, "linear_kv_down_proj": is_shard, "linear_q_up_proj": True}


PAIRS = [pytest.param(name, parallel, id=f"{name}-{parallel}") for name, (_, ps) in CASES.items() for parallel in ps]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of the same architectures with other weights."""
    return {name: write_model(tmp_path_factory.mktemp(name), seed=1, **sizes) for name, (sizes, _) in CASES.items()}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], others: dict[str, Path]) -> Callable[[str], list[list[np.ndarray]]]:
    """What transformers computes for a model's samples at both temperatures, and with the other model."""

    @functools.cache
    def compute(name: str) -> list[list[np.ndarray]]:
        model, other = (AutoModelForCausalLM.from_pretrained(of[name]).eval() for of in (models, others))
        samples = _samples(model.config.vocab_size)
        return [*(hf_logprobs(model, samples, one) for one in TEMPERATURES), hf_logprobs(other, samples)]

    return compute


@pytest.mark.parametrize(("name", "parallel"), PAIRS)
def test_logprobs_and_round_trip(
    models: dict[str, Path],
    others: dict[str, Path],
    expected: Callable[[str], list[list[np.ndarray]]],
    tmp_path: Path,
    name: str,
    parallel: Parallel,
) -> None:
    """Log-probabilities within 1e-4 of transformers (float32, logits of size 10), of a reference that is another model
    too, and the KL to it within 1e-5; the policy's tensors exported after that byte for byte."""
    computed, kl = run_ranks(_check, parallel.world_size, models[name], others[name], parallel, tmp_path / "hf")[0]
    differences = np.concatenate(expected(name)[2]) - np.concatenate(expected(name)[0])
    counted = np.repeat([one.figure_weight for one in _samples(1009)], [len(one) for one in expected(name)[0]])
    assert kl == pytest.approx(counted @ (differences.clip(-20, 20) ** 2 / 2) / counted.sum(), rel=1e-5)
    for ours, reference in zip(computed, expected(name), strict=True):
        assert ours is not None
        for mine, theirs in zip(ours, reference, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)
    original, exported = (load_file(path / "model.safetensors") for path in (models[name], tmp_path / "hf"))
    assert exported.keys() == original.keys()
    for key, tensor in original.items():
        assert tensor.dtype == exported[key].dtype and torch.equal(tensor, exported[key]), key
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    parameters = [tensor for key, tensor in original.items() if not key.endswith(CORRECTION_BIAS)]
    assert again.num_parameters() == sum(tensor.numel() for tensor in parameters)


def _logits(model_path: Path, parallel: Parallel) -> np.ndarray | None:
    """Full-vocabulary logits of one pack, gathered over tensor parallel ranks."""
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
    )

    actor = build_actor(model_path, parallel)
    samples = random_samples(6, 37, longest=200)
    collected: list[np.ndarray] = []

    def keep(_: object, hidden: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = gather_from_sequence_parallel_region(hidden[0]) if actor.layout.sequence_parallel else hidden[0]
        logits = rows @ output_weight(actor._chunks[-1]).t()
        collected.append(gather_from_tensor_model_parallel_region(logits).numpy())
        return torch.zeros(()), {}

    with torch.no_grad():
        actor._run_schedule(samples, plan_for(samples, parallel, cap=4096), keep, forward_only=True)
    return collected[0] if collected else None


LOGITS = [("untied", ONE), ("untied", FOUR), ("qwen2.5", ONE), ("llama3", ONE), ("moe", ONE), ("moe", FOUR)]


@pytest.mark.parametrize(("name", "parallel"), LOGITS, ids=str)
def test_logits_equal_transformers(models: dict[str, Path], name: str, parallel: Parallel) -> None:
    """The logits themselves, position by position in the pack, to 1e-4."""
    logits = next(x for x in run_ranks(_logits, parallel.world_size, models[name], parallel) if x is not None)
    model = AutoModelForCausalLM.from_pretrained(models[name]).eval()
    samples = random_samples(6, 37, longest=200)
    packed = plan_for(samples, parallel, cap=4096).microbatches[0][0]
    assert sorted(packed.members) == list(range(6))
    for start, member in zip(packed.cu_seqlens_padded[:-1], packed.members, strict=True):
        ids = torch.from_numpy(samples[member].token_ids[:-1])
        with torch.no_grad():
            expected = model(ids[None]).logits[0].numpy()
        np.testing.assert_allclose(logits[start : start + len(ids), :37], expected, rtol=0, atol=1e-4)


HEADS = [  # (heads, key-value heads, head_dim, intermediate_size)
    *itertools.product((4, 6), (1, 2), (10,), (36,)),
    *((6, 3, 6, 36), (9, 1, 4, 36), (9, 3, 4, 36), (12, 1, 6, 36), (12, 4, 4, 36), (12, 6, 4, 36), (12, 6, 4, 37)),
]


def _split_by_heads(paths: list[Path], refused: list[bool]) -> list[Any]:
    """Log-probabilities and gradients of each model over these ranks; of one that we refuse, what Megatron raises."""
    found: list[Any] = []
    tp = torch.distributed.get_world_size()
    for path, is_refused in zip(paths, refused, strict=True):
        samples = random_samples(3, 37)
        try:
            actor = build_actor(path, Parallel(tp=tp))
        except (AssertionError, ValueError, RuntimeError, UserError) as error:
            found.append(type(error).__name__)
            assert is_refused, (path, tp)
            continue
        plan = plan_for(samples, Parallel(tp=tp))
        actor.accumulate(samples, plan, supervised())
        gradients = {name: tensor.clone() for name, tensor in actor.gradients()}
        found.append((actor.logprobs(samples, plan), gradients))
    return found


def _refusal(path: Path, tp: int) -> str:
    try:
        read_architecture(path).check_layout(ActorConfig(layout=LayoutConfig(tensor_parallel=tp)))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_heads_split_right_or_are_refused(tmp_path: Path) -> None:
    """Heads, key-value heads (one of them for all, fewer than ranks) and sizes, on 2 to 4 ranks: transformers' values
    and the gradients of one process, to 1e-5 of their norm, or a sentence of ours where Megatron has an exception."""
    paths, expected = [], []
    for n, (heads, groups, head_dim, ffn) in enumerate(HEADS):
        sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim}
        sizes |= {"intermediate_size": ffn, "num_hidden_layers": 1, "hidden_size": 24}
        paths.append(write_model(tmp_path / str(n), **sizes))
        model = AutoModelForCausalLM.from_pretrained(paths[-1]).eval()
        expected.append(hf_logprobs(model, random_samples(3, 37)))
    whole = run_ranks(_split_by_heads, 1, paths, [False] * len(paths))[0]
    for tp in (2, 3, 4):
        refusals = [_refusal(path, tp) for path in paths]
        found = run_ranks(_split_by_heads, tp, paths, [bool(refusal) for refusal in refusals])[0]
        right = 0
        for sizes, refusal, computed, alone, logprobs in zip(HEADS, refusals, found, whole, expected, strict=True):
            if refusal:
                assert isinstance(computed, str), f"{sizes} at {tp}: refused ({refusal}), but Megatron builds it"
                assert f"actor.layout.tensor_parallel = {tp}" in refusal
                continue
            for mine, theirs in zip(computed[0], logprobs, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)
            for name, gradient in alone[1].items():
                assert (computed[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), (sizes, tp, name)
            right += 1
        assert right >= 3 and sum(map(bool, refusals)) >= 3, (tp, refusals)


def test_unsplittable_heads_are_refused(models: dict[str, Path]) -> None:
    """Three key-value heads on two ranks: Megatron cannot, so we say it before it starts."""
    with pytest.raises(UserError, match="3 key-value heads"):
        read_architecture(models["gqa_6_3"]).check_layout(ActorConfig(layout=LayoutConfig(tensor_parallel=2)))


def test_latent_attention_on_several_ranks_needs_sequence_parallelism(tmp_path: Path) -> None:
    """Without it the gradient of a dense model's q_a_layernorm was tensor_parallel times too large: Megatron adds up
    that of every `q_layernorm` over the ranks, as if each had its own heads. Experts need it anyway."""
    architecture = replace(read_architecture(write_model(tmp_path, family="deepseek_v3")), experts=None)
    layout = LayoutConfig(tensor_parallel=2)
    architecture.check_layout(ActorConfig(layout=layout))
    layout.sequence_parallel = False
    with pytest.raises(UserError, match="sequence_parallel = false: latent attention"):
        architecture.check_layout(ActorConfig(layout=layout))
    assert architecture.latent is not None
    without_norm = replace(architecture, latent=replace(architecture.latent, query_rank=0))
    for split, one in ((2, without_norm), (1, architecture)):  # Moonlight projects queries at once, without a norm
        layout.tensor_parallel = split
        one.check_layout(ActorConfig(layout=layout))


@pytest.mark.parametrize(("tp", "etp", "ep", "is_refused"), [(2, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 0), (1, 2, 2, 0)])
def test_experts_split_otherwise_need_an_optimizer_of_their_own(
    tmp_path: Path, tp: int, etp: int, ep: int, is_refused: int
) -> None:
    """Megatron gives them one with expert_parallel above 1 only; else it averages what are different slices."""
    architecture = read_architecture(write_model(tmp_path, family="qwen3_moe"))
    layout = LayoutConfig(tensor_parallel=tp, expert_tensor_parallel=etp, expert_parallel=ep)
    with pytest.raises(UserError, match=f"{etp} beside tensor_parallel = {tp}") if is_refused else nullcontext():
        architecture.check_layout(ActorConfig(layout=layout))


def test_missing_and_unknown_tensors_are_named(models: dict[str, Path], tmp_path: Path) -> None:
    """A checkpoint that does not fit its config.json is refused by tensor name."""
    from safetensors.torch import save_file

    architecture = read_architecture(models["untied"])
    tensors = load_file(models["untied"] / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks 1: model\.norm\.weight"):
        CheckpointReader(tmp_path, architecture)
    tensors["model.norm.weight"] = torch.ones(48)
    tensors["model.extra.bias"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"unknown tensors 1: model\.extra\.bias"):
        CheckpointReader(tmp_path, architecture)
