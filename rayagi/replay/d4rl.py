"""Reads HDF5 files in D4RL's layout (``flat`` has it)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayagi.replay.flat import D4RL_NAMES, flat_source
from rayagi.replay.trajectories import Source
from rayagi.serving.errors import DatasetError

_OURS = {theirs: ours for ours, theirs in D4RL_NAMES.items()}


def open_d4rl(path: Path, columns: Sequence[str]) -> Source:
    """A D4RL file.

    Raises:
        OSError: it is no HDF5 file.
        DatasetError: h5py is not installed, or as of ``flat_source``.
    """
    h5py = import_h5py(path)
    arrays = _arrays(h5py.File(path, "r"), h5py)
    return flat_source(path, "d4rl", arrays, columns)


def import_h5py(path: Path) -> Any:
    """The module h5py, which is an optional extra.

    Raises:
        DatasetError: it cannot be imported.
    """
    try:
        import h5py
    except ImportError as error:
        raise DatasetError(str(path), f"HDF5 needs h5py ({error}): pip install 'rayagi[hdf5]'") from error
    return h5py


def _arrays(file: Any, h5py: Any) -> dict[str, Any]:
    """Arrays by our names; ``metadata`` is about the file."""
    found: dict[str, Any] = {}

    def add(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset) and not name.startswith("metadata/") and entry.shape:
            found[_OURS.get(name, name.removeprefix("infos/"))] = entry

    file.visititems(add)
    return found
