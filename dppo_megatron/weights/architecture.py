"""Reads the architecture of a Hugging Face checkpoint from its config.json, with the values of transformers' config
class. A key that this code does not implement is refused by name (`config_keys.py`)."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from dppo_megatron.config.rollout import RolloutConfig
from dppo_megatron.config.schema import ActorConfig, LayoutConfig, LoraConfig
from dppo_megatron.config.server_args import read_split
from dppo_megatron.texts import one_line
from dppo_megatron.types import ExpertChoices, UserError
from dppo_megatron.weights.config_keys import (
    FULL,
    GEMMA3,
    GLM4,
    MODEL_TYPES,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    check_keys,
    read_ropes,
    read_values,
)
from dppo_megatron.weights.json_files import plain, read_object, shown
from dppo_megatron.weights.layer_parts import (
    PROJECTIONS,
    Experts,
    Gemma,
    Latent,
    Rope,
    make_rope,
    read_experts,
    read_gemma,
    read_latent,
)
from dppo_megatron.weights.pipeline import Stages, check_optimizers, split_layers


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of a model: B A x alpha / rank is added to the output of each target for the input x."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Projections by their Hugging Face names, in the order of `PROJECTIONS`."""

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}, {', '.join(self.targets)}"


_POST_NORMS = {GEMMA3: ("post_attention", "post_feedforward"), GLM4: ("post_self_attn", "post_mlp")}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder-only transformer, by their usual names."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope: Rope
    norm_eps: float
    tied_embeddings: bool
    qk_norm: bool
    """RMS norm of each head's queries and keys (Qwen3, GLM, Gemma)."""
    qkv_bias: bool
    """Bias of the query, key and value projections (Qwen2, GLM)."""
    experts: Experts | None = None
    latent: Latent | None = None
    gemma: Gemma | None = None
    post_norms: tuple[str, ...] = ()
    """The checkpoint's names of the norms after attention and feed-forward (Gemma, GLM-4)."""
    is_glm4: bool = False
    """Gate and up are one tensor in the checkpoint, and rotary pairs are interleaved."""
    lora: Lora | None = None
    prediction_layers: int = 0
    """Number of layers for multi-token prediction, the last ones of the checkpoint; they are not read."""
    provided_names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(key of `mapping.kinds`, the checkpoint's names), from `model.provider`; other keys have `mapping.py`'s."""

    def with_adapters(self, config: LoraConfig) -> Architecture:
        """The same model with the adapters of `actor.lora`; unchanged if it is off. Raises UserError for a target that
        the model does not have, or that PEFT could not load."""
        if not config.rank:
            return self
        known, takes_experts = PROJECTIONS if self.latent is None else self.latent.projections, config.experts
        setting = f"actor.lora.targets = [{', '.join(config.targets)}]"
        if takes_experts and self.experts is None:
            raise UserError(f"actor.lora.experts = true: {self.name} has no experts; leave it at false")
        if takes_experts and self.experts and (self.experts.shared_gate or self.experts.projections[0] not in known):
            raise UserError(f"actor.lora.experts = true: PEFT does not find the experts of {self.name}; use false")
        if "all-linear" in config.targets:
            targets = [name for name in known if self.experts is None or takes_experts or name not in PROJECTIONS[4:]]
        else:
            targets = config.targets
        if unknown := sorted(set(targets) - set(known)):
            raise UserError(f"{setting}: {unknown[0]}: must be one of {', '.join(known)}, or all-linear")
        of_experts = [name for name in PROJECTIONS[4:] if name in targets]
        if of_experts and self.experts is not None and not takes_experts:
            raise UserError(f"{setting}: {of_experts[0]} belongs to experts here; set actor.lora.experts = true")
        if self.is_glm4 and {"gate_proj", "up_proj"} & set(targets):
            raise UserError(f"{setting}: gate_proj and up_proj are one tensor in {self.name}; name other projections")
        if not targets:
            raise UserError(f"{setting}: names no projection; use all-linear")
        if takes_experts and ("gate_proj" in targets) != ("up_proj" in targets):
            one = "an expert's gate_proj and up_proj are one tensor in transformers"
            raise UserError(f"{setting}: {one}; name both or none")
        return replace(self, lora=Lora(config.rank, config.alpha, tuple(name for name in known if name in targets)))

    @property
    def expert_choices(self) -> ExpertChoices | None:
        """The size of the routers' choices for one token; None for a dense model."""
        e = self.experts
        return None if e is None else ExpertChoices(self.num_layers, e.per_token, e.count, e.dense_layers)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer (counted from 0) is a mixture of experts."""
        return self.experts is not None and layer >= self.experts.dense_layers

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token sees in this layer (counted from 0), itself included; None: all tokens before it."""
        return self.gemma.window if self.gemma and self.gemma.windowed[layer] else None

    def rope_of(self, layer: int) -> Rope:
        """The position embedding of this layer (counted from 0)."""
        return self.gemma.local_rope if self.gemma and self.gemma.windowed[layer] else self.rope

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def heads(self) -> tuple[int, int]:
        """Sizes of a head's keys and values."""
        return self.head_dim, self.value_dim

    @property
    def has_layer_keys(self) -> bool:
        """Whether each layer has its own keys in Megatron's sharded state dict, as in every mixture: with one key for
        all layers, torch would compare each expert with half of the others in every save and load."""
        return self.experts is not None

    def check_layout(self, actor: ActorConfig) -> None:
        """Raise `UserError` unless every rank gets whole heads, layers and experts."""
        layout = actor.layout
        tp = layout.tensor_parallel
        where = f"actor.layout.tensor_parallel = {tp}"
        if self.num_heads % tp:
            raise UserError(f"{where}: the model's {self.num_heads} attention heads do not divide by it")
        if (groups := self.num_kv_heads) % tp and tp % groups:
            raise UserError(f"{where}: must divide the model's {groups} key-value heads or be a multiple of them")
        columns = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if columns % tp:  # with fewer key-value heads than ranks, Megatron splits the rows of qkv regardless of heads
            raise UserError(
                f"{where}: the {columns} rows of the model's queries, keys and values ({self.num_heads} + 2 x"
                f" {self.num_kv_heads} heads of {self.head_dim}) do not divide by it"
            )
        sizes = {} if self.has_experts(0) else {"feed-forward size": self.ffn_size}
        if self.experts is not None:
            sizes["shared experts' feed-forward size"] = self.experts.shared_ffn_size
        if self.latent is not None:
            if tp > 1 and not layout.sequence_parallel and self.latent.query_rank:
                needs = "latent attention with tensor_parallel > 1 needs it: Megatron-core would add up the ranks'"
                raise UserError(f"actor.layout.sequence_parallel = false: {needs} equal gradients of the queries' norm")
            sizes["query rank"] = self.latent.query_rank
            sizes["key-value rank plus rotary dimensions"] = self.latent.rank + self.latent.rope_dim
        for what, size in sizes.items():
            if size % tp:
                raise UserError(f"{where}: the model's {what} {size} does not divide by it")
        stages = split_layers(self.num_layers, actor)
        if layout.expert_parallel > 1:
            self._check_stages(stages)
        self._check_experts(layout)
        check_optimizers(stages, actor)

    def check_servers(self, rollout: RolloutConfig) -> None:
        """Raise `UserError` unless a server's workers get whole heads; both engines duplicate key-value heads."""
        split = read_split(rollout.servers.args)
        if rollout.engine != "hf" and self.num_heads % split.heads:
            how = f"tensor parallel {split.tensor}"
            how += f" in {split.attention} attention groups" if split.attention > 1 else ""
            heads = f"the model's {self.num_heads} attention heads"
            raise UserError(f"rollout.servers.args: {how}: {heads} do not divide by it")

    def check_bf16_layers(self, actor: ActorConfig) -> None:
        """Raise `UserError` if the bfloat16 layers at one end of an FP8 model do not fit a pipeline stage."""
        layers, per_stage = actor.fp8_bf16_layers, self.num_layers // actor.layout.pipeline_parallel
        if layers > per_stage:
            raise UserError(f"actor.fp8_bf16_layers = {layers}: a pipeline stage has only {per_stage} layers")

    def _check_stages(self, stages: Stages) -> None:
        """Refuse a stage with only dense layers where experts have an optimizer of their own: there it would have no
        step to save."""
        mixtures, layer = [0] * len(stages), 0
        for chunk in range(len(stages[0])):
            for stage, sizes in enumerate(stages):
                mixtures[stage] += sum(self.has_experts(layer + index) for index in range(sizes[chunk]))
                layer += sizes[chunk]
        if self.experts is not None and self.experts.dense_layers and 0 in mixtures:
            raise UserError(
                f"actor.layout.pipeline_parallel = {len(stages)}: stage {mixtures.index(0)} would have no layer with"
                f" experts, as the model's first {self.experts.dense_layers} have none; give it more layers"
            )

    def _check_experts(self, layout: LayoutConfig) -> None:
        ep, tp = layout.expert_parallel, layout.tensor_parallel
        etp = layout.expert_tensor_parallel or tp
        if self.experts is None:
            if ep > 1 or layout.expert_tensor_parallel:
                both = f"expert_parallel = {ep}, expert_tensor_parallel = {layout.expert_tensor_parallel}"
                raise UserError(f"actor.layout.{both}: {self.name} has no experts; leave them at 1 and 0")
            return
        count, size = self.experts.count, self.experts.ffn_size
        if count % ep:
            raise UserError(f"actor.layout.expert_parallel = {ep}: the model's {count} experts do not divide by it")
        setting = f"actor.layout.expert_tensor_parallel = {etp}"
        if size % etp:
            raise UserError(f"{setting}: the experts' feed-forward size {size} does not divide by it")
        if tp > 1 and not layout.sequence_parallel:
            needs = "a mixture-of-experts model with tensor_parallel > 1 needs it"
            raise UserError(f"actor.layout.sequence_parallel = false: {needs}")
        if etp != tp and ep == 1:
            raise UserError(
                f"{setting} beside tensor_parallel = {tp} needs expert_parallel > 1: without it Megatron-core reduces"
                " the experts' gradients over the ranks of the rest of the model"
            )

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank holds the same number of rows."""
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel


def read_architecture(
    hf_path: str | Path, given_as: str = "model.hf_path =", ignored: Collection[str] = ()
) -> Architecture:
    """Read config.json of a Hugging Face checkpoint directory exactly as transformers does, or refuse it (UserError).

    Args:
        given_as: the setting or option that named the directory, for messages.
        ignored: `model.ignore_config_keys`, unknown keys that change nothing.
    """
    raw, path = read_config(hf_path, given_as)
    family = _family(raw, path)
    model_type = MODEL_TYPES[family]
    check_keys(raw, family, path, CONFIG_MAPPING[model_type](), ignored)
    ropes = read_ropes(raw, family, path)
    config = as_transformers_reads(raw, model_type, ropes, path)
    values = read_values(config, raw, family, path)
    read = assembled(family, raw.get("pad_token_id"), values, config, ropes, path)
    return replace(
        read,
        qk_norm=family in (QWEN3, QWEN3_MOE, GEMMA3) or values.get("use_qk_norm", False),
        qkv_bias=family == QWEN2 or values.get("qkv_bias", values.get("attention_bias", False)),
        experts=read_experts(values, family, path) if "num_experts_per_tok" in values else None,
        gemma=read_gemma(values, config, ropes, path) if family == GEMMA3 else None,
        post_norms=_POST_NORMS.get(family, ()),
        is_glm4=family == GLM4,
    )


def assembled(
    name: str, pad: Any, values: Mapping[str, Any], config: Any, ropes: Mapping[str, Mapping[str, Any]], path: Path
) -> Architecture:
    """What every family has: a dense decoder of the sizes in `values` (by the names of `config_keys.READ`), with
    transformers' `config` and `read_ropes`' parameters.

    Raises:
        UserError: heads do not divide into groups, or the padding token `pad` is outside the vocabulary.
    """
    heads, groups, vocab_size = (values[key] for key in ("num_attention_heads", "num_key_value_heads", "vocab_size"))
    if heads % groups:
        raise UserError(f"{path}: num_key_value_heads = {groups} does not divide num_attention_heads = {heads}")
    # transformers passes pad_token_id to the embedding, which refuses an index out of range
    if pad is not None and not (type(pad) is int and -vocab_size <= pad < vocab_size):
        raise UserError(f"{path}: pad_token_id = {shown(pad)}: must be one of the vocabulary's {vocab_size} tokens")
    latent = read_latent(values, config, path) if values.get("kv_lora_rank") else None
    head_dim = latent.nope_dim + latent.rope_dim if latent else values["head_dim"]
    # with YaRN, published config.json files state the context length before the extension
    original = ropes[FULL]["original_max_position_embeddings"] if ropes[FULL]["rope_type"] == "yarn" else 0
    return Architecture(
        name=name,
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_size=values["intermediate_size"],
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=max(values["max_position_embeddings"], int(original * ropes[FULL].get("factor", 1))),
        rope=make_rope(config, latent.rope_dim if latent else head_dim, ropes, path),
        norm_eps=values["rms_norm_eps"],
        tied_embeddings=bool(values["tie_word_embeddings"]),
        qk_norm=False,
        qkv_bias=False,
        latent=latent,
        prediction_layers=values.get("num_nextn_predict_layers", 0),
    )


def read_config(hf_path: str | Path, given_as: str) -> tuple[dict[str, Any], Path]:
    """config.json of a checkpoint directory, and its path. Raises UserError if it is missing or no JSON object."""
    path = Path(hf_path) / "config.json"
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        hint = f"; '{hf_path}/hf' is one" if os.path.exists(path.parent / "hf" / "config.json") else ""
        raise UserError(f"{given_as} '{hf_path}': holds no config.json, so it is no Hugging Face checkpoint{hint}")
    return read_object(path), path


def architecture_name(raw: Mapping[str, Any], path: Path) -> str:
    """The one name in a config.json's `architectures`. Raises `UserError` if there is another number of them."""
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UserError(f"{path}: architectures = {shown(names)}: must be a list of one name")
    return names[0]


def _family(raw: Mapping[str, Any], path: Path) -> str:
    name, model_type = architecture_name(raw, path), raw.get("model_type")
    if name not in MODEL_TYPES:
        more = f"; supported: {', '.join(MODEL_TYPES)}, and what model.provider describes (docs/extending.md)"
        if name.startswith(("Qwen3Next", "Qwen3_5")):  # no rows describe linear attention
            more = "; docs/scope.md has what is missing for it"
        if name == "Gemma3ForConditionalGeneration":
            more = f", as it reads images too; save its language model alone, as {GEMMA3}"
        raise UserError(f"{path}: architecture {plain(name)} is not supported{more}")
    if model_type != MODEL_TYPES[name]:
        needed = f"which needs {MODEL_TYPES[name]}"
        raise UserError(f"{path}: model_type = {shown(model_type)} does not fit architectures = {name}, {needed}")
    return name


def as_transformers_reads(
    raw: Mapping[str, Any], model_type: str, ropes: Mapping[str, Mapping[str, Any]], path: Path
) -> Any:
    """transformers' config of `raw`. Raises `UserError` if transformers refuses it, or reads other `ropes` from it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(raw)))
    except Exception as error:  # validators raise classes of their own, and TypeErrors
        raise UserError(f"{path}: transformers refuses it: {one_line(str(error) or type(error).__name__)}") from None
    for kind, rope in ropes.items():
        theirs = config.rope_parameters[kind] if len(ropes) > 1 else config.rope_parameters or {}
        read = {key: value for key, value in theirs.items() if value is not None}
        if {key: value for key, value in read.items() if key not in ("type", "partial_rotary_factor")} != rope:
            raise UserError(f"{path}: the rope parameters {shown(rope)} are read as {shown(read)} by transformers")
    return config
