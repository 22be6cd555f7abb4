"""Compares transformers' reading of a config.json with ours.

The actor takes its sizes from our reading; the embedded engine, and whoever loads the checkpoint later, from
transformers' config class. Both are read at the start and a difference is an error that names both values. Should a new
version of transformers read a key differently, that is an error message and not a run on two different models.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from dppo_megatron.types import UserError
from dppo_megatron.weights.json_files import shown


def check_agreement(raw: Mapping[str, Any], model_type: str, ours: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` unless transformers accepts `raw` and reads each key of `ours` as we did."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(raw)))
    except Exception as error:  # its validators raise their own classes, and TypeErrors from deep inside
        raise UserError(f"{path}: transformers refuses it: {_one_line(error)}") from None
    theirs = {
        name: getattr(config, name, None) for name in ours if name not in ("head_dim", "rope_theta", "rope_factor")
    }
    theirs["head_dim"] = getattr(config, "head_dim", None)
    if theirs["head_dim"] is None and "head_dim" not in raw:
        theirs["head_dim"] = config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters or {}
    theirs["rope_theta"] = rope.get("rope_theta")
    theirs["rope_factor"] = rope.get("factor", 0.0) if rope.get("rope_type") != "default" else 0.0
    for name, value in ours.items():
        if value != theirs[name]:
            raise UserError(
                f"{path}: {name} is read as {shown(value)} here and as {shown(theirs[name])} by transformers; state the"
                " key plainly"
            )


def _one_line(error: Exception) -> str:
    """The message without line breaks, in ASCII: it may quote what the file holds."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.encode("ascii", "backslashreplace").decode()[:300]
