"""Reads and exports datasets for RLlib's offline algorithms.

RLlib (new API stack) makes every row an episode of one step. Algorithms without next observations (BC) can read a dataset
as it is::

    config = BCConfig().environment(**spaces("data/ant")).offline_data(**offline_settings("data/ant"))

For the others (CQL, MARWIL, IQL), ``rayagi export data/ant --to rllib OUT`` writes the next observation into every row,
under RLlib's names, and ``offline_data(input_=[OUT])`` reads that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset

from rayagi.serving.dataset import Dataset, Episode, open_dataset, spaces_of
from rayagi.serving.errors import ExportError
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
_ROWS_PER_FILE, _ROWS_PER_GROUP = 2**20, 2**16


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


def export_rllib(dataset: Dataset, out: Path, *, whole_only: bool) -> int:
    """Write Parquet files with ``new_obs`` in every row; returns the number of rows.

    Raises:
        ExportError: ``out`` exists already.
        DiskError: it cannot be written; nothing of it is left.
    """
    layout = dataset.folder.description.layout
    vector = pa.list_(pa.float32(), layout.obs_dim)
    schema = pa.schema(
        {
            "eps_id": pa.int64(),
            "t": pa.int32(),
            "obs": vector,
            "new_obs": vector,
            "actions": layout.action_type,
            "rewards": pa.float32(),
            "terminateds": pa.bool_(),
            "truncateds": pa.bool_(),
        }
    )
    rows = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in _batches(dataset.episodes(whole_only=whole_only), schema):
            rows += batch.num_rows
            yield batch

    with finished_folder(out) as folder:
        pyarrow.dataset.write_dataset(
            counted(),
            folder,
            schema=schema,
            format="parquet",
            max_rows_per_file=_ROWS_PER_FILE,
            max_rows_per_group=_ROWS_PER_GROUP,
            min_rows_per_group=_ROWS_PER_GROUP,
        )
    return rows


def _batches(episodes: Iterator[Episode], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for episode in episodes:
        steps = len(episode.rewards)
        last = np.zeros(steps, dtype=bool)
        last[-1] = True

        def lists(values: Any) -> pa.Array:
            return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])

        columns = {
            "eps_id": pa.array(np.full(steps, episode.number, dtype=np.int64)),
            "t": pa.array(np.arange(steps, dtype=np.int32)),
            "obs": lists(episode.obs[:-1]),
            "new_obs": lists(episode.obs[1:]),
            "actions": pa.array(episode.actions) if episode.actions.ndim == 1 else lists(episode.actions),
            "rewards": pa.array(episode.rewards),
            "terminateds": pa.array(last & episode.terminated),
            # Episodes cut by the end of the recording count as truncated: the next observation is known.
            "truncateds": pa.array(last & (not episode.terminated)),
        }
        yield pa.record_batch([columns[name] for name in schema.names], schema=schema)
