"""Reads torch files: a dict of tensors, a row per step, by our names or D4RL's (``flat`` has both)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rayagi.replay.flat import by_our_names, flat_source
from rayagi.replay.trajectories import Source
from rayagi.serving.errors import DatasetError


def open_tensors(path: Path, columns: Sequence[str]) -> Source:
    """A file of ``torch.save({"obs": ..., "action": ..., ...})``. It is mapped into memory, and no code of it is run.

    Raises:
        RuntimeError, pickle.UnpicklingError: it is no such file, or has more than tensors.
        DatasetError: it is no dict of tensors, or as of ``flat_source``.
    """
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if (
        not isinstance(found, Mapping)
        or not found
        or not all(isinstance(one, torch.Tensor) for one in found.values())
    ):
        raise DatasetError(
            str(path), "has no dict of tensors, such as {'obs': ..., 'action': ..., 'reward': ...}"
        )
    if half := next(
        (name for name, one in found.items() if one.dtype in (torch.bfloat16, torch.complex64)), None
    ):
        raise DatasetError(
            str(path), f"column {half!r} has type {found[half].dtype}, which NumPy does not have"
        )
    arrays = by_our_names(path, {str(name): one.detach().numpy() for name, one in found.items()})
    return flat_source(path, "torch", arrays, columns)
