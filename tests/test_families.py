"""Every supported family trains through the whole loop, in the layout that is peculiar to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines.servers import local_settings, needs
from support.job import QUICK, job_config, read_metrics
from support.launch import run_ranks
from support.tiny import write_model

from dppo_megatron.job import prepare_job
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.workbench.quickstart.tiny_model import VOCABULARY, make_tokenizer

pytestmark = pytest.mark.slow

EXPERTS = {"actor__layout__expert_parallel": 2, "actor__layout__expert_tensor_parallel": 1}
TENSOR = {"actor__layout__tensor_parallel": 2}
CONTEXT = {"actor__layout__context_parallel": 2}
INTERLEAVED = {"actor__layout__pipeline_parallel": 2, "actor__layout__virtual_pipeline": 2}
CASES = [
    ("qwen3_moe", 2, EXPERTS),
    ("qwen2", 2, INTERLEAVED),
    ("llama3", 2, CONTEXT),
    ("qwen2_moe", 2, EXPERTS | {"actor__routing_replay": "engine"}),
    ("mixtral", 2, EXPERTS | {"actor__routing_replay": "actor"}),
    ("glm4", 2, TENSOR),
    ("glm4_moe", 2, EXPERTS),
    ("deepseek_v3", 2, EXPERTS),
    ("gemma3", 2, TENSOR),
]


def _train(files: Path, run_dir: Path, world_size: int, extra: dict[str, Any]) -> None:
    config = job_config(files, run_dir, steps=2, **QUICK | {"sft__steps": 5} | extra)
    with Run(prepare_job(config, world_size)) as run:
        train(run)


@pytest.mark.parametrize(("family", "world_size", "layout"), CASES, ids=[family for family, *_ in CASES])
def test_family_trains(files: Path, tmp_path: Path, family: str, world_size: int, layout: dict[str, Any]) -> None:
    """Log-probabilities of engine and actor stay together over updates: weights went in, moved, and came out right.

    Mean |difference| below 1e-4 in float32, at the second step too, which is after an update.
    """
    write_model(tmp_path / "model", family=family, vocab_size=len(VOCABULARY), tie_word_embeddings=True)
    make_tokenizer().save_pretrained(tmp_path / "model")
    run_ranks(_train, world_size, files, tmp_path / "run", world_size, layout | {"model__hf_path": tmp_path / "model"})
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-4
        assert row["train/grad_norm"] > 0 and row["prune/completions_trained"] > 0


SERVED: dict[str, dict[str, Any]] = {
    "gemma3": {"head_dim": 32, "num_hidden_layers": 8},
    "glm4": {"head_dim": 32},
    "qwen2_moe": {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 96},
}
"""Sizes that vLLM's kernels on a CPU take."""


@needs("vllm")
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.long] * (family != "gemma3")) for family in SERVED]
)
def test_family_trains_through_vllm(files: Path, tmp_path: Path, forked_vllm: Path, family: str) -> None:
    """vLLM's Gemma and GLM-4 have the same windows, positions and norms, its Qwen2-MoE the gate on the shared expert:
    log-probabilities stay together over updates, each of which is read back from the server."""
    tokenizer = make_tokenizer()
    own = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    sizes = SERVED[family] | {"vocab_size": len(VOCABULARY), "tie_word_embeddings": True}
    write_model(tmp_path / "model", family=family, **sizes, **own)
    tokenizer.save_pretrained(tmp_path / "model")
    served = local_settings("vllm") | {"rollout__servers__python": str(forked_vllm), "rollout__sync__verify_every": 1}
    run_ranks(_train, 1, files, tmp_path / "run", 1, served | {"model__hf_path": tmp_path / "model"}, timeout_s=300)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["mismatch/logprob_abs_diff_mean"] < 1e-4 and row["rollout/completion_tokens_mean"] > 7
        assert row["train/grad_norm"] > 0 and row["prune/completions_trained"] > 0
