"""Hugging Face checkpoint directories: lazy reading, atomic writing, and an account of every tensor name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dppo_megatron.types import UserError
from dppo_megatron.weights.architecture import Architecture
from dppo_megatron.weights.mapping import all_hf_names

_NOT_WEIGHTS = ("*.json", "*.txt", "*.model", "*.jinja")


class CheckpointReader:
    """Reads single tensors of a safetensors checkpoint, sharded or not, without loading the rest.

    Raises:
        UserError: no safetensors file, an unreadable one, or names that are missing or unknown.
    """

    def __init__(self, hf_path: str | Path, architecture: Architecture) -> None:
        self._files: dict[str, Any] = {}
        paths = sorted(Path(hf_path).glob("*.safetensors"))
        if not paths:
            raise UserError(f"model.hf_path = '{hf_path}': holds no *.safetensors file")
        for path in paths:
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is not a readable safetensors file: {error}") from None
            self._files.update(dict.fromkeys(handle.keys(), handle))  # type: ignore[no-untyped-call]
        expected = all_hf_names(architecture)
        surplus = set(self._files) - expected
        if architecture.tied_embeddings:
            surplus.discard("lm_head.weight")
        for what, names in (("lacks", expected - set(self._files)), ("has unknown tensors", surplus)):
            if names:
                listed = ", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")
                raise UserError(f"checkpoint '{hf_path}' {what} {len(names)}: {listed}")

        self.names = sorted(expected)
        """The tensors of this architecture, all present."""

    def get(self, name: str) -> Tensor:
        """One full tensor, on the CPU."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def write_checkpoint(target: Path, source: str | Path, tensors: Iterable[tuple[str, Tensor]], *, write: bool) -> None:
    """Write a checkpoint that `transformers` loads: new weights, and `source`'s config and tokenizer.

    Every rank must consume `tensors` (the stream is collective), only the one with `write=True` keeps them. The
    directory appears under its name only when it is complete.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if write:
            weights[name] = tensor.cpu().clone()
    if not write:
        return
    aside = target.with_name(target.name + ".incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for pattern in _NOT_WEIGHTS:
        for path in Path(source).glob(pattern):
            if path.name != "model.safetensors.index.json":
                shutil.copy(path, aside / path.name)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config = json.loads((aside / "config.json").read_text(encoding="utf-8"))
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
    with open(aside / "model.safetensors", "rb") as file:
        os.fsync(file.fileno())
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
