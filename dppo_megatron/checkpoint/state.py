"""loop.pt: the loop's own state and each rank's random number generators, readable without running code.

torch's restricted unpickler (`weights_only`) rebuilds tensors and plain containers; the types in numpy arrays are added
here, one by one. Anything it could not rebuild is an error when the checkpoint is written, not when it is needed.

The loop's own random numbers are functions of (seed, step, ids) and need no state. The generators of Python, numpy,
torch and Megatron are saved for user code that draws from them.
"""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from dppo_megatron.texts import reason
from dppo_megatron.types import UserError

_NUMPY = [
    np.ndarray,
    np.dtype,
    bytes,  # the data of an empty array
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(type(np.dtype(kind)) for kind in "?bhilqBHILQefdU"),
]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `loop` (containers, numbers, text, numpy arrays and tensors) and `generators`.

    Raises:
        UserError: `state` holds something else.
        OSError: it cannot be written.
    """
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch raises it on a full disk
        raise OSError(str(error)) from None
    read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote.

    Raises:
        UserError: it cannot be read, or reading it would have to run code.
    """
    try:
        with torch.serialization.safe_globals(_NUMPY):
            state: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise UserError(f"'{path}' cannot be read: {reason(error)}") from None
    if not isinstance(state, dict) or not isinstance(state.get("loop"), dict) or "generators" not in state:
        raise UserError(f"'{path}' does not hold the state of a run")
    return state


def generators() -> dict[str, Any]:
    """The state of every random number generator of this rank."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_generators(state: dict[str, Any]) -> None:
    """Restore what `generators` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
