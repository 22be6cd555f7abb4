"""`actor.megatron` and `actor.ddp`: fields of Megatron's own dataclasses, checked before a model is built.

Megatron has some 250 of them and every release adds more, so they are not copied into the schema. A field that this
program decides by itself is refused: two places that say different things would be one too many.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from dppo_megatron.types import UserError

FREE = frozenset(
    {
        "attention_softmax_in_fp32",
        "batch_p2p_comm",
        "bias_activation_fusion",
        "gradient_accumulation_fusion",
        "moe_grouped_gemm",
        "moe_router_padding_for_quantization",
        "moe_token_dispatcher_type",
        "persist_layer_norm",
        "grad_reduce_in_fp32",
        "overlap_grad_reduce",
        "overlap_param_gather",
    }
)
"""Fields that this program gives a value and that may be given another one."""
_REFUSED = {
    "use_megatron_fsdp": "checkpoints and the weight stream know the distributed optimizer only",
    "use_custom_fsdp": "checkpoints and the weight stream know the distributed optimizer only",
    "data_parallel_sharding_strategy": "it belongs to Megatron's FSDP, which is not offered",
    "cuda_graph_impl": "packs have a new shape every time, and a graph is of one shape",
    "enable_cuda_graph": "packs have a new shape every time, and a graph is of one shape",
    "external_cuda_graph": "packs have a new shape every time, and a graph is of one shape",
    "tp_comm_overlap": "Transformer Engine's buffers for it are made by Megatron's training program, not by its core",
    "overlap_moe_expert_parallel_comm": "Megatron schedules it by layers, which needs its own forward step",
    "apply_rope_fusion": "rotary embedding is this program's own (docs/actor.md)",
    "mtp_num_layers": "no model family here has such layers",
}


def overridden(name: str, cls: type, ours: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`ours` with the fields of `given`, which is the setting `name` and meant for the dataclass `cls`.

    Raises:
        UserError: a field that `cls` does not have, or that is this program's to decide.
    """
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    for key in given:
        if key in _REFUSED:
            raise UserError(f"{name}.{key}: cannot be set: {_REFUSED[key]}")
        if key in ours and key not in FREE:
            raise UserError(f"{name}.{key}: is decided by the model's config.json and the other settings of actor")
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"{name}.{key}: the installed megatron-core's {cls.__name__} has no such field{hint}")
    return {**ours, **given}


def build(name: str, cls: type, ours: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """`cls` from `ours` and `given`; what Megatron refuses of it becomes a `UserError`, if anything was given."""
    settings = overridden(name, cls, ours, given)
    try:
        return cls(**settings)
    except (ValueError, TypeError, AssertionError, ImportError) as error:
        if not given:
            raise
        raise UserError(f"{name} = {dict(given)}: megatron-core refuses it: {error}") from None
