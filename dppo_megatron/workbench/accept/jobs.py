"""What takes whole runs: a job that is killed and resumed, servers beside it, the repository's own tests.

The task is the quickstart's and the models are made here, so nothing is downloaded. Processes find this package as
the one does that starts them: `runner.py` has set its variables.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dppo_megatron.actor.layout import start_process_group, stop_process_group
from dppo_megatron.children import python_command
from dppo_megatron.config import load_config
from dppo_megatron.config.paths import shipped
from dppo_megatron.job import prepare_job
from dppo_megatron.rollout.engine import Request, Sampling
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.workbench.accept.basics import this_site
from dppo_megatron.workbench.accept.runner import Sheet, tests_directory
from dppo_megatron.workbench.accept.workload import SHAPES, RandomWeights
from dppo_megatron.workbench.planning.memory import plan_memory
from dppo_megatron.workbench.planning.shares import whole_model
from dppo_megatron.workbench.planning.site import GIB
from dppo_megatron.workbench.planning.timing import speeds_for
from dppo_megatron.workbench.quickstart.make import write_task
from dppo_megatron.workbench.quickstart.tiny_model import make_tokenizer, write_model_directory, write_tiny_qwen3

_CONFIG = str(shipped("configs", "quickstart.yaml"))


def gpu_tests(sheet: Sheet) -> None:
    """pytest's own counts."""
    tests = tests_directory()
    assert tests is not None
    found = sheet.directory / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(tests / "test_gpu.py"), "-p", "no:cacheprovider"]
    subprocess.run([*command, f"--junitxml={found}"], cwd=tests.parent)
    counts = next(ElementTree.parse(found).iter("testsuite")).attrib
    failed, skipped = int(counts["failures"]) + int(counts["errors"]), int(counts["skipped"])
    sheet.note("failed", failed)
    sheet.note("passed", int(counts["tests"]) - failed - skipped)
    sheet.note("skipped", skipped)


def killed_and_resumed(sheet: Sheet) -> None:
    """The quickstart's job; what the second process does again must be what the first one did."""
    steps, every, kill_at = (40, 16, 20) if sheet.cuda else (8, 4, 5)
    with _task(sheet, "job") as files:
        settings = _settings(files, sheet) | {
            "steps": steps,
            "checkpoint.every_steps": every,
            "checkpoint.async_save": str(sheet.cuda).lower(),
            "sft.steps": 200 if sheet.cuda else 20,
        }
        first = subprocess.Popen(_train(settings))
        while first.poll() is None and (not (rows := _metrics(files)) or max(rows) < kill_at):
            time.sleep(0.1)
        first.kill()  # no warning, as a lost machine
        first.wait()
        before = _metrics(files)
        subprocess.run(_train(settings), check=True)
        after = _metrics(files)
    repeated = [step for step in sorted(before) if after[step]["time/step_s"] != before[step]["time/step_s"]]
    sheet.note("steps", len(after), steps)
    sheet.note("repeated", len(repeated), note=f"killed after step {max(before)}; done again: {repeated}")
    sheet.note("kept", len(before) - len(repeated), every, "from the checkpoint")
    if repeated:
        old, new = before[repeated[0]], after[repeated[0]]
        sheet.note("loss", abs(new["train/loss"] - old["train/loss"]))
        sheet.note("grad_norm", abs(new["train/grad_norm"] / old["train/grad_norm"] - 1))
    sheet.note("mismatch", _mismatch(after))


def servers(sheet: Sheet) -> None:
    """One engine by its own interface, then three steps through the command line."""
    colocate = {"rollout.servers.colocate": str(sheet.cuda).lower()}
    with _task(sheet, "syncs") as files:
        _syncs(sheet, files, colocate)
    three_steps(sheet, colocate)


def three_steps(sheet: Sheet, more: dict[str, str], ranks: int = 1, arguments: tuple[str, ...] = ()) -> None:
    """A training run beside a server that it launches; `arguments` are the server's."""
    with _task(sheet, "training") as files:
        settings = _settings(files, sheet) | _serving(sheet, *arguments) | more
        settings |= {"steps": 3, "sft.steps": 30, "rollout.sync.verify_every": 1}
        subprocess.run(_train(settings, ranks), check=True)
        rows = _metrics(files)
    sheet.note("steps", len(rows))
    sheet.note("mismatch", _mismatch(rows))
    sheet.note("train_sync_s", rows[max(rows)]["rollout/sync_s"])


def _syncs(sheet: Sheet, files: Path, colocate: dict[str, str]) -> None:
    """Two syncs of other weights, each followed by completions whose log-probabilities must be those weights'."""
    model = Path(sheet.model) if sheet.model else _random_model(files / "random", sheet)
    settings = _settings(files, sheet) | _serving(sheet) | colocate | {"model.hf_path": model}
    config = load_config(_CONFIG, [f"{key}={value}" for key, value in settings.items()])
    start_process_group()
    job = prepare_job(config, 1)
    engine = ServerEngine(config, job.architecture, job.tokenizer)
    device, dtype = ("cuda", torch.bfloat16) if sheet.cuda else ("cpu", torch.float32)
    requests = [Request(prompt, index, 1) for prompt in job.train_prompts[:8] for index in range(4)]
    try:
        for seed, name in ((1, "first"), (2, "second")):
            weights = RandomWeights(job.architecture, device, seed)
            awake = _used_gib()
            engine.rest()
            if sheet.cuda:
                sheet.note("freed_share", (awake - _used_gib()) * GIB / torch.cuda.mem_get_info()[1])
            started = time.perf_counter()
            engine.load_weights(partial(weights.all, dtype))
            seconds = time.perf_counter() - started
            in_use = {"sync": _used_gib()}
            completions = engine.generate(requests, Sampling(16, 1.0, 0))
            in_use["generate"] = _used_gib()
            expected = _logprobs(model, weights, device, requests, completions)
            said = np.concatenate([one.logprobs for one in completions])
            sheet.note(f"{name}_diff", float(np.abs(said - expected).mean()))
    finally:
        engine.close()
        stop_process_group()
    if sheet.cuda:
        planned = {one.name: one.total / GIB for one in plan_memory(config, job.architecture, this_site(), 32.0).phases}
        for phase, used_gib in in_use.items():
            sheet.note(phase, used_gib, planned[phase], "the prediction includes an actor")
    expected_gb_s = speeds_for(job.architecture).sync_gb_per_s.value
    expected_s = whole_model(job.architecture) * dtype.itemsize / 1e9 / expected_gb_s
    sheet.note("sync_s", seconds, expected_s, "random weights are drawn meanwhile")


def _used_gib() -> float:
    """Of the device, by all processes; 0 without one."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return (total - free) / GIB


@torch.no_grad()
def _logprobs(model: Path, weights: RandomWeights, device: str, requests: Any, completions: Any) -> Any:
    """[all tokens]: transformers' model in float32 on what the server has said."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    reference = reference.to(device).eval()
    reference.load_state_dict(dict(weights.all()), strict=False)
    found = []
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.tensor([[*request.prompt.token_ids, *completion.token_ids.tolist()]], device=device)
        start = len(request.prompt.token_ids)
        scores = reference(tokens).logits[0, start - 1 : -1].float().log_softmax(-1)
        found.append(scores.gather(1, tokens[0, start:, None])[:, 0].cpu().numpy())
    return np.concatenate(found)


def _random_model(directory: Path, sheet: Sheet) -> Path:
    """A checkpoint of about 0.6B, or of ten million parameters, with the quickstart's tokenizer."""
    tiny = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "tie_word_embeddings": True}
    write_model_directory(directory, make_tokenizer(), 0, **SHAPES["0.6b"] if sheet.cuda else tiny)
    return directory


@contextmanager
def _task(sheet: Sheet, part: str) -> Iterator[Path]:
    """A directory with task and model, and `run` beside them, of which the metrics and the servers' logs are kept, in a
    directory of the step for each of its parts."""
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch)
        write_task(files, seed=0, num_train=512, num_heldout=16, num_sft=4096)
        write_tiny_qwen3(files / "model", seed=0, hidden_size=256, tie_word_embeddings=True)
        try:
            yield files
        finally:
            (sheet.directory / part).mkdir()
            for kept in (*files.glob("run/metrics.jsonl"), *files.glob("run/servers/*.log")):
                shutil.copy(kept, sheet.directory / part)


def _settings(files: Path, sheet: Sheet) -> dict[str, Any]:
    """The quickstart's config on these files, with fewer prompts a step where there is no device."""
    return {
        "run_dir": files / "run",
        "model.hf_path": files / "model",
        "model.dtype": "bfloat16" if sheet.cuda else "float32",
        "data.train_path": files / "train.jsonl",
        "data.eval_paths.heldout": files / "heldout.jsonl",
        "sft.examples_path": files / "sft.jsonl",
        "rollout.prompts_per_step": 64 if sheet.cuda else 16,
        "rollout.sampling.max_completion_tokens": 56 if sheet.cuda else 24,
        "eval.every_steps": 0,
        "reward.min_self_consistency": 0,
    }


def _serving(sheet: Sheet, *arguments: str) -> dict[str, Any]:
    """Servers that the job launches, of the engine that the given Python can import."""
    asked = "import importlib.util as u; print('vllm' if u.find_spec('vllm') else 'sglang')"
    engine = subprocess.check_output([sheet.server_python, "-c", asked], text=True).strip()
    share = {"vllm": ["--gpu-memory-utilization", "0.3", "--enforce-eager"], "sglang": ["--mem-fraction-static", "0.3"]}
    of = [*(share[engine] if sheet.cuda else []), *arguments]
    return {
        "rollout.engine": engine,
        "rollout.servers.launch": "local",
        "rollout.servers.python": sheet.server_python,
        "rollout.servers.args": "[" + ", ".join(f"'{one}'" for one in of) + "]",
    }


def _train(settings: dict[str, Any], ranks: int = 1) -> list[str]:
    return python_command("dppo_megatron", "train", _CONFIG, *(f"{k}={v}" for k, v in settings.items()), ranks=ranks)


def _metrics(files: Path) -> dict[int, dict[str, Any]]:
    """Step -> its line; a last line that is being written is not counted."""
    try:
        lines = (files / "run" / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return {}
    return {row["step"]: row for row in map(json.loads, lines) if row.get("step", 0) > 0}


def _mismatch(rows: dict[int, dict[str, Any]]) -> float:
    return max(row["mismatch/logprob_abs_diff_mean"] or 0.0 for row in rows.values())
