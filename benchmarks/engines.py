"""Rollout engines on this machine: start-up, tokens a second, and the seconds of a weight sync through each channel.

    python benchmarks/engines.py [--vllm-python .venv-vllm/bin/python] [--sglang-python PYTHON] [--channels ipc ...]
        [--only-sync] [--json FILE]

Throughput is measured with the quickstart's model, the best of two rounds. A sync sends a Qwen3 of about 100 million
parameters to one server, compared with what the same bytes cost without an engine: a torch.distributed broadcast
between two processes for gloo and ipc, a safetensors write and read for disk. Medians of nine of each, taken in turns.
SGLang on a CPU needs PYTHONPATH=tests/support/engines/sglang_cpu (docs/engines.md).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dppo_megatron.config import Config, load_config
from dppo_megatron.job import Job, prepare_job
from dppo_megatron.rollout.engine import Engine, Request, Sampling
from dppo_megatron.rollout.hf import engine_from_files
from dppo_megatron.rollout.server_engine import ServerEngine
from dppo_megatron.workbench.quickstart.make import Recipe, write_task
from dppo_megatron.workbench.quickstart.tiny_model import write_tiny_qwen3

_ROUNDS = 9
_TOKENS = 48
_LARGE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", metavar="PYTHON")
    parser.add_argument("--sglang-python", metavar="PYTHON")
    parser.add_argument("--channels", nargs="+", choices=list(_PLAIN), default=list(_PLAIN), metavar="CHANNEL")
    parser.add_argument("--only-sync", action="store_true", help="no start-up and throughput")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    figures["torch"] = torch.__version__
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        directory = Path(folder)
        write_task(directory, Recipe(0, num_train=64, num_heldout=8, num_sft=64))
        write_tiny_qwen3(directory / "model", seed=0)
        write_tiny_qwen3(directory / "large", seed=0, **_LARGE)
        if not arguments.only_sync:
            figures |= _embedded(directory)
        for engine, python in (("vllm", arguments.vllm_python), ("sglang", arguments.sglang_python)):
            if python and not arguments.only_sync:
                figures |= _served_throughput(directory, engine, python)
            if python:
                figures |= _syncs(directory, engine, python, arguments.channels)
    for name, value in figures.items():
        print(f"{name:40} {value:.3g}" if isinstance(value, float) else f"{name:40} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _config(directory: Path, model: str, **extra: str) -> Config:
    values = {
        "run_dir": str(directory / "run"),
        "model.hf_path": str(directory / model),
        "model.dtype": "float32",
        "data.train_path": str(directory / "train.jsonl"),
        "data.max_prompt_tokens": "16",
        "rollout.completions_per_prompt": "8",
        "rollout.sampling.max_completion_tokens": str(_TOKENS),
        "rollout.limits.max_concurrent_sequences": "512",
        "packing.max_tokens_per_microbatch": "8192",
        **extra,
    }
    quickstart = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
    values |= {"data.eval_paths.heldout": str(directory / "heldout.jsonl")}
    values |= {"sft.examples_path": str(directory / "sft.jsonl")}
    return load_config(str(quickstart), [f"{key}={value}" for key, value in values.items()], writes_run=False)


def _served(directory: Path, model: str, engine: str, python: str, **extra: str) -> tuple[ServerEngine, Job, float]:
    local = {"rollout.engine": engine, "rollout.servers.launch": "local", "rollout.servers.python": python}
    if engine == "sglang":
        local["rollout.servers.args"] = "['--max-total-tokens', '65536', '--mem-fraction-static', '0.3']"
    config = _config(directory, model, **local, **extra)
    job = prepare_job(config, 1)
    started = time.perf_counter()
    served = ServerEngine(config, job.architecture, job.tokenizer)
    return served, job, time.perf_counter() - started


def _embedded(directory: Path) -> dict[str, float]:
    job = prepare_job(_config(directory, "model"), 1)
    started = time.perf_counter()
    engine = engine_from_files(job.config, job.tokenizer, job.checkpoint)
    return {"hf: start-up, s": time.perf_counter() - started, "hf: tokens/s": _tokens_per_s(engine, job)}


def _served_throughput(directory: Path, name: str, python: str) -> dict[str, float]:
    engine, job, start_up_s = _served(directory, "model", name, python)
    try:
        engine.load_weights(lambda: ((name, job.checkpoint.get(name)) for name in job.checkpoint.names))
        return {f"{name}: start-up, s": start_up_s, f"{name}: tokens/s": _tokens_per_s(engine, job)}
    finally:
        engine.close()


def _tokens_per_s(engine: Engine, job: Job) -> float:
    requests = [Request(prompt, index, 1) for prompt in job.train_prompts[:64] for index in range(8)]
    best = 0.0
    for seed in range(2):
        started = time.perf_counter()
        completions = engine.generate(requests, Sampling(_TOKENS, 1.0, seed))
        best = max(best, sum(len(c.token_ids) for c in completions) / (time.perf_counter() - started))
    return best


def _syncs(directory: Path, name: str, python: str, channels: Sequence[str]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for channel in channels:
        plain = _PLAIN[channel]
        extra = {"rollout.sync.channel": channel, "rollout.sync.verify_every": "0"}
        engine, job, _ = _served(directory, "large", name, python, **extra)
        tensors = {key: job.checkpoint.get(key) for key in job.checkpoint.names}
        figures["sync: parameters, millions"] = sum(t.numel() for t in tensors.values()) / 1e6
        try:
            engine.load_weights(lambda: iter(tensors.items()))  # noqa: B023 - untimed: makes the group, touches memory
            rounds = []
            for _ in range(_ROUNDS):
                ours = _seconds(lambda: engine.load_weights(lambda: iter(tensors.items())))  # noqa: B023
                rounds.append((ours, plain(tensors, directory)))
        finally:
            engine.close()
        figures |= {
            f"{name} sync {channel}: s": median(ours for ours, _ in rounds),
            f"{name} sync {channel}: plain, s": median(bare for _, bare in rounds),
            f"{name} sync {channel}: plain / ours": median(bare / ours for ours, bare in rounds),
        }
    return figures


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _plain_files(tensors: dict[str, torch.Tensor], directory: Path) -> float:
    path = directory / "plain.safetensors"

    def write_and_read() -> None:
        save_file(tensors, path)
        for tensor in load_file(path).values():
            tensor.clone()

    return _seconds(write_and_read)


def _plain_broadcast(tensors: dict[str, torch.Tensor], _: Path) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(port, shapes))
    receiver.start()
    group = _group(0, port)
    _broadcast(group, torch.zeros(1))  # wait until both have joined
    started = time.perf_counter()
    for tensor in tensors.values():
        _broadcast(group, tensor)
    _broadcast(group, torch.zeros(1), root=1)  # wait until the receiver has everything
    seconds = time.perf_counter() - started
    receiver.join()
    return seconds


def _receive(port: int, shapes: list[tuple[int, ...]]) -> None:
    group = _group(1, port)
    _broadcast(group, torch.zeros(1))
    for shape in shapes:
        _broadcast(group, torch.empty(shape))
    _broadcast(group, torch.zeros(1), root=1)


def _group(rank: int, port: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=120))


def _broadcast(group: Any, tensor: torch.Tensor, root: int = 0) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([tensor], options).wait()


_PLAIN: dict[str, Callable[[dict[str, torch.Tensor], Path], float]] = {
    "ipc": _plain_broadcast,
    "gloo": _plain_broadcast,
    "disk": _plain_files,
}


if __name__ == "__main__":
    main()
