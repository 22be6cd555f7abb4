"""What config.json may hold: keys that are read, keys that must have the one value computed here, harmless keys.

A key that changes the computation and is not read silently makes it another model. So a key of none of these lists is
refused by name if its value is on (not null, false, 0 or empty); `model.ignore_config_keys` is the way out. The price:
a harmless key that we have not met is refused too, at the start of a run and with that way out in the message. Tests
compare the lists with what transformers' own code reads while it builds and runs a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.types import UserError
from dppo_megatron.weights.json_files import plain, shown

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
_YES = OneOf((True,))
_NONE = OneOf((None,))
_ONE = OneOf((1,))
_OFF = OneOf((None, False, 0, "", [], {}))
"""Values that switch a feature off."""
FIXED = (
    Key(("hidden_act",), OneOf(("silu",)), "the activation"),
    Key(("activation",), OneOf(("silu", "swiglu")), "Falcon3's name for it", nullable=True),
    Key(("attention_bias",), _NO, "no biases", _ALL - {QWEN2}),
    Key(("attention_bias", "qkv_bias"), _YES, "Qwen2 has these biases always", frozenset({QWEN2})),
    Key(("mlp_bias",), _NO, "no biases"),
    Key(
        ("use_qk_norm", "qk_layernorm", "qk_norm"), _YES, "Qwen3 has these norms always", frozenset({QWEN3, QWEN3_MOE})
    ),
    Key(("attention_dropout",), OneOf((0, False)), "the actor trains without dropout", nullable=True),
    Key(("use_sliding_window",), _NO, "no windows", nullable=True),
    Key(("sliding_window",), _NONE, "no windows", frozenset({LLAMA})),
    Key(("layer_types",), "`full_attention` for every layer", nullable=True),
    Key(("partial_rotary_factor", "rotary_pct", "rotary_percent"), _ONE, "whole heads rotate", nullable=True),
    Key(("position_embedding_type",), OneOf(("rope",)), "positions", nullable=True),
    Key(("attention_chunk_size", "num_kv_shared_layers", "cache_implementation"), _NONE, "attention"),
    Key(("is_causal",), _YES, "every token sees those before it"),
    Key(("add_cross_attention", "is_decoder", "is_encoder_decoder"), _NO, "one decoder"),
    Key(("per_layer_config", "block_configs", "kv_sharing_modes"), _NONE, "every layer is alike"),
    Key(("text_config", "text_encoder", "vision_config", "decoder", "generator"), _NONE, "one model, of text"),
    Key(("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"), _NONE, "as above"),
    Key(("chunk_size_feed_forward",), OneOf((0,))),
    Key(("decoder_sparse_step",), _ONE, "every layer has experts", _MOE),
    Key(("mlp_only_layers",), OneOf(([], None)), "every layer has experts", _MOE),
    Key(("output_router_logits",), _NO, "no auxiliary loss", _MOE),
    Key(("output_hidden_states", "output_attentions"), _NO, "outputs that nothing reads", nullable=True),
    Key(("return_dict", "use_return_dict"), _YES),
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
    Key(("auto_map",), OneOf(({},)), "code of a model directory is never run"),
    Key(
        ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
        _NONE,
        "may name code on the Hub",
    ),
)
"""Keys whose only accepted value is what this code computes; `model.ignore_config_keys` does not reach them."""

LEFT = (
    Key(("initializer_range", "use_cache", "pretraining_tp", "gradient_checkpointing"), "any", "changes no logits"),
    Key(("_attn_implementation_autoset", "_flash_attn_2_enabled", "torchscript"), "any", "which kernel, not what"),
    Key(("router_aux_loss_coef",), "any", "there is no auxiliary loss"),
    Key(("norm_topk_prob", "output_router_logits", "decoder_sparse_step"), "any", "there is no router", _DENSE),
    Key(("sliding_window",), "any", "use_sliding_window is false", _ALL - {LLAMA}),
    Key(("max_window_layers",), "any", "there are no windows"),
    Key(("max_sequence_length", "seq_length", "model_max_length"), "any", "max_position_embeddings is read"),
    Key(("pad_token_id",), "a row of the embedding, or null", "padding is never computed"),
    Key(("tokenizer_class", "bos_token_id", "eos_token_id"), "any", "the tokenizer decides"),
    Key(("transformers_version", "_name_or_path", "name_or_path", "_commit_hash"), "any", "where it came from"),
    Key(("is_llama_config", "unsloth_version", "unsloth_fixed", "transformers.js_config"), "any", "programs' notes"),
    Key(("temperature", "top_p", "top_k", "typical_p", "do_sample"), "any", "rollout.sampling decides"),
    Key(("max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences"), "any", "as above"),
    Key(("repetition_penalty", "length_penalty", "diversity_penalty"), "any", "as above"),
    Key(
        ("id2label", "label2id", "problem_type", "classifier_dropout", "finetuning_task", "task_specific_params"),
        "any",
        "classification",
    ),
)
"""Ignored keys: they change nothing that is computed here."""
_TOKENS = re.compile(r".*_token_(ids?|index)")
"""Other special tokens, of any name."""


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


def check_keys(raw: Mapping[str, Any], family: str, path: Path, theirs: object, ignored: Collection[str] = ()) -> None:
    """Refuse every key that asks for something this code does not implement, or may.

    Args:
        theirs: transformers' config of the family with its defaults; a key with the name of any attribute, methods
            included, would replace it.
        ignored: `model.ignore_config_keys`.

    Raises:
        UserError: names the key, its value and what is supported.
    """
    for key in FIXED:
        if family not in key.families or isinstance(key.takes, str):
            continue
        for name in key.names:
            if name not in raw or (key.nullable and raw[name] is None) or key.takes.fits(raw[name]):
                continue
            why = f" ({key.why})" if key.why else ""
            raise UserError(f"{path}: {name} = {shown(raw[name])} is not supported; supported: {key.takes}{why}")
    _check_layer_types(raw, path)
    listed = {name for key in (*READ, *FIXED, *LEFT) if family in key.families for name in key.names}
    for name, value in raw.items():
        if name in listed or _TOKENS.fullmatch(name):
            continue
        if hasattr(theirs, name):
            if not OneOf((getattr(theirs, name),)).fits(value):
                raise UserError(f"{path}: {plain(name)} = {shown(value)} is not supported: leave the key out")
        elif not _OFF.fits(value) and name not in ignored:
            raise UserError(
                f"{path}: {plain(name)} = {shown(value)} is not supported: this key is not known here and may change"
                " what the model computes. If the model was trained without it, name it in model.ignore_config_keys"
            )


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
