"""Writes whole episodes by the libraries that own the formats: Minari's and RLlib's. Cut trajectories count as truncated."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np

from actors.replay import Column
from rayagi.replay.trajectories import (
    FLAGS,
    Source,
    Trajectory,
    TrajectoryBatch,
    check_kept,
    is_obs,
    num_choices,
    one_by_one,
)
from rayagi.serving.dataset import Episode
from rayagi.serving.errors import ExportError
from rayagi.serving.files import finished_folder
from rayagi.serving.minari import import_minari, minari_name
from rayagi.serving.rllib import write_episodes


def write_minari(
    source: Source,
    out: Path,
    batches: Iterator[TrajectoryBatch],
    data_format: Literal["arrow", "hdf5"] = "arrow",
) -> None:
    """Write a Minari dataset. Spaces are as wide as their types; further columns are infos. If ``out`` lies in Minari's
    datasets folder, its path there is the dataset's name.

    Raises:
        ExportError: the folder exists, Minari does not accept its name, or it is not installed; there are no rewards; or
            a column's name has a slash, and the format is HDF5.
        DiskError: it cannot be written; nothing of it is left.
    """
    minari, new_storage, episode_buffer = import_minari()
    if "reward" not in (column.name for column in source.schema.columns):
        raise ExportError(str(source.path), "has no rewards, which Minari needs: export it to lerobot")
    slashed = [column.name for column in source.schema.columns if "/" in column.name]
    if slashed and data_format == "hdf5":
        reason = f"has the column {slashed[0]}, whose slash begins a group in HDF5: export it to minari"
        raise ExportError(str(source.path), reason)
    obs, action = spaces_of_source(source)
    infos = [
        c.name
        for c in source.schema.columns
        if not is_obs(c.name) and c.name not in ("action", "reward", *FLAGS)
    ]

    def buffers() -> Iterator[Any]:
        for number, steps in enumerate(one_by_one(batches)):
            last = np.arange(len(steps["reward"])) == len(steps["reward"]) - 1
            yield episode_buffer(
                id=number,
                observations=_observations(steps),
                actions=steps["action"],
                rewards=steps["reward"],
                terminations=steps["terminated"],
                truncations=steps["truncated"] | (last & ~steps["terminated"]),
                infos={name: _info(steps[name]) for name in infos},
            )

    # Versions that can store images as JPEG do so by default.
    lossless = (
        {"jpeg_encoding": False} if "jpeg_encoding" in inspect.signature(new_storage).parameters else {}
    )
    with finished_folder(out) as unfinished:
        storage = new_storage(
            unfinished / "data",
            observation_space=obs,
            action_space=action,
            data_format=data_format,
            **lossless,
        )
        storage.update_metadata({"dataset_id": minari_name(out), "minari_version": minari.__version__})
        storage.update_episodes(buffers())


def write_rllib(source: Source, out: Path, batches: Iterator[TrajectoryBatch]) -> None:
    """Write episodes as ``rayagi export --to rllib`` does, with rewards of float32. Arguments as of ``write_minari``.

    Raises:
        ExportError: the folder exists, there are no rewards, observations have several parts, or there are further columns.
        DiskError: it cannot be written; nothing of it is left.
    """
    check_kept(source, "rllib")
    names = [column.name for column in source.schema.columns]
    if "obs" not in names or "reward" not in names:
        raise ExportError(
            str(source.path), "has no rewards, or observations of several parts: RLlib needs one of each"
        )
    write_episodes(map(_episode, range(2**62), one_by_one(batches)), spaces_of_source(source), out)


def _episode(number: int, steps: Trajectory) -> Episode:
    count = len(steps["reward"])
    return Episode(
        number=number,
        env=0,
        obs=steps["obs"],
        actions=steps["action"],
        rewards=steps["reward"].astype(np.float32),
        terminated=bool(steps["terminated"][-1]),
        truncated=bool(steps["truncated"][-1]),
        policy_versions=steps.get("policy_version", np.zeros(count, np.int64)),
        log_probs=steps.get("log_prob", np.full(count, np.nan, np.float32)),
    )


def _observations(steps: Trajectory) -> Any:
    """As a space of ``spaces_of_source`` has them."""
    if "obs" in steps:
        return steps["obs"]
    return {name.removeprefix("obs."): values for name, values in steps.items() if is_obs(name)}


def _info(values: Any) -> Any:
    """(L + 1, size): the last observation has zeros, and Minari does not read scalars of an info."""
    rows = np.concatenate([values, np.zeros_like(values[:1])])
    return rows[:, None] if rows.ndim == 1 else rows


def spaces_of_source(source: Source) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """Observation space and action space of a source's columns: boxes as wide as their types; whole numbers are choices.

    Actions that are whole numbers take a pass over the source. Raises ExportError: one is below 0.
    """
    columns = {column.name: column for column in source.schema.columns}
    if "obs" in columns:
        obs: gymnasium.Space[Any] = _box(columns["obs"])
    else:
        parts = {name.removeprefix("obs."): _box(column) for name, column in columns.items() if is_obs(name)}
        obs = gymnasium.spaces.Dict(parts)
    action = columns["action"]
    if action.dtype.kind in "iu" and not action.shape:
        return obs, gymnasium.spaces.Discrete(num_choices(source))
    return obs, _box(action)


def _box(column: Column) -> gymnasium.spaces.Box:
    if column.dtype.kind == "f":
        return gymnasium.spaces.Box(-np.inf, np.inf, column.shape, column.dtype)
    most = np.iinfo(column.dtype) if column.dtype.kind in "iu" else None
    low, high = (most.min, most.max) if most is not None else (0, 1)
    return gymnasium.spaces.Box(low, high, column.shape, column.dtype)
