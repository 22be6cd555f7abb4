"""Quantizes weights to FP8 for the servers. The trainer does it, once, so that all servers hold the same bytes.

W [rows, columns] of a linear layer becomes float8_e4m3fn of the same shape, and one float32 scale for each block of
128 x 128, [ceil(rows / 128), ceil(columns / 128)], under the name W_scale_inv: the format of DeepSeek-V3's checkpoints,
which both engines load. Embeddings, output layer, norms and routers are not quantized. If each server quantized for
itself, the bytes would depend on how it splits and joins its layers, and twice as many bytes would be sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.config.server_args import read_split
from dppo_megatron.rollout.engine import Weights
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.mapping import hf_shapes

BLOCK = 128
SCALE = "_scale_inv"
_ROUNDS_AGAIN = "VLLM_USE_DEEP_GEMM_E8M0"
_REPACKS = "SGLANG_ENABLE_JIT_DEEPGEMM"
_SPLIT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight", "w2.weight")
_NOT_SPLIT = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
_LARGEST = 448.0  # the largest finite float8_e4m3fn
_LEAST_AMAX = 1e-4
"""Lower bound for the largest magnitude of a block, as in DeepGEMM: without it a block of zeros would have scale 0."""
_ROWS = 16 * BLOCK
"""Rows quantized at a time: the float32 copy of a whole output projection would be a gigabyte."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Matrices that engines hold as one. No block may contain rows of two matrices, so all but the last of a group must
have a multiple of 128 rows."""


def in_blocks(weight: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Round a matrix block by block, byte for byte as DeepGEMM's `per_block_cast_to_fp8`, which both engines copy.

    Args:
        weight: [rows, columns] in bfloat16 or float32.
        power_of_two: round scales up to powers of two, which DeepGEMM's kernels for Blackwell need.

    Returns:
        float8_e4m3fn [rows, columns], and float32 scales [ceil(rows / 128), ceil(columns / 128)]; weight = product of
        both.

    Example: a block whose largest magnitude is 0.896 has scale 0.002; 0.09 is stored as 44, which stands for 0.088.
    """
    rounded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = []
    for part, target in zip(torch.split(weight, _ROWS), torch.split(rounded, _ROWS), strict=True):
        rows, columns = part.shape
        padded = pad(part, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).float().clamp(_LEAST_AMAX) / _LARGEST
        if power_of_two:
            scale = scale.log2().ceil().exp2()
        values = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn)
        target.copy_(values.view_as(padded)[:rows, :columns])
        scales.append(scale[:, 0, :, 0])
    return rounded, torch.cat(scales)


def multiplied_out(rounded: Tensor, scales: Tensor) -> Tensor:
    """Dequantize the result of `in_blocks`, to bfloat16."""
    each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (rounded.float() * each[: rounded.shape[0], : rounded.shape[1]]).bfloat16()


def rounded_names(architecture: Architecture) -> set[str]:
    """Hugging Face names of the tensors that servers hold in FP8.

    Layers that engines join and whose rows do not divide into blocks are not quantized; no Qwen3 model has any.
    """
    shapes = {
        name: shape
        for name, shape in hf_shapes(architecture).items()
        if ".layers." in name and name.endswith(".weight") and len(shape) == 2 and not name.endswith("gate.weight")
    }
    return {name for name in shapes if _divides(name, shapes)}


def _divides(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    module, _, projection = name.removesuffix(".weight").rpartition(".")
    if projection == "gate_up_proj":  # GLM-4 joins the two already in the checkpoint
        return shapes[name][0] % (2 * BLOCK) == 0
    if ".experts." in name:  # engines hold all matrices of an expert in one format
        return min(shapes[name]) % BLOCK == 0
    for projections in _JOINED:
        joined = [f"{module}.{one}.weight" for one in projections]
        if projection in projections and all(one in shapes for one in joined):
            return all(shapes[one][0] % BLOCK == 0 for one in joined[:-1])
    return True


def quantized(weights: Weights, names: Collection[str], *, power_of_two: bool) -> Weights:
    """The same stream with the tensors `names` quantized, each followed by its scales."""

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights():
            if name not in names:
                yield name, tensor
                continue
            rounded, scales = in_blocks(tensor, power_of_two=power_of_two)
            yield name, rounded
            yield name + SCALE, scales

    return stream


def quantization_config(architecture: Architecture) -> dict[str, object]:
    """The `quantization_config` that servers need in the model's config.json."""
    rounded = rounded_names(architecture)
    matrices = [name for name, shape in hf_shapes(architecture).items() if len(shape) == 2]
    kept = [name.removesuffix(".weight") for name in matrices if name not in rounded and "embed" not in name]
    parts = [name.replace("gate_up_proj", part) for name in kept for part in ("gate_proj", "up_proj")]
    kept += [name for name in parts if name not in kept]  # SGLang looks up the parts of a joined matrix
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }


def check_split(rollout: RolloutConfig, architecture: Architecture) -> None:
    """Raise UserError if a worker of a launched server would hold a part of a block. For experts, vLLM also splits over
    replicas, and accepts blocks down to 32."""
    is_vllm, shapes = rollout.engine == "vllm", hf_shapes(architecture)
    split = read_split(rollout.servers.args)
    expert_ways = split.tensor * (split.replicas if is_vllm else 1)
    if {"--enable-expert-parallel", "-ep", "--ep-size", "--ep"} & {one.split("=")[0] for one in rollout.servers.args}:
        expert_ways = 1
    for name in sorted(rounded_names(architecture)):
        of_experts = ".experts." in name
        ways, least = (expert_ways, 32 if is_vllm else BLOCK) if of_experts else (split.tensor, BLOCK)
        if ".self_attn." in name:
            ways = split.heads
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            ways = min(ways, architecture.num_kv_heads)  # beyond that, key-value heads are replicated, not split
        size = shapes[name][1 if name.endswith(_SPLIT_BY_COLUMNS) else 0]
        if ways > 1 and not name.endswith(_NOT_SPLIT) and (size % ways or size // ways % least):
            raise UserError(
                f"rollout.quantization = {rollout.quantization}: {size} rows or columns of {name} over {ways} workers"
                f" are not whole blocks of {least}: lower --tensor-parallel-size in rollout.servers.args"
            )


def quantized_arguments(engine: str, architecture: Architecture) -> list[str]:
    changed = json.dumps({"quantization_config": quantization_config(architecture)}, separators=(",", ":"))
    option = "--hf-overrides" if engine == "vllm" else "--json-model-override-args"
    return ["--quantization", "fp8", option, changed]


def quantized_variables(rollout: RolloutConfig) -> dict[str, str]:
    """Additional environment variables of a server on this machine, against what engines do to weights for DeepGEMM.

    On Hopper vLLM quantizes weights again, with powers of two as scales (0.32, utils/deep_gemm.py), which only
    Blackwell needs. On Blackwell SGLang packs the scales of its first weights, and then has no place for those of a
    sync (0.5.23, fp8_utils.py); without DeepGEMM it uses FlashInfer's kernels, which take scales as they are. Raises
    UserError for a chip on which it can take no sync at all.
    """
    if rollout.quantization == "off" or not torch.cuda.is_available():
        return {}
    chip, is_vllm = torch.cuda.get_device_capability(), rollout.engine == "vllm"
    if not is_vllm and chip < (8, 9):
        raise UserError(
            f"rollout.quantization = {rollout.quantization}: on a chip older than Ada SGLang packs its first weights"
            " for its Marlin kernel (0.5.23), and cannot load those of a sync; leave it off"
        )
    if is_vllm and rollout.quantization == "fp8" and chip == (9, 0):
        return {_ROUNDS_AGAIN: os.environ.get(_ROUNDS_AGAIN, "0")}
    return {_REPACKS: os.environ.get(_REPACKS, "0")} if not is_vllm and chip >= (10, 0) else {}
