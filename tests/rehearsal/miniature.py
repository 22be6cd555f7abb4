"""A recipe of configs/ as a job of at most eight processes on a CPU: the recipe's own file, and what must be smaller.

The rule, for a recipe on `nodes` machines of 8 GPUs each, or on one of fewer:

    nodes, tensor, pipeline, context   2 where the recipe has more than one
    data parallel                      2 where the recipe has more than one
    expert parallel                    2 where the recipe's experts have replicas, and then data parallel grows until
                                       they have two here too; else all that compute a stage
    servers                            one a node, of as many workers as the node has ranks: 2 replicas, of 2
                                       workers each if there are four
    model                              of the same family, ties and YaRN, 2 layers (4 where the first differs) of width
                                       128; 8 experts, 2 a token
    lengths, data, steps               LENGTHS, SHORT, 8 problems, so that step 2 prunes; a checkpoint after it

A size that is above one stays above one, so every group that the recipe has is there with two members at least, and
what the recipe does not have is not there. All other settings are the recipe's. What is not kept: the learning rate,
which would not move a weight in bfloat16 within three steps; the grader, to whom everything that an untrained model
writes is wrong; kernels for experts, which are a GPU's; and bfloat16 of a mixture, whose random router has near
ties that two programs decide differently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support.chat_model import train_tokenizer
from support.job import REPOSITORY
from support.tiny import FAMILIES

from dppo_megatron.config import load_config
from dppo_megatron.config.schema import Config

_CONFIGS = REPOSITORY / "configs"
RECIPES = [
    *sorted(_CONFIGS.glob("h100/*gpus*.yaml")),
    _CONFIGS / "qwen3_4b.yaml",
    *sorted(_CONFIGS.glob("math/*.yaml")),
]
PROBLEMS, VOCABULARY = 8, 512
LENGTHS = {"data.max_prompt_tokens": 192, "rollout.sampling.max_completion_tokens": 12}
SHORT = {
    "steps": 3,
    "threads_per_rank": 1,
    "checkpoint.every_steps": 2,
    "rollout.prompts_per_step": 8,
    "packing.max_tokens_per_microbatch": 512,
    "rollout.sync.verify_every": 1,
    "rollout.limits.engine_wait_s": 30,
    "actor.optimizer.learning_rate": 1e-3,
    "reward.function": "support.faulty:length_parity",
    "reward.min_self_consistency": 0,
}


@dataclass(frozen=True)
class Sizes:
    """How many of what; a world has tensor x pipeline x context x data ranks."""

    nodes: int
    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int = 1
    expert_tensor: int = 1

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_replicas(self) -> int:
        """Copies of each expert."""
        return self.world // self.pipeline // (self.expert * self.expert_tensor)


def reduced(full: Sizes) -> Sizes:
    """The sizes of a recipe's miniature; the rule is above.

    Example: tensor 4, pipeline 4, data 2 on 4 nodes (32 GPUs) -> tensor 2, pipeline 2, data 2 on 2 nodes (8)
    Example: expert 8 of data 32 on 4 nodes, so 4 replicas -> expert 2 of data 4 on 2 nodes
    """
    small = Sizes(*(min(2, size) for size in (full.nodes, full.tensor, full.pipeline, full.context, full.data)))
    small = replace(small, expert_tensor=min(2, full.expert_tensor))
    if full.expert > 1:
        if full.expert_replicas == 1:
            return replace(small, expert=small.world // small.pipeline // small.expert_tensor)
        small = replace(small, expert=2)
        while small.expert_replicas < 2:
            small = replace(small, data=2 * small.data)
    return small


@dataclass(frozen=True)
class Miniature:
    """A recipe, and how it is run here."""

    recipe: Path
    sizes: Sizes
    family: str
    tied: bool
    prunes: bool
    """Prompts, from the second step on."""
    settings: tuple[str, ...]
    """Overrides of the recipe, but for the paths of this machine."""

    @property
    def ranks_per_node(self) -> int:
        """Also the workers of a node's server."""
        return self.sizes.world // self.sizes.nodes

    @property
    def is_mixture(self) -> bool:
        return "moe" in self.family

    def stands_for(self, other: Miniature) -> bool:
        """Whether this is a job of the same family that has every kind of group which `other` has."""
        own, theirs = vars(self.sizes), vars(other.sizes)
        return self.family == other.family and all(own[kind] > 1 or size == 1 for kind, size in theirs.items())


def miniature(recipe: Path) -> Miniature:
    """Of one of `RECIPES`."""
    config = _loaded(recipe)
    layout = config.actor.layout
    ranks = _gpus(recipe)
    nodes = max(1, ranks // 8)
    full = Sizes(
        nodes,
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.context_parallel,
        ranks // (layout.tensor_parallel * layout.pipeline_parallel * layout.context_parallel),
        layout.expert_parallel,
        layout.expert_tensor_parallel or layout.tensor_parallel,
    )
    sizes = reduced(full)
    small = Miniature(
        recipe,
        sizes,
        _family(recipe, full),
        "4b" in recipe.name,
        config.pruning.prompt.method != "none",
        (),
    )
    values = SHORT | LENGTHS | _parallel(config, small)
    values["rollout.completions_per_prompt"] = min(4, config.rollout.completions_per_prompt)
    if full.expert > 1:
        values |= {"model.dtype": "float32", "actor.megatron": "{moe_permute_fusion: false}"}
        values["actor.routing_replay"] = "actor"  # vLLM records its own with Triton only, which a CPU lacks
    if config.objective.overlong.buffer_tokens:
        values["objective.overlong.buffer_tokens"] = 4
    own = [name for name, one in config.data.eval_sets.items() if one.max_prompt_tokens is not None]
    values |= {f"data.eval_sets.{name}.max_prompt_tokens": LENGTHS["data.max_prompt_tokens"] for name in own}
    return replace(small, settings=tuple(f"{key}={value}" for key, value in values.items()))


def _family(recipe: Path, full: Sizes) -> str:
    if "64k" in recipe.name:
        return "qwen3_yarn"
    return "glm4_moe" if "glm" in recipe.name else "qwen3_moe" if full.expert > 1 else "qwen3"


def _loaded(recipe: Path) -> Config:
    anything = f"model.hf_path={REPOSITORY}"  # a directory that is there
    return load_config(str(recipe), [anything], purpose="plan", writes_run=False)


def _gpus(recipe: Path) -> int:
    gpus = [part.removesuffix("gpus") for part in recipe.stem.split("_") if part.endswith("gpus")]
    return int(gpus[0]) if gpus else 8


def _parallel(config: Config, small: Miniature) -> dict[str, Any]:
    """The servers' sizes stand in their command line, which is the recipe's but for them."""
    sizes, workers = small.sizes, small.ranks_per_node
    replaced = {
        "--data-parallel-size": "2",
        "--tensor-parallel-size": str(max(1, workers // 2)),
        "--moe-backend": "auto",
    }
    servers = config.rollout.servers
    assert servers.count == 1 and len(servers.gpus) == 1 and "--data-parallel-size" in servers.args
    arguments = [replaced.get(before, value) for before, value in zip(["", *servers.args], servers.args, strict=False)]
    values: dict[str, Any] = {
        "rollout.servers.gpus": json.dumps([",".join(map(str, range(workers)))]),
        "rollout.servers.args": json.dumps(arguments),
        "actor.layout.tensor_parallel": sizes.tensor,
        "actor.layout.pipeline_parallel": sizes.pipeline,
        "actor.layout.context_parallel": sizes.context,
    }
    if sizes.expert > 1:
        values |= {
            "actor.layout.expert_parallel": sizes.expert,
            "actor.layout.expert_tensor_parallel": sizes.expert_tensor,
        }
    return values


def write_files(directory: Path) -> None:
    """Problems, and the models of all families."""
    rows = [{"problem": f"What is {n} + {n % 7}?", "answer": str(n + n % 7)} for n in range(PROBLEMS)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "train.jsonl").write_text(text, encoding="utf-8")
    (directory / "test.jsonl").write_text("".join(text.splitlines(keepends=True)[:2]), encoding="utf-8")
    ask = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    tokenizer = train_tokenizer((row["problem"] + ask for row in rows), VOCABULARY)
    for family in ("qwen3", "qwen3_yarn", "qwen3_moe", "glm4_moe"):
        for tied in (False, True):
            folder = directory / model_name(family, tied)
            _write_model(folder, family, tied, tokenizer)
            tokenizer.save_pretrained(folder)


def model_name(family: str, tied: bool) -> str:
    """Its directory."""
    return f"{family}_{'tied' if tied else 'untied'}"


def _write_model(folder: Path, family: str, tied: bool, tokenizer: Any) -> None:
    config_class, model_class, special = FAMILIES[family.removesuffix("_yarn")]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "dtype": "bfloat16",
    }
    # as the real ones' heads: in FP8 each of two workers must hold whole blocks of 128
    mixture = {"num_experts": 8, "moe_intermediate_size": 128} if family == "qwen3_moe" else {"head_dim": 128}
    if family == "glm4_moe":  # as the recipe's model: no norms on heads; experts in each stage
        mixture = {"n_routed_experts": 8, "moe_intermediate_size": 128, "n_shared_experts": 1, "use_qk_norm": False}
        mixture["num_hidden_layers"] = 4
    if family == "qwen3_yarn":  # prompts are longer than the original length
        scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
        mixture |= {"rope_parameters": scaled}
    torch.manual_seed(0)
    model_class(config_class(**(sizes | special | mixture))).to(torch.bfloat16).save_pretrained(folder)


def arguments(small: Miniature, files: Path, run_dir: Path, python: Path) -> list[str]:
    """Of `dppo-megatron train`."""
    config = _loaded(small.recipe)
    tests = {f"data.eval_sets.{name}.path": files / "test.jsonl" for name in config.data.eval_sets}
    tests |= {f"data.eval_paths.{name}": files / "test.jsonl" for name in config.data.eval_paths}
    paths = {
        "run_dir": run_dir,
        "model.hf_path": files / model_name(small.family, small.tied),
        "data.train_path": files / "train.jsonl",
        "rollout.servers.python": python,
        **tests,
    }
    return ["train", str(small.recipe), *small.settings, *(f"{key}={value}" for key, value in paths.items())]
