"""Replay shards in Ray actors: one on each node, announced in the directory, restarted empty after a loss."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.raylet_watch import end_with_raylet
from actors.rendezvous import RemoteDirectory
from actors.replay import ReplaySchema, ReplayShard, ReplayStore, ShardLostError
from collectives.experience.directory import Directory

START_TIMEOUT_S = 120.0
"""Default limit for the shards of a table to start."""


def announced_shards(directory: Directory, table: str) -> Callable[[], Sequence[str]]:
    """Function that returns the addresses of a table's shards: what ``ReplayShards`` asks for missing ones."""

    def addresses() -> Sequence[str]:
        return [json.loads(text)["address"] for text in directory.announced(_key(table)).values()]

    return addresses


def _key(table: str, shard: int | None = None) -> str:
    """Key of a shard in the directory; without a shard, the common prefix of these keys."""
    return f"replay/{table}/{'' if shard is None else shard}"


class ReplayShardActor:
    """A ``ReplayShard`` in an actor. If Ray restarts it after a loss, the shard is empty, under the same indices."""

    def __init__(
        self,
        rendezvous: Any,
        table: str,
        schema: ReplaySchema,
        capacity: int,
        *,
        shard: int,
        num_shards: int,
        host_id: str | None = None,
        **options: Any,
    ) -> None:
        """Create the store and announce it in the directory of ``rendezvous``, where readers and writers find the table.

        Other arguments and errors as of ``ReplayStore.create`` and ``ReplayShard``.
        """
        end_with_raylet()
        self._directory = directory = RemoteDirectory(rendezvous)
        key = _key(table, shard)
        before = directory.announced(key).get(key)
        incarnation = 0 if before is None else json.loads(before)["incarnation"] + 1
        store = ReplayStore.create(
            schema, capacity, shard=shard, num_shards=num_shards, incarnation=incarnation, **options
        )
        self._shard = ReplayShard(store, host=ray.util.get_node_ip_address(), host_id=host_id)
        directory.announce(key, json.dumps({"address": self._shard.address, "incarnation": incarnation}))

    def process_id(self) -> int:
        """Its process id."""
        return os.getpid()


def create_shards(
    rendezvous: Any,
    table: str,
    schema: ReplaySchema,
    capacity: int,
    nodes: Sequence[str],
    *,
    host_ids: Sequence[str | None] = (),
    timeout_s: float = START_TIMEOUT_S,
    **options: Any,
) -> list[Any]:
    """Start a shard on each of these nodes, which may repeat, and wait for all. Returns their actors' handles.

    ``nodes``: Ray's node ids, by shard; ``host_ids``: by shard, empty: their own; ``timeout_s``: for all to start. Other
    arguments and errors as of ``ReplayShardActor``; ``capacity`` is each shard's.

    Raises:
        ShardLostError: a shard has not started in time. None is left.
    """
    handles = []
    for shard, node in enumerate(nodes):
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(ReplayShardActor).options(num_cpus=0, max_restarts=-1, scheduling_strategy=there)
        host_id = host_ids[shard] if host_ids else None
        handles.append(
            actor.remote(
                rendezvous,
                table,
                schema,
                capacity,
                shard=shard,
                num_shards=len(nodes),
                host_id=host_id,
                **options,
            )
        )
    started = [handle.process_id.remote() for handle in handles]
    _, late = ray.wait(started, num_returns=len(started), timeout=timeout_s)
    if late:
        for handle in handles:
            ray.kill(handle)
        shards = [started.index(ref) for ref in late]
        where = ", ".join(dict.fromkeys(nodes[shard] for shard in shards))
        raise ShardLostError(
            f"shard {', '.join(map(str, shards))} of table {table!r} did not start within {timeout_s:g} s, on Ray node "
            f"{where}: see `ray status`"
        )
    ray.get(started)
    return handles
