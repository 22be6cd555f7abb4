"""Settings that name the user's own code as `module:name`.

They are imported while the job is prepared, so that a misspelt module is a one-line error before any model is loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dppo_megatron.types import UserError


def is_plugin(text: str) -> bool:
    """Whether a setting names code rather than a built-in choice."""
    return ":" in text


def load_function(key: str, path: str) -> Callable[..., Any]:
    """Import `path`, a `module:function` from setting `key`; modules of the working directory are found too.

    Raises UserError if there is no such function.
    """
    module_name, separator, name = path.partition(":")
    if not separator:
        raise UserError(f"{key} = '{path}': expected module:function")
    _find_here()
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # importing a module can raise anything
        message = str(error).strip().partition("\n")[0]
        if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] == "examples":
            message += "; `dppo-megatron init DIR` copies the shipped examples to DIR"
        raise UserError(f"{key} = '{path}' cannot be imported: {type(error).__name__}: {message}") from None
    if not callable(function):
        raise UserError(f"{key} = '{path}' is not callable")
    loaded: Callable[..., Any] = function
    return loaded


def source_digest(path: str) -> str:
    """SHA-256 of the source file of `module:function`, without importing it; empty if there is no such file."""
    _find_here()
    try:
        spec = find_spec(path.partition(":")[0])
        return sha256(Path(spec.origin).read_bytes()).hexdigest() if spec and spec.origin else ""
    except (ImportError, ValueError, OSError):
        return ""


def _find_here() -> None:
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # Python does not add it for a console script
