"""Weights for servers that hold them in FP8: rounded once, here, so that all servers hold the same bytes.

W [rows, columns] of a linear layer becomes float8_e4m3fn of the same shape, and one float32 scale for each block of
128 x 128, [ceil(rows / 128), ceil(columns / 128)], under the name W_scale_inv: the form of DeepSeek-V3's checkpoints,
which both engines load. Embeddings, output layer, norms and routers stay as they are. Rounded by each server for
itself, the bytes would depend on how it splits and joins its layers, and twice as many would be sent.

The price: servers sample from another policy than the actor's. What the correction leaves of that is a row of the
ledger (`rollout/quantized`).
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
_SPLIT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight", "w2.weight")
_NOT_SPLIT = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
_LARGEST = 448.0
_LEAST_AMAX = 1e-4
"""Of a block, as DeepGEMM has it: a block of zeros has a scale too."""
_ROWS = 16 * BLOCK
"""Rounded at a time: the float32 copy of a whole output projection would be a gigabyte."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""What engines hold as one matrix. A block must not hold rows of two: all but the last end at a multiple of 128."""


def in_blocks(weight: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Round a matrix block by block, byte for byte as DeepGEMM's `per_block_cast_to_fp8`, which both engines copy.

    Args:
        weight: [rows, columns] in bfloat16 or float32.
        power_of_two: round scales up to powers of two, which DeepGEMM's kernels for Blackwell need.

    Returns:
        float8_e4m3fn [rows, columns]; float32 scales [ceil(rows / 128), ceil(columns / 128)], by which it is multiplied
        to have the weight again.

    Example: in a block whose largest magnitude is 0.896 the scale is 0.002, and 0.09 is stored as 44, so as 0.088.
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
    """What `in_blocks` has rounded, in bfloat16."""
    each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (rounded.float() * each[: rounded.shape[0], : rounded.shape[1]]).bfloat16()


def rounded_names(architecture: Architecture) -> set[str]:
    """Hugging Face names of the tensors that servers hold in FP8.

    Layers that engines join and that do not divide into blocks stay as they are; no Qwen3 has any.
    """
    shapes = {
        name: shape
        for name, shape in hf_shapes(architecture).items()
        if ".layers." in name and name.endswith(".weight") and len(shape) == 2 and not name.endswith("gate.weight")
    }
    return {name for name in shapes if _divides(name, shapes)}


def _divides(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    module, _, projection = name.removesuffix(".weight").rpartition(".")
    if projection == "gate_up_proj":  # GLM-4's, joined in the checkpoint
        return shapes[name][0] % (2 * BLOCK) == 0
    if ".experts." in name:  # engines hold all of an expert alike
        return min(shapes[name]) % BLOCK == 0
    for joined in _JOINED:
        mates = [f"{module}.{one}.weight" for one in joined]
        if projection in joined and all(mate in shapes for mate in mates):
            return all(shapes[mate][0] % BLOCK == 0 for mate in mates[:-1])
    return True


def quantized(weights: Weights, names: Collection[str], *, power_of_two: bool) -> Weights:
    """The stream in which `names` are rounded, each followed by its scales."""

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
    """`quantization_config` of the model's config.json as servers need it."""
    rounded = rounded_names(architecture)
    matrices = [name for name, shape in hf_shapes(architecture).items() if len(shape) == 2]
    kept = [name.removesuffix(".weight") for name in matrices if name not in rounded and "embed" not in name]
    joined = [name.replace("gate_up_proj", part) for name in kept for part in ("gate_proj", "up_proj")]
    kept += [name for name in joined if name not in kept]  # SGLang looks for the parts
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }


def check_split(rollout: RolloutConfig, architecture: Architecture) -> None:
    """Raise UserError unless each worker of a launched server holds whole blocks. vLLM splits experts over replicas
    too, and takes blocks down to 32 for them."""
    is_vllm, shapes = rollout.engine == "vllm", hf_shapes(architecture)
    given = read_split(rollout.servers.args)
    spread = given.tensor * (given.replicas if is_vllm else 1)
    if {"--enable-expert-parallel", "-ep", "--ep-size", "--ep"} & {one.split("=")[0] for one in rollout.servers.args}:
        spread = 1
    for name in sorted(rounded_names(architecture)):
        of_experts = ".experts." in name
        ways, least = (spread, 32 if is_vllm else BLOCK) if of_experts else (given.tensor, BLOCK)
        if ".self_attn." in name:
            ways = given.heads
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            ways = min(ways, architecture.num_kv_heads)  # heads are copied, not split
        size = shapes[name][1 if name.endswith(_SPLIT_BY_COLUMNS) else 0]
        if ways > 1 and not name.endswith(_NOT_SPLIT) and (size % ways or size // ways % least):
            raise UserError(
                f"rollout.quantization = {rollout.quantization}: {size} rows or columns of {name} over {ways} workers"
                f" are no whole blocks of {least}: lower --tensor-parallel-size in rollout.servers.args"
            )


def quantized_arguments(engine: str, architecture: Architecture) -> list[str]:
    """What the command line of a server with weights in FP8 has more."""
    changed = json.dumps({"quantization_config": quantization_config(architecture)}, separators=(",", ":"))
    option = "--hf-overrides" if engine == "vllm" else "--json-model-override-args"
    return ["--quantization", "fp8", option, changed]


def quantized_variables(rollout: RolloutConfig) -> dict[str, str]:
    """What the environment of a vLLM server on this machine has more. For DeepGEMM's kernels, its first choice, vLLM
    rounds weights once more, with scales of powers of two (0.32, utils/deep_gemm.py); only Blackwell's need that.
    SGLang (0.5.23) does it for Blackwell alone."""
    if rollout.quantization != "fp8" or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return {}
    return {_ROUNDS_AGAIN: os.environ.get(_ROUNDS_AGAIN, "0")}
