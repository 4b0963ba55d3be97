"""A replay store as a dataset of Ray Data: a row per step, with its next observation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray
import ray.data
from numpy.typing import NDArray
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.replay import ReplayError, ReplayStore, kernel
from rayagi.replay.saved import copied_rows
from rayagi.replay.trajectories import TrajectoryBatch, is_obs


class ReplayDatasource(Datasource):
    """Steps of a store's rows in the order of their commits: its columns, ``row`` and ``step``, and ``next_obs`` where
    observations have an extra step.

    The tasks attach to the store, so they run on its host, while this process has it open. Rows that are overwritten
    meanwhile are left out.
    """

    def __init__(self, store: ReplayStore) -> None:
        """Note the rows that the store has now. Raises ReplayError: the store has a column of a name that is added."""
        super().__init__()
        names = [column.name for column in store.schema.columns]
        added = {"row", "step", *(f"next_{name}" for name in names if is_obs(name))}
        if taken := [name for name in names if name in added]:
            reason = (
                f"the store has the columns {', '.join(taken)}, names of columns that are added: rename them"
            )
            raise ReplayError(reason)
        status = store.status()
        self._endpoint, self._schema = store.endpoint, store.schema
        self._rows = np.sort(status[status["state"] == kernel.COMMITTED], order="sequence")

    def get_name(self) -> str:
        """Shown by Ray Data."""
        return "Replay"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all steps, with both observations."""
        return int(self._rows["length"].sum()) * self._step_bytes()

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Tasks of about equally many steps."""
        ends = np.cumsum(self._rows["length"])
        if not len(ends):
            return []
        cuts = np.searchsorted(ends, np.linspace(0, ends[-1], parallelism + 1)[1:-1], side="right")
        return [
            ReadTask(
                _reader(self._endpoint, rows), self._metadata(rows), per_task_row_limit=per_task_row_limit
            )
            for rows in np.split(self._rows, cuts)
            if len(rows)
        ]

    def _metadata(self, rows: NDArray[Any]) -> BlockMetadata:
        steps = int(rows["length"].sum())
        return BlockMetadata(
            num_rows=steps, size_bytes=steps * self._step_bytes(), input_files=None, exec_stats=None
        )

    def _step_bytes(self) -> int:
        return sum(column.step_bytes * (1 + column.extra) for column in self._schema.columns)


def read_replay(store: ReplayStore, *, override_num_blocks: int | None = None) -> ray.data.Dataset:
    """A dataset of a store's steps. Ray must run on this host; ``load`` makes a store of a dataset or a saved replay.

    Args:
        store: open in this process until the dataset has been read
        override_num_blocks: as of ``ray.data.read_datasource``

    Raises:
        ReplayError: as of ``ReplayDatasource``.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.data.read_datasource(
        ReplayDatasource(store),
        override_num_blocks=override_num_blocks,
        ray_remote_args={"scheduling_strategy": here},
    )


def _reader(endpoint: str, rows: NDArray[Any]) -> Callable[[], Iterator[Block]]:
    """What a task runs."""

    def read() -> Iterator[Block]:
        with ReplayStore.attach(endpoint) as store:
            for indices, batch in copied_rows(store, rows):
                yield BlockAccessor.batch_to_block(_steps(indices, batch))

    return read


def _steps(indices: NDArray[np.int64], batch: TrajectoryBatch) -> dict[str, NDArray[Any]]:
    """(steps, ...) of each column; ``indices``: of the rows (n,)."""
    found = {name: batch.shifted(name) for name in batch.columns}
    with_next = (
        name for name, values in batch.columns.items() if is_obs(name) and len(values) > batch.num_steps
    )
    found |= {f"next_{name}": batch.shifted(name, 1) for name in with_next}
    found |= {"row": indices[batch.owners], "step": batch.times}
    return {name: np.ascontiguousarray(values) for name, values in found.items()}
