"""Exports datasets to Minari: one record per episode, with the environment's spaces and specification.

Uses Minari's own storage, so that the installed version decides the format. Open with
``minari.MinariDataset("OUT/data")``, or by name where OUT lies in Minari's datasets folder.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rayagi.serving.dataset import Dataset, spaces_of
from rayagi.serving.errors import ExportError
from rayagi.serving.files import finished_folder

_DATA_FORMAT = "arrow"
"""The storage format of Minari that needs no further dependency."""


def export_minari(dataset: Dataset, out: Path, *, whole_only: bool) -> int:
    """Write a Minari dataset; returns the number of episodes.

    Args:
        dataset: what ``rayagi serve`` wrote
        out: folder to create; if it lies in Minari's datasets folder, its path there is the dataset's name
        whole_only: leave out episodes cut by the end of the recording; else they count as truncated

    Raises:
        ExportError: ``out`` exists, Minari does not accept its name, or Minari is not installed.
        DiskError: it cannot be written; nothing of it is left.
    """
    minari, new_storage, episode_buffer = _minari()
    name = _dataset_name(out)
    folder = dataset.folder
    obs_space, action_space = spaces_of(folder.description.layout)
    written = 0

    def buffers() -> Iterator[Any]:
        nonlocal written
        for number, episode in enumerate(dataset.episodes(whole_only=whole_only)):
            steps = len(episode.rewards)
            last = np.arange(steps) == steps - 1
            written += 1
            yield episode_buffer(
                id=number,
                observations=episode.obs,
                actions=episode.actions,
                rewards=episode.rewards.tolist(),
                terminations=(last & episode.terminated).tolist(),
                truncations=(last & (not episode.terminated)).tolist(),
            )

    with finished_folder(out) as unfinished:
        storage = new_storage(
            unfinished / "data",
            observation_space=obs_space,
            action_space=action_space,
            env_spec=_env_spec(dataset),
            data_format=_DATA_FORMAT,
        )
        storage.update_metadata(
            {"dataset_id": name, "minari_version": minari.__version__, **_origin(dataset)}
        )
        storage.update_episodes(buffers())
    return written


def _minari() -> tuple[Any, Any, Any]:
    """Minari's package, storage constructor and EpisodeBuffer. Imported here: it is an optional extra."""
    try:
        import minari
        from minari.data_collector.episode_buffer import EpisodeBuffer
        from minari.dataset.minari_storage import MinariStorage
    except ImportError as error:
        raise ExportError("minari", f"cannot be imported ({error}); pip install 'rayagi[minari]'") from error
    return minari, MinariStorage.new, EpisodeBuffer


def _dataset_name(out: Path) -> str:
    """``namespace/name-v0``, as Minari requires."""
    from minari.storage import get_dataset_path

    root, path = Path(get_dataset_path()).absolute(), out.absolute()
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    if not re.search(r"-v\d+$", name):
        if path.is_relative_to(root):
            raise ExportError(
                str(out), f"a dataset in {root} needs a name with a version, such as {path.name}-v0"
            )
        name = f"{name}-v0"
    if not re.fullmatch(r"[\w\-/]+-v\d+", name):
        raise ExportError(str(out), f"{name!r} is no valid Minari name: letters, digits, - and _ only")
    return name


def _env_spec(dataset: Dataset) -> Any:
    """Gymnasium's EnvSpec with the environments' options; None for a task that Gymnasium does not know."""
    found = gymnasium.registry.get(dataset.folder.description.task)
    if found is None:
        return None
    spec = copy.deepcopy(found)
    sessions = dataset.folder.sessions()
    options = dict(sessions[-1].get("env_kwargs", {})) if sessions else {}
    spec.max_episode_steps = options.pop("max_episode_steps", spec.max_episode_steps)
    spec.kwargs.update(options)
    return spec


def _origin(dataset: Dataset) -> dict[str, Any]:
    sessions = dataset.folder.sessions()
    checkpoints = ", ".join(
        dict.fromkeys(f"{each['checkpoint']} of {Path(each['run']).name}" for each in sessions)
    )
    return {
        "algorithm_name": "rayagi",
        "description": f"{dataset.folder.description.task} by rayagi serve: {checkpoints}",
    }
