"""config.json is read as transformers reads it, or refused by name; the lists of what it may hold are true.

The independent source is transformers itself: its config classes, and the attributes that its modelling code is seen
to read while it builds and runs a model.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import REPOSITORY, settings, write_job_files
from support.tiny import FAMILIES, write_model
from support.transformers_reading import same_as_transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.config_keys import (
    DEEPSEEK,
    FIXED,
    GEMMA3,
    GLM4,
    GLM4_MOE,
    IGNORED,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    MODEL_TYPES,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    READ,
    check_keys,
)
from dppo_megatron.workbench.cli import main

ARCHITECTURE = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "qwen2": QWEN2, "llama3": LLAMA}
ARCHITECTURE |= {"mistral": MISTRAL, "mixtral": MIXTRAL, "glm4_moe": GLM4_MOE, "deepseek_v3": DEEPSEEK}
ARCHITECTURE |= {"gemma3": GEMMA3, "qwen2_moe": QWEN2_MOE, "glm4": GLM4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_model(tmp_path_factory.mktemp(family), family=family) for family in FAMILIES}


def _with(model: Path, tmp_path: Path, changes: dict[str, Any], drop: tuple[str, ...] = ()) -> Path:
    raw = json.loads((model / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key not in drop}))
    return tmp_path


def _listed(family: str) -> set[str]:
    return IGNORED | {name for key in (*READ, *FIXED) if family in key.families for name in key.names}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_the_config_class_is_in_the_tables(family: str) -> None:
    """A new version of transformers that adds a field fails here; at run time only its default is accepted."""
    name = ARCHITECTURE[family]
    fields = {field.name for field in dataclasses.fields(CONFIG_MAPPING[MODEL_TYPES[name]])}
    assert fields <= _listed(name), fields - _listed(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_transformers_reads_is_in_the_tables(
    family: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watched while a model is built and run with a cache, `getattr(config, name, default)` included."""
    seen: set[str] = set()
    original = PreTrainedConfig.__getattribute__

    def watched(self: PreTrainedConfig, name: str) -> Any:
        seen.add(name)
        return original(self, name)

    config = CONFIG_MAPPING[MODEL_TYPES[ARCHITECTURE[family]]].from_pretrained(models[family])
    monkeypatch.setattr(PreTrainedConfig, "__getattribute__", watched)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache, use_cache=True)
    assert "hidden_size" in seen
    members = {name for name, value in inspect.getmembers_static(PreTrainedConfig) if callable(value)}
    # bookkeeping of the class itself, and keys of config.json that are refused because the class has the attribute
    refused = {name for name in seen if name.startswith("_") or hasattr(PreTrainedConfig, name)}
    unlisted = seen - members - refused - _listed(ARCHITECTURE[family])
    assert " ".join(sorted(unlisted)) == ""


@functools.cache
def _fields_of_others() -> list[str]:
    """Fields of the config classes of all causal language models of transformers."""
    fields = (dataclasses.fields(CONFIG_MAPPING[model_type]) for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return sorted({field.name for some in fields for field in some})


INVENTED = ("attention_temperature_scale", "logits_soft_cap_value", "value_residual_gate", "query_scaling", "my_note")
INVENTED += ("differential_attention", "_hidden_scale", "Attn Scale", "use_rope_2d", "rmsnorm")
ON = (True, 7, 0.7, "x", [1], {"a": 1}, -1, 1e-30, [[]], [None], {"a": None}, " ", float("nan"))
OFF = (None, False, 0, 0.0, "", [], {})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_of_no_list_is_refused_when_on_and_ignored_when_named(family: str, models: dict[str, Path]) -> None:
    """Whoever invented it: every key that transformers knows for any causal language model, and some that nobody has.
    What a list of ours holds, or transformers' config class of the family, cannot be ignored."""
    name = ARCHITECTURE[family]
    raw = json.loads((models[family] / "config.json").read_text())
    theirs, path = CONFIG_MAPPING[MODEL_TYPES[name]](), Path("config.json")
    unknown = {one for one in (*_fields_of_others(), *INVENTED) if not hasattr(theirs, one)} - _listed(name)
    unknown = {one for one in unknown if not re.fullmatch(r".*_token_(ids?|index)", one)}
    assert len(unknown) > 400
    for place, key in enumerate(sorted(unknown)):
        for value in ON if key in INVENTED else ON[place % len(ON) :][:1]:
            with pytest.raises(UserError, match=re.escape(f"{key} = ") + ".*name it in model.ignore_config_keys"):
                check_keys(raw | {key: value}, name, path, theirs)
            check_keys(raw | {key: value}, name, path, theirs, [key])
        for value in OFF:
            check_keys(raw | {key: value}, name, path, theirs)
    for key, value in (("auto_map", {"a": "b"}), ("hidden_act", "gelu"), ("is_causal", False), ("to_dict", 1)):
        with pytest.raises(UserError, match=f"{key} = "):
            check_keys(raw | {key: value}, name, path, theirs, [key])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_accepted(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Every key with its default, as `to_dict` has it, and as the versions before wrote it."""
    config = CONFIG_MAPPING[MODEL_TYPES[ARCHITECTURE[family]]]
    sizes = json.loads((models[family] / "config.json").read_text())
    everything = config().to_dict() | config.from_pretrained(models[family]).to_dict() | sizes
    assert len(everything) > len(sizes) + 5
    (tmp_path / "config.json").write_text(json.dumps(everything | WRITTEN_BY_4))
    same_as_transformers(read_architecture(tmp_path), tmp_path)


def test_a_file_without_the_key_has_mistrals_window(models: dict[str, Path], tmp_path: Path) -> None:
    """transformers' default, and vLLM's: 4096 tokens."""
    with pytest.raises(UserError, match="sliding_window is read as 4096 by transformers: must be null"):
        read_architecture(_with(models["mistral"], tmp_path, {}, ("sliding_window",)))


WRITTEN_BY_4: dict[str, Any] = {
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("finetuning_task", "prefix", "suppress_tokens", "task_specific_params", "tokenizer_class"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sep_token_id", "decoder_start_token_id"), None),
    **dict.fromkeys(("do_sample", "early_stopping", "output_scores", "remove_invalid_values", "torchscript"), False),
    **dict.fromkeys(("return_dict_in_generate", "tf_legacy_loss", "tie_encoder_decoder", "use_bfloat16"), False),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), 1),
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "temperature", "top_p", "typical_p"), 1.0),
    "diversity_penalty": 0.0,
    "max_length": 20,
    "pruned_heads": {},
    "top_k": 50,
}
"""What transformers 4 added to every config.json that was saved in full."""


NEIGHBOURS = (
    "ministral",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "cohere",
    "glm4_moe_lite",
)
GATED_DELTA = ("qwen3_next", *(name for name in ("qwen3_5_text", "qwen3_5_moe_text") if name in CONFIG_MAPPING))
NEIGHBOURS += ("olmoe", *GATED_DELTA, "gpt_oss", "glm", "deepseek_v2")


@pytest.mark.parametrize("model_type", NEIGHBOURS)
def test_neighbours_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    """Their own files, and the same files under the name of a family that is supported."""
    config = CONFIG_MAPPING[model_type]()
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    raw = config.to_dict() | {"architectures": [own], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    where = r"; docs/scope\.md has what is missing" if model_type in GATED_DELTA else ""
    with pytest.raises(UserError, match=f"architecture {own} is not supported.*{where}"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [QWEN3]}, default=str))
    with pytest.raises(UserError, match="does not fit architectures"):
        read_architecture(tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    # S1: rope_scaling wins in transformers, so a plain rope_parameters beside it is another model
    "yarn_beside_plain": (
        "qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        "disagree; transformers would only use rope_scaling",
    ),
    "two_types": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "type": "linear"}},
        "rope_parameters.type disagree",
    ),
    "two_thetas": ("qwen3", {"rope_theta": 5e5}, "rope_theta = 500000.0 and rope_parameters.rope_theta = 10000.0"),
    "llama3_beside_plain": (
        "llama3",
        {"rope_scaling": {"rope_type": "default", "rope_theta": 10000.0}},
        "disagree; transformers would only use rope_scaling",
    ),
    **{
        kind: ("qwen3", {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}, f'rope_type = "{kind}"')
        for kind, more in {
            "dynamic": {"factor": 2.0},
            "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
            "proportional": {"partial_rotary_factor": 0.5},
            "mrope": {"mrope_section": [2, 3, 3]},
        }.items()
    },
    "yarn_missing": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "rope type yarn needs original_max",
    ),
    "yarn_factor": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}},
        "rope_parameters.factor = null: must be a number from 1 to 1e+06",
    ),
    "yarn_turns": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2,
                "original_max_position_embeddings": 64,
                "beta_slow": 40,
            }
        },
        "beta_slow must be below beta_fast",
    ),
    "yarn_base": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1,
                "factor": 2,
                "original_max_position_embeddings": 64,
            }
        },
        "gives no frequencies",
    ),
    "mrope_as_default": (
        "qwen2",
        {"rope_parameters": {"type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}},
        "rope_parameters.mrope_section = [2, 2, 2] is not supported with rope type default",
    ),
    "rope_by_layer_type": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "rope_parameters.full_attention",
    ),
    "rope_partial": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor = 0.5",
    ),
    "partial": ("llama3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    "theta_inf": ("qwen3", {"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta = Infinity: must be"),
    "theta_null": ("qwen3", {"rope_parameters": None, "rope_theta": None}, "rope_theta = null: must be a number"),
    "theta_huge": ("qwen3", {"rope_parameters": {"rope_theta": 10**400}}, "must be a number from 1 to 1e+30"),
    "original": ("qwen3", {"original_max_position_embeddings": 64}, "original_max_position_embeddings = 64"),
    "window": ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window = true"),
    "window_llama": ("llama3", {"sliding_window": 8}, "sliding_window = 8 is not supported; supported: null"),
    "layer_types": ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "attention_bias": ("qwen3", {"attention_bias": True}, "attention_bias = true is not supported; supported: false"),
    "mlp_bias": ("llama3", {"mlp_bias": True}, "mlp_bias = true is not supported; supported: false"),
    "no_qkv_bias": ("qwen2", {"attention_bias": False}, "attention_bias = false is not supported; supported: true"),
    "dropout": ("qwen3", {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
    "activation": ("qwen3", {"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported; supported: "silu"'),
    "eps_zero": ("qwen3", {"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0: must be a number from 1e-30 to 0.1"),
    "eps_negative": ("qwen3", {"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06"),
    "eps_null": ("qwen3", {"rms_norm_eps": None}, "rms_norm_eps = null"),
    "eps_nan": ("qwen3", {"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN"),
    "sinks": ("qwen3", {"attention_sinks": True}, "attention_sinks = true is not supported"),
    "local_theta": ("qwen3", {"rope_local_base_freq": 1e4}, "rope_local_base_freq = 10000.0"),
    "vision": ("qwen2", {"vision_config": {"depth": 2}}, "vision_config"),
    "quantized": ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "per_layer": ("qwen3", {"per_layer_config": {"1": {"intermediate_size": 32}}}, "per_layer_config"),
    "code": ("qwen3", {"auto_map": {"AutoConfig": "evil.Config"}}, "auto_map"),
    "kernels": ("qwen3", {"attn_implementation": "someone/kernels"}, 'attn_implementation = "someone/kernels"'),
    "bidirectional": ("qwen3", {"is_causal": False}, "is_causal = false is not supported; supported: true"),
    "bidirectional_null": ("qwen3", {"is_causal": None}, "is_causal = null"),
    "tuples": ("qwen3", {"return_dict": None}, "return_dict = null is not supported; supported: true"),
    # transformers makes a name for each label: 20 GiB were filled before the process was killed
    "labels": ("qwen3", {"num_labels": 10**12}, "num_labels = 1000000000000 is not supported; supported: a whole"),
    "private": ("qwen3", {"_rope_type_labels": ["rope_theta"]}, "_rope_type_labels"),
    "method": ("qwen3", {"to_dict": 1}, "to_dict = 1 is not supported: leave the key out"),
    "sizes_null": ("qwen3", {"hidden_size": None}, "hidden_size = null: must be a whole number"),
    "sizes_negative": ("qwen3", {"num_hidden_layers": -1}, "num_hidden_layers = -1"),
    "sizes_huge": ("qwen3", {"num_hidden_layers": 10**12}, "num_hidden_layers = 1000000000000"),
    "sizes_bool": ("qwen3", {"num_hidden_layers": True}, "num_hidden_layers = true"),
    "sizes_float": ("qwen3", {"vocab_size": 37.0}, "vocab_size = 37.0"),
    "sizes_text": ("qwen3", {"vocab_size": "37"}, 'vocab_size = "37"'),
    "odd_head": ("qwen3", {"head_dim": 15}, "head_dim = 15: must be an even number"),
    "null_head": ("qwen2", {"head_dim": None}, "head_dim"),
    "groups": ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
    "tied_null": ("qwen3", {"tie_word_embeddings": None}, "tie_word_embeddings = null: must be false or true"),
    "model_type": ("qwen3", {"model_type": "llama"}, 'model_type = "llama" does not fit architectures'),
    "two_architectures": ("qwen3", {"architectures": ["Qwen3ForCausalLM", "X"]}, "must be a list of one name"),
    "architectures_text": ("qwen3", {"architectures": "Qwen3ForCausalLM"}, "must be a list of one name"),
    "strict": ("qwen3", {"use_cache": "yes"}, "transformers refuses it"),
    "dtype": ("qwen3", {"dtype": "int8"}, 'dtype = "int8" is not supported; supported: "float32" or'),
    "pad": ("qwen3", {"pad_token_id": 37}, "pad_token_id = 37: must be one of the vocabulary's 37"),
    "sparse_step": ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    "dense_layers": ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    "sparse_step_qwen2": ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    "dense_layers_qwen2": ("qwen2_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    "other_name_qwen2": ("qwen2_moe", {"num_local_experts": 6}, "num_local_experts = 6 is not supported"),
    "no_shared_expert": ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
    "window_qwen2": ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window = true is not supported"),
    "router_loss": ("qwen3_moe", {"output_router_logits": True}, "output_router_logits = true"),
    "top_1": ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 with norm_topk_prob = true"),
    "top_1_mixtral": ("mixtral", {"num_experts_per_tok": 1}, "= 1 with MixtralForCausalLM is not supported"),
    "noise": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    "window_mistral": ("mistral", {"sliding_window": 4096}, "sliding_window = 4096: must be null"),
    "window_mixtral": ("mixtral", {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
    "groups_of_experts": (
        "deepseek_v3",
        {"n_group": 3},
        "n_group = 3, topk_group = 2: 4 of 8 experts cannot be chosen",
    ),
    "groups_of_three": ("deepseek_v3", {"num_experts_per_tok": 3}, "only with num_experts_per_tok = 4"),
    "all_dense": ("glm4_moe", {"first_k_dense_replace": 4}, "first_k_dense_replace = 4: leaves no layer with experts"),
    "raw_shares": ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = false is not supported"),
    "softmax_router": ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func = "softmax" is not supported'),
    "odd_part": ("glm4_moe", {"partial_rotary_factor": 0.3}, "partial_rotary_factor has 2 values that disagree"),
    "rotary_head": ("deepseek_v3", {"head_dim": 16}, "head_dim = 16: must be qk_rope_head_dim = 6"),
    "halves": ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = false is not supported"),
    "part_of_qwen": ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    "top_9": ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_experts = 4"),
    "experts_huge": (
        "qwen3_moe",
        {"num_hidden_layers": 4096, "num_local_experts": 4096, "layer_types": None},
        "at most 131072 are supported",
    ),
    "images": (
        "gemma3",
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        "architecture Gemma3ForConditionalGeneration is not supported, as it reads images too; save its language model",
    ),
    "cap": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
    "cap_of_logits": ("gemma3", {"final_logit_softcapping": 30.0}, "supported: null (logits are not capped)"),
    "both_ways": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true is not"),
    "exact_gelu": ("gemma3", {"hidden_activation": "gelu"}, 'hidden_activation = "gelu" is not supported'),
    "no_window": ("gemma3", {"sliding_window": None}, "sliding_window = null: must be a whole number from 1"),
    "short_layer_types": ("gemma3", {"layer_types": ["full_attention"]}, "for each of the 4 layers"),
    "other_layer_types": ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "full_attention or sliding_attention"),
    "one_rope": ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "an object each for full_attention"),
    "two_scalings": (
        "gemma3",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "disagree; transformers would only use rope_scaling",
    ),
    "two_local_bases": ("gemma3", {"rope_local_base_freq": 1e4}, "rope_theta = 10000.0 and rope_parameters.rope_theta"),
    "two_counts": ("qwen3_moe", {"num_local_experts": 8, "num_experts": 4}, "mean the same but disagree"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Keys that some list here holds; those of no list are above."""
    family, changes, expected = REFUSED[case]
    with pytest.raises(UserError) as refusal:
        read_architecture(_with(models[family], tmp_path, changes))
    assert expected in str(refusal.value)
    assert str(refusal.value).startswith(f"{tmp_path / 'config.json'}") and "\n" not in str(refusal.value)


TEXTS = {
    "list": ("[1, 2]", "holds [1, 2], expected an object"),
    "number": ("5", "holds 5, expected an object"),
    "twice": ('{"hidden_size": 48, "hidden_size": 64}', 'the key "hidden_size" appears twice'),
    "twice_inside": ('{"rope_parameters": {"factor": 1, "factor": 2}}', 'the key "factor" appears twice'),
    "deep": ("[" * 100_000, "nested too deeply"),
    "digits": ('{"hidden_size": ' + "9" * 5000 + "}", "is not valid JSON"),
    "empty": ("", "is not valid JSON"),
    "latin_1": ('{"a": "\xe9"}', "is not valid JSON"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_damaged_text_is_one_sentence(case: str, tmp_path: Path) -> None:
    text, expected = TEXTS[case]
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as refusal:
        read_architecture(tmp_path)
    assert expected in str(refusal.value) and "\n" not in str(refusal.value)


ACCEPTED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "yarn": (
        "qwen3",
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": None,
            },
        },
        ("rope_parameters",),
    ),
    "linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}}, ()),
    "both_and_equal": ("qwen3", {"rope_scaling": {"type": "default", "rope_theta": 10000.0}}, ()),
    "old_spelling": (
        "llama3",
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 8192,
            },
        },
        ("rope_parameters",),
    ),
    "no_theta": ("qwen2", {}, ("rope_parameters",)),
    "no_eps": ("qwen3", {}, ("rms_norm_eps", "tie_word_embeddings")),
    "default_head_dim": ("qwen3", {}, ("head_dim",)),
    "derived_head_dim": ("qwen3_moe", {}, ("head_dim",)),
    "null_groups": ("llama3", {"num_key_value_heads": None}, ()),
    "default_groups": ("qwen3", {"num_attention_heads": 64}, ("num_key_value_heads",)),
    "default_groups_moe": ("qwen3_moe", {"num_attention_heads": 8}, ("num_key_value_heads",)),
    "local_experts": ("qwen3_moe", {"num_local_experts": 4}, ("num_experts",)),
    "null_head_dim": ("mixtral", {"head_dim": None}, ()),
    "glm_4_no_biases": ("glm4", {"attention_bias": False}, ()),
    "no_biases": ("qwen2_moe", {"qkv_bias": False}, ()),
    "default_biases": ("qwen2_moe", {}, ("qkv_bias", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")),
    "normalized": ("qwen2_moe", {"norm_topk_prob": True}, ()),
    "top_1_qwen2": ("qwen2_moe", {"num_experts_per_tok": 1}, ()),
    "top_1_raw": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}, ()),
    "generation_keys": (
        "qwen3",
        {"temperature": 0.7, "_attn_implementation_autoset": True},
        (),
    ),
    "switched_off": ("qwen3", {"conv_bias": False, "use_sandwich_norm": None, "embedding_dropout": 0.0}, ()),
    "falcon_3": ("llama3", {"activation": "swiglu"}, ()),
    "gemma_default_layers": ("gemma3", {"num_hidden_layers": 13}, ("layer_types", "sliding_window_pattern")),
    "gemma_default_rope": ("gemma3", {}, ("rope_parameters", "sliding_window", "tie_word_embeddings")),
    "gemma_half_rope": ("gemma3", {"rope_parameters": {"full_attention": None}, "rope_local_base_freq": 2e4}, ()),
    "gemma_4b": (
        "gemma3",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ("rope_parameters",),
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted_as_transformers_reads_it(case: str, models: dict[str, Path], tmp_path: Path) -> None:
    family, changes, drop = ACCEPTED[case]
    architecture = read_architecture(_with(models[family], tmp_path, changes, drop))
    same_as_transformers(architecture, tmp_path)


@pytest.mark.slow
def test_the_way_out_is_the_same_for_every_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job, `plan`, the check of `actor.megatron`, the embedded engine, and both directions of `convert`."""
    files = write_job_files(tmp_path / "task")
    _with(files / "model", files / "model", {"query_scaling": 0.5})
    job = [str(REPOSITORY / "configs" / "quickstart.yaml"), *settings(files, tmp_path / "run")]
    named = "model.ignore_config_keys=[query_scaling]"
    dry_run = ["train", *job, "--dry-run", "actor.megatron={calculate_per_token_loss: false}"]
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    for command, way_out in (
        (dry_run, [named]),
        (["eval", *job, "--limit", "2", "--out", str(tmp_path / "eval")], [named]),
        (
            ["convert", "to-megatron", "--hf", str(files / "model"), "--out", there],
            ["--ignore-config-keys=query_scaling"],
        ),
        (["convert", "to-hf", "--checkpoint", there, "--out", back], ["--ignore-config-keys", "a,query_scaling"]),
    ):
        assert main(command) == 2
        option = way_out[0].partition("=")[0]
        assert "query_scaling = 0.5 is not supported: this key is not known here" in (said := capsys.readouterr().err)
        assert f"name it in {option}" in said
        assert main([*command, *way_out]) == 0, capsys.readouterr().err
