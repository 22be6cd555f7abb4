"""Conversion between Hugging Face checkpoints and Megatron distributed checkpoints, both ways, one tensor at a time.

Neither direction needs a process group, Megatron or the whole model in memory: names and shapes come from
`weights/mapping.py`, the table that the trainer and the weight sync use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dppo_megatron.config.schema import ActorConfig, LayoutConfig, ModelConfig
from dppo_megatron.progress import progress
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.hf_files import MAX_SHARD_BYTES, CheckpointReader, aside, check_space, copy_assets, hf_writer
from dppo_megatron.weights.mapping import EXPERT_BIAS, Place, hf_names, in_layer_order, join, places, table
from dppo_megatron.weights.pipeline import UNEVEN_HINT
from dppo_megatron.weights.provider import NotComparedError, check_first_layers, model_architecture
from dppo_megatron.weights.torch_dist import TorchDistReader, is_torch_dist, write_torch_dist

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def hf_to_megatron(
    source: Path,
    target: Path,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    *,
    ignored: Collection[str] = (),
    provider: str = "",
    verify: bool = False,
) -> list[str]:
    """Write `source`, a Hugging Face checkpoint, as a distributed checkpoint that loads at any layout.

    config.json and the tokenizer are copied too, so that the trainer and the conversion back need nothing else.

    Args:
        tp, pp, ep: a layout to check the model against; the files are the same for every layout.
        ignored, provider: see `ModelConfig`.
        verify: read the result back and compare every tensor byte for byte.

    Returns:
        Lines to print.

    Raises:
        UserError: something is wrong with the input, the target or the disk.
    """
    if is_torch_dist(source):
        raise UserError(
            f"--hf '{source}' is a distributed checkpoint already; the way back is `dppo-megatron convert to-hf`"
        )
    model = ModelConfig(str(source), provider, list(ignored))
    architecture = model_architecture(model, "--hf")
    for name, size in (("tp", tp), ("pp", pp), ("ep", ep)):
        if size < 1:
            raise UserError(f"--{name} {size}: must be at least 1")
    lines, stages = [], pp
    if pp < (num_layers := architecture.num_layers) and num_layers % pp:
        lines, stages = [f"--pp {pp}: the model's {num_layers} layers do not divide by it{UNEVEN_HINT}"], 1
    layout = LayoutConfig(tensor_parallel=tp, pipeline_parallel=stages, expert_parallel=ep)
    try:
        architecture.check_layout(ActorConfig(layout=layout))
    except UserError as error:
        raise UserError(f"--tp {tp} --pp {pp} --ep {ep}: {error}") from None
    reader = CheckpointReader(source, architecture, "--hf")
    lines += _left_out(reader)
    lines += [f"{name}: equal to the tied embedding, stored once" for name in sorted(reader.redundant)]
    lines += _compared(model)
    dtypes = {key: _dtype_of_key(key, reader, architecture) for key in table(architecture)}

    read_so_far = itertools.count(1)

    def read(key: str, place: Place) -> Tensor:
        advance(next(read_so_far))
        return join(key, [reader.get(name) for name in hf_names(key, place, architecture)], architecture)

    with _disk_errors(target), aside(target) as directory:
        check_space(directory, sum(path.stat().st_size for path in set(reader.files.values())))
        copy_assets(source, directory)
        with progress("converting", len(list(in_layer_order(architecture))), "tensors") as advance:
            write_torch_dist(directory, architecture, dtypes, read)
        if verify:
            lines.append(_verify(reader, TorchDistReader(directory, architecture).get, "the converted checkpoint"))
    lines.append(f"{target}: {len(reader.names)} tensors of {architecture.name}, loadable at any layout")
    return lines


def megatron_to_hf(
    checkpoint: Path,
    target: Path,
    *,
    hf: Path | None = None,
    dtype: str = "",
    shard_gb: float = MAX_SHARD_BYTES / 1e9,
    ignored: Collection[str] = (),
    provider: str = "",
    verify: bool = False,
) -> list[str]:
    """Write a distributed checkpoint, converted or from training, as one that `transformers` can load.

    Args:
        hf: directory with config.json and tokenizer, if the checkpoint does not contain them.
        dtype: a name of `DTYPES`; empty: as stored.
        shard_gb: the weights are spread over files of at most this many GB (1e9 bytes).

    Returns, raises:
        As `hf_to_megatron`.
    """
    if not is_torch_dist(checkpoint):
        advice = ""
        if (checkpoint / "checkpoints").is_dir():
            latest = checkpoint / "checkpoints/latest"
            advice = f"; of a run, give {latest}" if latest.exists() else "; the run has no checkpoint yet"
        raise UserError(
            f"--checkpoint '{checkpoint}' is not a distributed checkpoint: it has no .metadata, or has safetensors too"
            + advice
        )
    assets = hf or checkpoint
    if not (assets / "config.json").is_file():
        raise UserError(f"'{assets}': holds no config.json; give the original Hugging Face directory with --hf")
    if not shard_gb > 0:
        raise UserError(f"--shard-gb {shard_gb}: must be greater than 0")
    if dtype and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}")
    model = ModelConfig(str(assets), provider, list(ignored))
    architecture = model_architecture(model, "--hf" if hf else "--checkpoint")
    reader = TorchDistReader(checkpoint, architecture)
    dtypes = {
        # a correction bias stays as it is: rounded to bfloat16 it would choose other experts
        name: DTYPES[dtype] if dtype and not key.endswith(EXPERT_BIAS) else reader.dtypes[key]
        for key, place in in_layer_order(architecture)
        for name in hf_names(key, place, architecture)
    }
    lines = _left_out(reader) + _compared(model)
    with (
        _disk_errors(target),
        hf_writer(target, assets, architecture, dtypes, max_shard_bytes=int(shard_gb * 1e9)) as writer,
        progress("converting", len(reader.names), "tensors") as advance,
    ):
        for done, name in enumerate(reader.names, start=1):  # in an order in which each key is read only once
            writer.put(name, reader.get(name))
            advance(done)
        writer.put_adapter(reader.adapters(), reader.lora, reader.base)
    if verify:
        written, what = CheckpointReader(target, architecture), "the checkpoint it came from"
        lines.append(_verify(written, lambda name: reader.get(name).to(dtypes[name]), what))
    return [*lines, f"{target}: {len(reader.names)} tensors of {architecture.name}"]


def _left_out(reader: CheckpointReader | TorchDistReader) -> list[str]:
    count = len(reader.left_out)
    return [f"left out: {count} tensors of layers for multi-token prediction"] if count else []


def _compared(model: ModelConfig) -> list[str]:
    """Compare the first layers of a provider's model with transformers'; a line with the result. If this machine has no
    memory for that, it is a warning only: tensors are converted correctly anyway, and a run compares again."""
    try:
        return [check_first_layers(model)] if model.provider else []
    except NotComparedError as error:
        return [f"warning: {error}"]


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Turn errors of writing `target`, which must not exist yet, into UserError."""
    try:
        if target.exists():
            raise UserError(f"--out '{target}' exists already; remove it or choose another")
        yield
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):  # torch.save raises RuntimeError on a full disk
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise UserError(f"--out '{target}' cannot be written: {cause.strerror}; nothing was left there") from None


def _dtype_of_key(key: str, reader: CheckpointReader, architecture: Architecture) -> torch.dtype:
    """The dtype of a distributed tensor, which all of its parts must share."""
    names = [name for place in places(key, architecture) for name in hf_names(key, place, architecture)]
    dtypes = {reader.dtypes[name]: name for name in reversed(names)}
    if len(dtypes) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
        raise UserError(f"the tensors that make up {key} have different types ({listed}); convert them to one first")
    return next(iter(dtypes))


def _verify(reader: CheckpointReader, other: Callable[[str], Tensor], what: str) -> str:
    wrong = []
    with progress("verifying", len(reader.names), "tensors") as advance:
        for done, name in enumerate(reader.names, start=1):
            if not _same_bytes(reader.get(name), other(name)):
                wrong.append(name)
            advance(done)
    if wrong:
        raise UserError(f"--verify: {len(wrong)} tensors differ from {what}: {', '.join(wrong[:8])}")
    return f"verified: {len(reader.names)} tensors are byte for byte those of {what}"


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    """Byte equality: NaNs equal themselves, 0.0 does not equal -0.0."""
    left_bytes, right_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left_bytes, right_bytes)
