"""Reads and writes Hugging Face checkpoint directories with one tensor in memory at a time.

Reading maps one file at a time and copies out of it, so that pages of files already read do not stay resident. Writing
first lays out the files from the known shapes and then writes each tensor at its offset as it arrives: the safetensors
library would need a whole file in memory, twice. Readers disagree on ambiguous directories (transformers prefers
`model.safetensors` to an index, vLLM the index), so a directory that another reader would read differently is an error.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dppo_megatron.files import make_directory, remove_tree
from dppo_megatron.progress import progress
from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture, Lora
from dppo_megatron.weights.json_files import plain, read_object, shown
from dppo_megatron.weights.mapping import CORRECTION_BIAS, Shape, hf_shapes

INDEX = "model.safetensors.index.json"
_SINGLE, _ADAPTER = "model.safetensors", "adapter_config.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
INPUT_NAME, OUTPUT_NAME = "model.embed_tokens.weight", "lm_head.weight"
MAX_SHARD_BYTES = 5 * 10**9
"""Largest size of a written file, as in transformers; only a file with a single larger tensor exceeds it."""

_NOT_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_TORCH_DTYPES = {label: dtype for dtype, label in _DTYPES.items()}


class WeightReader(Protocol):
    """Full tensors by their Hugging Face names, from any kind of checkpoint."""

    names: list[str]
    """Every tensor of the architecture."""

    def get(self, name: str) -> Tensor:
        """One full tensor, on the CPU; the caller owns it."""


class CheckpointReader:
    """Reads single tensors of a safetensors checkpoint, sharded or not, without loading the rest.

    Raises:
        UserError: no safetensors file, an unreadable one, an index that does not match, or tensors that are missing,
            unknown or of another shape (all are named).
    """

    def __init__(self, hf_path: str | Path, architecture: Architecture, given_as: str = "model.hf_path =") -> None:
        directory = Path(hf_path)
        paths, index = weight_files(directory, given_as)
        self.files: dict[str, Path] = {}
        """Tensor name -> the file that holds it."""
        self.dtypes: dict[str, torch.dtype] = {}
        self._open: tuple[Path, Any] | None = None
        shapes: dict[str, Shape] = {}
        for path in paths:
            handle = _open(path)
            for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                if name in self.files:
                    raise UserError(f"{plain(name)} is in two files, {self.files[name]} and {path}; remove one of them")
                tensor = handle.get_slice(name)
                shapes[name] = tuple(tensor.get_shape())
                if (dtype := tensor.get_dtype()) not in _TORCH_DTYPES:
                    raise UserError(f"{path}: {name} has type {dtype}; supported: {', '.join(_TORCH_DTYPES)}")
                self.dtypes[name] = _TORCH_DTYPES[dtype]
                self.files[name] = path
        check_index(directory, index, self.files)
        expected = hf_shapes(architecture)
        first = architecture.num_layers
        prefixes = tuple(f"model.layers.{first + index}." for index in range(architecture.prediction_layers))
        self.left_out = [name for name in shapes if name.startswith(prefixes)]
        """Tensors of layers for multi-token prediction, which are not read."""
        for name in self.left_out:
            del shapes[name]
        self.redundant = {OUTPUT_NAME} & set(shapes) if architecture.tied_embeddings else set()
        """Tensors that a checkpoint may hold in addition: a tied model's second copy of the embedding."""
        copies = {name: shapes.pop(name) for name in self.redundant}
        check_shapes(f"checkpoint '{hf_path}'", expected, shapes)
        self.names = list(expected)
        for name, shape in copies.items():
            if shape != expected[INPUT_NAME] or not torch.equal(self.get(name), self.get(INPUT_NAME)):
                # transformers would load such a checkpoint untied, with a warning
                raise UserError(
                    f"'{hf_path}': config.json says tie_word_embeddings, but {name} differs from {INPUT_NAME}"
                )

    def get(self, name: str) -> Tensor:
        """One full tensor, on the CPU."""
        path = self.files[name]
        if self._open is None or self._open[0] != path:
            self._open = None  # close the file first, so that only one is mapped at a time
            self._open = (path, _open(path))
        try:
            tensor: Tensor = self._open[1].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise UserError(f"{path}: {name} cannot be read: {error}") from None
        return tensor.clone()  # a copy, so that the mapping can be released


def check_shapes(where: str, expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    """Raise `UserError` that lists missing and unknown tensors and those of another shape, if there are any."""
    problems = (
        ("lacks", [name for name in expected if name not in found]),
        ("has unknown tensors", [name for name in found if name not in expected]),
        (
            "has tensors of another shape than its config.json says",
            [
                f"{name} {list(found[name])} instead of {list(shape)}"
                for name, shape in expected.items()
                if found.get(name, shape) != shape
            ],
        ),
    )
    lists = [
        f"{what} {len(names)}: {', '.join(map(plain, sorted(names)[:8]))}{', ...' if len(names) > 8 else ''}"
        for what, names in problems
        if names
    ]
    if lists:
        raise UserError(f"{where} " + "; ".join(lists))


class _TensorSlot(NamedTuple):
    file: BinaryIO
    offset: int
    shape: Shape


@contextmanager
def aside(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """A new directory, which replaces `target` if the block succeeds. `durable`: only when all data is on the disk."""
    directory = target.with_name(target.name + ".incomplete")
    remove_tree(directory)
    try:
        directory.mkdir(parents=True)
        yield directory
        if durable:
            with progress(f"flushing {target} to the disk"):
                publish(directory, target)
        else:
            remove_tree(target)
            directory.rename(target)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


@contextmanager
def hf_writer(
    target: Path,
    source: str | Path,
    architecture: Architecture,
    dtype: torch.dtype | Mapping[str, torch.dtype],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Iterator[HFWriter]:
    """Writes a checkpoint that `transformers` loads, tensor by tensor in any order; `target` appears after the block.

    Args:
        source: directory with config.json and tokenizer, which are copied.
        dtype: tensors are converted to it, except correction biases, which stay float32; or one dtype per tensor.
        max_shard_bytes: larger weights are divided into several files with an index.

    Raises:
        ValueError: at the end of the block, if a tensor is missing.
    """
    shapes = hf_shapes(architecture)
    if isinstance(dtype, Mapping):
        dtypes = dtype
    else:
        dtypes = {name: torch.float32 if name.endswith(CORRECTION_BIAS) else dtype for name in shapes}
    with aside(target) as directory, ExitStack() as files:
        writer = HFWriter(directory, shapes, dtypes, files)
        check_space(directory, sum(writer.num_bytes.values()))
        copy_assets(source, directory)
        writer.lay_out(max_shard_bytes)
        yield writer
        if writer.slots:
            raise ValueError(f"not written: {sorted(writer.slots)}")


class HFWriter:
    """Writes tensors at their offsets in the files of `hf_writer`."""

    def __init__(
        self, directory: Path, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], files: ExitStack
    ) -> None:
        self._directory, self._shapes, self._dtypes, self._files = directory, shapes, dtypes, files
        self.num_bytes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
        self.slots: dict[str, _TensorSlot] = {}
        """The slots of tensors that have not been written yet."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. Raises ValueError for an unknown name, a repeated tensor, or another shape."""
        slot = self.slots.pop(name, None)
        if slot is None or tuple(tensor.shape) != slot.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {self._shapes.get(name)}, once")
        slot.file.seek(slot.offset)
        data = tensor.detach().to("cpu", self._dtypes[name]).contiguous()
        slot.file.write(data.reshape(-1).view(torch.uint8).numpy().data)

    def put_adapter(self, tensors: Mapping[str, Tensor], lora: Lora | None, base: str) -> None:
        """Also write the adapter (which is merged into the tensors) into `adapter/`. Without `lora` do nothing."""
        if lora is not None:
            write_adapter(self._directory / "adapter", tensors, lora, base)

    def lay_out(self, max_shard_bytes: int) -> None:
        """Open the files and write everything but the tensors: config.json, headers, an index."""
        self._write_config()
        shards: list[dict[str, Any]] = [{}]
        end = 0
        for name, shape in self._shapes.items():
            if shards[-1] and end + self.num_bytes[name] > max_shard_bytes:
                shards.append({})
                end = 0
            start, end = end, end + self.num_bytes[name]
            dtype = _DTYPES[self._dtypes[name]]
            shards[-1][name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        weight_map = {}
        for number, entries in enumerate(shards, start=1):
            sharded = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file_name = _SINGLE if len(shards) == 1 else sharded
            file = self._files.enter_context(open(self._directory / file_name, "wb"))  # noqa: SIM115
            text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
            text += b" " * (-len(text) % 8)  # the format requires 8-byte alignment
            file.write(len(text).to_bytes(8, "little") + text)
            for name, entry in entries.items():
                offset = 8 + len(text) + entry["data_offsets"][0]
                self.slots[name] = _TensorSlot(file, offset, self._shapes[name])
                weight_map[name] = file_name
        if len(shards) > 1:
            index = {"metadata": {"total_size": sum(self.num_bytes.values())}, "weight_map": weight_map}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write_config(self) -> None:
        path = self._directory / "config.json"
        config = read_object(path)
        largest = max(self.num_bytes, key=lambda name: self.num_bytes[name])  # norms may have another dtype
        config["dtype" if "dtype" in config else "torch_dtype"] = str(self._dtypes[largest]).removeprefix("torch.")
        if "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = 0  # those layers are not written
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_checkpoint(
    target: Path,
    source: str | Path,
    architecture: Architecture,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    write: bool,
    adapters: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write a checkpoint that `transformers` loads: new weights, with `source`'s config and tokenizer, and the
    `adapters` of `architecture.lora` in a directory of their own. Every rank must call this, because the stream
    `tensors` is collective; only the rank with `write=True` writes."""
    stream = iter(tensors)
    first = next(stream, None)
    if not write or first is None:
        for _ in stream:
            pass
        return
    with hf_writer(target, source, architecture, first[1].dtype) as writer:
        for name, tensor in chain([first], stream):
            writer.put(name, tensor)
        writer.put_adapter(adapters, architecture.lora, str(source))


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], lora: Lora, base: str) -> None:
    """Write an adapter as PEFT's files: its `tensors`, by PEFT's names, and a config that names the model `base` it
    belongs to. Raises UserError if the disk is full."""
    make_directory(directory)
    saved = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    path = directory / "adapter_model.safetensors"
    try:
        save_file(saved, path, {"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"'{path}' cannot be written: {error}") from None
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "bias": "none",
        "inference_mode": True,
        "target_modules": list(lora.targets),
    }
    (directory / _ADAPTER).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def assets(source: str | Path) -> list[Path]:
    """Config.json, tokenizer files and so on: all files of a checkpoint except weights and descriptions of them.

    Raises:
        UserError: a file is a link out of `source`: a copy could publish a file that is not part of the model. Links in
            Hugging Face's cache (snapshots/REVISION/NAME -> ../../blobs/HASH) are allowed.
    """
    home, files = Path(source).resolve(), [path for pattern in _NOT_WEIGHTS for path in Path(source).glob(pattern)]
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    for path in files:
        if not (target := path.resolve()).is_relative_to(home) and target.parent != blobs:
            problem = f"{path} is a link to a file outside of the model's directory ({target})"
            raise UserError(f"{problem}; if it is part of the model, replace the link by the file itself")
    # the names left out describe the source's own weight files
    return [path for path in files if path.is_file() and path.name not in (INDEX, "metadata.json", "manifest.json")]


def copy_assets(source: str | Path, target: Path) -> None:
    """Copy the `assets` of `source` into `target`. Raises UserError as `assets` does."""
    for path in assets(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)  # without its mode: a published model is often read-only, and config.json is edited


def check_space(directory: Path, num_bytes: int) -> None:
    """Raise `UserError` unless the file system of `directory` has `num_bytes` free."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        needs, has = (f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB" for size in (num_bytes, free))
        raise UserError(f"'{directory}': needs {needs}, but only {has} are free there")


def publish(directory: Path, target: Path) -> None:
    """Flush `directory` to the disk, then rename it to `target`; an older `target` is replaced."""
    for path in [*sorted(directory.rglob("*")), directory]:
        sync(path)
    old = target.with_name(target.name + ".replaced")
    remove_tree(old)
    if os.path.lexists(target):
        target.rename(old)  # a directory cannot be renamed over another
    directory.rename(target)
    sync(target.parent)
    remove_tree(old)


def sync(path: Path) -> None:
    """Flush a file, or a directory's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> Any:
    try:
        if not path.is_file():  # also refuses a pipe, whose reading would block
            raise UserError(f"{path} is not a readable safetensors file: no such file")
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from None


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise `UserError` that names the tensor if it holds a NaN or an infinity."""
    # a NaN or infinity makes the sum non-finite, and a sum needs one pass and no copy; the second test is for overflow
    if not bool(tensor.sum(dtype=torch.float32).isfinite()) and not bool(tensor.isfinite().all()):
        bad = int((~tensor.isfinite()).sum())
        raise UserError(f"{name}: {bad} of {tensor.numel()} weights are NaN or infinite; the checkpoint is damaged")


def holds_safetensors(directory: str | Path) -> bool:
    """Whether the directory has safetensors weights or an index of them, which take precedence over other formats."""
    return (Path(directory) / INDEX).exists() or any(Path(directory).glob("*.safetensors"))


def weight_files(directory: Path, given_as: str) -> tuple[list[Path], dict[str, str]]:
    """The files that hold the weights, and the index: tensor name -> file name, empty if there is none. Raises
    UserError for an adapter, an ambiguous directory, one without safetensors, or an index that points outside it."""
    if (directory / _ADAPTER).exists():
        problem = f"holds {_ADAPTER}, an adapter and not a model"
        raise UserError(f"{given_as} '{directory}': {problem}; merge it into its base model and save that")
    index = _read_index(directory)
    if index and (directory / _SINGLE).exists() and _SINGLE not in index.values():
        readers = "transformers reads the first, engines the second"
        raise UserError(f"'{directory}': holds {_SINGLE} beside {INDEX}, which does not name it: {readers}; remove one")
    paths = sorted({directory / name for name in index.values()}) or sorted(directory.glob("*.safetensors"))
    if not paths:
        pickled = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
        instead = f", only {', '.join(pickled[:4])}: pickles, which are never loaded; convert them" if pickled else ""
        raise UserError(f"{given_as} '{directory}': holds no *.safetensors file{instead}")
    return paths, index


def check_index(directory: Path, index: Mapping[str, str], files: Mapping[str, Path]) -> None:
    """Raise `UserError` unless the files hold exactly the tensors that the index (if any) lists for them."""
    named = {name: directory / file for name, file in index.items()} or files
    if wrong := sorted({name for name, _ in named.items() ^ files.items()}):
        listed = ", ".join(plain(name) for name in wrong[:8])
        raise UserError(f"{directory / INDEX} does not agree with the files about {len(wrong)} tensors: {listed}")


def _read_index(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    if not path.exists():
        return {}
    raw = read_object(path)
    index, about = raw.get("weight_map"), raw.get("metadata", {})
    if not isinstance(about, dict):  # not used here, but transformers would not load the directory
        raise UserError(f"{path}: metadata = {shown(about)}: expected an object")
    if not isinstance(index, dict) or not index:
        raise UserError(f"{path}: weight_map = {shown(index)}: expected tensor names with file names")
    for name, file in index.items():
        if not isinstance(file, str) or not _inside(file):
            raise UserError(
                f"{path}: {plain(name)} is in {shown(file)}: must be the name of a .safetensors file in '{directory}'"
            )
    # symbolic links are allowed: the Hub's cache consists of them, and creating one needs write access to the directory
    missing = sorted({file for file in index.values() if not (directory / file).is_file()})
    if missing:
        listed = ", ".join(plain(name) for name in missing[:8])
        raise UserError(f"{path} names {len(missing)} files that do not exist: {listed}")
    return index


def _inside(file: str) -> bool:
    path = PurePosixPath(file)
    return path.suffix == ".safetensors" and not path.is_absolute() and ".." not in path.parts and "\0" not in file
