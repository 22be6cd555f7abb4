"""Checks before training that the layers described by a model provider compute the same as transformers' layers.

A model with random weights, with layers up to the first of each kind, in full width, in float32 on the CPU, takes the
path of a checkpoint (files, reader, Megatron, weight stream). This runs in a process of its own, since process groups
of one rank cannot be created within a job's.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dppo_megatron.children import die_with_parent
from dppo_megatron.config.schema import ActorConfig, LayoutConfig, ModelConfig
from dppo_megatron.launcher_env import forget_launcher
from dppo_megatron.types import TrainSample, UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.hf_files import CheckpointReader
from dppo_megatron.weights.mapping import kinds
from dppo_megatron.weights.provider import model_architecture

_VOCABULARY = 256
"""Of the compared model. Embeddings work alike in every family, and full ones are larger than the layers."""


def compare(model: ModelConfig, embedded: bool = False) -> dict[str, float]:
    """Build and compare both models in this process, which must not have a process group yet. Returns how many `layers`
    of how many (`of`) were compared, and the largest `difference` between log-probabilities.

    Args:
        embedded: compare the embedded engine with transformers too.

    Raises:
        UserError: names, shapes or bytes differ from those of transformers' model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = model_architecture(model)
    config = AutoConfig.from_pretrained(model.hf_path, trust_remote_code=False)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    depth = _depth(whole, architecture)
    kinds_of = [list(_parts(layer)) for layer in _layers(whole, architecture)[:depth]]
    how: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}  # others need even sizes
    theirs = AutoModelForCausalLM.from_config(_shallow(config, depth), trust_remote_code=False, **how).eval()
    if [list(_parts(layer)) for layer in _layers(theirs, architecture)] != kinds_of:
        raise UserError(
            f"model.provider = {model.provider}: transformers' layers depend on how many there are; they cannot be"
            " compared alone"
        )
    _randomize(theirs)
    samples = _samples()
    expected = list(_logprobs(theirs, samples))
    ours = replace(architecture, num_layers=depth, vocab_size=_VOCABULARY, prediction_layers=0)
    with tempfile.TemporaryDirectory(prefix="dppo_first_layers_") as directory:
        theirs.save_pretrained(directory)
        del theirs
        try:
            reader = CheckpointReader(directory, ours)
        except UserError as error:  # its text names the temporary directory, which means nothing to a user
            what = f"model.provider = {model.provider}: by its names, transformers' model"
            raise UserError(str(error).replace(f"checkpoint '{directory}'", what)) from None
        results = [_actor_logprobs(ours, reader, samples)]
        if embedded:
            results.append(list(_engine_logprobs(ours, reader, samples)))
    pairs = (pair for logprobs in results for pair in zip(logprobs, expected, strict=True))
    largest = max(float(np.abs(one - other[-len(one) :]).max()) for one, other in pairs)
    return {"layers": depth, "of": architecture.num_layers, "difference": largest}


def _layers(model: nn.Module, architecture: Architecture) -> list[nn.Module]:
    names = next(names for key, (_, names) in kinds(architecture).items() if key.endswith("linear_proj.weight"))
    path = names[0].partition(".{layer}")[0]
    try:
        return list(model.get_submodule(path).children())
    except AttributeError:
        raise UserError(f"model.provider: transformers' {type(model).__name__} has no layers under {path}") from None


def _depth(model: nn.Module, architecture: Architecture) -> int:
    """The number of first layers that include one of every kind in transformers' model."""
    layers = _layers(model, architecture)
    if len(layers) != architecture.num_layers:
        raise UserError(f"model.provider: transformers builds {len(layers)} layers, not {architecture.num_layers}")
    seen = ["\n".join(_parts(layer)) for layer in layers]
    return 1 + max(map(seen.index, seen))


def _parts(layer: nn.Module) -> Iterator[str]:
    """What determines a layer's kind: its modules, shapes, and settings other than its number."""
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str | None)
            and not key.startswith("_")  # torch's and transformers' internal state
            and key not in ("layer_idx", "layer_number", "training")
        }
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        yield f"{name} {type(module).__name__} {settings} {shapes}"


def _shallow(config: Any, depth: int) -> Any:
    shallow = copy.deepcopy(config)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(shallow, key, value[:depth])
    shallow.num_hidden_layers, shallow.vocab_size = depth, _VOCABULARY
    shallow.pad_token_id = 0  # the model's own may be beyond the small vocabulary
    return shallow


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Random weights with which every part affects the result: norms and biases that differ, embeddings so small that a
    norm's epsilon matters, matrices that preserve a vector's size."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("inv_freq", "position_ids")):
            continue
        if tensor.ndim <= 1:
            tensor.copy_((1.0 if "norm" in name else 0.0) + 0.2 * torch.randn(tensor.shape, generator=generator))
        elif tensor.is_floating_point():
            scale = 0.02 if "embed" in name else tensor.shape[-1] ** -0.5
            tensor.normal_(0.0, scale, generator=generator)


def _samples() -> list[TrainSample]:
    rng = np.random.default_rng(0)
    samples = []
    for index, length in enumerate((7, 41, 24)):
        ids = rng.integers(0, _VOCABULARY, length)
        unused = np.zeros(length - 1, np.float32)
        samples.append(TrainSample(f"{index}:0", ids, 1, unused, 1.0, 1.0, 1.0))
    return samples


@torch.no_grad()
def _logprobs(model: nn.Module, samples: list[TrainSample]) -> Iterator[Any]:
    """Those of transformers' model, one sequence at a time."""
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids)
        logits: Tensor = model(ids[None]).logits[0, :-1].double()
        yield logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()


def _actor_logprobs(architecture: Architecture, reader: CheckpointReader, samples: list[TrainSample]) -> list[Any]:
    """Those of the actor, with all sequences in one pack. Raises UserError if its weight stream changes the weights."""
    from dppo_megatron.actor.actor import Actor
    from dppo_megatron.actor.layout import build_layout, start_process_group
    from dppo_megatron.packing.alignment import packing_layout
    from dppo_megatron.packing.planner import plan_microbatches

    start_process_group()
    config = ActorConfig(layout=LayoutConfig(), recompute="none")
    actor = Actor(config, build_layout(config.layout, seed=0), architecture, reader.get, dtype=torch.float32)
    plan = plan_microbatches(samples, layout=packing_layout(config, 1), max_tokens_per_microbatch=256)
    logprobs = actor.logprobs(samples, plan)
    assert logprobs is not None
    streamed = dict(actor.weights())
    if differ := [name for name in reader.names if not torch.equal(streamed[name], reader.get(name))]:
        raise UserError(f"model.provider: {differ[0]} is not the same after Megatron's weight stream")
    return logprobs


@torch.inference_mode()
def _engine_logprobs(architecture: Architecture, reader: CheckpointReader, samples: list[TrainSample]) -> Iterator[Any]:
    """Those of the embedded engine, for the second half of each sequence: it reads the first half at once and the
    second token by token."""
    from dppo_megatron.rollout.decoder import Decoder

    decoder = Decoder(architecture, dtype=torch.float32, device=torch.device("cpu"))
    for name, tensor in decoder.named.items():
        tensor.copy_(reader.get(name))
    for sample in samples:
        ids, half = torch.from_numpy(sample.token_ids), len(sample.token_ids) // 2
        cache, positions = decoder.empty_cache(1, half), torch.arange(len(ids))
        logits = [decoder.read(ids[None, :half], positions[None, :half], torch.ones(1, half, dtype=torch.bool), cache)]
        logits += [decoder.step(ids[at : at + 1], positions[at : at + 1], None, cache) for at in positions[half:-1]]
        yield torch.cat(logits).double().log_softmax(-1).gather(1, ids[half:, None])[:, 0].numpy()


def main() -> None:
    """In the child: writes the result or the error as JSON to stdout. Other output to stdout goes to stderr."""
    from transformers.utils.logging import disable_progress_bar

    die_with_parent(parent=int(sys.argv[2]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the directory of weights is removed
    forget_launcher()
    disable_progress_bar()
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        model, embedded = json.loads(sys.argv[1])
        result = json.dumps(compare(ModelConfig(**model), embedded))
    except UserError as error:
        result = json.dumps({"error": str(error)})
    os.write(answer, result.encode())


if __name__ == "__main__":
    main()
