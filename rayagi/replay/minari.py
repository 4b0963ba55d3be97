"""Reads Minari datasets in HDF5, Arrow or Parquet. Minari itself is not needed.

Row t of ``infos`` is that of observation t; a further column of an info has the rows of the observations before actions.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
from numpy.typing import NDArray

from placement.errors import counted
from rayagi.replay.arrow import as_array
from rayagi.replay.flat import import_h5py
from rayagi.replay.trajectories import (
    Source,
    Trajectory,
    check_fits,
    episode_source,
    further_columns,
    is_obs,
    native,
)
from rayagi.serving.errors import DatasetError

_OURS = {
    "observations": "obs",
    "actions": "action",
    "rewards": "reward",
    "terminations": "terminated",
    "truncations": "truncated",
}
_IMAGE_SIZE = 32
"""From this height and width on, Minari stores uint8 boxes as JPEG."""
_NAME = re.compile(r"[\w\-]+(/[\w\-]+)*-v\d+")
"""Of Minari's datasets: NAMESPACE/NAME-v0."""


def minari_folder(path: Path) -> Path | None:
    """The folder of a Minari dataset that has its metadata: itself, or its ``data``; None if there is none."""
    return next((each for each in (path, path / "data") if (each / "metadata.json").exists()), None)


def downloaded(name: str) -> Path | None:
    """The dataset of this name in Minari's datasets folder; None if there is none."""
    if not _NAME.fullmatch(name):
        return None
    path = _datasets_folder() / name
    return path if os.path.exists(path / "data" / "metadata.json") else None


def minari_hint(path: Path) -> str:
    """How to get a missing dataset whose path may be a name of Minari's; empty: it may not."""
    if not _NAME.fullmatch(str(path)):
        return ""
    install = "" if find_spec("minari") else "pip install 'rayagi[minari]', then "
    return (
        f", nor does {_datasets_folder() / path}: if it is one of Minari's, {install}`minari download {path}`"
    )


def _datasets_folder() -> Path:
    """Where Minari has its datasets."""
    given = os.environ.get("MINARI_DATASETS_PATH")
    return Path(given) if given is not None else Path.home() / ".minari" / "datasets"


def open_minari(path: Path, columns: Sequence[str]) -> Source:
    """A Minari dataset. Observations of several parts are the columns obs.PART.

    Raises:
        DatasetError: it has images or nested spaces, h5py is not installed, a column or an episode is missing, or there is
            no step.
    """
    folder = minari_folder(path)
    assert folder is not None  # as ``loading.kind_of`` has found
    about = json.loads((folder / "metadata.json").read_text())
    shapes = _shapes(path, about)
    if about["data_format"] == "hdf5":
        lengths, read = _open_hdf5(path, folder)
    else:
        lengths, read = _open_arrow(path, folder, about, shapes)
    _check_totals(path, about, lengths)
    known = {name: values for name, values in next(read(), {}).items() if values.dtype.kind in "biuf"}
    return episode_source(path, "minari", known, columns, lengths, read)


def _check_totals(path: Path, about: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """Refuse a dataset that has not the episodes and steps that its metadata say."""
    for found, key, unit in (
        (len(lengths), "total_episodes", "episode"),
        (sum(lengths), "total_steps", "step"),
    ):
        if found != (announced := int(about.get(key, found))):
            reason = f"is damaged: it has {counted(found, unit)} where metadata.json says {announced:,}"
            raise DatasetError(str(path), reason)


def _shapes(path: Path, about: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Shape of one step of observations and actions, by our names; None: as stored."""
    found: dict[str, tuple[int, ...] | None] = {}
    for ours, key in (("obs", "observation_space"), ("action", "action_space")):
        space: dict[str, Any] = json.loads(about[key]) if key in about else {"type": "unknown"}
        parts: dict[str, Any] = {ours: space}
        if space["type"] == "Dict":
            parts = {f"{ours}.{name}": part for name, part in space["subspaces"].items()}
        for name, part in parts.items():
            if part["type"] in ("Dict", "Tuple", "Text", "Graph", "Sequence"):
                raise DatasetError(
                    str(path), f"{name} is of a {part['type']} space, which replay stores do not have"
                )
            shape = tuple(part["shape"]) if "shape" in part else None
            if about.get("jpeg_encoding", True) and _is_image(part):
                raise DatasetError(
                    str(path), f"{name} has JPEG images: write the dataset with jpeg_encoding=False"
                )
            found[name] = shape
    return found


def _is_image(space: Mapping[str, Any]) -> bool:
    """As Minari decides it."""
    shape = space.get("shape", ())
    if space.get("dtype") != "uint8" or len(shape) not in (2, 3) or min(shape[:2]) < _IMAGE_SIZE:
        return False
    return bool(np.all(np.array(space["low"]) == 0) and np.all(np.array(space["high"]) == 255))


_Opened = tuple[Sequence[int], Callable[[], Iterator[Trajectory]]]
"""Steps of each episode, and what begins a pass over them."""


def _open_hdf5(path: Path, folder: Path) -> _Opened:
    h5py = import_h5py(path)
    file = h5py.File(folder / "main_data.hdf5", "r")
    names = sorted((name for name in file if name.startswith("episode_")), key=lambda name: int(name[8:]))
    lengths = [len(file[name]["rewards"]) for name in names]

    def read() -> Iterator[Trajectory]:
        for name, steps in zip(names, lengths, strict=True):
            episode, found = file[name], dict[str, NDArray[Any]]()
            check_fits(path, _announced_bytes(episode), f"of {name}")
            for theirs, ours in _OURS.items():
                entry = episode[theirs]
                parts = (
                    {ours: entry}
                    if isinstance(entry, h5py.Dataset)
                    else {f"{ours}.{k}": v for k, v in entry.items()}
                )
                found |= {part: values[()] for part, values in parts.items()}
            infos = {
                key: values[()]
                for key, values in episode.get("infos", {}).items()
                if isinstance(values, h5py.Dataset)
            }
            _check_rows(path, name, found, steps, steps)
            yield _steps(found | further_columns(found, infos), steps)

    return lengths, read


def _announced_bytes(episode: Any) -> int:
    """Of all arrays of a group."""
    sizes = list[int]()
    episode.visititems(lambda _, entry: sizes.append(getattr(entry, "nbytes", 0)))
    return sum(sizes)


def _open_arrow(
    path: Path, folder: Path, about: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None]
) -> _Opened:
    folders = [folder / str(number) for number in range(int(about["total_episodes"]))]
    lengths = [json.loads((each / "metadata.json").read_text())["total_steps"] for each in folders]

    def read() -> Iterator[Trajectory]:
        for each, steps in zip(folders, lengths, strict=True):
            table = pyarrow.dataset.dataset(
                each, format=about["data_format"], ignore_prefixes=["_", ".", "metadata.json"]
            ).to_table()
            found = dict[str, NDArray[Any]]()
            for theirs, ours in _OURS.items():
                column = table[theirs].combine_chunks()
                parts = _parts(column, f"{ours}.") if pa.types.is_struct(column.type) else {ours: column}
                found |= {part: as_array(values, shapes.get(part)) for part, values in parts.items()}
            if "infos" in table.column_names:
                infos = _parts(table["infos"].combine_chunks(), "")
                found |= further_columns(
                    found,
                    {name: as_array(values) for name, values in infos.items() if _is_numeric(values.type)},
                )
            # Arrow pads the columns of actions to the observations' rows.
            _check_rows(path, f"episode {each.name}", found, steps, steps + 1)
            yield _steps(found, steps)

    return lengths, read


def _parts(column: pa.StructArray, prefix: str) -> dict[str, pa.Array]:
    return {f"{prefix}{field.name}": column.field(number) for number, field in enumerate(column.type)}


def _is_numeric(kind: pa.DataType) -> bool:
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _check_rows(path: Path, episode: str, found: Trajectory, steps: int, rows: int) -> None:
    """Refuse an episode that has not steps + 1 observations, and ``rows`` rows of actions, rewards and flags."""
    for name in (name for name in found if is_obs(name) or name in _OURS.values()):
        if len(found[name]) != (expected := steps + 1 if is_obs(name) else rows):
            has = counted(len(found[name]), "row")
            raise DatasetError(
                str(path), f"is damaged: {name} of {episode} has {has} where {expected:,} are expected"
            )


def _steps(found: Trajectory, steps: int) -> Trajectory:
    """All columns with their own steps: infos, and Arrow's columns of actions, have the observations' rows.

    ``log_prob`` and ``policy_version`` have an axis of size 1 in rayagi's exports, as Minari needs it.
    """
    found = {name: values.astype(native(values.dtype), copy=False) for name, values in found.items()}
    shortened = {name: values if is_obs(name) else values[:steps] for name, values in found.items()}
    for name in ("log_prob", "policy_version"):
        if name in shortened:
            shortened[name] = shortened[name].reshape(steps)
    return shortened
