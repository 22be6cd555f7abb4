"""Megatron's own fields pass through, checked; and those that act on a CPU train the same model."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from support.job import REPOSITORY, job_config, write_job_files
from support.job import settings as job_settings
from support.launch import run_ranks
from support.tiny import Parallel, build_actor, plan_for, random_samples, write_model
from test_pipeline import SEVEN
from torch.utils._python_dispatch import TorchDispatchMode

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.batch import build_microbatch
from dppo_megatron.actor.layout import build_layout
from dppo_megatron.actor.logprobs import LogprobStore
from dppo_megatron.actor.loss import LossHook
from dppo_megatron.actor.model import check_settings, not_tried, overrides
from dppo_megatron.actor.overrides import DECIDED, ELSEWHERE, RECIPES, REFUSED, TESTED, Overrides, refusal
from dppo_megatron.algorithms.objectives import make_objective, supervised
from dppo_megatron.config import load_config
from dppo_megatron.config.checks import Purpose
from dppo_megatron.config.schema import (
    INTERLEAVED_GROUP,
    UNEVEN_STAGES,
    ActorConfig,
    LoraConfig,
    ObjectiveConfig,
    OptimizerConfig,
)
from dppo_megatron.platform.capabilities import LayerSpec
from dppo_megatron.steps.build import what_to_offload
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.hf_files import CheckpointReader
from dppo_megatron.weights.layer_parts import Rope

TWO = Parallel(dp=2, distributed_optimizer=True)


def _gathering_late(path: Path, late: bool) -> list[torch.Tensor]:
    """Weights, log-probabilities, a checkpoint's weights and host copies, each read right after an update."""
    settings: dict[str, Any] = {"overlap_grad_reduce": True, "ddp": {"bucket_size": 20_000}}
    actor = build_actor(path, TWO, overlap_param_gather=late, **settings)
    samples, found = random_samples(24, 37), []
    plan = plan_for(samples, TWO)

    def update() -> None:
        actor.update(samples, plan, supervised())
        assert actor._is_stale == late

    update()
    found += [tensor.clone() for _, tensor in actor.weights()]
    update()
    found += [torch.from_numpy(values) for _, values in sorted(actor.own_logprobs(samples, plan).values.items())]
    update()
    found += [value.data.clone() for value in nested_values(actor.sharded_state()["model"])]
    update()
    actor.offload(weights=True)
    found += [actor._memory.host_view(parameter).clone() for parameter in actor._parameters()]
    update()
    actor.freeze_reference()
    return found + [kept.clone() for kept in actor._reference or ()]


def test_weights_that_are_gathered_late_are_never_read_stale(model: Path) -> None:
    """With overlap_param_gather an update leaves each rank with the others' old weights. Whoever reads them before the
    next forward pass gets what there is without it, to the bit: server, checkpoint, host, reference policy."""
    for one, other in zip(
        run_ranks(_gathering_late, 2, model, False), run_ranks(_gathering_late, 2, model, True), strict=True
    ):
        assert len(one) == len(other) > 100
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _train(path: Path, settings: dict[str, Any], parallel: Parallel = TWO) -> dict[str, torch.Tensor] | str:
    """Weights after two updates, or why there is no such actor."""
    config = replace(ActorConfig(layout=parallel.layout, optimizer=OptimizerConfig(learning_rate=1e-2)), **settings)
    architecture = read_architecture(path)
    reader = CheckpointReader(path, architecture)
    try:
        actor = Actor(config, build_layout(config.layout, 0), architecture, reader.get, dtype=parallel.dtype)
        actor.start_phase(config.optimizer, 10)
    except UserError as error:
        return str(error)
    samples = random_samples(24, 37)
    for _ in range(2):
        actor.update(samples, plan_for(samples, parallel), supervised())
    return {name: tensor.clone() for name, tensor in actor.weights()}


@pytest.fixture(scope="module")
def job_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job_files(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


VPP = Parallel(pp=2, vpp=2, distributed_optimizer=True)
SAME: list[tuple[Parallel, dict[str, Any]]] = [
    (TWO, {"overlap_grad_reduce": True, "ddp": {"bucket_size": 20_000}}),
    (TWO, {"ddp": {"average_in_collective": True}}),
    (TWO, {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp": {"bucket_size": 20_000}}),
    (TWO, {"recompute": "selective"}),
    (TWO, {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}),
    (
        TWO,
        {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "pad_buckets_for_high_nccl_busbw": True}},
    ),
    (
        TWO,
        {
            "ddp": {
                "check_for_nan_in_grad": True,
                "check_for_large_grads": True,
                "pad_buckets_for_high_nccl_busbw": True,
            }
        },
    ),
    (TWO, {"ddp": {"reduce_scatter_with_fp32_accumulation": True}}),
    (TWO, {"megatron": {"bias_activation_fusion": True, "perform_initialization": False}}),
    (Parallel(pp=2), {"megatron": {"deallocate_pipeline_outputs": True, "batch_p2p_comm": True}}),
    (Parallel(tp=2), {"megatron": {"clone_scatter_output_in_embedding": False}}),
    (VPP, {"megatron": {"overlap_p2p_comm": True, "overlap_p2p_comm_warmup_flush": True}}),
    (VPP, {"megatron": {"microbatch_group_size_per_vp_stage": 4}}),
]
SAME_MIXTURE: list[tuple[Parallel, dict[str, Any]]] = [
    (Parallel(dp=2, ep=2), {"megatron": {"bias_activation_fusion": True, "moe_router_dtype": "fp64"}}),
]


Plain = Callable[[Parallel], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    """Its weights at a layout without settings: those of another layout differ by what Adam makes of rounding."""

    @functools.cache
    def trained(parallel: Parallel) -> dict[str, torch.Tensor]:
        [found, _] = run_ranks(_train, 2, model, {}, parallel)
        assert isinstance(found, dict), found
        return found

    return trained


def _is_same(
    path: Path, plain: dict[str, torch.Tensor], parallel: Parallel, settings: dict[str, Any], bound: float = 1e-5
) -> None:
    other = run_ranks(_train, 2, path, settings, parallel)[0]
    assert isinstance(other, dict), other
    for name, tensor in plain.items():
        assert (other[name] - tensor).norm() < bound * tensor.norm(), name


@pytest.mark.parametrize(("parallel", "settings"), SAME, ids=str)
def test_it_trains_the_same_model(model: Path, plain: Plain, parallel: Parallel, settings: dict[str, Any]) -> None:
    """Two updates on two ranks, over several micro-batches: weights to 1e-5 of their norm (test_actor_layouts.py)."""
    _is_same(model, plain(parallel), parallel, settings)


def test_it_trains_the_same_mixture(tmp_path: Path) -> None:
    """The same of a mixture of experts, to 3e-5 (test_actor_layouts.py)."""
    path = write_model(tmp_path, family="qwen3_moe")
    plain = run_ranks(_train, 2, path, {}, SAME_MIXTURE[0][0])[0]
    assert isinstance(plain, dict), plain
    for parallel, settings in SAME_MIXTURE:
        _is_same(path, plain, parallel, settings, 3e-5)


# ------------------------------------------------------------------------------------------- the lists of fields

_NEWER = """
activation_offload_fraction cpu_offloading_retain_pinned_cpu_buffers cuda_graph_modules
delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks dsa_indexer_k_norm_epsilon
dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend experimental_attention_variant_loss_scale_func
expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards fine_grained_offloading_max_inflight_offloads
fp4_param_gather fp8_output_proj fsdp_all_gather_in_start_param_sync fsdp_db_use_persist_buf_on_alloc_fail
gtp_weight_remat_size high_priority_a2a_comm_stream inference_cuda_graph_scope inference_disable_triton_nvls_kernels
inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
mamba_training_ssm_states_dtype megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather
megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype
megatron_fsdp_max_pool_double_buffer megatron_fsdp_use_decoupled_grad moe_expert_rank_capacity_factor
moe_grad_scale_func moe_mlp_glu_interleave_size moe_pad_experts_for_cuda_graph_inference moe_router_force_biased
moe_router_quantile_balancing_ema moe_shared_expert_glu_interleave_size moe_single_grouped_bias
moe_single_grouped_weight mtp_detach_heads mtp_grad_scale_func mtp_hybrid_override_pattern mtp_use_repeated_layer
mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult
nccl_all_reduce_for_prefill overlap_dispatch_backward_with_experts_wgrad tensor_parallel_num_weight_shards
use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_mup
"""  # of 0.19.2, not in 0.16.1
NEWER = set(_NEWER.split())
_OLDER = """
async_tensor_model_parallel_allreduce moe_extended_tp moe_use_legacy_grouped_gemm preserve_fp32_weights
"""  # of 0.16.1, not in 0.19.2
OLDER = set(_OLDER.split())
_NOT_TRIED = """
attention_backend autocast_dtype batch_invariant_mode batch_p2p_sync config_logger_dir cp_comm_type
activation_func_fp8_input_store deterministic_mode disable_bf16_reduced_precision_matmul
disable_symmetric_registration distribute_saved_activations enable_autocast flash_attention_version
fused_residual_rmsnorm gradient_accumulation_fusion mlp_chunks_for_training moe_deepep_num_sms moe_enable_deepep
moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_grouped_gemm moe_hybridep_num_blocks_permute
moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
moe_hybridep_pad_uneven_dispatch_inputs moe_ncclep_static_shape moe_ncclep_zero_copy moe_paged_stash
moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_fusion moe_router_padding_for_quantization
moe_token_dispatcher_type nccl_ub num_buckets param_name_patterns_for_fp32_local_accumulation symmetric_ar_type
use_transformer_engine_op_fuser grad_reduce_in_fp32 disable_parameter_transpose_cache
"""  # every other field of either version
NOT_TRIED = set(_NOT_TRIED.split())


def test_every_field_of_megatron_is_in_one_list() -> None:
    """Of the installed version, and no list has a name that neither version has."""
    classes = MLATransformerConfig, DistributedDataParallelConfig  # of latent attention: with all fields of the other
    fields = {field.name for one in classes for field in dataclasses.fields(one)}
    assert len(fields) > 250
    known = fields | NEWER | OLDER
    refused = {pattern: set(fnmatch.filter(known, pattern)) for pattern in REFUSED}
    assert all(refused.values())
    lists = [set(DECIDED), set().union(*refused.values()), set(RECIPES), set(TESTED), NOT_TRIED]
    twice = {name for one, other in itertools.combinations(lists, 2) for name in one & other}
    assert not twice
    assert not fields - set().union(*lists)
    assert set().union(*lists[:4]) <= known


def test_fields_called_tested_are_trained_with() -> None:
    """By a test of this file, or by one of tests/test_pipeline.py, which divides layers."""
    used = {key for _, one in SAME + SAME_MIXTURE for part in ("megatron", "ddp") for key in one.get(part, {})}
    divided = {key for one in [*SEVEN[2], *SEVEN[4]] for key, _ in one.uneven}
    assert divided == set(UNEVEN_STAGES) and used | divided == TESTED


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_we_set_is_decided_or_said_to_be_free(tmp_path: Path, family: str) -> None:
    """The fields that have a value of ours and may have another."""
    architecture, ours = read_architecture(write_model(tmp_path, family=family)), {}
    for recompute, fp8 in itertools.product(("none", "selective", "full"), ("off", "delayed", "mxfp8")):
        config = ActorConfig(recompute=recompute, fp8=fp8, fp8_bf16_layers=1)  # type: ignore[arg-type]
        for one in overrides(architecture, torch.bfloat16, config, "te"):
            ours |= one.ours
    mixture = {"moe_router_dtype", "moe_grouped_gemm", "moe_router_padding_for_quantization"}
    assert {name for name in ours.keys() - DECIDED.keys() if not refusal(name, "off")} == (
        mixture if family == "qwen3_moe" else set()
    ) | {
        "batch_p2p_comm",
        "bias_activation_fusion",
        "gradient_accumulation_fusion",
        "moe_token_dispatcher_type",
        "grad_reduce_in_fp32",
        "overlap_grad_reduce",
        "overlap_param_gather",
    }


def _settings_of(cls: type, name: str, given: dict[str, Any], fp8: str = "off") -> dict[str, Any]:
    return Overrides(name, cls, {"moe_router_load_balancing_type": "none"}, given, fp8).merged()


def test_a_refused_field_may_keep_its_value() -> None:
    """Megatron's default, or ours where we set one: it changes nothing."""
    harmless = {"fp4": None, "mtp_num_layers": None, "cpu_offloading": False, "moe_router_load_balancing_type": "none"}
    assert _settings_of(TransformerConfig, "actor.megatron", harmless) == {"moe_router_load_balancing_type": "none"}
    with pytest.raises(UserError, match="router losses are off"):
        _settings_of(TransformerConfig, "actor.megatron", {"moe_router_load_balancing_type": "aux_loss"})
    off = {"moe_z_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0, "moe_aux_loss_coeff": 0.0}  # NeMo RL's recipes
    assert _settings_of(TransformerConfig, "actor.megatron", off).keys() == {"moe_router_load_balancing_type"}
    with pytest.raises(UserError, match="router losses are off"):
        _settings_of(TransformerConfig, "actor.megatron", {"moe_z_loss_coeff": 1e-3})
    refused = 0
    for name, cls in (("actor.megatron", TransformerConfig), ("actor.ddp", DistributedDataParallelConfig)):
        for field in dataclasses.fields(cls):
            if field.init and any(fnmatch.fnmatchcase(field.name, pattern) for pattern in REFUSED):
                with pytest.raises(UserError, match=re.escape(f"{name}.{field.name}: cannot be set: ")):
                    _settings_of(cls, name, {field.name: "another value"})
                refused += 1
    assert refused > 100


def test_fields_of_a_recipe_and_of_an_enumeration() -> None:
    """What only one recipe of actor.fp8 reads is refused under any other; Python's enumerations are given by name."""
    given = {"fp8_margin": 1, "fp8_wgrad": False, "tp_only_amax_red": True}
    assert given.keys() == RECIPES.keys()
    assert _settings_of(TransformerConfig, "actor.megatron", given, "delayed").items() >= given.items()
    for key, fp8 in itertools.product(given, ("off", "tensorwise", "blockwise", "mxfp8")):
        with pytest.raises(UserError, match=f"{key}: has no effect with actor.fp8 = {fp8}, only with delayed"):
            _settings_of(TransformerConfig, "actor.megatron", {key: given[key]}, fp8)
    found = _settings_of(TransformerConfig, "actor.megatron", {"attention_backend": "flash"})
    assert found["attention_backend"] is AttnBackend.flash
    with pytest.raises(UserError, match="attention_backend = quick: must be one of flash, fused"):
        _settings_of(TransformerConfig, "actor.megatron", {"attention_backend": "quick"})


def _notes_of_recomputation(path: Path) -> tuple[int, int]:
    """In Transformer Engine's list, after a pass for log-probabilities and then after one for gradients."""
    actor, samples, notes = build_actor(path, Parallel()), random_samples(4, 37), list[bool]()
    recomputation = SimpleNamespace(_is_first_fp8_module=notes)
    sys.modules["transformer_engine.pytorch.distributed"] = SimpleNamespace(activation_recompute_forward=recomputation)  # type: ignore[assignment]
    actor._chunks[0].register_forward_hook(lambda *_: notes.append(False))
    actor.own_logprobs(samples, plan_for(samples))
    left = len(notes)
    actor.accumulate(samples, plan_for(samples), supervised())
    return left, len(notes)


def test_a_pass_without_backward_leaves_no_note_of_recomputation(model: Path) -> None:
    """Transformer Engine notes each part that a forward pass will recompute, and only backward passes take notes."""
    [(left, noted)] = run_ranks(_notes_of_recomputation, 1, model)
    assert left == 0 and noted > 0


def test_what_is_not_tried_is_said(tmp_path: Path) -> None:
    """Once, by name, by plan and by the line about the actor; not what is tested, nor a value that the field has
    without it: ours, or Megatron's default."""
    architecture = read_architecture(write_model(tmp_path, family="qwen3_moe"))

    def said(**actor: Any) -> list[str]:
        return not_tried(overrides(architecture, torch.bfloat16, ActorConfig(**actor), "local"))

    given = {"moe_permute_fusion": True, "overlap_p2p_comm": True, "mtp_num_layers": None, "num_layers": 4}
    unchanged = {"moe_token_dispatcher_type": "alltoall", "moe_router_fusion": False, "attention_backend": "auto"}
    [line] = said(megatron=given | unchanged, ddp={"nccl_ub": True, "grad_reduce_in_fp32": True})
    assert line.endswith(": actor.ddp.nccl_ub, actor.megatron.moe_permute_fusion")
    assert said(megatron={"bias_activation_fusion": True}) == said(megatron=unchanged) == []


def test_a_dispatcher_needs_its_package(tmp_path: Path) -> None:
    """Megatron asks for DeepEP when it builds a layer of experts, which a dense model has not; a plan for other
    machines cannot know."""
    actor = ActorConfig(megatron={"moe_token_dispatcher_type": "flex"})

    def check(family: str, runs_here: bool) -> list[str]:
        architecture = read_architecture(write_model(tmp_path / family, family=family))
        return check_settings(actor, architecture, torch.bfloat16, "local", runs_here=runs_here)

    assert check("qwen3", True) == check("qwen3_moe", False) != []
    with pytest.raises(UserError, match=r"= flex: DeepEP is not installed \(the package deep_ep\); use"):
        check("qwen3_moe", True)


@pytest.mark.parametrize(
    ("family", "exchange", "refused"),
    [
        ("qwen3", "p2p", ""),
        ("qwen3", "a2a", ""),
        ("qwen3", "all_gather", "= all_gather: Transformer Engine does not have it for packs; use p2p or a2a"),
        ("qwen3", "a2a+p2p", "does not have it for packs"),
        ("qwen3", ["p2p", "a2a"], "does not have it for packs"),
        ("deepseek_v3", "a2a", "= a2a: it lacks latent attention; use p2p"),
    ],
)
def test_exchanges_of_context_parallelism_that_packs_lack(
    tmp_path: Path, family: str, exchange: str | list[str], refused: str
) -> None:
    """Transformer Engine asserts it in the first layer's forward pass (`AttnFuncWithCPAndKVAllGather.forward` and
    `attn_forward_func_with_cp`); Megatron counts a list's layers from 1, and fails at the last."""
    architecture = read_architecture(write_model(tmp_path, family=family))
    actor = ActorConfig(megatron={"cp_comm_type": exchange})
    specs: tuple[LayerSpec, ...] = ("te", "local")
    for size, spec in itertools.product((1, 2), specs):  # local layers have one exchange, and do not read the field
        actor.layout.context_parallel = size
        refuses = refused and size > 1 and spec == "te"
        with pytest.raises(UserError, match=re.escape(refused)) if refuses else nullcontext():
            check_settings(actor, architecture, torch.bfloat16, spec, runs_here=False)


@pytest.mark.parametrize(("tensor", "context", "heads"), [(1, 2, 0), (2, 2, 1), (4, 2, 1), (1, 4, 2)])
def test_heads_that_an_exchange_cannot_divide(tmp_path: Path, tensor: int, context: int, heads: int) -> None:
    """`AttnFuncWithCPAndQKVOA2A.forward`: "The number of attention heads needs to be divisible by CP size!", of queries
    and of keys. The model has 4 and 2; ranks in excess of key heads have one each. `heads`: of keys, where refused."""
    architecture = read_architecture(write_model(tmp_path))
    for exchange in ("a2a", "p2p"):
        actor = ActorConfig(megatron={"cp_comm_type": exchange})
        actor.layout.tensor_parallel, actor.layout.context_parallel = tensor, context
        said = f"= a2a: a rank's {heads} key-value heads do not divide by context_parallel = {context}; use p2p"
        with pytest.raises(UserError, match=said) if heads and exchange == "a2a" else nullcontext():
            check_settings(actor, architecture, torch.bfloat16, "te", runs_here=False)


def test_names_of_other_programs_are_known() -> None:
    """No letter-by-letter guess: freeze_moe_router is not meant for moe_router_topk."""
    for key, said in ELSEWHERE.items():
        for cls in (TransformerConfig, DistributedDataParallelConfig):
            with pytest.raises(UserError, match=re.escape(f"has no such field; {said}")):
                Overrides("actor.megatron", cls, {}, {key: True}, "off").merged()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"megatron": {"moe_permute_fusio": True}}, "has no such field; did you mean moe_permute_fusion?"),
        ({"megatron": {"tp_comm_overlap": True}}, "are made by Megatron's training program"),
        ({"megatron": {"overlap_moe_expert_parallel_comm": True}}, "which needs its own forward step"),
        ({"megatron": {"cuda_graph_impl": "local"}}, "packs have a new shape every time"),
        ({"optimizer": OptimizerConfig(moments_dtype="bfloat16")}, "Transformer Engine (transformer-engine[pytorch]"),
        ({"optimizer": OptimizerConfig(cpu_offload=1.0)}, "and cpu_offload: Transformer Engine (transformer-engine"),
        ({"megatron": {"hidden_size": 8}}, "actor.megatron.hidden_size: is decided by the model's config.json"),
        ({"megatron": {"moe_expert_capacity_factor": 1.0}}, "tokens beyond the capacity would be dropped"),
        ({"megatron": {"fp4": "e2m1"}}, "NVFP4 is not supported"),
        ({"megatron": {"recompute_granularity": "full"}}, "is decided by actor.recompute"),
        ({"megatron": {"fp8": "hybrid"}}, "is decided by actor.fp8"),
        ({"megatron": {"apply_rope_fusion": True}}, "rotary embedding is this program's own"),
        ({"ddp": {"use_distributed_optimizer": False}}, "is decided by"),
        (
            {"lora": LoraConfig(rank=2, experts=True), "megatron": {"moe_grouped_gemm": True}},
            "actor.megatron.moe_grouped_gemm: adapters on experts need",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_set_is_said(model: Path, settings: dict[str, Any], said: str) -> None:
    """One sentence with the key, before a model is built."""
    answer = run_ranks(_train, 2, model, settings)[0]
    assert isinstance(answer, str) and said in answer


@pytest.mark.parametrize(
    "field",
    [
        "moe_token_dispatcher_type",
        "moe_enable_deepep",
        "moe_permute_fusion",
        "moe_router_fusion",
        "cp_comm_type",
        "bias_activation_fusion",
        "gradient_accumulation_fusion",
        "deallocate_pipeline_outputs",
        "moe_router_dtype",
    ],
)
def test_what_the_page_names_is_there(field: str) -> None:
    """The fields that docs/actor.md names as reachable are the installed Megatron's."""
    assert field in {one.name for one in dataclasses.fields(TransformerConfig)}
    page = (REPOSITORY / "docs" / "actor.md").read_text(encoding="utf-8")
    assert f"`{field}`" in page


COLOCATED = {
    "rollout__engine": "vllm",
    "rollout__servers__launch": "local",
    "rollout__servers__colocate": "true",
    "model__dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"actor__offload": "all"}, "actor.offload = all has no effect while rollout.servers.colocate = false"),
        ({"actor__offload": "everything"}, "actor.offload"),
        ({"actor__lora__alpha": 64}, "actor.lora.alpha = 64.0 has no effect while actor.lora.rank = 0"),
        ({"actor__lora__experts": "true"}, "actor.lora.experts = True has no effect while actor.lora.rank = 0"),
        ({f"actor__megatron__{INTERLEAVED_GROUP}": 4}, "= 4 has no effect while actor.layout.virtual_pipeline = 1"),
        (
            {"actor__megatron__overlap_p2p_comm": "true", "actor__layout__pipeline_parallel": 2},
            "needs actor.layout.virtual_pipeline above 1",
        ),
        (
            {"actor__megatron__overlap_p2p_comm": "true", "actor__megatron__batch_p2p_comm": "true"}
            | {"actor__layout__pipeline_parallel": 2, "actor__layout__virtual_pipeline": 2},
            "overlap_p2p_comm = true excludes batch_p2p_comm = true",
        ),
        (
            {f"actor__megatron__{INTERLEAVED_GROUP}": 1, "actor__layout__pipeline_parallel": 2}
            | {"actor__layout__virtual_pipeline": 2},
            "= 1: must be a whole number, at least actor.layout.pipeline_parallel = 2",
        ),
        ({"actor__optimizer__cpu_offload": 1.5}, "actor.optimizer.cpu_offload = 1.5: must be in"),
        ({"actor__optimizer__cpu_offload": 1, "actor__optimizer__distributed": "false"}, "distributed = true"),
        *((where | {"actor__optimizer__cpu_offload": 0.5}, "use 1, or 0") for where in ({}, COLOCATED)),
        ({"actor__optimizer__cpu_offload": 1}, "cpu_offload = 1.0 needs model.dtype = bfloat16, not float32"),
        (
            {"actor__optimizer__moments_dtype": "bfloat16"},
            "moments_dtype = bfloat16 needs model.dtype = bfloat16, not float32",
        ),
        (
            COLOCATED | {"rollout__quantization": "fp8", "model__dtype": "float32"},
            "fp8 needs model.dtype = bfloat16, not float32: engines",
        ),
        (COLOCATED | {"rollout__quantization": "fp8"}, "set objective.correction.level=token"),
        (COLOCATED | {"actor__optimizer__moments_dtype": "float16"}, "cannot be written from the host"),
        (COLOCATED | {"actor__optimizer__main_params_dtype": "float16", "actor__offload": "none"}, ""),
        ({"actor__overlap_param_gather": "true"}, "overlap_param_gather = true needs actor.overlap_grad_reduce"),
        (COLOCATED | {"actor__offload": "optimizer"}, ""),
    ],
    ids=str,
)
def test_contradictions_are_said_before_anything_is_built(
    job_files: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    """With the setting and what would be right; the last two are fine."""
    if not said:
        job_config(job_files, tmp_path / "run", **settings)
        return
    with pytest.raises(UserError, match=re.escape(said)):
        job_config(job_files, tmp_path / "run", **settings)


_INTERLEAVED = [
    "actor.layout={pipeline_parallel: 2, virtual_pipeline: 2}",
    f"actor.megatron={{{INTERLEAVED_GROUP}: 1}}",
]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["actor.optimizer.cpu_offload=0.5"], "use 1, or 0"),
        (["actor.optimizer={cpu_offload: 1, distributed: false}"], "needs actor.optimizer.distributed"),
        (["actor.optimizer.cpu_offload=1", "model.dtype=float32"], "needs model.dtype = bfloat16"),
        (["actor.optimizer.moments_dtype=bfloat16", "model.dtype=float32"], "needs model.dtype = bfloat16"),
        (["actor.optimizer.min_learning_rate=1"], "is above learning_rate"),
        (_INTERLEAVED, "= 1: must be a whole number, at least"),
    ],
    ids=str,
)
def test_what_updates_nothing_is_not_refused_for_its_optimizer(
    job_files: Path, tmp_path: Path, given: list[str], said: str
) -> None:
    """A run's config evaluated in float32 was, for an optimizer on the host that nobody builds."""
    line = (str(REPOSITORY / "configs" / "quickstart.yaml"), [*job_settings(job_files, tmp_path / "run"), *given])
    load_config(*line, purpose="evaluate")
    load_config(*line, purpose="grade")
    for_training: tuple[Purpose, ...] = ("train", "plan")
    for purpose in for_training:
        with pytest.raises(UserError, match=re.escape(said)):
            load_config(*line, purpose=purpose)


@pytest.mark.parametrize(
    ("offload", "colocate", "device", "leaves"),
    [
        ("auto", "true", "cuda", "all"),
        ("auto", "true", "cpu", "none"),
        ("auto", "false", "cuda", "none"),
        ("optimizer", "true", "cuda", "optimizer"),
        ("none", "true", "cuda", "none"),
    ],
)
def test_what_leaves_the_device(
    job_files: Path, tmp_path: Path, offload: str, colocate: str, device: str, leaves: str
) -> None:
    """`auto` is for colocated servers on GPUs."""
    given = COLOCATED | {"rollout__servers__colocate": colocate, "actor__offload": offload}
    assert what_to_offload(job_config(job_files, tmp_path / "run", **given), device) == leaves


class _Waits(TorchDispatchMode):
    """Operations after which the host waits for a CUDA device: scalars, sizes that depend on values, bool indices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        booleans = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        waits = booleans or name in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount")
        # tensors of the host on CUDA too, and not needed there: what the padded attention of a CPU uses
        if waits and not any(frame.name == "bucketed" for frame in traceback.extract_stack()):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _waits(path: Path) -> list[str]:
    config = ActorConfig(optimizer=OptimizerConfig(distributed=False))
    architecture = read_architecture(path)
    layout = build_layout(config.layout, 0)
    actor = Actor(config, layout, architecture, CheckpointReader(path, architecture).get, dtype=torch.float32)
    samples = random_samples(12, 37)
    plan = plan_for(samples)
    objective = make_objective(ObjectiveConfig(), None)
    actor.accumulate(samples, plan, objective)
    hook = LossHook(objective, actor._scorer(1.0), layout, plan.num_microbatches)
    with _Waits() as waits:
        actor._run_schedule(samples, plan, hook, forward_only=False)
    return waits.found


def test_no_host_waits_for_the_device_in_a_schedule(model: Path) -> None:
    """Forward and backward over several packs, loss included: nothing asks the device for a value."""
    assert run_ranks(_waits, 1, model)[0] == []


def test_a_pack_travels_without_waiting() -> None:
    """Every copy to the device is asynchronous: tokens, offsets, positions, rotary frequencies. Seen on torch's `meta`
    device, which takes copies as any other and has no memory."""
    [microbatch] = plan_for(random_samples(4, 37)).microbatches[0]
    copies: list[bool] = []

    class Copies(TorchDispatchMode):
        """Notes whether each copy to another device waits."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "_to_copy" and str((kwargs or {}).get("device")) == "meta":
                copies.append(bool(kwargs.get("non_blocking")))
            return func(*args, **(kwargs or {}))

    with Copies():
        pack = build_microbatch(random_samples(4, 37), microbatch, device=torch.device("meta"))
        rotation = pack.packed.rotation(Rope((1.0,) * 8), torch.bfloat16)
    LogprobStore().add(pack, torch.zeros(len(pack.targets), device="meta"))  # which nobody can read
    assert pack.packed.cu_seqlens_q.device == rotation.cos.device == torch.device("meta")
    assert len(copies) >= 8 and all(copies)
