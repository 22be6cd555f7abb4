"""Reads sets through the `datasets` library: directories that it saved, and repositories of the hub, local or remote.

The library is imported only if a set needs it: that takes two seconds, and a job on JSON Lines does not need it. Rows
are returned as Arrow tables, so images and audio are never decoded and the library's extras are not needed. Version 4
is the minimum because since then a repository's own script is never run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dppo_megatron.data.rows import Row, table_rows
from dppo_megatron.texts import reason
from dppo_megatron.types import UserError

_NAME = re.compile(r"(?P<name>(?:[\w.-]+/)?[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_OLDEST = 4
_ROWS_AT_A_TIME = 1000


def read_hub(path: str, subset: str, split: str) -> Iterator[Row]:
    """The rows of `hub:owner/name` or `hub:owner/name@revision`. Raises UserError: the extra is missing, there is no
    network, no such set, subset or split."""
    match = _NAME.fullmatch(path.removeprefix("hub:"))
    if match is None:
        raise UserError(f"{path}: expected hub:owner/name or hub:owner/name@revision")
    datasets = _import_datasets(path)
    try:
        loaded = datasets.load_dataset(
            match["name"], subset or None, split=split or None, revision=match["revision"] or None
        )
    except Exception as error:  # the library and its dependencies raise some thirty kinds
        raise UserError(f"{path}: {_hub_reason(error)}") from None
    yield from _rows(_one_split(loaded, path, split), path)


def read_directory(path: str, subset: str, split: str) -> Iterator[Row]:
    """The rows of a directory that `save_to_disk` wrote, or of a repository of the hub that was downloaded. Raises
    UserError: the extra is missing, the directory is neither, or has no such subset or split."""
    datasets = _import_datasets(path)
    saved = any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if saved and subset:
        raise UserError(f"{path}: subset = '{subset}' has no effect: a directory saved by `datasets` has splits only")
    datasets.disable_progress_bars()  # they are for downloads
    try:
        if saved:
            loaded = datasets.load_from_disk(path)
        else:  # streamed, so that no second copy is left in the library's cache
            loaded = datasets.load_dataset(str(Path(path).absolute()), subset or None, streaming=True)
    except Exception as error:
        raise UserError(
            f"{path}: neither a directory saved by `datasets` nor a downloaded repository: {reason(error)}"
        ) from None
    yield from _rows(_one_split(loaded, path, split), path)


def _import_datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"{path}: needs the extra 'data': pip install 'dppo_megatron[data]'") from None
    if int(datasets.__version__.partition(".")[0]) < _OLDEST:
        found = datasets.__version__
        raise UserError(f"{path}: needs datasets {_OLDEST} or later (older ones run its scripts), not {found}")
    return datasets


def _one_split(loaded: Any, path: str, split: str) -> Any:
    """The requested split; without a name, the only one."""
    if not isinstance(loaded, dict):
        if split and str(loaded.split) != split and not path.startswith("hub:"):
            raise UserError(f"{path}: has no split '{split}': it was saved as one set, so leave the split out")
        return loaded
    if split in loaded:
        return loaded[split]
    names = ", ".join(map(str, loaded)) or "none"
    if not split and len(loaded) == 1:
        return next(iter(loaded.values()))
    raise UserError(f"{path}: {f'has no split {split!r}' if split else 'name its split'}; it has: {names}")


def _rows(split: Any, origin: str) -> Iterator[Row]:
    """Arrow tables, whatever format the set was saved with."""
    number = 0
    try:
        for table in split.with_format("arrow").iter(_ROWS_AT_A_TIME):
            yield from table_rows(table, origin, number)
            number += len(table)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{origin}[{number}]: cannot be read: {reason(error)}") from None


def _hub_reason(error: Exception) -> str:
    """Advice for a set of the hub that did not load."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if os.environ.get("HF_DATASETS_OFFLINE") == "1" or os.environ.get("HF_HUB_OFFLINE") == "1":
        return f"offline (HF_DATASETS_OFFLINE or HF_HUB_OFFLINE is set) and not in the local cache: {reason(error)}"
    if "ConnectionError" in names or "OfflineModeIsEnabled" in names or "Timeout" in names or "ConnectError" in names:
        return f"the hub cannot be reached: {reason(error)}"
    if "DatasetNotFoundError" in names and "gated" in str(error):
        return f"needs a login that has accepted its terms (hf auth login): {reason(error)}"
    if "DatasetNotFoundError" in names:
        return f"not found on the hub, or not open to you (hf auth login): {reason(error)}"
    if "TransportError" in names:
        return f"the connection to the hub broke, run it again: {reason(error)}"
    return reason(error)
