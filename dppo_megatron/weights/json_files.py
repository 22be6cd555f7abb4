"""Strict reading of a model directory's JSON files: anything wrong with one is a one-line UserError.

It is stricter than `json.loads` in one point: a duplicate key is an error. Python keeps the last value and other
readers the first, so two engines could run two different models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dppo_megatron.config.paths import distinct_keys, json_reason
from dppo_megatron.types import UserError

_SHOWN_CHARACTERS = 120


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        UserError: the file is missing or not readable, or is not a JSON object without duplicate keys.
    """
    try:
        if not path.is_file():  # also refuses a pipe, whose reading would block
            raise UserError(f"{path}: no such file")
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct_keys)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{path} is not valid JSON: nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of more than 4,300 digits
        raise UserError(f"{path} is not valid JSON: {json_reason(error)}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {shown(value)}, expected an object of keys and values")
    return value


def shown(value: Any) -> str:
    """A JSON value as one short printable line of ASCII, for messages."""
    text = json.dumps(value, default=lambda other: str(type(other)))
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."


def plain(name: str) -> str:
    """The name itself if it is short and printable ASCII, else `shown(name)`."""
    return name if name.isascii() and name.isprintable() and len(name) <= _SHOWN_CHARACTERS else shown(name)
