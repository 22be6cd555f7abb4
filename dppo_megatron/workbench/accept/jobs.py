"""Steps that take whole runs: a job that is killed and resumed, servers beside one, the repository's own tests.

The task is the quickstart's and the model is made here, so nothing is downloaded. Each run is `dppo-megatron train` in
the directory of its step, where its metrics, logs and checkpoints stay.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dppo_megatron.algorithms.correction import Mismatch
from dppo_megatron.children import start_python
from dppo_megatron.config import load_config
from dppo_megatron.config.paths import shipped
from dppo_megatron.types import UserError
from dppo_megatron.workbench.accept.runner import TESTS, Sheet, repository
from dppo_megatron.workbench.quickstart.make import Recipe, write_task
from dppo_megatron.workbench.quickstart.tiny_model import make_tokenizer, write_tiny_qwen3
from dppo_megatron.workbench.runs.run_record import Follow, RunRecord

_SHARE = {"vllm": ["--gpu-memory-utilization", "0.3", "--enforce-eager"], "sglang": ["--mem-fraction-static", "0.3"]}
_FP8 = {
    "rollout.quantization": "fp8",
    "objective.correction.level": "token",
    "model.dtype": "bfloat16",
    "rollout.sync.max_canary_logprob_diff": 0.1,  # of a model of two narrow layers, whose rounding does not average out
}
_POLL_S = 0.1


def gpu_tests(sheet: Sheet) -> None:
    """Run the tests that need a GPU; the figures are pytest's counts."""
    tests, results = repository(TESTS), sheet.directory / "tests.xml"
    assert tests is not None
    arguments = ["-q", "-m", "gpu", str(tests), "-p", "no:cacheprovider", f"--junitxml={results}"]
    start_python("pytest", *arguments, cwd=tests.parents[1]).wait()
    counts = next(ElementTree.parse(results).iter("testsuite")).attrib
    failed, skipped = int(counts["failures"]) + int(counts["errors"]), int(counts["skipped"])
    sheet.note("failed", failed)
    sheet.note("passed", int(counts["tests"]) - failed - skipped)
    sheet.note("skipped", skipped)


def killed_and_resumed(sheet: Sheet) -> None:
    """The quickstart's job; steps that the second process repeats must match those of the first."""
    steps, every, kill_at = (16, 8, 10) if sheet.cuda else (8, 4, 5)  # the embedded engine: 2 s a step on an H200
    settings = {
        "steps": steps,
        "checkpoint.every_steps": every,
        "checkpoint.async_save": str(sheet.cuda).lower(),
        "sft.steps": 200 if sheet.cuda else 20,
    }
    first = _start(sheet, settings)
    while first.poll() is None and max(_record(sheet).steps, default=0) < kill_at:
        time.sleep(_POLL_S)
    first.kill()  # without warning, like a lost machine
    first.wait()
    before = _record(sheet)
    _check(_start(sheet, settings))
    after = _record(sheet)

    def old_and_new(name: str, step: int) -> list[float]:
        return [run.columns[name][run.steps.index(step)] or 0.0 for run in (before, after)]

    trained = [step for step in before.steps if step]
    repeated = [step for step in trained if len(set(old_and_new("time/step_s", step))) > 1]
    sheet.note("steps", sum(step > 0 for step in after.steps), steps)
    sheet.note("repeated", len(repeated), note=f"killed after step {max(trained)}; done again: {repeated}")
    sheet.note("kept", len(trained) - len(repeated), every, "from the checkpoint")
    if repeated:
        old, new = old_and_new("train/loss", repeated[0])
        sheet.note("loss", abs(new - old))
        old, new = old_and_new("train/grad_norm", repeated[0])
        sheet.note("grad_norm", abs(new / old - 1))
    sheet.note("mismatch", _mismatch(after))


def three_steps(sheet: Sheet, servers: str) -> None:
    """A training run with a server that it launches, of the engine that --server-python can import. Weights change in
    every step, and the server's log-probabilities are compared with the actor's."""
    settings_of: dict[str, dict[str, Any]] = {
        "colocate": {"rollout.servers.colocate": str(sheet.cuda).lower()},
        "nccl": {"rollout.servers.gpus": "['1']", "rollout.sync.channel": "nccl"},
        "replicas": {"rollout.servers.gpus": "['0,1']", "rollout.servers.colocate": "true"},
        "fp8": _FP8,
    }
    ranks = 2 if servers == "replicas" else 1
    settings = _served(sheet, *(["--data-parallel-size", "2"] if ranks == 2 else [])) | settings_of[servers]
    run, used = _start(sheet, settings, ranks), list[float]()
    while run.poll() is None:
        time.sleep(_POLL_S)
        if sheet.cuda and 0 < max(_record(sheet).steps, default=0) < 3:  # while the server runs
            free, total = torch.cuda.mem_get_info()
            used.append(1 - free / total)
    _check(run)
    _note_run(sheet)
    if used and servers == "colocate":
        sheet.note("freed_share", max(used) - min(used))


def replayed(sheet: Sheet) -> None:
    """Three steps that replay the experts of a server, or of the embedded engine: vLLM records none on a CPU. Then a
    rollout's mismatch with routers 3 % off, with and without replay: in a tiny model rounding moves few tokens."""
    from dppo_megatron.job import prepare_job
    from dppo_megatron.run import Run  # the other steps import no Megatron here
    from dppo_megatron.train import train

    served = sheet.cuda and sheet.server_python
    settings = {"actor.routing_replay": "engine"} | (_served(sheet) if served else {})
    config, *overrides = _task(sheet, settings | {"pruning.completion.method": "none"}, write_mixture)
    os.chdir(sheet.directory)
    with Run(prepare_job(load_config(config, overrides), 1)) as run:
        train(run)
        _note_run(sheet)
        loop, kl = run.loop, list[float]()
        with loop.step(run.last_step + 1) as step:
            loop.rollout(step)
            loop.prune(step)
        torch.manual_seed(0)
        weights = {
            name: one * (1 + 0.03 * torch.randn_like(one)) if ".mlp.gate." in name else one.clone()
            for name, one in loop.actor.weights(to=[0])
        }
        loop.actor.freeze_reference(weights.__getitem__)
        [update] = step.updates
        with loop.actor.reference_weights():
            for replays in (True, False):
                samples, mismatch = [one for _, one in sorted(update.samples.items())], Mismatch()
                samples = samples if replays else [replace(one, experts=None) for one in samples]
                for one, values in zip(samples, loop.actor.logprobs(samples, update.plan.pack) or [], strict=True):
                    mismatch.add(values, one.behaviour_logprobs, 1.0, 1.0)
                kl.append(mismatch.metrics()["mismatch/kl"])
    sheet.note("replay", kl[1] / kl[0], note=f"{'a server' if served else 'embedded engine'}; {kl[0]:.3g} with replay")


def write_dense(directory: Path) -> None:
    write_tiny_qwen3(directory, seed=0, hidden_size=256, tie_word_embeddings=True)


def write_mixture(directory: Path) -> None:
    """Eight experts in each of two layers, two of them active for a token."""
    tokenizer = make_tokenizer()
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    layers = {"num_hidden_layers": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 128}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts | sizes | layers | ends)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _served(sheet: Sheet, *arguments: str) -> dict[str, Any]:
    """Settings of a run that launches a server of the engine that --server-python can import."""
    code = "import importlib.util as u; print('vllm' if u.find_spec('vllm') else 'sglang')"
    engine = subprocess.check_output([sheet.server_python, "-c", code], text=True).strip()
    engine_arguments = [*(_SHARE[engine] if sheet.cuda else []), *arguments]
    return {
        "rollout.engine": engine,
        "rollout.servers.launch": "local",
        "rollout.servers.python": sheet.server_python,
        "rollout.servers.args": "[" + ", ".join(f"'{one}'" for one in engine_arguments) + "]",
        "rollout.sync.verify_every": 1,
    }


def _task(sheet: Sheet, settings: dict[str, Any], write_model: Callable[[Path], None] = write_dense) -> list[str]:
    """CONFIG and settings for the quickstart's task, which the first call makes, with fewer prompts a step without a
    GPU. The config's paths are relative to the directory of the step."""
    task = sheet.directory / "runs" / "task_seed0"
    if not task.exists():
        write_task(task, Recipe(0, num_train=512, num_heldout=16, num_sft=4096))
        write_model(task / "model")
    settings = {
        "steps": 3,
        "sft.steps": 30,
        "model.dtype": "bfloat16" if sheet.cuda else "float32",
        "rollout.prompts_per_step": 64 if sheet.cuda else 16,
        "rollout.completions_per_prompt": 8,
        "rollout.sampling.max_completion_tokens": 56 if sheet.cuda else 24,
        "actor.optimizer.learning_rate": 1e-3,
        "eval.every_steps": 0,
        "reward.min_self_consistency": 0,
    } | settings
    return [str(shipped("configs", "quickstart.yaml")), *(f"{key}={value}" for key, value in settings.items())]


def _start(sheet: Sheet, settings: dict[str, Any], ranks: int = 1) -> subprocess.Popen[bytes]:
    return start_python("dppo_megatron", "train", *_task(sheet, settings), ranks=ranks, cwd=sheet.directory)


def _check(run: subprocess.Popen[bytes]) -> None:
    if code := run.wait():
        raise RuntimeError(f"the training run ended with exit code {code}")


def _record(sheet: Sheet) -> RunRecord:
    """The run so far; a record without steps if it has not begun."""
    path = sheet.directory / "runs" / "quickstart"
    with contextlib.suppress(UserError):
        return Follow(path).look()
    return RunRecord(path.name, path)


def _note_run(sheet: Sheet) -> None:
    run = _record(sheet)
    sheet.note("steps", sum(step > 0 for step in run.steps))
    sheet.note("mismatch", _mismatch(run))
    seconds = run.columns.get("rollout/sync_s", [None])[-1]
    sheet.note("sync_s", seconds, note="no server" if seconds is None else "")


def _mismatch(run: RunRecord) -> float:
    values = [one for one in run.columns.get("mismatch/logprob_abs_diff_mean", ()) if one is not None]
    return max(values, default=math.nan)  # a NaN fails: nothing was compared
