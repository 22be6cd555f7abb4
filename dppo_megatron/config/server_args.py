"""Checks of `rollout.servers.args`, read as vLLM 0.32.0 and SGLang 0.5.23 read it: options that the trainer sets
itself, and the GPUs that a server needs. Engines would refuse them only minutes after their start."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from dppo_megatron.config.ranges import Range
from dppo_megatron.types import UserError

KEY_OPTIONS = ("--api-key", "--admin-api-key", "--hf-token", "--ssl-keyfile-password", "--watermark-config")
OWN_OPTIONS = (
    *("--host", "--port", "--uds", "--config", "--root-path", "--fastapi-root-path", "--grpc-port", "--grpc-mode"),
    *("--smg-grpc-mode", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers"),
    *("--enable-ssl-refresh", "--enable-http2", "--headless", "--nnodes", "-n", "--node-rank", "-r", "--master-addr"),
    *("--master-port", "--dist-init-addr", "--nccl-init-addr", "--data-parallel-address", "-dpa", "--model"),
    *("--model-path", "--served-model-name", "--weight-transfer-config", "--tokenizer-worker-num", "--middleware"),
    *("--worker-cls", "--worker-extension-cls", "--scheduler-cls", "--logits-processors", "--custom-weight-loader"),
    "--kv-transfer-config",  # most connectors keep prefixes of former weights: vLLM's reset reaches only its own
)
"""With another value the trainer could not reach the server, send it weights, or believe its probabilities."""
DRAFT_OPTIONS = (
    *("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens", "--speculative-algorithm"),
    *("--speculative-adaptive-config", "--speculative-draft-model-path", "--speculative-num-steps"),
    *("--speculative-eagle-topk", "--speculative-num-draft-tokens", "--speculative-ngram-max-bfs-breadth"),
    *("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
    "--sleep-preserve-parameter-names",
)
REPLICA_OPTIONS = ("--data-parallel-size", "-dp", "--dp-size", "--dp")
STAGE_OPTIONS = ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp")
_SIZES = {
    "tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    "replicas": REPLICA_OPTIONS,
    "stages": STAGE_OPTIONS,
    "attention": ("--attn-dp-size", "--attention-data-parallel-size"),
}
QUANTIZATION_OPTIONS = ("--quantization", "-q", "--hf-overrides", "--json-model-override-args")
_OTHER_SPLITS = {"--data-parallel-size-local", "--prefill-context-parallel-size", "-pcp"}
"""With these, the number of a server's GPUs is not the product of the three sizes."""
_NOT_SHORT = ("--reasoning-parser", "--tokenizer", "--watermark")
"""Options in their own right, although the name of an option above begins with theirs."""
_COUNTERPARTS = (
    ("--gpu-memory-utilization", "--mem-fraction-static"),
    ("--max-num-seqs", "--max-running-requests"),
    ("--max-num-batched-tokens", "--chunked-prefill-size"),
    ("--max-model-len", "--context-length"),
    ("--enforce-eager", "--disable-cuda-graph"),
    ("--enable-expert-parallel", "--ep-size"),
    ("--moe-backend", "--moe-runner-backend"),
    ("--no-enable-prefix-caching", "--disable-radix-cache"),
)
"""(vLLM's name, SGLang's name) of the same option; neither engine accepts the other's."""


@dataclass(frozen=True, slots=True)
class ServerSplit:
    """How a server splits its model and its requests over GPUs."""

    tensor: int
    replicas: int
    stages: int
    attention: int
    """SGLang's attention data parallelism: groups inside the tensor group, each with its own batch and KV cache, that
    compute attention separately and the rest of every layer together."""

    @property
    def heads(self) -> int:
        """Workers over which the attention heads are split."""
        return self.tensor // self.attention

    @property
    def gpus(self) -> int:
        """GPUs of one server."""
        return self.tensor * self.replicas * self.stages


def read_split(arguments: Sequence[str]) -> ServerSplit:
    """Raises UserError for a size that is not a number above 0, and for attention groups of unequal sizes."""
    sizes = read_options(arguments, {name: (flags, int, 1, "[1, 1e6]") for name, flags in _SIZES.items()})
    if "--enable-dp-attention" in _names(arguments) and sizes["attention"] == 1:  # SGLang's older spelling
        sizes |= {"attention": sizes["replicas"], "replicas": 1}
    if sizes["tensor"] % sizes["attention"]:
        raise UserError(
            f"rollout.servers.args: attention data parallel {sizes['attention']} must divide tensor parallel"
            f" {sizes['tensor']}"
        )
    return ServerSplit(**sizes)


def read_options(
    arguments: Sequence[str], options: Mapping[str, tuple[tuple[str, ...], type, Any, str]]
) -> dict[str, Any]:
    """The values of some options, each with its flags, type, default and range (empty: any). Raises UserError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, (flags, kind, default, _) in options.items():
        parser.add_argument(*flags, dest=name, type=kind, default=default)
    try:
        given = vars(parser.parse_known_args(arguments)[0])
    except argparse.ArgumentError as error:
        raise UserError(f"rollout.servers.args: {error}") from None
    for name, (flags, _, _, interval) in options.items():
        value = given[name]
        if interval and value is not None and value not in (allowed := Range.parse(interval)):
            raise UserError(f"rollout.servers.args: {flags[0]} {value}: {allowed.wanted(value)}")
    return given


def check_gpus(gpus: Sequence[str], arguments: Sequence[str]) -> None:
    """Raise UserError unless each entry of `rollout.servers.gpus` has as many devices as its server needs."""
    split, devices = read_split(arguments), [device.strip() for entry in gpus for device in entry.split(",")]
    if len(set(devices)) < len(devices):
        raise UserError("rollout.servers.gpus names a device twice")
    if _OTHER_SPLITS & set(_names(arguments)):
        return
    for entry in gpus:
        if (given := len(entry.split(","))) != split.gpus:
            stages = f" x pipeline {split.stages}" if split.stages > 1 else ""
            raise UserError(
                f"rollout.servers.gpus gives a server {given} GPUs ({entry}), but its rollout.servers.args need"
                f" {split.gpus}: tensor {split.tensor} x data {split.replicas}{stages}. (A list on the command line"
                " replaces that of the file: give all arguments.)"
            )


def check_longest(arguments: Sequence[str], longest: int) -> None:
    """Raise UserError if a server's sequences cannot have `longest` tokens, prompt and completion together."""
    for option, value in pairwise(part for one in arguments for part in one.split("=", 1)):
        if option in ("--max-model-len", "--context-length") and value.isdecimal() and int(value) < longest:
            raise UserError(f"rollout.servers.args: {option} {value}: the longest sequence has {longest} tokens")


def check_engine_names(engine: Literal["vllm", "sglang"], arguments: Sequence[str]) -> None:
    """Raise UserError for an option that only the other engine has."""
    names = _names(arguments)
    for of_vllm, of_sglang in _COUNTERPARTS:
        own, other = (of_vllm, of_sglang) if engine == "vllm" else (of_sglang, of_vllm)
        if other in names:
            raise UserError(
                f"rollout.servers.args has {other}, which rollout.engine = {engine} does not know; use {own}"
            )


def named_option(arguments: Sequence[str], options: Sequence[str]) -> str:
    """The first of `options` that occurs in `arguments`, also abbreviated or with underscores, which engines accept.

    Example: "--api_key=x" and "--api-k" both mean --api-key.
    """
    names = _names(arguments)
    return next((option for option in options if any(_is_meant(option, name) for name in names)), "")


def _is_meant(option: str, name: str) -> bool:
    """Whether an engine's parser would read the argument `name` as `option`."""
    if not name.startswith("--"):
        return option[1] != "-" and name.startswith(option)  # a short option may be joined to its value: -n2
    return name == option or (len(name) > 2 and name not in _NOT_SHORT and option.startswith(name))


def _names(arguments: Sequence[str]) -> list[str]:
    return [re.split(r"[=.]", argument)[0].replace("_", "-") for argument in arguments]
