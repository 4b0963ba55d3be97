"""Rows of an experience channel into a replay table: how GMIs write online (GEAR, section 3.2)."""

from __future__ import annotations

from typing import Any

from actors.replay import Keys, ReplayError, ReplaySchema, ReplayShards, ReplayStore, ShardLostError
from collectives.experience.consumer_endpoint import Batch, ConsumerEndpoint
from collectives.experience.errors import LeaseExpiredError
from collectives.experience.schema import ExperienceSchema

_STATISTICS = ("length", "priority", "timestamp")
"""Fields that are no columns, and belong to the row: see ``ReplayStore.insert``."""


class ReplayIntake:
    """Consumes a channel whose rows are trajectories, and inserts them into the shard beside it.

    Fields are columns of the same name, (max_length + extra, *shape) of a row, or (*shape) for single transitions. Fields
    ``length``, ``priority`` and ``timestamp`` that are no columns are the row's. A batch is released after its rows are
    committed: each row is in the table, also if this process is killed, and then perhaps twice.
    """

    def __init__(self, endpoint: ConsumerEndpoint, table: ReplayStore | ReplayShards) -> None:
        """Consume this endpoint, which the caller closes.

        Raises:
            ReplayError: the channel does not have the table's columns.
        """
        _check_fields(endpoint.schema, table.schema)
        self._endpoint, self._table = endpoint, table
        self._columns = [column.name for column in table.schema.columns]
        fields = {field.name for field in endpoint.schema.fields}
        self._statistics = [
            name if name in fields and name not in self._columns else None for name in _STATISTICS
        ]
        self._held: Batch | None = None

    def take(self, timeout_s: float = 60.0) -> Keys | None:
        """Insert the next batch. Returns the keys of its rows; None once all producers have closed.

        Raises:
            ChannelTimeoutError: no batch came in time.
            ShardLostError: all shards are lost; the next call inserts the same batch.
            ReplayError, ReplayBusyError: as of ``ReplayStore.insert``; the next call inserts the same batch.
        """
        if self._held is None:
            self._held = self._endpoint.take(timeout_s)
        batch = self._held
        if batch is None:
            return None
        keys = self._insert(batch)
        self._held = None
        try:
            batch.release()
        except LeaseExpiredError:
            self._table.delete(
                keys
            )  # another consumer has these rows, and they may have been overwritten here
            raise
        return keys

    def _insert(self, batch: Batch) -> Keys:
        """Insert a batch; into another shard if the first is lost meanwhile."""
        while True:
            rows = {name: batch[name].numpy() for name in self._columns}
            statistics = [None if name is None else batch[name].numpy() for name in self._statistics]
            try:
                return self._table.insert(rows, *statistics)
            except ShardLostError:
                if not isinstance(self._table, ReplayShards) or not self._table.present:
                    raise


def _check_fields(channel: ExperienceSchema, schema: ReplaySchema) -> None:
    fields: dict[str, Any] = {field.name: field for field in channel.fields}
    for column in schema.columns:
        steps = schema.max_length + column.extra
        shapes = [(steps, *column.shape), *([column.shape] if steps == 1 else [])]
        field = fields.get(column.name)
        dtype = "" if field is None else str(field.dtype).removeprefix("torch.")
        if field is None or field.shape not in shapes or dtype != str(column.dtype):
            raise ReplayError(
                f"channel {channel.name!r} has {field or f'no field {column.name!r}'} where the table expects rows of "
                f"{steps} steps of {column}"
            )
