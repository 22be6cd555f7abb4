"""What config.json may hold: keys that are read, keys that must have the value implemented here, harmless keys.

If a key changes the computation and is not read, another model is trained, without an error. So a key in none of the
lists is refused by name if it switches something on. Tests compare the lists with what transformers' own code reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dppo_megatron.types import UserError
from dppo_megatron.weights.json_files import plain, shown

LLAMA, QWEN2, QWEN3, QWEN3_MOE = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
QWEN2_MOE, MISTRAL, MIXTRAL = "Qwen2MoeForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"
GLM4, GLM4_MOE, DEEPSEEK = "Glm4ForCausalLM", "Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"
GEMMA3 = "Gemma3ForCausalLM"
MODEL_TYPES = {
    QWEN3: "qwen3",
    QWEN3_MOE: "qwen3_moe",
    QWEN2: "qwen2",
    QWEN2_MOE: "qwen2_moe",
    LLAMA: "llama",
    MISTRAL: "mistral",
    MIXTRAL: "mixtral",
    GLM4: "glm4",
    GLM4_MOE: "glm4_moe",
    DEEPSEEK: "deepseek_v3",
    GEMMA3: "gemma3_text",
}
"""Architectures with rows in the weight table of `mapping.py` -> the `model_type` by which transformers finds them."""
PROVIDED = "model.provider"
"""Stands for any family that a provider describes. The provider reads keys of its own, so only what no family here
supports is refused."""

_ALL = frozenset(MODEL_TYPES)
_LATENT = frozenset({DEEPSEEK})
_GEMMA = frozenset({GEMMA3})
SIGMOID = frozenset({GLM4_MOE, DEEPSEEK})
"""Mixtures like DeepSeek-V3: sigmoid routers, shared experts, dense first layers."""
PARTIAL = frozenset({GLM4, GLM4_MOE, PROVIDED})
"""Families that may rotate only a part of each head's dimensions."""
_QWEN2_MOE = frozenset({QWEN2_MOE})
_MOE = _QWEN2_MOE | SIGMOID | {QWEN3_MOE, MIXTRAL}


class Accepted(NamedTuple):
    """The values that a key accepts, as words for messages and as a test."""

    wanted: str
    fits: Callable[[Any], bool]


def _size(least: int, most: int, *, even: bool = False) -> Accepted:
    """A whole number in a range, but not True or 4.0."""
    wanted = f"{'an even' if even else 'a whole'} number from {least} to {most}"
    return Accepted(wanted, lambda value: type(value) is int and least <= value <= most and not (even and value % 2))


def _number(least: float, most: float) -> Accepted:
    """A number in a range. It is compared as it is: an int such as 10**400 cannot be converted to a float."""
    wanted = f"a number from {least:g} to {most:g}"
    return Accepted(wanted, lambda value: type(value) in (int, float) and least <= value <= most)


def _one_of(*values: Any) -> Accepted:
    """One of these values exactly: 1 is not True, but 1 is 1.0."""
    wanted = " or ".join(shown(value) for value in values)
    return Accepted(
        wanted, lambda value: any((type(value) is bool) == (type(v) is bool) and value == v for v in values)
    )


def _or_null(accepted: Accepted) -> Accepted:
    return Accepted(f"{accepted.wanted} or null", lambda value: value is None or accepted.fits(value))


@dataclass(frozen=True, slots=True)
class Key:
    """How this code treats one key of config.json, or several that have the same rule."""

    names: tuple[str, ...]
    takes: Accepted
    why: str = ""
    families: frozenset[str] = _ALL
    nullable: bool = False
    """null means the same as a missing key."""
    optional: bool = False
    """The key may be missing: transformers has a default, which depends only on the family and the other keys."""

    def holds_for(self, family: str) -> bool:
        """Whether the rule applies to a config.json of this family."""
        return family in self.families or (family == PROVIDED and self.families == _ALL)


_POSITIVE = 2**31 - 1
READ = (
    Key(("num_hidden_layers",), _size(1, 4096)),
    Key(("hidden_size",), _size(2, 2**20)),
    Key(("intermediate_size",), _size(1, 2**24)),
    Key(("num_attention_heads",), _size(1, 2**14)),
    Key(("num_key_value_heads",), _size(1, 2**14), "divides the heads", nullable=True, optional=True),
    Key(("head_dim",), _size(2, 2**14, even=True), "", _ALL - _LATENT, nullable=True, optional=True),
    Key(("q_lora_rank",), _or_null(_size(1, 2**20)), "", _LATENT, optional=True),
    Key(("kv_lora_rank",), _size(1, 2**20), "", _LATENT),
    Key(("qk_nope_head_dim",), _size(1, 2**14), "", _LATENT),
    Key(("qk_rope_head_dim",), _size(2, 2**14, even=True), "", _LATENT),
    Key(("v_head_dim",), _size(1, 2**14), "", _LATENT),
    Key(("vocab_size",), _size(2, 2**24)),
    Key(("max_position_embeddings",), _size(1, _POSITIVE)),
    Key(("rms_norm_eps",), _number(1e-30, 0.1), optional=True),
    Key(("tie_word_embeddings",), _one_of(False, True), optional=True),
    Key(("num_experts", "num_local_experts"), _size(1, 4096), "synonyms", _MOE - SIGMOID - _QWEN2_MOE),
    Key(("num_experts",), _size(1, 4096), "", _QWEN2_MOE),
    Key(("shared_expert_intermediate_size",), _size(1, 2**24), "", _QWEN2_MOE),
    Key(("qkv_bias",), _one_of(False, True), "", _QWEN2_MOE, optional=True),
    Key(("n_routed_experts", "num_local_experts"), _size(1, 4096), "synonyms", SIGMOID),
    Key(("num_experts_per_tok",), _size(1, 4096), "1 only without norm_topk_prob", _MOE),
    Key(("moe_intermediate_size",), _size(1, 2**24), "", _MOE - {MIXTRAL}),
    Key(("norm_topk_prob",), _one_of(False, True), "", _QWEN2_MOE | {QWEN3_MOE}, optional=True),
    Key(("n_shared_experts",), _size(1, 4096), "", SIGMOID, optional=True),
    Key(("first_k_dense_replace",), _size(0, 4096), "", SIGMOID, optional=True),
    Key(("routed_scaling_factor",), _number(1e-3, 1e3), "", SIGMOID, optional=True),
    Key(("n_group",), _size(1, 4096), "", SIGMOID, optional=True),
    Key(("topk_group",), _size(1, 4096), "", SIGMOID, optional=True),
    Key(("num_nextn_predict_layers", "num_mtp_layers"), _size(0, 64), "", SIGMOID, optional=True),
    Key(("attention_bias",), _one_of(False, True), "", PARTIAL, optional=True),
    Key(("use_qk_norm",), _one_of(False, True), "", frozenset({GLM4_MOE}), optional=True),
    # transformers' default is a window of 4096, so a file without this key means a model with windows
    Key(("sliding_window",), _one_of(None), "no windows", frozenset({MISTRAL}), optional=True),
    Key(("sliding_window",), _size(1, _POSITIVE), "", _GEMMA, optional=True),
    Key(("query_pre_attn_scalar",), _number(1e-3, 1e6), "", _GEMMA, optional=True),
)
"""Keys whose values, as transformers reads them, become the `Architecture`."""

_NO = _one_of(False)
_YES = _one_of(True)
_NONE = _one_of(None)
_ONE = _one_of(1)
_OFF = _one_of(None, False, 0, "", [], {})
FIXED = (
    Key(("hidden_act",), _one_of("silu"), "the activation", _ALL - _GEMMA),
    Key(("hidden_activation", "hidden_act"), _one_of("gelu_pytorch_tanh"), "the activation", _GEMMA),
    Key(("attn_logit_softcapping", "final_logit_softcapping"), _NONE, "logits are not capped", _GEMMA),
    Key(("use_bidirectional_attention",), _NO, "attention is causal", _GEMMA, nullable=True),
    Key(("sliding_window_pattern", "_sliding_window_pattern"), _size(1, 4096), "layer_types is read instead", _GEMMA),
    Key(("rope_local_base_freq",), _number(1.0, 1e30), "with rope_parameters", _GEMMA),
    Key(("cache_implementation",), _one_of(None, "hybrid"), "attention", _GEMMA),
    Key(("activation",), _one_of("silu", "swiglu"), "Falcon3's name of the activation", nullable=True),
    Key(("attention_bias",), _NO, "no biases", _ALL - PARTIAL - {QWEN2}),
    Key(("attention_bias", "qkv_bias"), _YES, "Qwen2 always has these biases", frozenset({QWEN2})),
    Key(("mlp_bias",), _NO, "no biases"),
    Key(
        ("use_qk_norm", "qk_layernorm", "qk_norm"), _YES, "Qwen3 always has these norms", frozenset({QWEN3, QWEN3_MOE})
    ),
    Key(
        ("attention_dropout",),
        _one_of(0, False),
        "the actor trains without dropout; to accept that, name the key in model.ignore_config_keys",
        nullable=True,
    ),
    Key(("use_sliding_window",), _NO, "no windows", nullable=True),
    Key(("sliding_window",), _NONE, "no windows", frozenset({LLAMA, MIXTRAL})),
    Key(("router_jitter_noise",), _one_of(0), "the actor trains without noise", frozenset({MIXTRAL})),
    Key(("partial_rotary_factor",), _ONE, "whole heads rotate", _ALL - PARTIAL, nullable=True),
    Key(("rotary_pct", "rotary_percent"), _ONE, "whole heads rotate", nullable=True),
    Key(("position_embedding_type",), _one_of("rope"), "rotary positions", nullable=True),
    Key(("attention_chunk_size", "num_kv_shared_layers"), _NONE, "attention"),
    Key(("cache_implementation",), _NONE, "attention", _ALL - _GEMMA),
    Key(("is_causal",), _YES, "attention is causal"),
    Key(("add_cross_attention", "is_decoder", "is_encoder_decoder"), _NO, "a single decoder"),
    Key(("per_layer_config", "block_configs", "kv_sharing_modes"), _NONE, "all layers are alike"),
    Key(("text_config", "text_encoder", "vision_config", "decoder", "generator"), _NONE, "a single text model"),
    Key(("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"), _NONE, "a text model"),
    Key(("chunk_size_feed_forward",), _one_of(0)),
    Key(("decoder_sparse_step",), _ONE, "every layer has experts", _MOE),
    Key(("mlp_only_layers",), _one_of([], None), "every layer has experts", _MOE),
    Key(("output_router_logits",), _NO, "no auxiliary loss", _MOE),
    Key(("norm_topk_prob",), _YES, "Megatron-core's sigmoid router has no other mode", SIGMOID, nullable=True),
    Key(("rope_interleave",), _YES, "rotary pairs are interleaved", _LATENT, nullable=True),
    Key(("head_dim", "qk_head_dim"), _size(1, 2**14), "derived from the other sizes", _LATENT, nullable=True),
    Key(("scoring_func",), _one_of("sigmoid"), "how routers score", SIGMOID),
    Key(("topk_method",), _one_of("noaux_tc"), "how routers choose", SIGMOID),
    Key(("moe_layer_freq", "ep_size"), _ONE, "every layer after the dense ones has experts", SIGMOID),
    Key(("output_hidden_states", "output_attentions"), _NO, "outputs that are never read", nullable=True),
    Key(("return_dict", "use_return_dict"), _YES),
    Key(
        ("quantization_config", "compression_config", "quantization"),
        _NONE,
        "quantized weights: dequantize the checkpoint first",
    ),
    Key(
        ("dtype", "torch_dtype"),
        _one_of("float32", "bfloat16", "float16", "float64"),
        "the dtype of the files; model.dtype is that of the computation",
        nullable=True,
    ),
    Key(("num_labels",), _size(0, 65536), "classification; transformers makes a table of that size", nullable=True),
    Key(("auto_map",), _one_of({}), "code of a model directory is never run"),
    Key(
        ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
        _NONE,
        "may name code on the Hub",
    ),
)
"""Keys that are accepted only with the value that this code implements."""

_IGNORED_BY_REASON = {
    "checked by functions of their own": "architectures model_type layer_types pad_token_id partial_rotary_factor"
    " rope_parameters rope_scaling rope_theta original_max_position_embeddings",
    "changes no logits": "initializer_range use_cache pretraining_tp gradient_checkpointing",
    "it chooses kernels, not results": "_attn_implementation_autoset _flash_attn_2_enabled torchscript",
    "there is no auxiliary loss": "router_aux_loss_coef aux_loss_alpha seq_aux",
    "in a dense model there is no router": "norm_topk_prob output_router_logits decoder_sparse_step",
    "there are no windows, or use_sliding_window is false": "sliding_window max_window_layers",
    "max_position_embeddings is read": "max_sequence_length seq_length model_max_length",
    "the tokenizer decides": "tokenizer_class bos_token_id eos_token_id",
    "origin of the file": "transformers_version _name_or_path name_or_path _commit_hash",
    "notes of other programs": "is_llama_config unsloth_version unsloth_fixed transformers.js_config",
    "rollout.sampling decides": "temperature top_p top_k typical_p do_sample max_length min_length num_beams"
    " num_beam_groups num_return_sequences repetition_penalty length_penalty diversity_penalty",
    "classification": "id2label label2id problem_type classifier_dropout finetuning_task task_specific_params",
}
IGNORED = {name for names in _IGNORED_BY_REASON.values() for name in names.split()}
"""Keys that are ignored unless `READ` or `FIXED` has them for the family: they change nothing that is computed here."""
_TOKENS = re.compile(r".*_token_(ids?|index)")
"""Keys of other special tokens, also ignored."""


def read_values(config: Any, raw: Mapping[str, Any], family: str, path: Path) -> dict[str, Any]:
    """The value of every key of `READ`, from transformers' `config` of `raw`. Raises UserError for a default of
    transformers that is out of range."""
    values: dict[str, Any] = {}
    for key in READ:
        if family not in key.families:
            continue
        name = key.names[0]
        value = getattr(config, name, None)
        # as in transformers' modelling code, which for Mixtral also does this if the file has null
        if name == "head_dim" and value is None and (name not in raw or family == MIXTRAL):
            value = config.hidden_size // config.num_attention_heads
        if not key.takes.fits(value):
            raise UserError(f"{path}: {name} is read as {shown(value)} by transformers: must be {key.takes.wanted}")
        values[name] = value
    return values


def check_keys(
    raw: Mapping[str, Any],
    family: str,
    path: Path,
    defaults: object,
    ignored: Collection[str] = (),
    read: Collection[str] = (),
) -> None:
    """Refuse every key that requires, or may require, something that this code does not implement.

    Args:
        defaults: transformers' config of the family with its defaults. A key of config.json replaces the attribute of
            that name, even a method.
        ignored: `model.ignore_config_keys`.
        read: the keys that a provider has read.

    Raises:
        UserError: names the key, its value and what is supported; or a key of `READ` is missing or out of range.
    """
    if family != PROVIDED:
        _check_sizes(raw, family, path)
        _check_layer_types(raw, family, path)
    for key in FIXED:
        if not key.holds_for(family):
            continue
        for name in key.names:
            if name not in raw or (key.nullable and raw[name] is None) or key.takes.fits(raw[name]):
                continue
            if name == "attention_dropout" and name in ignored:
                continue
            why = f" ({key.why})" if key.why else ""
            raise UserError(f"{path}: {name} = {shown(raw[name])} is not supported; supported: {key.takes.wanted}{why}")
    listed = IGNORED | set(read) | {name for key in (*READ, *FIXED) if key.holds_for(family) for name in key.names}
    unread = "this key is not known here and"
    if family == PROVIDED:
        unread = "model.provider's class does not read this key, which"
    for name, value in raw.items():
        has_default = hasattr(defaults, name)
        if name in listed or _TOKENS.fullmatch(name) or (has_default and _one_of(getattr(defaults, name)).fits(value)):
            continue
        if has_default and family != PROVIDED:
            raise UserError(f"{path}: {plain(name)} = {shown(value)} is not supported: leave the key out")
        # a known attribute differs from its default here: for a provider's family that is refused even if it is off
        if (has_default or not _OFF.fits(value)) and name not in ignored:
            raise UserError(
                f"{path}: {plain(name)} = {shown(value)} is not supported: {unread} may change"
                " what the model computes. If the model was trained without it, name it in model.ignore_config_keys"
            )


def _check_sizes(raw: Mapping[str, Any], family: str, path: Path) -> None:
    for key in READ:
        if family not in key.families:
            continue
        present = [name for name in key.names if name in raw and not (key.nullable and raw[name] is None)]
        for name in present:
            if not key.takes.fits(raw[name]):
                raise UserError(f"{path}: {name} = {shown(raw[name])}: must be {key.takes.wanted}")
        if len({raw[name] for name in present}) > 1:
            raise UserError(f"{path}: {' and '.join(present)} mean the same but disagree: {[raw[n] for n in present]}")
        if not present and not key.optional:
            raise UserError(f"{path}: key '{key.names[0]}' is missing")


def _check_layer_types(raw: Mapping[str, Any], family: str, path: Path) -> None:
    types, count = raw.get("layer_types"), int(raw["num_hidden_layers"])
    if types is None:
        return
    known = list(LAYER_TYPES) if family == GEMMA3 else [FULL]
    if not isinstance(types, list) or len(types) != count or any(one not in known for one in types):
        wanted = f"{' or '.join(known)} for each of the {count} layers"
        raise UserError(f"{path}: layer_types = {shown(types)} is not supported; supported: {wanted}")


_DEFAULT_THETA = 10_000.0  # transformers'
_THETA = _number(1.0, 1e30)  # frequencies are computed in float32
_FACTOR, _CONTEXT = _number(1.0, 1e6), _size(1, _POSITIVE)
_ABOVE_0 = _number(1e-6, 1e6)
_ROPE_KINDS: dict[str, tuple[dict[str, Accepted], dict[str, Accepted]]] = {
    "default": ({}, {}),
    "linear": ({"factor": _FACTOR}, {}),
    "llama3": (
        {"factor": _FACTOR, "low_freq_factor": _ABOVE_0, "high_freq_factor": _ABOVE_0}
        | {"original_max_position_embeddings": _CONTEXT},
        {},
    ),
    "yarn": (
        {"factor": _FACTOR, "original_max_position_embeddings": _CONTEXT},
        dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _ABOVE_0)
        | {"truncate": _one_of(False, True)},
    ),
}
"""rope_type -> the keys that it requires, and the keys that it may have. `dynamic` and `longrope` are not supported:
they rotate a token differently as its sequence grows, so cached keys become wrong, and the engines disagree on them."""
_ORDERED = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
_ROPE_DEFAULTS = {"beta_fast": 32, "beta_slow": 1}
_PART, _PARTS = "partial_rotary_factor", _number(0.01, 1.0)
_ROPE_SOURCES = ("rope_parameters", "rope_scaling")
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
"""Gemma's layer types -> the key of config.json for the base of their position embedding, and transformers' default."""


def read_ropes(raw: Mapping[str, Any], family: str, path: Path) -> dict[str, dict[str, Any]]:
    """The parameters of the position embedding for each type of layer (see `_read_rope`); most families have one type.
    Raises UserError if two keys disagree, or for a type, key or value that is not implemented in the actor."""
    if family != GEMMA3:
        return {FULL: _read_rope(raw, family, path)}
    by_type = raw.get("rope_parameters") or {}
    if not isinstance(by_type, dict) or not set(by_type) <= set(LAYER_TYPES):
        wanted = f"an object each for {' and '.join(LAYER_TYPES)}"
        raise UserError(f"{path}: rope_parameters = {shown(by_type)}: must have {wanted}")
    ropes = {}
    for kind, (key, theta) in LAYER_TYPES.items():
        view = {name: raw[name] for name in ("original_max_position_embeddings", _PART) if name in raw}
        view["rope_parameters"] = parameters = by_type.get(kind)
        view["rope_scaling"] = raw.get("rope_scaling") if kind == FULL else None
        if key in raw or not (isinstance(parameters, dict) and "rope_theta" in parameters):
            view["rope_theta"] = _checked(key, raw.get(key, theta), _THETA, path)
        ropes[kind] = _read_rope(view, family, path)
    return ropes


def _read_rope(raw: Mapping[str, Any], family: str, path: Path) -> dict[str, Any]:
    """The parameters of the position embedding that transformers would build from `raw`: rope_type, rope_theta and the
    scaling's. partial_rotary_factor is only checked.

    transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`. If a file has all of them,
    transformers uses only `rope_scaling`. With YaRN in one and plain RoPE in the other, the two models differ by 0.5
    nats per token, so contradictions are refused rather than resolved.
    """
    top = _checked("rope_theta", raw["rope_theta"], _THETA, path) if "rope_theta" in raw else None
    ropes = [_read_rope_of(name, raw, top, family, path) for name in _ROPE_SOURCES if raw.get(name)]
    if len(ropes) > 1 and ropes[0] != ropes[1]:
        first, second = (f"{name} = {shown(raw[name])}" for name in _ROPE_SOURCES)
        raise UserError(
            f"{path}: {first} and {second} disagree; transformers would only use rope_scaling. Remove one of them"
        )
    rope = ropes[0] if ropes else {"rope_type": "default", "rope_theta": top or _DEFAULT_THETA}
    if top is not None and rope["rope_theta"] != top:
        source, inner = next(name for name in _ROPE_SOURCES if raw.get(name)), rope["rope_theta"]
        raise UserError(f"{path}: rope_theta = {top} and {source}.rope_theta = {inner} disagree; remove one")
    # at the top level this key overrides the one inside the object, and plain RoPE ignores it
    key = "original_max_position_embeddings"
    if key in raw and (isinstance(raw[key], bool) or raw[key] != rope.get(key)):
        raise UserError(f"{path}: {key} = {shown(raw[key])} is not supported; supported: {shown(rope.get(key))}")
    parts = [part[_PART] for part in (raw, *(raw.get(name) or {} for name in _ROPE_SOURCES)) if _PART in part]
    for part in parts:
        _checked(_PART, part, _PARTS, path)
    if len(set(parts)) > 1:
        raise UserError(f"{path}: {_PART} has {len(parts)} values that disagree: {shown(parts)}; keep one")
    return rope


def _read_rope_of(
    source: str, raw: Mapping[str, Any], top_theta: float | None, family: str, path: Path
) -> dict[str, Any]:
    given = raw[source]
    if not isinstance(given, dict):
        raise UserError(f"{path}: {source} = {shown(given)}: expected an object")
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) != kind:
        raise UserError(f"{path}: {source}.rope_type and {source}.type disagree: {shown(given)}; remove one")
    if not isinstance(kind, str) or kind not in _ROPE_KINDS:
        supported = ", ".join(_ROPE_KINDS)
        raise UserError(f"{path}: {source}.rope_type = {shown(kind)} is not supported; supported: {supported}")
    needed, optional = _ROPE_KINDS[kind]
    theta = given.get("rope_theta", _DEFAULT_THETA if top_theta is None else top_theta)
    rope = {"rope_type": kind, "rope_theta": _checked(f"{source}.rope_theta", theta, _THETA, path)}
    if missing := sorted(set(needed) - set(given)):
        raise UserError(f"{path}: {source}: rope type {kind} needs {', '.join(missing)}")
    for key, value in given.items():
        if key in ("rope_type", "type", "rope_theta") or (key in optional and value is None):
            continue
        if key in needed or key in optional:
            rope[key] = _checked(f"{source}.{key}", value, (needed | optional)[key], path)
        elif key != _PART or not (family in PARTIAL or _ONE.fits(value)):
            raise UserError(f"{path}: {source}.{plain(key)} = {shown(value)} is not supported with rope type {kind}")
    if kind in _ORDERED:
        low, high = _ORDERED[kind]
        if (_ROPE_DEFAULTS | rope)[low] >= (_ROPE_DEFAULTS | rope)[high]:
            raise UserError(f"{path}: {source} = {shown(given)}: {low} must be below {high}")
    return rope


def _checked(name: str, value: Any, allowed: Accepted, path: Path) -> Any:
    if not allowed.fits(value):
        raise UserError(f"{path}: {name} = {shown(value)}: must be {allowed.wanted}")
    return value
