"""Reads saved states without running code from them: a run folder may come from somebody else."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from rayagi.run.errors import CheckpointError


def _allowed() -> list[Any]:
    """What a state may hold besides tensors and Python's own values: numpy arrays and scalars."""
    array = np.zeros(1)
    reconstruct = array.__reduce__()[0]
    scalar = np.float64(0.0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdU"}
    # An empty array is pickled with a call of bytes.
    return [reconstruct, scalar, np.ndarray, np.dtype, bytes, *dtypes]


def load_tensors(data: bytes, path: Path) -> dict[str, Any]:
    """What ``torch.save`` wrote, on the CPU.

    Raises:
        CheckpointError: the data holds something else than tensors, numpy arrays and Python's own values.
    """
    # Imported here: to open a run's folder does not need it.
    import torch

    try:
        with torch.serialization.safe_globals(_allowed()):
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(str(path.parent), f"{path.name} cannot be read ({_reason(error)})") from error
    return dict(loaded)


def _reason(error: Exception) -> str:
    """The one sentence of torch's page of advice that says what is wrong."""
    lines = str(error).splitlines() or [type(error).__name__]
    telling = [line for line in lines if "Unpickler error: " in line or "unsupported GLOBAL" in line]
    return (telling or lines)[0].rpartition("error: ")[2].partition(". ")[0].strip().rstrip(".")
