"""Lines of JSON for those who compute with them: what is not as the trainer writes it is refused, by its place."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from dppo_megatron.config.paths import json_reason
from dppo_megatron.types import UserError

_T = TypeVar("_T")


def decoded(line: bytes, kind: type[_T], where: str) -> _T:
    """A line as msgspec reads it, which takes neither NaN nor a number in quotes.

    Raises:
        UserError: it is no such line; `where`, such as `path:line`, begins the message.
    """
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: not as a run writes it: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {json_reason(error)}") from None
