"""Experience replay: trajectories in shared memory, selected by many rules. Independent of Ray and torch."""

from actors.replay.errors import ReplayBusyError, ReplayError
from actors.replay.schema import Column, ReplaySchema
from actors.replay.selection import (
    Fifo,
    Lifo,
    Prioritized,
    Selection,
    Sequences,
    Share,
    TopK,
    Uniform,
    WithoutReplacement,
    select,
    select_mixture,
)
from actors.replay.store import Keys, ReplayStore, ReservedRow
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
    "Share",
    "Subscription",
    "TopK",
    "Uniform",
    "WithoutReplacement",
    "gather",
    "select",
    "select_mixture",
]
