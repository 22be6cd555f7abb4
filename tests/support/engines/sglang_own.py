"""Runs in SGLang's environment: what its own functions do with what the trainer sends, and on a B200, whose chip,
DeepGEMM and FlashInfer they are told of, or on older chips. Prints JSON.

python -m sglang_own experts ARGUMENTS OF THE SERVER       whether the kernel of a mixture routes past the recorder
python -m sglang_own scales                                whether a layer takes scales after its first weights
python -m sglang_own packs                                 compute capabilities on which a layer's first weights are
                                                             replaced by others, without a loader and without scales
python -m sglang_own beside                                  whether it starts on GPUs that others use unequally
python -m sglang_own bucket < OFFER                          what a model is given to load: {name: [type, values]}
"""

from __future__ import annotations

import json
import sys
import types
from functools import partial
from typing import Any

import torch
from sglang.srt.distributed import bootstrap
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.deep_gemm_wrapper import configurer
from sglang.srt.layers.moe.topk import TopK, TopKConfig, TopKOutputFormat
from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType
from sglang.srt.layers.parameter import BlockQuantScaleParameter, ModelWeightParameter
from sglang.srt.layers.quantization import fp8_utils, marlin_utils_fp8
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader import utils as loading
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.common import MultiprocessingSerializer, normalize_serialized_named_tensor_payloads


def routes_unseen(arguments: list[str]) -> bool:
    """For a router like Qwen3's: softmax, no groups, no bias, renormalized."""
    args = prepare_server_args(arguments)
    args.resolve_once()
    chosen = args.resolved_dict()["moe_runner_backend"]
    topk = types.SimpleNamespace(is_fp4_experts=False, _runner_backend_bound=False, topk_config=TopKConfig(top_k=2))
    runner = MoeRunnerBackend("triton" if chosen == "auto" else chosen)
    TopK.bind_runner_backend(topk, runner, routing_method_type=RoutingMethodType.Renormalize)
    return bool(topk.topk_config.output_format == TopKOutputFormat.BYPASSED)


def _aligned(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def install_deep_gemm() -> None:
    """The functions of DeepGEMM that prepare weights, as SGLang has them in torch."""
    utils, layout = types.ModuleType("deep_gemm.utils"), types.ModuleType("deep_gemm.utils.layout")
    utils.align, utils.get_tma_aligned_size = _aligned, lambda size, each: _aligned(size, 16 // each)  # type: ignore[attr-defined]
    packed = fp8_utils._get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl
    layout.get_mn_major_tma_aligned_packed_ue8m0_tensor = packed  # type: ignore[attr-defined]
    sys.modules |= {
        "deep_gemm": types.ModuleType("deep_gemm"),
        "deep_gemm.utils": utils,
        "deep_gemm.utils.layout": layout,
    }
    sys.modules["deep_gemm"].utils, utils.layout = utils, layout  # type: ignore[attr-defined]
    configurer._is_cuda = True
    configurer.get_device_sm = loading.get_device_sm = lambda: 100
    fp8_utils.is_flashinfer_available = lambda: True
    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = configurer._compute_enable_deep_gemm()
    deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM
    fp8_utils.block_quant_dequant = _multiplied_out  # SGLang's is a kernel


def _multiplied_out(weight: Any, scales: Any, block: list[int], dtype: torch.dtype) -> Any:
    return (weight.float() * scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)).to(dtype)


def takes_scales() -> bool:
    """A layer [256, 1024] is given weights, prepared for its kernel, and given scales again."""
    install_deep_gemm()
    weight = torch.nn.Parameter(torch.ones(256, 1024).to(torch.float8_e4m3fn), requires_grad=False)
    scales = BlockQuantScaleParameter(data=torch.ones(2, 8), input_dim=1, output_dim=0, weight_loader=lambda *_: None)
    linear = fp8_utils.dispatch_w8a8_block_fp8_linear([128, 128])
    on_deep_gemm = linear is fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    fp8_utils.requant_block_scale_ue8m0_for_deepgemm(
        weight, scales, [128, 128], on_deep_gemm, output_dtype=torch.bfloat16, weight_shape=weight.shape
    )
    try:
        scales.load_row_parallel_weight(torch.full((2, 8), 0.5), tp_rank=0)
    except AssertionError:
        return False
    return bool((scales == 0.5).all())


def packing_chips() -> list[tuple[int, int]]:
    """Of a layer [256, 1024]. The kernels that pack it are left out: they keep neither its loader nor its name."""
    marlin_utils_fp8.gptq_marlin_repack = lambda b_q_weight, **_: b_q_weight
    marlin_utils_fp8.marlin_make_workspace = lambda device: torch.empty(0)
    found = []
    for chip in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        fp8_utils.get_device_capability = lambda chip=chip: chip
        rounded = {"data": torch.ones(256, 1024).to(torch.float8_e4m3fn), "weight_loader": lambda *_: None}
        layer = torch.nn.Module()
        layer.weight = ModelWeightParameter(input_dim=1, output_dim=0, **rounded)
        scales = {"data": torch.ones(2, 8), "weight_loader": lambda *_: None}
        layer.weight_scale_inv = BlockQuantScaleParameter(input_dim=1, output_dim=0, **scales)
        layer.output_size_per_partition, layer.input_size_per_partition = 256, 1024
        layer.weight_block_size, layer.orig_dtype = [128, 128], torch.bfloat16
        if fp8_utils.can_auto_enable_marlin_fp8():
            marlin_utils_fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
        names = {name for name, _ in layer.named_parameters()}
        if not hasattr(layer.weight, "weight_loader") and "weight_scale_inv" not in names:
            found.append(chip)
    return found


def given_of_a_bucket() -> dict[str, Any]:
    """As a worker of a server takes its part of POST /update_weights_from_tensor."""
    [part] = normalize_serialized_named_tensor_payloads([sys.stdin.read()])
    model = types.SimpleNamespace(named=dict[str, Any](), modules=list[Any])
    model.load_weights = model.named.update
    updater = types.SimpleNamespace(get_model=lambda: model, _assert_weight_cache_inactive=lambda _: None)
    take = partial(WeightUpdater._update_weights_from_flattened_bucket, updater)
    updater._update_weights_from_flattened_bucket = take
    tensors = MultiprocessingSerializer.deserialize(part)
    assert WeightUpdater.update_weights_from_tensor(updater, tensors, "flattened_bucket")[0]
    return {name: [str(tensor.dtype), tensor.float().tolist()] for name, tensor in model.named.items()}


def starts_beside_others() -> bool:
    """A worker with 70 GB free, while another of its tensor-parallel group has 60."""
    try:
        bootstrap._check_tp_memory_balance(pre_model_load_memory=60.0, local_gpu_memory=70.0)
    except RuntimeError:
        return False
    return True


ask = {
    "experts": partial(routes_unseen, sys.argv[2:]),
    "scales": takes_scales,
    "packs": packing_chips,
    "bucket": given_of_a_bucket,
    "beside": starts_beside_others,
}[sys.argv[1]]
with override_platform(is_sm100=True, is_blackwell=True, is_sm90=False, is_sm120=False):
    print(json.dumps(ask()))
