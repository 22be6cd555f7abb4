"""The actor of this machine against float32 on a CPU: the same weights and samples, log-probabilities and gradients.

The references are stored, not computed here, so that a change of the CPU's numbers shows as well.
`tools/accept_references.py` writes them again (40 s of CPU).
"""

from __future__ import annotations

import io
from importlib.resources import files

import numpy as np
import numpy.typing as npt
import torch

from dppo_megatron.actor.actor import Actor
from dppo_megatron.actor.layout import build_layout, start_process_group
from dppo_megatron.algorithms.objectives import clipped_surrogate
from dppo_megatron.config.schema import ActorConfig, LayoutConfig, LoraConfig
from dppo_megatron.packing.alignment import packing_layout
from dppo_megatron.packing.planner import plan_microbatches
from dppo_megatron.platform.capabilities import LayerSpec
from dppo_megatron.weights.config_keys import DEEPSEEK, GEMMA3, GLM4, GLM4_MOE, QWEN2_MOE
from dppo_megatron.workbench.accept.bars import FAMILIES
from dppo_megatron.workbench.accept.runner import Sheet
from dppo_megatron.workbench.accept.workload import TEN_MILLION, LivelyWeights, RandomWeights, Shape, architecture_of
from dppo_megatron.workbench.random_samples import SampleLengths, random_samples

_DENSE: Shape = TEN_MILLION | {"num_hidden_layers": 4}
_MIXTURE = _DENSE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
_SIGMOID = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 192, "first_k_dense_replace": 1}
_SIGMOID |= {"num_experts_per_tok": 4, "num_nextn_predict_layers": 0}
_ROPE: Shape = {"rope_type": "default", "rope_theta": 1e4}
_HALF = {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}
_YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_GEMMA: Shape = {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
_GEMMA |= {"rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _ROPE}}
_LATENT: Shape = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_LATENT |= {"v_head_dim": 128, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2}
_FAR = _YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_LATENT |= {"max_position_embeddings": 2560, "rope_parameters": _FAR}
_DEEPSEEK = _DENSE | _SIGMOID | _LATENT | {"architectures": [DEEPSEEK]}
_GATED = {"norm_topk_prob": False, "shared_expert_intermediate_size": 384}
MODELS: dict[str, Shape] = {
    "dense": _DENSE,
    "mixture": _MIXTURE,
    "yarn": _DENSE | {"rope_parameters": _YARN, "max_position_embeddings": 256},
    "adapters": _DENSE,
    "gemma3": _DENSE | _GEMMA | {"architectures": [GEMMA3]},
    "glm4": _DENSE | _HALF | {"architectures": [GLM4], "pad_token_id": None, "eos_token_id": 1},
    "qwen2_moe": _MIXTURE | _GATED | {"architectures": [QWEN2_MOE]},
    "adapters_moe": _MIXTURE,
    "glm4_moe": _DENSE | _SIGMOID | _HALF | {"architectures": [GLM4_MOE], "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": _DEEPSEEK,
    "adapters_latent": _DEEPSEEK,
}
"""Samples are longer than a window of `gemma3` and than the original length under YaRN. Heads of `deepseek_v3` are as
wide as the published ones, for which Transformer Engine's kernels are made."""
_LORA = {name: LoraConfig(rank=8, experts=name == "adapters_moe") for name in MODELS if name.startswith("adapters")}
_LAYOUTS: dict[str, tuple[str, LayoutConfig]] = {
    "dp2": ("dense", LayoutConfig()),
    "tp2": ("dense", LayoutConfig(tensor_parallel=2)),
    "pp2": ("dense", LayoutConfig(pipeline_parallel=2)),
    "cp2": ("dense", LayoutConfig(context_parallel=2)),
    "ep2": ("mixture", LayoutConfig(expert_parallel=2)),
    "latent_tp2": ("deepseek_v3", LayoutConfig(tensor_parallel=2)),
}

Arrays = dict[str, npt.NDArray[np.float32]]
"""`before` and `after` three updates: log-probabilities of all completion tokens, [n]; `loss` and `grad_norm`, [3]."""


def against_references(sheet: Sheet, spec: LayerSpec, *dtypes: str) -> None:
    """One rank in each number format. Transformer Engine's attention has no packs in float32."""
    for dtype in dtypes:
        if dtype == "float32" or sheet.cuda:  # a CPU rounds bfloat16 differently from a device
            _compare(sheet, f"{dtype} {spec}", "dense", LayoutConfig(), getattr(torch, dtype), spec)


def families(sheet: Sheet) -> None:
    """What families have beyond Qwen3, in Transformer Engine's layers; without CUDA in local layers and float32."""
    dtype_and_spec: tuple[torch.dtype, LayerSpec] = (torch.bfloat16, "te") if sheet.cuda else (torch.float32, "local")
    failed = ""
    for model in FAMILIES:
        try:
            _compare(sheet, model, model, LayoutConfig(), *dtype_and_spec)
        except Exception as error:  # whatever a kernel raises: the other models are still measured
            failed += f"{model}: {type(error).__name__}: {error}; "
    if failed:
        raise RuntimeError(failed)


def layouts(sheet: Sheet) -> None:
    """One layout after the other, each on two ranks."""
    for name, (model, sizes) in _LAYOUTS.items():
        # megatron-core's experts need Transformer Engine on CUDA, whose attention has no float32 packs
        half = model != "dense" and sheet.cuda
        _compare(sheet, name, model, sizes, torch.bfloat16 if half else torch.float32, "te" if half else "local")


def _compare(sheet: Sheet, case: str, model: str, sizes: LayoutConfig, dtype: torch.dtype, spec: LayerSpec) -> None:
    arrays = measure(model, sizes, dtype, spec)
    for name, value in differences(arrays, model).items() if arrays else ():  # on rank 0
        if f"{case}_{name}" in sheet.step.figures:
            sheet.note(f"{case}_{name}", value)


def measure(model: str, sizes: LayoutConfig, dtype: torch.dtype, spec: LayerSpec) -> Arrays:
    """Log-probabilities before and after three updates. Collective; empty except on rank 0. The process group stays;
    Megatron's groups end here, so that a process can measure several times."""
    from megatron.core import parallel_state  # only after platform.prepare(), which other imports of ours have called

    config = ActorConfig(layout=sizes, layer_spec=spec, lora=_LORA.get(model, LoraConfig()))
    config.optimizer.learning_rate = 3e-3 if config.lora.rank else 1e-4  # an adapter's B begins at 0
    start_process_group(rendezvous_timeout_s=60.0)
    architecture, layout = architecture_of(MODELS[model]).with_adapters(config.lora), build_layout(sizes, seed=0)
    samples = random_samples(SampleLengths(12, 48, 0.9, 200), architecture.vocab_size, seed=1)
    weights = (LivelyWeights if model in FAMILIES else RandomWeights)(architecture)
    try:
        actor = Actor(config, layout, architecture, weights, dtype=dtype)
        actor.start_phase(config.optimizer, total_steps=10**6)
        packing = packing_layout(config, layout.world_size)
        plan = plan_microbatches(samples, layout=packing, max_tokens_per_microbatch=512)
        before = actor.logprobs(samples, plan)
        steps = [actor.update(samples, plan, clipped_surrogate(0.2, 0.2, 0.0)).figures() for _ in range(3)]
        after = actor.logprobs(samples, plan)
    finally:
        parallel_state.destroy_model_parallel()
    if before is None or after is None:
        return {}
    arrays = {"before": np.concatenate(before), "after": np.concatenate(after)}
    arrays |= {name: np.array([step[name] for step in steps]) for name in ("loss", "grad_norm")}
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def differences(arrays: Arrays, model: str) -> dict[str, float]:
    """Against the stored references: mean |difference| of log-probabilities before and after, and the relative
    difference of the first grad_norm; later ones drift apart (2.2 % at the third, bfloat16 on a CPU)."""
    stored = np.load(io.BytesIO((files("dppo_megatron.workbench.accept") / "assets" / "references.npz").read_bytes()))
    reference = {name: stored[f"{model}/{name}"] for name in arrays}
    off = {name: float(np.abs(arrays[name] - reference[name]).mean()) for name in ("before", "after")}
    return off | {"grad_norm": float(abs(arrays["grad_norm"][0] / reference["grad_norm"][0] - 1))}
