"""Finds the weight files of a model directory.

Readers disagree on ambiguous directories: transformers prefers `model.safetensors` to an index, vLLM the index; shards
without an index are an error for one and mean the last file for the other. Here an index decides, else every
safetensors file counts, and a directory that another reader would read differently is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from dppo_megatron.types import UserError
from dppo_megatron.weights.json_files import plain, read_object, shown

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def holds_safetensors(directory: str | Path) -> bool:
    """Whether the directory has safetensors weights or an index of them; they then take precedence."""
    return (Path(directory) / INDEX).exists() or any(Path(directory).glob("*.safetensors"))


def weight_files(directory: Path, given_as: str) -> tuple[list[Path], dict[str, str]]:
    """The files that hold the weights, and the index: tensor name to file name, empty without one.

    Raises:
        UserError: no safetensors file, an adapter, an ambiguous directory, or an index that points outside it.
    """
    if (directory / "adapter_config.json").exists():
        raise UserError(
            f"{given_as} '{directory}': holds adapter_config.json, an adapter and not a model; merge it into its base"
            " model and save that"
        )
    index = _read_index(directory)
    if index and (directory / _SINGLE).exists() and _SINGLE not in index.values():
        raise UserError(
            f"'{directory}': holds {_SINGLE} beside {INDEX}, which does not name it: transformers reads the first,"
            " engines the second; remove one of them"
        )
    paths = sorted({directory / name for name in index.values()}) or sorted(directory.glob("*.safetensors"))
    if not paths:
        pickled = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
        instead = f", only {', '.join(pickled[:4])}: pickles, which are never loaded; convert them" if pickled else ""
        raise UserError(f"{given_as} '{directory}': holds no *.safetensors file{instead}")
    return paths, index


def check_index(directory: Path, index: Mapping[str, str], files: Mapping[str, Path]) -> None:
    """Raise `UserError` unless every tensor lies where the index says, and no other was found."""
    wrong = sorted(name for name, file in index.items() if files.get(name) != directory / file)
    if index and not wrong:
        wrong = sorted(set(files) - set(index))
    if wrong:
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
                f"{path}: {plain(name)} lies in {shown(file)}: must be the name of a .safetensors file in '{directory}'"
            )
    # symbolic links are allowed: the Hub's cache consists of them, and whoever can place one here owns the directory
    missing = sorted({file for file in index.values() if not (directory / file).is_file()})
    if missing:
        listed = ", ".join(plain(name) for name in missing[:8])
        raise UserError(f"{path} names {len(missing)} files that are not there: {listed}")
    return index


def _inside(file: str) -> bool:
    path = PurePosixPath(file)
    return path.suffix == ".safetensors" and not path.is_absolute() and ".." not in path.parts and "\0" not in file
