"""Exports datasets to Minari: one record per episode, with the environment's spaces and specification.

Uses Minari's own storage, so that the installed version decides the format. Observations and actions have the types of the
environment's spaces, such as float64 (their values were recorded in float32). Step t's info has ``log_prob`` and
``policy_version`` of action t; the last info, of the observation after the episode, has NaN and the last version. Open with
``minari.MinariDataset("OUT/data")``, or by name where OUT lies in Minari's datasets folder.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from rayagi.serving.dataset import Dataset, spaces_of
from rayagi.serving.errors import NO_EPISODES, ExportError
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
        ExportError: ``out`` exists, there are no episodes, Minari does not accept its name, Minari is not installed, or
            Gymnasium cannot make the environment here.
        DiskError: it cannot be written; nothing of it is left.
    """
    minari, new_storage, episode_buffer = import_minari()
    name = minari_name(out)
    env_spec = _env_spec(dataset)
    obs_space, action_space = _spaces(dataset, env_spec)
    written, episodes = 0, dataset.episodes(whole_only=whole_only)
    first = next(episodes, None)
    if first is None:
        raise ExportError(str(out), NO_EPISODES)

    def buffers() -> Iterator[Any]:
        nonlocal written
        for number, episode in enumerate(chain([first], episodes)):
            steps = len(episode.rewards)
            last = np.arange(steps) == steps - 1
            written += 1
            yield episode_buffer(
                id=number,
                observations=_cast(episode.obs, obs_space),
                actions=_cast(episode.actions, action_space),
                rewards=episode.rewards.tolist(),
                terminations=(last & episode.terminated).tolist(),
                truncations=(last & (not episode.terminated)).tolist(),
                infos={  # (L + 1, 1): Minari does not read scalars of an info
                    "log_prob": np.append(episode.log_probs, np.float32(np.nan))[:, None],
                    "policy_version": np.append(episode.policy_versions, episode.policy_versions[-1])[
                        :, None
                    ],
                },
            )

    with finished_folder(out) as unfinished:
        storage = new_storage(
            unfinished / "data",
            observation_space=obs_space,
            action_space=action_space,
            env_spec=env_spec,
            data_format=_DATA_FORMAT,
        )
        storage.update_metadata(
            {"dataset_id": name, "minari_version": minari.__version__, **_origin(dataset)}
        )
        storage.update_episodes(buffers())
    return written


def import_minari() -> tuple[Any, Any, Any]:
    """Minari's package, storage constructor and EpisodeBuffer. Imported here: it is an optional extra."""
    try:
        import minari
        from minari.data_collector.episode_buffer import EpisodeBuffer
        from minari.dataset.minari_storage import MinariStorage
    except ImportError as error:
        raise ExportError("minari", f"cannot be imported ({error}); pip install 'rayagi[minari]'") from error
    return minari, MinariStorage.new, EpisodeBuffer


def minari_name(out: Path) -> str:
    """``namespace/name-v0``, as Minari requires."""
    # Imported here: it is an optional extra.
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


def _spaces(dataset: Dataset, env_spec: Any) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
    """The environment's spaces where they are boxes of the columns' shape, else the columns'."""
    own = spaces_of(dataset.folder.description.layout)
    if env_spec is None:
        return own
    try:
        env = gymnasium.make(env_spec)
    except Exception as error:  # any exception of an environment
        reason = f"Gymnasium cannot make {env_spec.id} here, whose spaces the export has ({error})"
        raise ExportError(str(dataset.folder.path), reason) from error
    theirs = env.observation_space, env.action_space
    env.close()
    obs, action = (
        their if isinstance(their, Box) and isinstance(mine, Box) and their.shape == mine.shape else mine
        for their, mine in zip(theirs, own, strict=True)
    )
    return obs, action


def _cast(values: NDArray[Any], space: gymnasium.Space[Any]) -> NDArray[Any]:
    """Values in the space's type. What is at a bound, which float32 may have rounded outwards, is that bound again.

    Values beyond the bounds stay: they were observed.
    """
    if not isinstance(space, Box) or values.dtype == space.dtype:
        return values
    with np.errstate(invalid="ignore"):  # an integer's bound, rounded outwards
        found = (np.rint(values) if space.dtype.kind in "iu" else values).astype(space.dtype)
    for bound in (space.low, space.high):
        found = np.where(values == bound.astype(np.float32), bound, found)
    return found


def _origin(dataset: Dataset) -> dict[str, Any]:
    sessions = dataset.folder.sessions()
    checkpoints = ", ".join(
        dict.fromkeys(f"{each['checkpoint']} of {Path(each['run']).name}" for each in sessions)
    )
    return {
        "algorithm_name": "rayagi",
        "description": f"{dataset.folder.description.task} by rayagi serve: {checkpoints}",
    }
