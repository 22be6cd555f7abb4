"""Engines on CUDA: `python -m pytest -m gpu tests/test_engines_gpu.py`, with DPPO_VLLM_PYTHON and DPPO_SGLANG_PYTHON.

What a CPU cannot show of them: CUDA IPC, NCCL, and servers that sleep on the GPU they share with the actor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.distribution import check_distribution
from support.engines.servers import Reference, local_settings, needs
from support.job import REPOSITORY, job_config, read_metrics, settings, write_job_files

from dppo_megatron.actor.layout import start_process_group, stop_process_group
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.workbench.cli import main
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

pytestmark = pytest.mark.gpu
ENGINES = [pytest.param(name, marks=needs(name)) for name in ("vllm", "sglang")]
SERVER_ARGUMENTS = {
    "vllm": ("--gpu-memory-utilization", "0.3", "--enforce-eager"),  # compiling and CUDA graphs take minutes a server
    "sglang": ("--mem-fraction-static", "0.3"),
}
BF16_DIFF = 0.05
"""Mean |log-probability difference| of a bfloat16 engine to float32 weights; a stale sync is above 1."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_job_files(tmp_path_factory.mktemp("task"))
    write_tiny_qwen3(directory / "model", seed=0, hidden_size=256, tie_word_embeddings=True)
    return directory


@pytest.fixture
def process_group() -> Iterator[None]:
    start_process_group()
    yield
    stop_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize(("channel", "device"), [("ipc", 0), ("ipc", 1), ("nccl", 0), ("disk", 0)])
def test_every_channel_and_sleep(files: Path, tmp_path: Path, engine_name: str, channel: str, device: int) -> None:
    """Colocated and asleep between syncs where the channel allows it; log-probabilities follow each sync's weights. On
    `device` 1 the server knows it as its first, and the trainer as its second."""
    colocated = channel != "nccl"
    if (device or not colocated) and torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU; for nccl, since two members of a group cannot share one")
    torch.cuda.set_device(device)
    place = {"rollout__servers__colocate": "true"} if colocated else {}
    if device or not colocated:
        place["rollout__servers__gpus"] = "['1']"
    config = job_config(
        files,
        tmp_path / "run",
        model__dtype="bfloat16",
        rollout__sync__channel=channel,
        rollout__sync__bucket_mb=1,
        rollout__sampling__max_completion_tokens=24,
        **place,
        **local_settings(engine_name, *SERVER_ARGUMENTS[engine_name]),
    )
    job = prepare_job(config, 1)
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    requests = [Request(prompt, index, 1) for prompt in job.train_prompts[:8] for index in range(4)]
    try:
        for seed in (1, 2):
            reference = Reference(files / "model", seed)
            free_awake = torch.cuda.mem_get_info()[0]
            engine.sleep()
            if colocated:
                freed = torch.cuda.mem_get_info()[0] - free_awake
                assert freed > 0.1 * torch.cuda.mem_get_info()[1], "a sleeping server gives its memory back"
            engine.load_weights(lambda r=reference: ((n, t.to("cuda", torch.bfloat16)) for n, t in r.weights()))
            completions = engine.generate(requests, Sampling(24, 1.0, 0))
            assert reference.difference(requests, completions).mean() < BF16_DIFF
    finally:
        engine.close()
        torch.cuda.set_device(0)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("engine_name", ENGINES)
def test_drafts_change_neither_samples_nor_logprobs(files: Path, tmp_path: Path, engine_name: str) -> None:
    """n-grams draft after every first token. Chi-square against the model; rounding to bfloat16 moves probabilities by
    a hundredth, which 4,096 samples do not see."""
    config = job_config(
        files,
        tmp_path / "run",
        model__dtype="bfloat16",
        data__max_prompt_tokens=40,
        packing__max_tokens_per_microbatch=128,
        rollout__speculation__method="ngram",
        rollout__speculation__max_drafted=0,
        **local_settings(engine_name, *SERVER_ARGUMENTS[engine_name]),
    )
    job = prepare_job(config, 1)
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    try:
        reference = Reference(files / "model", 4)
        engine.load_weights(lambda: ((name, t.to("cuda", torch.bfloat16)) for name, t in reference.weights()))
        check_distribution(engine, reference, job.train_prompts[0], 4096, far=0.2)
    finally:
        engine.close()


@pytest.mark.parametrize("engine_name", ENGINES)
def test_training_with_a_colocated_server(files: Path, tmp_path: Path, engine_name: str) -> None:
    """Three steps through the command line, by CUDA IPC; then an evaluation, whose weights come from files."""
    of_server = local_settings(engine_name, *SERVER_ARGUMENTS[engine_name])
    values = settings(
        files,
        tmp_path / "run",
        steps=3,
        model__dtype="bfloat16",
        rollout__servers__colocate="true",
        rollout__sync__verify_every=1,
        **of_server,
    )
    assert main(["train", str(REPOSITORY / "configs" / "quickstart.yaml"), *values]) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 3 and all(row["mismatch/logprob_abs_diff_mean"] < BF16_DIFF for row in rows)
    own = [f"{key.replace('__', '.')}={value}" for key, value in of_server.items()]
    assert main(["eval", str(tmp_path / "run"), *own, "--out", str(tmp_path / "eval")]) == 0
    assert "weight sync: gloo" in json.loads((tmp_path / "eval" / "results.json").read_text())["generated_by"]
