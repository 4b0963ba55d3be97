"""Loads saved states without executing code from them: a run folder may be untrusted."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from rayagi.run.errors import CheckpointError


def _allowed() -> list[Any]:
    """Types allowed besides tensors and Python's built-in values: numpy arrays and scalars."""
    array = np.zeros(1)
    reconstruct = array.__reduce__()[0]
    scalar = np.float64(0.0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdU"}
    # Pickle writes an empty array as a call of bytes.
    return [reconstruct, scalar, np.ndarray, np.dtype, bytes, *dtypes]


def load_tensors(data: bytes, path: Path) -> dict[str, Any]:
    """Load the output of ``torch.save`` to the CPU.

    Raises:
        CheckpointError: the data holds types other than tensors, numpy arrays and Python's built-in values.
    """
    # Imported here: opening a run folder does not need torch.
    import torch

    try:
        with torch.serialization.safe_globals(_allowed()):
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(str(path.parent), f"{path.name} cannot be read ({_reason(error)})") from error
    return dict(loaded)


def _reason(error: Exception) -> str:
    """The sentence of torch's message that states the cause."""
    lines = str(error).splitlines() or [type(error).__name__]
    telling = [line for line in lines if "Unpickler error: " in line or "unsupported GLOBAL" in line]
    return (telling or lines)[0].rpartition("error: ")[2].partition(". ")[0].strip().rstrip(".")
