"""The keys of config.json: which are read, which must have the one value this code implements, which are ignored.

A key that changes the computation and is not read silently makes it another model. So every key that transformers knows
for a family is listed here, and `check_keys` refuses by name whatever is not listed as harmless. docs/actor.md has this
table (`tools/write_actor_table.py` writes it), and tests compare it with what transformers' own code reads while it
builds and runs a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.types import UserError
from dppo_megatron.weights.json_files import plain, shown
from dppo_megatron.weights.other_families import OTHER_FAMILIES

LLAMA, QWEN2, QWEN3, QWEN3_MOE = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
MODEL_TYPES = {QWEN3: "qwen3", QWEN3_MOE: "qwen3_moe", QWEN2: "qwen2", LLAMA: "llama"}
"""Architectures with rows in the weight table of `mapping.py`, and the `model_type` that transformers goes by."""
SUPPORTED = tuple(MODEL_TYPES)

_ALL = frozenset(SUPPORTED)
_MOE = frozenset({QWEN3_MOE})
_DENSE = _ALL - _MOE


@dataclass(frozen=True, slots=True)
class Size:
    """A whole number in a range; `even`: and even."""

    least: int
    most: int
    even: bool = False

    def __str__(self) -> str:
        return f"{'an even' if self.even else 'a whole'} number from {self.least} to {self.most}"

    def fits(self, value: Any) -> bool:
        """Whether it is one; True and 4.0 are not."""
        return type(value) is int and self.least <= value <= self.most and not (self.even and value % 2)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in a range."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"

    def fits(self, value: Any) -> bool:
        """Whether it is one. Compared before it is converted: 10**400 is an int that no float holds."""
        return type(value) in (int, float) and self.least <= value <= self.most and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these values exactly: 1 is not True, but 1 is 1.0."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(shown(value) for value in self.values)

    def fits(self, value: Any) -> bool:
        """Whether it is one of them."""
        return any(isinstance(value, bool) == isinstance(known, bool) and value == known for known in self.values)


@dataclass(frozen=True, slots=True)
class Key:
    """How this code treats one key of config.json, or several of one kind."""

    names: tuple[str, ...]
    takes: Size | Number | OneOf | str
    """The accepted values; a text if any value is accepted or a separate function checks them."""
    why: str = ""
    families: frozenset[str] = _ALL
    nullable: bool = False
    """null means the same as a missing key."""


_POSITIVE = 2**31 - 1
READ = (
    Key(("architectures",), "a list of one supported name", "the family"),
    Key(("model_type",), "the family's own: " + ", ".join(MODEL_TYPES.values()), "transformers goes by it"),
    Key(("num_hidden_layers",), Size(1, 4096)),
    Key(("hidden_size",), Size(2, 2**20)),
    Key(("intermediate_size",), Size(1, 2**24)),
    Key(("num_attention_heads",), Size(1, 2**14)),
    Key(("num_key_value_heads",), Size(1, 2**14), "divides the heads", nullable=True),
    Key(("head_dim",), Size(2, 2**14, even=True), "left out: 128 for Qwen3, else hidden_size / heads", nullable=True),
    Key(("vocab_size",), Size(2, 2**24)),
    Key(("max_position_embeddings",), Size(1, _POSITIVE)),
    Key(("rms_norm_eps",), Number(1e-30, 0.1), "left out: 1e-6"),
    Key(("tie_word_embeddings",), OneOf((False, True))),
    Key(
        ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"),
        "rope type `default`, or `llama3` with Megatron-core's constants",
        "refused where two of them disagree; every other rope type or key is refused by name",
    ),
    Key(("num_experts", "num_local_experts"), Size(1, 4096), "one thing under two names", _MOE),
    Key(("num_experts_per_tok",), Size(1, 4096), "1 only without norm_topk_prob", _MOE),
    Key(("moe_intermediate_size",), Size(1, 2**24), "", _MOE),
    Key(("norm_topk_prob",), OneOf((False, True)), "left out: false", _MOE),
)
"""Keys whose values become the `Architecture`."""

_NO = OneOf((False,))
_NONE = OneOf((None,))
_NONE_OR_FALSE = OneOf((None, False))
_ABSENT_OR_ZERO = OneOf((0, False))
FIXED = (
    Key(("hidden_act",), OneOf(("silu",)), "the activation"),
    Key(("attention_bias",), _NO, "no biases", _ALL - {QWEN2}),
    Key(("attention_bias", "qkv_bias"), OneOf((True,)), "Qwen2 has these biases always", frozenset({QWEN2})),
    Key(("qkv_bias",), _NO, "no biases", _ALL - {QWEN2}),
    Key(("mlp_bias", "bias", "use_bias", "qkv_proj_bias", "o_bias", "lm_head_bias"), _NO, "no biases"),
    Key(
        ("attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"),
        OneOf((0, False)),
        "the actor trains without dropout",
        nullable=True,
    ),
    Key(("attention_probs_dropout_prob", "hidden_dropout_prob"), OneOf((0, False)), "as above", nullable=True),
    Key(("use_sliding_window",), _NO, "no windows", nullable=True),
    Key(("sliding_window",), _NONE, "no windows", frozenset({LLAMA})),
    Key(("layer_types",), "`full_attention` for every layer", "no windows", nullable=True),
    Key(("partial_rotary_factor", "rotary_pct", "rotary_percent"), OneOf((1,)), "whole heads rotate", nullable=True),
    Key(("rope_interleaved", "use_mrope", "alibi", "use_alibi", "nope"), _NO, "positions", nullable=True),
    Key(("position_embedding_type",), OneOf(("rope",)), "positions", nullable=True),
    Key(("mrope_section", "no_rope_layers", "no_rope_layer_interval", "rotary_dim"), OneOf(([], None)), "positions"),
    Key(("attention_chunk_size", "num_kv_shared_layers", "cache_implementation"), _NONE, "attention"),
    Key(("attn_logit_softcapping", "final_logit_softcapping", "logit_softcap", "clip_qkv"), _NONE, "caps"),
    Key(("query_pre_attn_scalar", "attention_multiplier"), _NONE, "scores are scaled by head_dim ** -0.5"),
    Key(
        ("logits_scaling", "logit_scale", "residual_multiplier", "embedding_multiplier", "scale_emb", "scale_depth"),
        OneOf((1,)),
        "scaling multipliers of other families",
        nullable=True,
    ),
    Key(("use_qk_norm", "qk_layernorm", "qk_norm"), _NO, "query and key norms are Qwen3's", frozenset({LLAMA, QWEN2})),
    Key(
        ("use_qk_norm", "qk_layernorm", "qk_norm"),
        OneOf((True,)),
        "Qwen3 has these norms always",
        frozenset({QWEN3, QWEN3_MOE}),
    ),
    Key(("parallel_residual", "use_parallel_residual", "add_cross_attention", "is_decoder", "is_encoder_decoder"), _NO),
    Key(("is_causal",), OneOf((True,)), "every token sees those before it"),
    Key(("per_layer_config", "block_configs", "kv_sharing_modes"), _NONE, "every layer is alike"),
    Key(("text_config", "text_encoder", "vision_config", "decoder", "generator"), _NONE, "one model, of text"),
    Key(("chunk_size_feed_forward",), OneOf((0,))),
    Key(("decoder_sparse_step", "moe_layer_freq"), OneOf((1,)), "every layer has experts", _MOE),
    Key(("mlp_only_layers",), OneOf(([], None)), "every layer has experts", _MOE),
    Key(("scoring_func", "router_scoring_func"), OneOf(("softmax",)), "the router", _MOE, nullable=True),
    Key(("routed_scaling_factor", "n_group", "topk_group", "num_expert_group"), OneOf((1,)), "the router", _MOE, True),
    Key(("topk_method",), OneOf(("greedy",)), "the router", _MOE, nullable=True),
    Key(
        ("use_routing_bias", "router_bias", "router_jitter_noise", "swiglu_limit"),
        _ABSENT_OR_ZERO,
        "the router",
        _MOE,
        True,
    ),
    Key(
        ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"),
        _ABSENT_OR_ZERO,
        "no shared experts, no dense layers",
        nullable=True,
    ),
    Key(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"),
        _ABSENT_OR_ZERO,
        "a dense model",
        _DENSE,
        nullable=True,
    ),
    Key(
        ("attention_sink", "attention_sinks", "use_attention_sinks", "use_sinks", "num_sink_tokens"),
        _ABSENT_OR_ZERO,
        "no attention sinks",
        nullable=True,
    ),
    Key(
        ("num_mtp_layers", "num_mtp_modules", "mtp_num_layers", "use_mtp"),
        _ABSENT_OR_ZERO,
        "no heads that predict further tokens",
        nullable=True,
    ),
    Key(
        ("rope_local_base_freq", "local_rope_theta", "global_rope_theta", "rotary_emb_base", "rope_ratio"),
        _NONE_OR_FALSE,
        "positions, under names of older code",
    ),
    Key(("use_dynamic_ntk", "use_logn_attn", "dual_chunk_attention_config"), _NONE_OR_FALSE, "as above"),
    Key(("activation", "activation_function", "hidden_activation"), OneOf(("silu", "swiglu")), "", nullable=True),
    Key(("norm_type", "layernorm_type", "normalization"), OneOf(("rmsnorm", "rms_norm", "RMSNorm")), "", nullable=True),
    Key(("num_nextn_predict_layers", "q_lora_rank", "kv_lora_rank"), _ABSENT_OR_ZERO, "other families", nullable=True),
    Key(("output_router_logits",), _NO, "no auxiliary loss", _MOE),
    Key(("output_hidden_states", "output_attentions"), _NO, "outputs that nobody reads", nullable=True),
    Key(("return_dict", "use_return_dict"), OneOf((True,))),
    Key(
        ("quantization_config", "compression_config", "quantization"),
        _NONE,
        "quantized weights: dequantize the checkpoint first",
    ),
    Key(
        ("dtype", "torch_dtype"),
        OneOf(("float32", "bfloat16", "float16", "float64")),
        "how it is stored; model.dtype decides how it is computed",
        nullable=True,
    ),
    Key(("num_labels",), Size(0, 65536), "classification; transformers makes a table of so many names", nullable=True),
    Key(("auto_map",), OneOf((None, {})), "code of a model directory is never run"),
    Key(
        ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
        _NONE,
        "may name code on the Hub",
    ),
)
"""Keys whose only accepted value is what this code computes."""

LEFT = (
    Key(("initializer_range", "use_cache", "pretraining_tp"), "any", "changes no logits"),
    Key(("router_aux_loss_coef",), "any", "there is no auxiliary loss", _MOE),
    Key(("sliding_window",), "any", "use_sliding_window is false", _ALL - {LLAMA}),
    Key(("max_window_layers",), "any", "there are no windows"),
    Key(
        ("router_aux_loss_coef", "norm_topk_prob", "output_router_logits", "decoder_sparse_step"),
        "any",
        "a model without experts has no router",
        _DENSE,
    ),
    Key(
        ("init_std", "initializer_factor", "embed_init_std", "embedding_initializer_range", "init_device", "seed"),
        "any",
        "weights before training",
    ),
    Key(("rescale_prenorm_residual", "initializer_cutoff_factor"), "any", "as above"),
    Key(
        ("classifier_dropout", "classifier_dropout_prob", "classifier_bias", "classifier_activation"),
        "any",
        "classification",
    ),
    Key(("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"), "any", "classification"),
    Key(("summary_first_dropout", "summary_last_dropout"), "any", "classification"),
    Key(("bos_token_id", "eos_token_id"), "any", "the tokenizer decides"),
    Key(("pad_token_id",), "a row of the embedding, or null", "padding is never computed"),
    Key(("transformers_version", "_name_or_path", "name_or_path", "_commit_hash"), "any", "where it came from"),
    Key(("_attn_implementation_autoset", "tokenizer_class", "gradient_checkpointing"), "any", "changes no logits"),
    Key(("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"), "any", "there is no vision"),
    Key(("id2label", "label2id", "problem_type"), "any", "classification"),
)
"""Ignored keys: they change nothing that is computed here."""


def default_of(family: str, key: str, raw: Mapping[str, Any]) -> Any:
    """transformers' default for a key of `READ` that is missing or null; None if it is required."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    defaults: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "norm_topk_prob": False}
    if key == "num_key_value_heads":
        by_class = {QWEN3: 32, QWEN2: 32, QWEN3_MOE: 4}
        return by_class[family] if key not in raw and family in by_class else heads
    if key == "head_dim":
        return 128 if family == QWEN3 else hidden // heads if hidden and heads else None
    return defaults.get(key)


def read_keys(raw: Mapping[str, Any], family: str, path: Path) -> dict[str, Any]:
    """The value of every key of `READ` that has a plain range, with transformers' defaults filled in.

    Raises:
        UserError: a key is missing or has a wrong value.
    """
    values: dict[str, Any] = {}
    for key in READ:
        if family not in key.families or isinstance(key.takes, str):
            continue
        given = [name for name in key.names if name in raw and not (key.nullable and raw[name] is None)]
        for name in given:
            if not key.takes.fits(raw[name]):
                raise UserError(f"{path}: {name} = {shown(raw[name])}: must be {key.takes}")
        if len({raw[name] for name in given}) > 1:
            raise UserError(f"{path}: {' and '.join(given)} are one thing and disagree: {[raw[n] for n in given]}")
        value = raw[given[0]] if given else default_of(family, key.names[0], raw)
        if value is None:
            raise UserError(f"{path}: key '{key.names[0]}' is missing")
        if not key.takes.fits(value):
            raise UserError(f"{path}: {key.names[0]}, left out, is {value}: must be {key.takes}")
        values[key.names[0]] = value
    return values


def check_keys(raw: Mapping[str, Any], family: str, path: Path, known: Collection[str]) -> None:
    """Refuse every key that asks for something this code does not implement.

    Args:
        known: names that mean something to transformers' config class beside those of the tables.

    Raises:
        UserError: names the key, its value and what is supported.
    """
    listed = {name for key in (*READ, *FIXED, *LEFT) if family in key.families for name in key.names}
    for key in FIXED:
        if family not in key.families or isinstance(key.takes, str):
            continue
        for name in key.names:
            if name not in raw or (key.nullable and raw[name] is None) or key.takes.fits(raw[name]):
                continue
            why = f" ({key.why})" if key.why else ""
            raise UserError(f"{path}: {name} = {shown(raw[name])} is not supported; supported: {key.takes}{why}")
    _check_layer_types(raw, path)
    for name in raw:
        if name in listed:
            continue
        if name in known or name.startswith("_"):
            raise UserError(f"{path}: {plain(name)} = {shown(raw[name])} is not supported: leave the key out")
        if name in OTHER_FAMILIES and raw[name] not in _NOTHING:
            raise UserError(
                f"{path}: {name} = {shown(raw[name])} is not supported: a key of other families, which transformers"
                f" ignores in a {family}. If the model was trained without it, leave the key out"
            )


_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values that switch a feature off."""


def _check_layer_types(raw: Mapping[str, Any], path: Path) -> None:
    types = raw.get("layer_types")
    if types is None:
        return
    expected = ["full_attention"] * int(raw["num_hidden_layers"])
    if types != expected:
        raise UserError(
            f"{path}: layer_types = {shown(types)} is not supported; supported: full_attention for each of the"
            f" {len(expected)} layers"
        )


def table() -> str:
    """The three tables as Markdown, for docs/actor.md."""
    kinds: tuple[tuple[str, tuple[Key, ...], Callable[[Key], str]], ...] = (
        ("Read", READ, _takes),
        ("May only say what is computed; anything else is refused by name", FIXED, _takes),
        ("Left alone", LEFT, _takes),
    )
    lines: list[str] = []
    for title, keys, takes in kinds:
        lines += [f"### {title}", "", "| key | families | value | note |", "|---|---|---|---|"]
        for key in keys:
            names = ", ".join(f"`{name}`" for name in key.names)
            lines.append(f"| {names} | {_families(key)} | {takes(key)} | {key.why} |")
        lines.append("")
    lines += [
        f"Refused unless null, false, 0 or empty: {len(OTHER_FAMILIES)} further keys, of any causal language model that"
        " transformers has (`weights/other_families.py`).",
        "",
    ]
    return "\n".join(lines)


def _takes(key: Key) -> str:
    text = str(key.takes) if isinstance(key.takes, str | Size | Number) else f"`{key.takes}`".replace(" or ", "` or `")
    return text + (", or null" if key.nullable else "")


def _families(key: Key) -> str:
    if key.families == _ALL:
        return "all"
    short = {QWEN3: "Qwen3", QWEN3_MOE: "Qwen3-MoE", QWEN2: "Qwen2", LLAMA: "Llama"}
    return ", ".join(short[name] for name in SUPPORTED if name in key.families)
