"""Experience replay: trajectories in shared memory, selected by many rules. Independent of Ray and torch."""

from actors.replay.errors import ReplayBusyError, ReplayError, ShardLostError
from actors.replay.schema import Column, ReplaySchema
from actors.replay.selection import (
    Fifo,
    Lifo,
    Prioritized,
    Sequences,
    Share,
    TopK,
    Uniform,
    WithoutReplacement,
    select,
    select_centralised,
    select_mixture,
)
from actors.replay.store import Keys, ReplayStore, ReservedRow, Selection
from actors.replay.stream import BatchStream
from actors.replay.subscriptions import Gathered, Gatherer, Subscription, gather

__all__ = [
    "BatchStream",
    "Column",
    "Fifo",
    "Gathered",
    "Gatherer",
    "Keys",
    "Lifo",
    "Prioritized",
    "ReplayBusyError",
    "ReplayError",
    "ReplaySchema",
    "ReplayStore",
    "ReservedRow",
    "Selection",
    "Sequences",
    "ShardLostError",
    "Share",
    "Subscription",
    "TopK",
    "Uniform",
    "WithoutReplacement",
    "gather",
    "select",
    "select_centralised",
    "select_mixture",
]
