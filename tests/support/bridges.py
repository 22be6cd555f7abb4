"""Classes of mbridge that a user might bring along: one for rednote's dots.llm1, and the ways to get one wrong."""

from __future__ import annotations

from typing import Any, ClassVar

from mbridge.core import LLMBridge
from mbridge.models.deepseek_v3 import DeepseekV3Bridge

from examples.mbridge_family import SeedOssBridge

_HF = "model.layers.{layer_number}."
_ATTENTION = {
    "self_attention.linear_proj.weight": [_HF + "self_attn.o_proj.weight"],
    "self_attention.linear_qkv.layer_norm_weight": [_HF + "input_layernorm.weight"],
    "self_attention.q_layernorm.weight": [_HF + "self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": [_HF + "self_attn.k_norm.weight"],
    "self_attention.linear_qkv.weight": [_HF + f"self_attn.{part}_proj.weight" for part in "qkv"],
}


class DotsBridge(LLMBridge):  # type: ignore[misc]
    """Attention as Qwen3's, experts as DeepSeek's."""

    _MLP_MAPPING: ClassVar[Any] = DeepseekV3Bridge._MLP_MAPPING
    _ATTENTION_MAPPING: ClassVar[Any] = _ATTENTION
    _weight_name_mapping_mlp = DeepseekV3Bridge._weight_name_mapping_mlp
    OTHERS: ClassVar[dict[str, Any]] = {}

    def _build_config(self) -> Any:
        c = self.hf_config
        assert (c.n_group, c.topk_group, c.norm_topk_prob) == (1, 1, True)
        own = {
            "qk_layernorm": True,
            "num_moe_experts": c.n_routed_experts,
            "moe_router_topk": c.num_experts_per_tok,
            "moe_ffn_hidden_size": c.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": c.moe_intermediate_size * c.n_shared_experts,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": c.routed_scaling_factor,
            "moe_layer_freq": [int(n >= c.first_k_dense_replace) for n in range(c.num_hidden_layers)],
        }
        return self._build_base_config(**own | self.OTHERS)

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        if "pre_mlp_layernorm" in mcore_weights_name:
            return list(self._weight_name_mapping_mlp(mcore_weights_name))
        return list(super()._weight_name_mapping_mcore_to_hf(mcore_weights_name))


def _other(**values: Any) -> type[DotsBridge]:
    return type("Other", (DotsBridge,), {"OTHERS": values})


def _swapped(base: type, table: str, key: str) -> type:
    """The last two names of a weight change places."""
    *first, one, other = getattr(base, table)[key]
    return type("Swapped", (base,), {table: getattr(base, table) | {key: [*first, other, one]}})


class EXITS(DotsBridge):
    """Ends the process, or tries to."""

    def _build_config(self) -> Any:
        raise SystemExit(0)


class OTHER_BIAS(DotsBridge):
    """Names the routers' correction bias otherwise than DeepSeek."""

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        names = super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)
        return [name.replace("gate.e_score_correction_bias", "expert_bias") for name in names]


WINDOW = _other(window_size=(127, 0))
CLAMP = _other(activation_func_clamp_value=7.0)
EPSILON = _other(layernorm_epsilon=1e-5)
NO_HEAD_NORMS = _other(qk_layernorm=False)
SCALE = _other(moe_router_topk_scaling_factor=1.0)
TOP_2 = _other(moe_router_topk=2)
ALL_MIXTURES = _other(moe_layer_freq=1)
SOFTMAX = _other(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)
NO_SHARED = _other(moe_shared_expert_intermediate_size=None)
EVERY_OTHER = _other(moe_layer_freq=[0, 1, 0, 1])
GATE_UP = _swapped(DotsBridge, "_MLP_MAPPING", "mlp.linear_fc1.weight")
SHARED_GATE_UP = _swapped(DotsBridge, "_MLP_MAPPING", "mlp.shared_experts.linear_fc1.weight")
KEYS_VALUES = _swapped(DotsBridge, "_ATTENTION_MAPPING", "self_attention.linear_qkv.weight")
SEED_KEYS_VALUES = _swapped(SeedOssBridge, "_ATTENTION_MAPPING", "self_attention.linear_qkv.weight")
