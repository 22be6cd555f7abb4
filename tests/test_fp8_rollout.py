"""Servers with weights in FP8: the bytes are the engines' own, a real server holds what was sent and computes with it,
half as much is sent, and what is left of the bias is in the ledger."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines.servers import PYTHON, Reference, local_settings, needs, stand_ins
from support.job import QUICK, job_config, read_metrics, write_job_files
from support.launch import run_ranks
from support.served import prompts_of, requests_for
from support.settings import rollout_config
from support.tiny import FAMILIES, Parallel, build_actor, write_model
from support.true_shapes import GLM, LARGEST, LONG, write_config
from transformers import AutoModelForCausalLM

from dppo_megatron.config.schema import Config
from dppo_megatron.job import prepare_job
from dppo_megatron.launcher_env import set_fp8_variables
from dppo_megatron.rollout.engine import Sampling
from dppo_megatron.rollout.fp8_weights import (
    BLOCK,
    SCALE,
    check_split,
    in_blocks,
    multiplied_out,
    quantization_config,
    quantized,
    rounded_names,
)
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.rollout.servers.server_process import make_servers
from dppo_megatron.rollout.sync.channels import buckets
from dppo_megatron.run import Run
from dppo_megatron.train import train
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import read_architecture
from dppo_megatron.weights.mapping import hf_shapes
from dppo_megatron.workbench.accept.jobs import write_mixture
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

SHAPES = ((128, 128), (256, 384), (2176, 130), (3, 5), (576, 256), (1, 1000))


def _matrices() -> dict[str, torch.Tensor]:
    """Of odd and even shapes, with tiny and huge entries, zeros, whole blocks below the least scale, both signs."""
    generator, found = torch.Generator().manual_seed(0), {}
    for number, shape in enumerate(SHAPES):
        for dtype in (torch.bfloat16, torch.float32):
            spread = torch.rand(shape, generator=generator).mul(24).sub(12).exp2()
            drawn = torch.randn(shape, generator=generator) * spread
            drawn[torch.rand(shape, generator=generator) < 0.1] = 0.0
            drawn[: shape[0] // 2 // BLOCK * BLOCK] *= 1e-9
            found[f"{number} {dtype}"] = drawn.to(dtype)
    return found


@pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in ("vllm", "sglang")])
def test_bytes_are_those_of_the_engines_quantiser(tmp_path: Path, request: pytest.FixtureRequest, engine: str) -> None:
    matrices = _matrices()
    torch.save(matrices, tmp_path / "given")
    python = str(request.getfixturevalue("forked_vllm")) if engine == "vllm" else PYTHON[engine]
    paths = [str(Path(__file__).parent / "support" / "engines"), stand_ins(engine).get("PYTHONPATH", "")]
    done = subprocess.run(
        [python, "-m", "fp8_reference", engine, str(tmp_path / "given"), str(tmp_path / "found")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, again = torch.load(tmp_path / "found")
    assert set(found) == ({False, True} if engine == "vllm" else {True})
    for power_of_two, theirs in found.items():
        assert len(theirs) == 2 * len(SHAPES)
        for name, matrix in matrices.items():
            rounded, scales = in_blocks(matrix, power_of_two=power_of_two)
            assert torch.equal(rounded.view(torch.uint8), theirs[name][0].view(torch.uint8)), name
            assert torch.equal(scales, theirs[name][1]), name
            if power_of_two in again:  # with other scales, what vLLM does for DeepGEMM's kernels is a second rounding
                twice = multiplied_out(*again[power_of_two][name])
                assert torch.equal(twice, multiplied_out(rounded, scales)) == power_of_two, name


def test_the_example_of_the_docstring() -> None:
    weight = torch.zeros(BLOCK, BLOCK)
    weight[0, :2] = torch.tensor([0.896, 0.09])
    rounded, scales = in_blocks(weight)
    assert scales.item() == pytest.approx(0.002) and rounded[0, 1].float() == 44


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries and keys fill whole blocks; with 32 dimensions a head, as in the quickstart's model, keys would not."""
    directory = write_job_files(tmp_path_factory.mktemp("task"))
    write_tiny_qwen3(directory / "model", seed=0, head_dim=64, tie_word_embeddings=True)
    return directory


def _config(files: Path, run_dir: Path, engine: str, python: Path | None, **more: object) -> Config:
    return job_config(
        files,
        run_dir,
        steps=3,
        model__dtype="bfloat16",
        rollout__quantization="fp8",
        rollout__sync__bucket_mb=1,
        rollout__sync__verify_every=1,
        rollout__sync__max_canary_logprob_diff=0.2,  # a random model of width 128: 0.065 seen
        objective__correction__level="token",
        **QUICK | local_settings(engine) | ({"rollout__servers__python": str(python)} if python else {}) | more,
    )


def _train(config: Config, world_size: int) -> None:
    with Run(prepare_job(config, world_size)) as run:
        train(run)


@pytest.mark.slow
@pytest.mark.parametrize("channel", ["ipc", "gloo", "disk"])
@pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in ("vllm", "sglang")])
def test_training_through_a_server_in_fp8(
    files: Path, tmp_path: Path, request: pytest.FixtureRequest, engine: str, channel: str
) -> None:
    """Three steps on two ranks. After each sync the server shows the bytes that were sent, of every tensor; its
    log-probabilities differ from the actor's by rounding and no more; the ledger has the bias."""
    python = request.getfixturevalue("forked_vllm") if engine == "vllm" else None
    config = _config(files, tmp_path / "run", engine, python, rollout__sync__channel=channel)
    run_ranks(_train, 2, config, 2, timeout_s=300)
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 3
    # per layer 2 norms, 2 of queries and keys, and 4 matrices; with vLLM their scales too, SGLang hashes the products;
    # the embedding, the last norm
    of_layer = {"vllm": 12, "sglang": 8}[engine]
    assert [row["rollout/tensors_verified"] for row in rows[:-1]] == [2 * of_layer + 2] * 2
    for row in rows:
        assert 1e-4 < row["mismatch/logprob_abs_diff_mean"] < 0.1
        [entry] = [one for one in row["prune/ledger"] if one["name"] == "rollout/quantized"]
        assert entry["label"] == "biased"
    assert any(0 < one["bias_estimate"] < 0.5 for row in rows for one in row["prune/ledger"] if one["bias_estimate"])


@pytest.mark.slow
@needs("vllm")
def test_a_mixture_with_a_server_in_fp8(tmp_path: Path, forked_vllm: Path) -> None:
    """Experts one by one, with their scales; routers stay as they are, and servers are told so."""
    files = write_job_files(tmp_path / "task")
    shutil.rmtree(files / "model")
    write_mixture(files / "model")
    config = _config(files, tmp_path / "run", "vllm", forked_vllm, actor__routing_replay="actor")
    run_ranks(_train, 2, config, 2, timeout_s=300)
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 3 and all(1e-4 < row["mismatch/logprob_abs_diff_mean"] < 0.1 for row in rows)


@pytest.mark.slow
@needs("vllm")
def test_a_server_computes_with_the_rounded_weights(files: Path, tmp_path: Path, forked_vllm: Path) -> None:
    """Its log-probabilities are those of transformers' model with the weights as rounded, nearer than to those of the
    weights themselves; again after a second sync."""
    config = _config(files, tmp_path / "run", "vllm", forked_vllm)
    run_ranks(_compare, 1, config, files, timeout_s=300)


def _compare(config: Config, files: Path) -> None:
    job = prepare_job(config, 1)
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    try:
        for seed in (4, 5):
            plain = Reference(files / "model", seed)
            rounded = Reference(files / "model", seed)
            state = rounded.model.state_dict()
            for name in rounded_names(job.architecture):
                state[name].copy_(multiplied_out(*in_blocks(state[name].bfloat16())))
            engine.load_weights(lambda plain=plain: ((n, t.bfloat16()) for n, t in plain.weights()))  # type: ignore[misc]
            requests = requests_for(prompts_of(config)[:1])
            answers = [found for _, found in engine.probe(requests, Sampling(16, 1.0, 0))]
            prompt, theirs = requests[0].prompt.token_ids, np.concatenate([found.logprobs for found in answers])
            apart = []
            for model in (rounded, plain):
                scored = np.concatenate([model.logprobs(prompt, found.token_ids.tolist()) for found in answers])
                apart.append(float(np.abs(scored - theirs).mean()))
            print(apart)
            assert apart[0] < 0.02 < 0.04 < apart[1]
    finally:
        engine.close()


def _sent_bytes(shapes: dict[str, tuple[int, ...]], rounded: set[str]) -> tuple[int, int]:
    """Of a sync in FP8 and of one in bfloat16, without the tensors themselves."""
    plain = sum(2 * math.prod(shape) for shape in shapes.values())
    saved = sum(math.prod(shapes[name]) - 4 * math.prod(-(-size // BLOCK) for size in shapes[name]) for name in rounded)
    return plain - saved, plain


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_rounded_are_the_linear_layers(tmp_path: Path, family: str) -> None:
    """Against transformers' modules: all linear layers of the decoder but routers, as far as they fill blocks; servers
    are told of the others. The stream has the same tensors, and scales behind what is rounded."""
    architecture = read_architecture(write_model(tmp_path / "model", family=family))
    rounded, shapes = rounded_names(architecture), hf_shapes(architecture)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    dense = {name for name in linear if ".layers." in name and not name.endswith("gate.weight")}
    kept = {f"{name}.weight" for name in quantization_config(architecture)["modules_to_not_convert"]}  # type: ignore[attr-defined]
    assert dense <= rounded | kept and not rounded & kept
    assert all(name in kept for name in shapes if name.endswith("gate.weight"))
    given = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    sent = list(quantized(lambda: given.items(), rounded, power_of_two=False)())
    assert [name for name, _ in sent if not name.endswith(SCALE)] == list(given)
    assert {name.removesuffix(SCALE) for name, _ in sent if name.endswith(SCALE)} == rounded
    assert sum(tensor.nbytes for _, tensor in sent) == _sent_bytes(shapes, rounded)[0]


SHARES = {LARGEST: 0.5029, GLM: 0.5065, "qwen3_30b_a3b": 0.5105, "qwen3_32b": 0.5239}
SHARES |= {"qwen3_4b": 0.5485, "qwen3_8b": 0.5761, LONG: 0.5761}
"""Bytes of a sync in FP8 over those in bfloat16, for every model that a recipe trains (docs/engines.md)."""


@pytest.mark.parametrize("name", SHARES)
def test_a_sync_of_a_real_model_is_about_half(tmp_path: Path, name: str) -> None:
    """Exactly half and the scales of what is rounded, at most 0.52 in all of a mixture. Dense models send more, as the
    embedding and the output layer stay, 15 % of 8B: neither engine loads these in blocks."""
    architecture = read_architecture(write_config(tmp_path, name))
    shapes, rounded = hf_shapes(architecture), rounded_names(architecture)
    kept = {one for one in set(shapes) - rounded if "layers" in one and "gate." not in one and len(shapes[one]) > 1}
    halves = {f"model.layers.0.mlp.{half}_proj.weight" for half in ("gate", "up")}  # of 10,944 rows each, 85.5 blocks
    assert kept == (halves if name == GLM else set())
    of_rounded, plain = _sent_bytes({name: shapes[name] for name in rounded}, rounded)
    assert of_rounded / plain < 0.5002
    sent, plain = _sent_bytes(shapes, rounded)
    assert sent / plain == pytest.approx(SHARES[name], abs=1e-4)
    assert (sent / plain <= 0.52) == (architecture.experts is not None)


@pytest.mark.parametrize(
    ("name", "engine", "arguments", "said"),
    [
        ("qwen3_8b", "vllm", "--tensor-parallel-size 2 --data-parallel-size 4", ""),
        ("qwen3_8b", "vllm", "--tensor-parallel-size 8", ""),  # each key head has a worker of its own
        ("qwen3_4b", "vllm", "-tp 8", "down_proj.weight over 8 workers are not whole blocks of 128"),
        ("qwen3_30b_a3b", "vllm", "--tensor-parallel-size 2 --data-parallel-size 4", ""),  # in blocks of 32
        ("qwen3_30b_a3b", "sglang", "--tp 4", "experts.0.down_proj.weight over 4 workers are not whole blocks of 128"),
        ("qwen3_30b_a3b", "sglang", "--tp 4 --ep-size=4", ""),
        ("qwen3_30b_a3b", "sglang", "--tp 64 --ep 64", "o_proj.weight over 64 workers are not whole blocks of 128"),
        ("qwen3_30b_a3b", "sglang", "--tp 64 --ep 64 --attn-dp-size 2", ""),  # heads are split within each half
        ("qwen3_8b", "vllm", "--tensor-parallel-size two", "rollout.servers.args: argument --tensor-parallel-size"),
    ],
)
def test_workers_hold_whole_blocks(tmp_path: Path, name: str, engine: str, arguments: str, said: str) -> None:
    architecture = read_architecture(write_config(tmp_path, name))
    rollout = rollout_config({"engine": engine, "quantization": "fp8", "servers.args": arguments.split()})
    if not said:
        return check_split(rollout, architecture)
    with pytest.raises(UserError, match=said):
        check_split(rollout, architecture)


def test_training_on_rounded_samples_needs_a_correction(files: Path, tmp_path: Path) -> None:
    rounded = {"rollout__engine": "vllm", "rollout__quantization": "fp8", "model__dtype": "bfloat16"}
    with pytest.raises(UserError, match=r"sampled from a rounded policy, .* set objective.correction.level=token"):
        job_config(files, tmp_path / "run", **rounded)


@pytest.mark.parametrize(
    ("engine", "quantization", "capability", "given", "found"),
    [
        ("vllm", "fp8", (9, 0), None, "0"),
        ("vllm", "fp8", (9, 0), "1", "1"),
        ("vllm", "fp8", (10, 0), None, None),
        ("vllm", "fp8_pow2", (9, 0), None, None),
        ("vllm", "off", (9, 0), None, None),
        ("sglang", "fp8", (9, 0), None, None),
    ],
)
def test_hoppers_servers_do_not_round_again(
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    quantization: str,
    capability: tuple[int, int],
    given: str | None,
    found: str | None,
) -> None:
    """By vLLM's variable, which stays as it is where scales are powers of two or have to be."""
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    config = _config(files, tmp_path / "run", engine, Path(sys.executable))
    config.rollout.quantization = quantization  # type: ignore[assignment]
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    [server] = make_servers(config)
    assert server.variables.get(name) == found


def test_a_drafter_is_not_left_without_weights(files: Path, tmp_path: Path) -> None:
    config = _config(files, tmp_path / "run", "vllm", Path(sys.executable))
    config.rollout.speculation.method = "eagle3"
    with pytest.raises(UserError, match="so would the draft model"):
        make_servers(config)


@pytest.mark.parametrize(
    "parallel", [Parallel(dtype=torch.bfloat16), Parallel(tp=2, pp=2, ep=2, etp=1, dtype=torch.bfloat16)], ids=str
)
def test_a_bucket_never_ends_between_what_an_engine_joins_in_one_call(tmp_path: Path, parallel: Parallel) -> None:
    """DeepSeek's queries and keys, of which SGLang keeps the first half for one call only."""
    run_ranks(_never_apart, parallel.world_size, write_model(tmp_path / "model", family="deepseek_v3"), parallel)


def _never_apart(model: Path, parallel: Parallel) -> None:
    """In what an actor streams, whatever the sizes of its exchanges and of buckets; and rounded."""
    actor = build_actor(model, parallel)
    for exchange in (1, 4000, 1 << 20):
        given = dict(actor.weights(bucket_bytes=exchange))
        stream = [(name, tensor) for name, tensor in given.items() if tensor.dtype == torch.bfloat16]  # no biases
        matrices = [name for name, tensor in stream if tensor.ndim == 2]
        halves = [name for name in matrices if ".q_a_proj." in name]
        assert len(halves) == 4, "one a layer"
        for most in (1, *range(1300, 13_000, 450)):
            together = [[name for name, _ in bucket.tensors] for bucket in buckets(stream, most)]
            assert [name for names in together for name in names] == [name for name, _ in stream]
            _assert_together(together, halves)
        rounded = list(quantized(partial(iter, stream), matrices, power_of_two=False)())
        for most in range(650, 6500, 37):  # also those that end between a weight and its scales
            together = [[name for name, _ in bucket.tensors] for bucket in buckets(rounded, most)]
            _assert_together(together, halves)
            _assert_together(together, [name + SCALE for name in halves])
            at = {name: place for place, names in enumerate(together) for name in names}
            assert all(at[name + SCALE] < at[name] for name in matrices), "scales go first"


def _assert_together(together: list[list[str]], halves: list[str]) -> None:
    for name in halves:
        mate = name.replace("q_a_proj", "kv_a_proj_with_mqa")
        assert any(name in names and mate in names for names in together), f"{name} without {mate}"


@pytest.mark.parametrize(
    ("recipe", "quantization", "given", "found"),
    [
        ("blockwise", "fp8", None, "1"),
        ("blockwise", "fp8", "0", "0"),
        ("blockwise", "fp8_pow2", None, None),
        ("blockwise", "off", None, None),
        ("tensorwise", "fp8", None, None),
    ],
)
def test_training_rounds_as_servers_do(
    monkeypatch: pytest.MonkeyPatch, recipe: str, quantization: str, given: str | None, found: str | None
) -> None:
    """Transformer Engine's variable, which it reads when it is imported."""
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    monkeypatch.setattr(os, "environ", {name: given} if given else {})
    config = Config()
    config.actor.fp8, config.rollout.quantization = recipe, quantization  # type: ignore[assignment]
    set_fp8_variables(config)
    assert os.environ.get(name) == found
