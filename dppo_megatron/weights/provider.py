"""`model.provider`: a model family without rows in `mapping.py`, described by an mbridge class (sizes, weight names).

Only the description is used: layers and splits are this project's own, since mbridge's need Transformer Engine and
cannot read packs. No description is trusted: before a run, an evaluation or a conversion the first layers are compared
with transformers' (`steps/first_layers.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING

from dppo_megatron.children import start_python
from dppo_megatron.config.plugins import is_plugin, load_function
from dppo_megatron.config.schema import ModelConfig
from dppo_megatron.progress import progress
from dppo_megatron.texts import one_line
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import (
    Architecture,
    architecture_name,
    as_transformers_reads,
    assembled,
    read_architecture,
    read_config,
)
from dppo_megatron.weights.config_keys import FULL, PROVIDED, check_keys, read_ropes
from dppo_megatron.weights.json_files import plain, shown
from dppo_megatron.weights.layer_parts import Experts
from dppo_megatron.weights.mapping import CORRECTION_BIAS, EXPERT_BIAS, kinds

_OURS = "decoder.layers."
_FIXED = {"normalization": "RMSNorm", "activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False}
_SIZES = {"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size", "kv_channels": "head_dim"}
_SIZES |= {"num_query_groups": "num_key_value_heads", "layernorm_epsilon": "rms_norm_eps"}
_SIZES |= {"qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim"}
_SIZES |= {key: key for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "v_head_dim")}
"""Fields of the class's TransformerConfig -> the value that our layers have; -> config.json's names for them."""
_READ = re.compile(
    "|".join((*_FIXED, *_SIZES)) + "|qk_layernorm|add_qkv_bias|num_moe_experts"
    "|moe_(ffn_hidden_size|layer_freq|shared_expert_(intermediate_size|gate))"
    "|moe_router_(topk|score_function|pre_softmax|topk_scaling_factor|num_groups|group_topk|enable_expert_bias)"
)
"""The fields above, and those that `_architecture` reads beside them."""
_IGNORED = re.compile(
    "rotary_.*|rope_type|mscale.*|beta_.*|original_max_position_embeddings|mtp_.*|.*_fusion|persist_layer_norm"
    "|attention_backend|attention_dropout|disable_bf16_.*|use_cpu_initialization|moe_(aux_loss_coeff|z_loss_coeff)"
    "|moe_(grouped_gemm|shared_expert_overlap|token_dispatcher_type|permute_fusion|enable_deepep)"
    "|moe_router_(bias_update_rate|load_balancing_type|dtype)|moe_per_layer_logging|.*cuda_graph.*|.*init_method.*"
)
"""Fields that only change how the model is computed or trained, or that are read from elsewhere: positions, layers for
multi-token prediction."""
_TOLERANCE = 2e-5
"""Largest difference of a log-probability from transformers'. Seed-OSS-36B's layer differs by 2e-6 in float32, one with
another epsilon in its norm by more than 3e-5, one with a wrong bias, head or position by more than 1e-2."""


def model_architecture(model: ModelConfig, given_as: str = "model.hf_path =") -> Architecture:
    """The architecture of the checkpoint in `model.hf_path` (named by the setting or option `given_as`), from this
    project's tables or from a provider. Raises UserError as `read_architecture` does, or if the provider is missing or
    describes a model that cannot train here."""
    if not model.provider:
        return read_architecture(model.hf_path, given_as, model.ignore_config_keys)
    raw, path = read_config(model.hf_path, given_as)
    name, model_type = architecture_name(raw, path), raw.get("model_type")
    setting = f"model.provider = {model.provider}"
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(f"{setting}: transformers has no model_type {shown(model_type)} ({path}) to compare with")
    if not hasattr(CONFIG_MAPPING[model_type], "rope_parameters"):
        raise UserError(f"{setting}: {path} is of {name}, which is not a text-only model with rotary positions")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Apex and CUDA graphs, which are not used
        bridge_class = _bridge_class(model.provider, model_type, setting)
        ropes = read_ropes(raw, PROVIDED, path)
        config = as_transformers_reads(raw, model_type, ropes, path)
        recorded = _AsIn4(config)
        bridge = _bridge(bridge_class, recorded, setting)
    read = recorded.all_names() | {"num_nextn_predict_layers"}  # those layers are left out here
    from_read_keys = CONFIG_MAPPING[model_type].from_dict({key: raw[key] for key in raw if key in read})
    check_keys(raw, PROVIDED, path, from_read_keys, model.ignore_config_keys, read)
    _check_windows(config, path)
    architecture = _architecture(name, bridge.config, config, ropes, path, setting)
    return replace(architecture, provided_names=tuple(_names(bridge, architecture, setting)))


class NotComparedError(UserError):
    """The first layers could not be compared with transformers' on this machine."""


def check_first_layers(model: ModelConfig, embedded: bool = False) -> str:
    """Compare the first layers with transformers', in a child process that builds them on the CPU. Everything that
    computes with a provider's layers calls this first.

    Args:
        embedded: compare the embedded engine's layers too; in an evaluation no metric compares them with an actor's.

    Returns a line for the log.

    Raises:
        UserError: the layers do not compute what transformers' do.
        NotComparedError: they could not be compared.
    """
    setting = f"model.provider = {model.provider}"
    with progress("comparing the first layers with transformers'"):
        child = start_python(
            "dppo_megatron.steps.first_layers",  # by name: it needs an actor, which this package may not import
            json.dumps([asdict(model), embedded]),
            str(os.getpid()),
            variables={"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        output, errors = child.communicate()
    try:
        result = json.loads(output)
    except ValueError:
        reason = one_line((errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1])
        if child.returncode < 0:
            reason = f"the child process was killed by signal {-child.returncode} (out of memory?)"
        problem = "the first layers could not be compared with transformers'"
        raise NotComparedError(f"{setting}: {problem}: {reason}") from None
    if "error" in result:
        raise UserError(result["error"])
    layers, difference = "the first layer", result["difference"]
    if result["layers"] > 1:
        layers = f"the first {result['layers']} of {result['of']} layers"
    if not difference <= _TOLERANCE:
        raise UserError(
            f"{setting}: log-probabilities after {layers} differ by up to {difference:.2g} from transformers' (allowed:"
            f" {_TOLERANCE:g}): the class describes another model, or one whose layers are not implemented here"
        )
    return f"{setting}: {layers} compared with transformers': log-probabilities differ by at most {difference:.1e}"


class _AsIn4:
    """transformers' config with the names that version 4 used, which records the attributes that are read."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # special methods that copying looks up
            raise AttributeError(name)
        self._read.add(name)
        rope = self._config.rope_parameters or {}
        if name == "rope_theta":
            return rope["rope_theta"]
        if name == "rope_scaling":
            return None if rope["rope_type"] == "default" else rope
        return getattr(self._config, name)

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def all_names(self) -> set[str]:
        """The attributes that were read, under every name that they may have in config.json."""
        synonyms = self._config.attribute_map.items()
        return self._read | {name for pair in synonyms for name in pair if self._read & set(pair)}


def _bridge_class(provider: str, model_type: str, setting: str) -> Any:
    try:
        from mbridge.core import LLMBridge
        from mbridge.core.bridge import _MODEL_REGISTRY
    except ImportError as error:
        raise UserError(f"{setting}: {error}; `pip install mbridge==0.15.1 einops`") from None
    if is_plugin(provider):
        plugin = load_function("model.provider", provider)
        if not (isinstance(plugin, type) and issubclass(plugin, LLMBridge)):
            raise UserError(f"{setting}: is not a subclass of mbridge.core.LLMBridge")
        return plugin
    if provider != "mbridge":
        raise UserError(f"{setting}: must be mbridge, or module:Class")
    if model_type not in _MODEL_REGISTRY:
        known = f"only for {', '.join(sorted(_MODEL_REGISTRY))}. Name your own class as module:Class"
        raise UserError(f"{setting}: mbridge has no class for model_type {model_type}, {known}")
    return _MODEL_REGISTRY[model_type]


def _bridge(bridge_class: Any, config: _AsIn4, setting: str) -> Any:
    from mbridge.core.parallel_states import ParallelStates

    config_class = bridge_class.TransformerConfigClass

    def make_config(**values: Any) -> Any:
        """Leaves out a field that later versions of Megatron-core have renamed; positions are read elsewhere."""
        return config_class(**{key: value for key, value in values.items() if key != "max_position_embeddings"})

    try:
        # a subclass with its own table, because a bridge with tied embeddings changes its class's table for all others
        names = dict(bridge_class._DIRECT_MAPPING)
        own = {"TransformerConfigClass": staticmethod(make_config), "_DIRECT_MAPPING": names}
        subclass = type(bridge_class.__name__, (bridge_class,), own)
        bridge = subclass(config, dtype=torch.float32, parallel_states=ParallelStates())
        base = bridge._build_base_config()
        changed = [
            field.name
            for field in fields(base)
            if getattr(bridge.config, field.name) != getattr(base, field.name)
            and not _READ.fullmatch(field.name)
            and not _IGNORED.fullmatch(field.name)
        ]
    except (Exception, SystemExit) as error:  # third-party code, written for other versions
        raise UserError(f"{setting}: {_failure(bridge_class, error)}") from None
    for name in changed:
        value = getattr(bridge.config, name)
        raise UserError(f"{setting}: {bridge_class.__name__} has {name} = {value}, which layers here do not have")
    return bridge


def _failure(bridge_class: Any, error: BaseException) -> str:
    return f"{bridge_class.__name__} fails with {type(error).__name__}: {one_line(str(error))}"


def _check_windows(config: Any, path: Path) -> None:
    """Refuse windows: the first layers are compared on sequences shorter than any window, so it would not show them."""
    types = getattr(config, "layer_types", None)
    is_on = getattr(config, "use_sliding_window", True) if hasattr(type(config), "use_sliding_window") else True
    window = getattr(config, "sliding_window", None) if is_on else None
    if any(one != FULL for one in types or []) or (types is None and window is not None):
        both = f"sliding_window = {shown(window)}, layer_types = {shown(types)}"
        raise UserError(f"{path}: {both} is not supported with model.provider: every token sees all tokens before it")


def _architecture(name: str, theirs: Any, config: Any, ropes: Any, path: Path, setting: str) -> Architecture:
    """From the bridge's TransformerConfig; positions, vocabulary and tying are from transformers' config."""
    for key, ours in _FIXED.items():
        if getattr(theirs, key) != ours:
            raise UserError(f"{setting}: has {key} = {getattr(theirs, key)}; layers here have {ours}")
    values = {key: getattr(theirs, field, None) for field, key in _SIZES.items()}
    values |= {key: getattr(config, key) for key in ("vocab_size", "max_position_embeddings", "tie_word_embeddings")}
    values["num_nextn_predict_layers"] = getattr(config, "num_nextn_predict_layers", 0) or 0
    dense = assembled(name, config.pad_token_id, values, config, ropes, path)
    return replace(
        dense,
        qk_norm=theirs.qk_layernorm and dense.latent is None,
        qkv_bias=theirs.add_qkv_bias,
        experts=_experts(theirs, setting) if theirs.num_moe_experts else None,
    )


def _experts(theirs: Any, setting: str) -> Experts:
    frequency, layers = theirs.moe_layer_freq, theirs.num_layers
    mixtures = list(frequency) if isinstance(frequency, list) else [int(n % frequency == 0) for n in range(layers)]
    dense = mixtures.index(1) if 1 in mixtures else layers
    if mixtures != [0] * dense + [1] * (layers - dense) or dense == layers:
        raise UserError(f"{setting}: has moe_layer_freq = {frequency}; only the first layers may be dense here")
    is_sigmoid = theirs.moe_router_score_function == "sigmoid"
    if is_sigmoid != bool(theirs.moe_router_enable_expert_bias):
        raise UserError(f"{setting}: here sigmoid routers have moe_router_enable_expert_bias, and others have not")
    return Experts(
        count=theirs.num_moe_experts,
        per_token=theirs.moe_router_topk,
        ffn_size=theirs.moe_ffn_hidden_size or theirs.ffn_hidden_size,
        normalize_weights=is_sigmoid or not theirs.moe_router_pre_softmax,
        is_sigmoid=is_sigmoid,
        scale=float(theirs.moe_router_topk_scaling_factor or 1.0),
        groups=theirs.moe_router_num_groups or 1,
        groups_per_token=theirs.moe_router_group_topk or 1,
        shared_ffn_size=theirs.moe_shared_expert_intermediate_size or 0,
        shared_gate=theirs.moe_shared_expert_gate,
        dense_layers=dense,
    )


def _theirs(key: str, layer: str, expert: str) -> str:
    """mbridge's name of a weight.

    Example: "decoder.layers.mlp.experts.experts.linear_fc1.weight", 3, 7
    -> "decoder.layers.3.mlp.experts.linear_fc1.weight7"
    """
    if not key.startswith(_OURS):
        return key
    inside = key.removeprefix(_OURS)
    if inside.startswith("mlp.experts."):
        inside = inside.replace("experts.experts.", "experts.") + expert
    return f"{_OURS}{layer}.{inside}"


def _names(bridge: Any, architecture: Architecture, setting: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each key with the checkpoint's names. Raises UserError for names that are no strings or no patterns."""
    for key in kinds(architecture):
        name = _theirs(key, "{layer}", "{expert}")
        try:
            # mbridge formats the number into the names without looking at it, so "{layer}" gives patterns
            patterns = bridge._weight_name_mapping_mcore_to_hf(name)
        except (Exception, SystemExit) as error:  # third-party code
            reason = _failure(type(bridge), error)
            raise UserError(f"{setting}: of {name}, {reason} (names may not depend on the numbers in it)") from None
        axes = set(re.findall(r"{(.*?)}", name))
        if not patterns or any(not isinstance(p, str) or set(re.findall(r"{(.*?)}", p)) != axes for p in patterns):
            raise UserError(f"{setting}: {type(bridge).__name__} names {name} {plain(str(patterns))}")
        if key.endswith(EXPERT_BIAS) and not patterns[0].endswith(CORRECTION_BIAS):
            problem = f"only names that end in {CORRECTION_BIAS} stay in float32"
            raise UserError(f"{setting}: names {name} {patterns[0]}, but {problem}")
        yield key, tuple(patterns)
