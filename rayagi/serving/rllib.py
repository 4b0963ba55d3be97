"""Reads and exports datasets for RLlib's offline algorithms.

``rayagi export data/ant --to rllib OUT`` writes whole episodes, as RLlib's own recording of episodes does::

    config = CQLConfig().environment(**spaces("data/ant")).offline_data(**episode_settings("OUT"))

BC needs no next observations, and can read a dataset as it is. RLlib then makes every row an episode of one step::

    config = BCConfig().environment(**spaces("data/ant")).offline_data(**offline_settings("data/ant"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from rayagi.serving.dataset import Dataset, Episode, open_dataset, spaces_of
from rayagi.serving.errors import NO_EPISODES, ExportError
from rayagi.serving.files import finished_folder

# Names of ray.rllib.core.columns.Columns. Importing it takes seconds.
_NAMES = {
    "obs": "obs",
    "actions": "action",
    "rewards": "reward",
    "terminateds": "terminated",
    "truncateds": "truncated",
    "eps_id": "episode",
    "t": "step",
}
"""RLlib's name of each of our columns."""
_GROUPS_PER_FILE, _EPISODES_PER_GROUP = 16, 16
_SAMPLED_STEPS = 256
"""Steps of a usual train batch."""


def offline_settings(path: Path | str) -> dict[str, Any]:
    """Keyword arguments of ``AlgorithmConfig.offline_data`` to read a Parquet dataset in place.

    Raises:
        DatasetError: there is no dataset.
        ExportError: it has Arrow files, which Ray Data does not read.
    """
    dataset = open_dataset(path)
    if dataset.folder.description.format != "parquet":
        raise ExportError(
            str(path), "holds Arrow files, and Ray Data reads Parquet: use rayagi export --to rllib"
        )
    return {
        # Absolute: other processes read them.
        "input_": [str(file.path.absolute()) for file in dataset.files],
        "input_read_method": "read_parquet",
        # The other columns would travel with every row as "extra model outputs".
        "input_read_method_kwargs": {"columns": list(_NAMES.values())},
        "input_read_schema": dict(_NAMES),
        "ignore_final_observation": True,
    }


def spaces(path: Path | str) -> dict[str, Any]:
    """Keyword arguments of ``AlgorithmConfig.environment`` for algorithms that run no environment.

    Raises:
        DatasetError: there is no dataset.
    """
    obs, action = spaces_of(open_dataset(path).folder.description.layout)
    return {"observation_space": obs, "action_space": action}


def episode_settings(out: Path | str) -> dict[str, Any]:
    """Keyword arguments of ``AlgorithmConfig.offline_data`` to read the episodes of an export.

    Raises:
        ExportError: there is no export, or it has no episodes.
    """
    files = sorted(Path(out).absolute().glob("*.parquet"))
    if not files:
        raise ExportError(str(out), "is no export: rayagi export DATASET --to rllib writes one")
    lengths = pyarrow.dataset.dataset(files).to_table(columns=["steps"])["steps"].to_numpy()
    if not len(lengths):
        raise ExportError(str(out), "has no episodes: export without --whole, or serve for longer")
    return {
        "input_": [str(file) for file in files],
        "input_read_method": "read_parquet",
        "input_read_episodes": True,
        # Episodes, not steps as RLlib's default. Each read samples one train batch: read about as many steps as it has.
        "input_read_batch_size": max(1, int(_SAMPLED_STEPS / lengths.mean())),
        # RLlib's default of two actors leaves no core for reading on a machine of two, and waits for ever.
        "map_batches_kwargs": {"concurrency": 1},
    }


def export_rllib(dataset: Dataset, out: Path, *, whole_only: bool) -> int:
    """Write each episode as RLlib writes its own: a SingleAgentEpisode's state in msgpack, in the column ``item`` of Parquet
    files, beside the number of ``steps``. The installed RLlib's class decides the format. Returns the number of episodes.

    An episode cut by the end of the recording counts as truncated. The extra model outputs of a step are ``action_logp`` and
    ``policy_version``.

    Raises:
        ExportError: ``out`` exists already, there are no episodes, or a package that RLlib reads episodes with is not
            installed.
        DiskError: it cannot be written; nothing of it is left.
    """
    return write_episodes(
        dataset.episodes(whole_only=whole_only), spaces_of(dataset.folder.description.layout), out
    )


def write_episodes(
    episodes: Iterable[Episode], spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]], out: Path
) -> int:
    """Write episodes of these observation and action spaces. Returns, and raises, as ``export_rllib``."""
    packed = _packing()
    schema = pa.schema({"item": pa.binary(), "steps": pa.int32()})
    rows = (
        {"item": packed(_rllib_episode(episode, *spaces)), "steps": len(episode.rewards)}
        for episode in episodes
    )
    groups = enumerate(iter(lambda: list(islice(rows, _EPISODES_PER_GROUP)), []))
    written = 0
    with finished_folder(out) as folder:
        for file, own in groupby(groups, lambda group: group[0] // _GROUPS_PER_FILE):
            with pq.ParquetWriter(folder / f"part-{file:05d}.parquet", schema) as writer:
                for _, group in own:
                    writer.write_table(pa.Table.from_pylist(group, schema))
                    written += len(group)
        if not written:  # the folder goes
            raise ExportError(str(out), NO_EPISODES)
    return written


def _packing() -> Callable[[Any], bytes]:
    """Packs a SingleAgentEpisode, as RLlib's OfflineSingleAgentEnvRunner does."""
    try:
        import msgpack
        import msgpack_numpy
    except ImportError as error:
        raise ExportError(
            "RLlib's episodes", f"cannot be written ({error}); pip install msgpack-numpy"
        ) from error

    def packed(episode: Any) -> bytes:
        content: bytes = msgpack.packb(episode.get_state(), default=msgpack_numpy.encode)
        return content

    return packed


def _rllib_episode(
    episode: Episode, obs_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> Any:
    # Imported here: RLlib takes seconds.
    from ray.rllib.core.columns import Columns
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    steps = len(episode.rewards)
    extra = {"policy_version": episode.policy_versions.tolist()}
    if not np.isnan(episode.log_probs).any():  # a file of before log_prob
        extra[Columns.ACTION_LOGP] = episode.log_probs.tolist()
    return SingleAgentEpisode(
        id_=str(episode.number),
        observation_space=obs_space,
        action_space=action_space,
        observations=list(episode.obs),
        actions=list(episode.actions),
        rewards=episode.rewards.tolist(),
        infos=[{}] * (steps + 1),
        terminated=episode.terminated,
        truncated=not episode.terminated,
        extra_model_outputs=extra,
        len_lookback_buffer=0,
    )
