"""Types of the servers' answers to all requests but those for completions (which are in `dialects.py`).

`Http.get` and `Http.post` decode into these: an answer that lacks a field, or has a value out of its bounds, is a
`BadAnswer`, a failure of that server. Other fields are skipped. Commands answer `http.Done`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Version: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9][0-9A-Za-z.+_-]{0,63}\Z")]
Workers: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Nccl: TypeAlias = dict[Text, Text]
Checksums: TypeAlias = dict[Text, Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16,64}\Z")]]
"""SHA-256, or its first digits, by name of a tensor."""


class NamedWeights(msgspec.Struct):
    weight_version: Text


class ModelFile(msgspec.Struct):
    """A checkpoint's config.json, at the path that a server names."""

    architectures: Annotated[list[Text], msgspec.Meta(min_length=1)]
    vocab_size: Tokens


# ------------------------------------------------------------------------------------------------------------ vLLM


class VLLMVersion(msgspec.Struct):
    version: Version


class Card(msgspec.Struct):
    id: Text
    root: Text | None = None
    max_model_len: Tokens | None = None


class Cards(msgspec.Struct):
    data: Annotated[list[Card], msgspec.Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True):
    """Of a server's settings; each has some of these."""

    logprobs_mode: Text = ""
    backend: Text = ""
    worker_extension_cls: Text = ""
    data_parallel_size: Workers = 1
    enable_chunked_prefill: bool = True
    device: Text = ""


class VLLMConfig(msgspec.Struct):
    model_config: Section
    weight_transfer_config: Section | None = None
    parallel_config: Section = Section()
    scheduler_config: Section = Section()
    device_config: Section = Section()


class Settings(msgspec.Struct):
    vllm_config: VLLMConfig


class WorldSize(msgspec.Struct):
    world_size: Workers


class Worker(msgspec.Struct):
    """The answer of `dppo_model` in `in_engine/dppo_vllm_extension.py`."""

    architecture: Text | None
    vocab_size: Tokens | None
    device: Text
    place: Annotated[int, msgspec.Meta(ge=0, lt=4096)] = 0
    nccl: Nccl = {}


class Models(msgspec.Struct):
    results: list[Worker] = []
    replicas: list[list[Worker]] = []


class VLLMChecksums(msgspec.Struct):
    checksums: Checksums


# ---------------------------------------------------------------------------------------------------------- SGLang


class ServerArgs(msgspec.Struct):
    version: Version
    model_path: Text = ""
    enable_deterministic_inference: bool | None = None
    device: Text | None = None
    tp_size: Workers = 1
    dp_size: Workers = 1
    pp_size: Workers = 1
    context_length: Tokens | None = None
    max_req_input_len: Tokens | None = None
    sampling_mask_max_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None


class Model(msgspec.Struct):
    model_path: Text = ""
    architectures: list[Text] | None = None


class Ranks(msgspec.Struct):
    ranks: list[VLLMChecksums]


# --------------------------------------------------------------------------------------------------------- routers


class Routed(msgspec.Struct):
    url: Text


class RoutedWorkers(msgspec.Struct):
    """As sglang-router 0.3.2 and vllm-router 0.1.17 list them."""

    workers: Annotated[list[Routed], msgspec.Meta(max_length=4096)]
