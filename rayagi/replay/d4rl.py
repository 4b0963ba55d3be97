"""Reads HDF5 files in D4RL's layout (``flat`` has it)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayagi.replay.flat import OUR_NAMES, by_our_names, flat_source
from rayagi.replay.trajectories import Source
from rayagi.serving.errors import DatasetError


def open_d4rl(path: Path, columns: Sequence[str]) -> Source:
    """A D4RL file.

    Raises:
        OSError: it is no HDF5 file.
        DatasetError: h5py is not installed, or as of ``flat_source``.
    """
    h5py = import_h5py(path)
    arrays = _arrays(path, h5py.File(path, "r"), h5py)
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


def _arrays(path: Path, file: Any, h5py: Any) -> dict[str, Any]:
    """Arrays by our names; ``metadata`` is about the file. If a name is taken, an info keeps its own: ``infos/NAME``."""
    entries: dict[str, Any] = {}

    def add(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset) and not name.startswith("metadata/") and entry.shape:
            entries[name] = entry

    file.visititems(add)
    infos = [name for name in entries if name.startswith("infos/") and name not in OUR_NAMES]
    found = by_our_names(path, {name: entry for name, entry in entries.items() if name not in infos})
    for name in infos:
        short = name.removeprefix("infos/")
        found[name if short in found else short] = entries[name]
    return found
