"""A family without rows in `mapping.py`, as a class of mbridge describes it: its sizes, and its names for weights.

So whoever has written such a class for another trainer brings his family along. Its layers are still this project's
own, since mbridge's need Transformer Engine and read no packs. So nothing that a class says is believed: the names must
fit the checkpoint, the splits must be those of `mapping.py`, and before a run, an evaluation or a conversion the first
layers are compared with transformers' (`steps/first_layers.py`).

mbridge 0.15.1 is written for transformers 4; `_AsIn4` gives its classes the names that transformers 5 has moved.
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
    as_transformers_reads,
    check_sizes,
    positions_of,
    read_architecture,
    read_config,
)
from dppo_megatron.weights.config_keys import FULL, PROVIDED, check_keys, read_ropes
from dppo_megatron.weights.json_files import plain, shown
from dppo_megatron.weights.layer_parts import Experts, make_rope, read_latent
from dppo_megatron.weights.mapping import CORRECTION_BIAS, EXPERT_BIAS, kinds, split, table

_OURS = "decoder.layers."
_TAKEN = re.compile(
    "num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels|layernorm_epsilon"
    "|qk_layernorm|add_qkv_bias|num_moe_experts|moe_(ffn_hidden_size|layer_freq|shared_expert_(intermediate_size|gate))"
    "|moe_router_(topk|score_function|pre_softmax|topk_scaling_factor|num_groups|group_topk|enable_expert_bias)"
    "|(q|kv)_lora_rank|qk_head_dim|qk_pos_emb_head_dim|v_head_dim|normalization|activation_func|gated_linear_unit"
    "|add_bias_linear"
)
"""Fields of a class's TransformerConfig that become the `Architecture`, or must have the one value that layers have."""
_HOW = re.compile(
    "rotary_.*|rope_type|mscale.*|beta_.*|original_max_position_embeddings|mtp_.*|.*_fusion|persist_layer_norm"
    "|attention_backend|attention_dropout|disable_bf16_.*|use_cpu_initialization|moe_(aux_loss_coeff|z_loss_coeff)"
    "|moe_(grouped_gemm|shared_expert_overlap|token_dispatcher_type|permute_fusion|enable_deepep)"
    "|moe_router_(bias_update_rate|load_balancing_type|dtype)|moe_per_layer_logging|.*cuda_graph.*|.*init_method.*"
)
"""Those that say how it is computed or trained, or what is read elsewhere: positions, layers that predict several
tokens."""


_TOLERANCE = 2e-5
"""Of a log-probability: Seed-OSS-36B's layer differs by 2e-6 in float32; another norm's epsilon by more than 3e-5, a
wrong bias, head or position by more than 1e-2."""


def model_architecture(model: ModelConfig, given_as: str = "model.hf_path =") -> Architecture:
    """The architecture of the checkpoint in `model.hf_path`, from the rows of this project or a provider.

    Args:
        given_as: the setting or option that named the directory, for messages.

    Raises:
        UserError: see `read_architecture`; or the provider is not there, or does not describe what can be trained here.
    """
    if not model.provider:
        return read_architecture(model.hf_path, given_as, model.ignore_config_keys)
    raw, path = read_config(model.hf_path, given_as)
    names, model_type = raw.get("architectures"), raw.get("model_type")
    said = f"model.provider = {model.provider}"
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f"{path}: architectures = {shown(names)}: must be a list of one name")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"{said}: transformers has no model_type {shown(model_type)} of {path}, with which its layers could be"
            " compared"
        )
    if not hasattr(CONFIG_MAPPING[model_type], "rope_parameters"):
        raise UserError(f"{said}: {path} is of {names[0]}, which is no model of text alone with rotary positions")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Apex and graphs, which are not used
        bridge_class = _bridge_class(model.provider, model_type, said)
        ropes = read_ropes(raw, PROVIDED, path)
        config = as_transformers_reads(raw, model_type, ropes, path)
        seen = _AsIn4(config)
        bridge = _bridge(bridge_class, seen, said)
    read = seen.all_names() | {"num_nextn_predict_layers"}  # those layers are left out here
    without_others = CONFIG_MAPPING[model_type].from_dict({key: raw[key] for key in raw if key in read})
    check_keys(raw, PROVIDED, path, without_others, model.ignore_config_keys, read)
    _check_windows(config, path)
    architecture = _architecture(names[0], bridge.config, config, ropes, path, said)
    architecture = replace(architecture, provided_names=tuple(_names(bridge, architecture, said)))
    _check_splits(bridge, architecture, said)
    return architecture


class NotComparedError(UserError):
    """Whether the first layers compute what transformers' do could not be found out here."""


def check_first_layers(model: ModelConfig, embedded: bool = False) -> str:
    """Compare the first layers with transformers', in a process of its own that builds them here, on the CPU. Whatever
    computes with layers that a provider describes begins with it, and a conversion where it can be done.

    Args:
        embedded: the embedded engine's layers too, which no metric holds against an actor's in an evaluation.

    Returns:
        A line for the log.

    Raises:
        UserError: the layers compute something else than transformers'.
        NotComparedError: they could not be compared.
    """
    said = f"model.provider = {model.provider}"
    with progress("comparing the first layers with transformers'"):
        child = start_python(
            "dppo_megatron.steps.first_layers",  # by its name: it needs an actor, which nothing here may know
            json.dumps([asdict(model), embedded]),
            str(os.getpid()),
            variables={"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        answer, errors = child.communicate()
    try:
        found = json.loads(answer)
    except ValueError:
        last = one_line((errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1])
        if child.returncode < 0:
            last = f"its process was killed by signal {-child.returncode} (memory?)"
        raise NotComparedError(f"{said}: the first layers could not be compared with transformers': {last}") from None
    if "error" in found:
        raise UserError(found["error"])
    line = f"the first {found['layers']} of {found['of']} layers" if found["layers"] > 1 else "the first layer"
    if not found["difference"] <= _TOLERANCE:
        raise UserError(
            f"{said}: log-probabilities behind {line} differ by up to {found['difference']:.2g} from transformers'"
            f" (at most {_TOLERANCE:g}): its class describes another model, or one whose layers are not built here"
        )
    return f"{said}: {line} compared with transformers': log-probabilities differ by at most {found['difference']:.1e}"


class _AsIn4:
    """transformers' config with what version 4 called by other names, and a record of what was read."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of Python's own, as it copies
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
        """Of what was read, those that config.json may have for it."""
        twice = self._config.attribute_map.items()
        return self._read | {one for pair in twice for one in pair if self._read & set(pair)}


def _bridge_class(provider: str, model_type: str, said: str) -> Any:
    try:
        from mbridge.core import LLMBridge
        from mbridge.core.bridge import _MODEL_REGISTRY
    except ImportError as error:
        raise UserError(f"{said}: {error}; `pip install mbridge==0.15.1 einops`") from None
    if is_plugin(provider):
        found = load_function("model.provider", provider)
        if not (isinstance(found, type) and issubclass(found, LLMBridge)):
            raise UserError(f"{said}: is no class of mbridge.core.LLMBridge")
        return found
    if provider != "mbridge":
        raise UserError(f"{said}: must be mbridge, or module:Class")
    if model_type not in _MODEL_REGISTRY:
        raise UserError(
            f"{said}: mbridge has no class for model_type {model_type}; it has {', '.join(sorted(_MODEL_REGISTRY))}."
            " Name one of your own as module:Class"
        )
    return _MODEL_REGISTRY[model_type]


def _bridge(bridge_class: Any, config: _AsIn4, said: str) -> Any:
    from mbridge.core.parallel_states import ParallelStates

    made = bridge_class.TransformerConfigClass

    def known(**values: Any) -> Any:
        """Without what later versions of Megatron-core call otherwise; positions are read elsewhere."""
        return made(**{key: value for key, value in values.items() if key != "max_position_embeddings"})

    try:
        # a model with tied embeddings writes into its class's table, which the next model would read
        own = {"TransformerConfigClass": staticmethod(known), "_DIRECT_MAPPING": dict(bridge_class._DIRECT_MAPPING)}
        ours = type(bridge_class.__name__, (bridge_class,), own)
        bridge = ours(config, dtype=torch.float32, parallel_states=ParallelStates())
        base = bridge._build_base_config()
        differ = [
            field.name
            for field in fields(base)
            if getattr(bridge.config, field.name) != getattr(base, field.name)
            and not _TAKEN.fullmatch(field.name)
            and not _HOW.fullmatch(field.name)
        ]
    except (Exception, SystemExit) as error:  # code of others, written for other versions
        raise UserError(f"{said}: {_failed(bridge_class, error)}") from None
    if differ:
        value = getattr(bridge.config, differ[0])
        raise UserError(f"{said}: {bridge_class.__name__} has {differ[0]} = {value}, which layers here do not have")
    return bridge


def _failed(bridge_class: Any, error: BaseException) -> str:
    return f"{bridge_class.__name__} fails with {type(error).__name__}: {one_line(str(error))}"


def _check_windows(config: Any, path: Path) -> None:
    """The first layers are compared on sequences that are shorter than any window."""
    types = getattr(config, "layer_types", None)
    is_on = getattr(config, "use_sliding_window", True) if hasattr(type(config), "use_sliding_window") else True
    window = getattr(config, "sliding_window", None) if is_on else None
    if any(one != FULL for one in types or []) or (types is None and window is not None):
        raise UserError(
            f"{path}: sliding_window = {shown(window)}, layer_types = {shown(types)} is not supported with"
            " model.provider: every token sees those before it"
        )


def _architecture(name: str, theirs: Any, config: Any, ropes: Any, path: Path, said: str) -> Architecture:
    """From the bridge's TransformerConfig; positions, vocabulary and tying from transformers' config."""
    fixed = {"normalization": "RMSNorm", "activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False}
    for key, ours in fixed.items():
        if getattr(theirs, key) != ours:
            raise UserError(f"{said}: has {key} = {getattr(theirs, key)}; layers here have {ours}")
    sizes = {"num_attention_heads": theirs.num_attention_heads, "num_key_value_heads": theirs.num_query_groups}
    check_sizes({"pad_token_id": config.pad_token_id}, sizes | {"vocab_size": config.vocab_size}, path)
    latent = None
    if getattr(theirs, "kv_lora_rank", None):
        of_latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        mcore = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        values = {key: getattr(theirs, own) for key, own in zip(of_latent, mcore, strict=True)}
        latent = read_latent(sizes | values, config, path)
    head_dim = latent.nope_dim + latent.rope_dim if latent else theirs.kv_channels
    return Architecture(
        name=name,
        num_layers=theirs.num_layers,
        hidden_size=theirs.hidden_size,
        ffn_size=theirs.ffn_hidden_size,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_query_groups,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_positions=positions_of(config.max_position_embeddings, ropes[FULL]),
        rope=make_rope(config, latent.rope_dim if latent else head_dim, ropes, path),
        norm_eps=theirs.layernorm_epsilon,
        tied_embeddings=bool(config.tie_word_embeddings),
        qk_norm=theirs.qk_layernorm and latent is None,
        qkv_bias=theirs.add_qkv_bias,
        experts=_experts(theirs, said) if theirs.num_moe_experts else None,
        latent=latent,
        prediction_layers=getattr(config, "num_nextn_predict_layers", 0) or 0,
    )


def _experts(theirs: Any, said: str) -> Experts:
    frequency, layers = theirs.moe_layer_freq, theirs.num_layers
    mixtures = list(frequency) if isinstance(frequency, list) else [int(n % frequency == 0) for n in range(layers)]
    dense = mixtures.index(1) if 1 in mixtures else layers
    if mixtures != [0] * dense + [1] * (layers - dense) or dense == layers:
        raise UserError(f"{said}: has moe_layer_freq = {frequency}; here the first layers may be dense, and no other")
    is_sigmoid = theirs.moe_router_score_function == "sigmoid"
    if is_sigmoid != bool(theirs.moe_router_enable_expert_bias):
        raise UserError(
            f"{said}: has routers by {theirs.moe_router_score_function} with moe_router_enable_expert_bias ="
            f" {theirs.moe_router_enable_expert_bias}; here those by sigmoid have that bias, and others none"
        )
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


def _names(bridge: Any, architecture: Architecture, said: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each key with the checkpoint's names. Raises UserError for names that are none, or not one pattern."""
    for key in kinds(architecture):
        name = _theirs(key, "{layer}", "{expert}")
        try:
            # its tables put the number into the text, whatever it is
            found = bridge._weight_name_mapping_mcore_to_hf(name)
        except (Exception, SystemExit) as error:  # code of others
            why = _failed(type(bridge), error)
            raise UserError(f"{said}: of {name}, {why} (names may not depend on the numbers in it)") from None
        numbers = set(re.findall(r"{(.*?)}", name))
        if not found or any(not isinstance(one, str) or set(re.findall(r"{(.*?)}", one)) != numbers for one in found):
            raise UserError(f"{said}: {type(bridge).__name__} names {name} {plain(str(found))}")
        if key.endswith(EXPERT_BIAS) and not found[0].endswith(CORRECTION_BIAS):
            raise UserError(
                f"{said}: names {name} {found[0]}, but only one that ends in {CORRECTION_BIAS} is kept exact"
            )
        yield key, tuple(found)


def _check_splits(bridge: Any, architecture: Architecture, said: str) -> None:
    """The bridge's own functions must split a tensor into those of the checkpoint as `mapping.split` does."""
    own = type(bridge)._weight_to_hf_format.__module__ != "mbridge.core.bridge"
    generator = torch.Generator().manual_seed(0)
    for key, (shape, names) in kinds(architecture).items():
        if len(names) == 1 and not own:
            continue
        full = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)  # bytes: matrices may be large
        name = _theirs(key, "0", "0")
        try:
            found = bridge._weight_to_hf_format(name, full)[1]
        except (Exception, SystemExit) as error:  # code of others
            raise UserError(f"{said}: of {name}, {_failed(type(bridge), error)}") from None
        ours = split(_of_some_layer(key, architecture), full, architecture)
        if len(found) != len(ours) or any(not torch.equal(one, other) for one, other in zip(found, ours, strict=True)):
            raise UserError(
                f"{said}: {type(bridge).__name__} divides {name} into {', '.join(names)} in another way than this"
                " program, which trains"
            )


def _of_some_layer(key: str, architecture: Architecture) -> str:
    """The key as the table has it: of a mixture, that of the first layer that has it."""
    numbered = (f"{_OURS}{layer}.{key.removeprefix(_OURS)}" for layer in range(architecture.num_layers))
    return next(one for one in (key, *numbered) if one in table(architecture))
