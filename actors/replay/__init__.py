"""Experience replay: trajectories in shared memory, selected by many rules. Independent of Ray and torch."""

from actors.replay.checkpoint import ReplayCheckpointer, Restored, Saved, saved_schema
from actors.replay.errors import (
    RateLimitedError,
    ReplayBusyError,
    ReplayCheckpointError,
    ReplayError,
    ReplayTimeoutError,
    ShardLostError,
)
from actors.replay.hindsight import Hindsight, HindsightGatherer
from actors.replay.limiter import LimiterStatus, RateLimit, WaitingRequest
from actors.replay.metrics import Histogram, ReplayMeter, ReplayMetrics
from actors.replay.rows import Keys, Selection
from actors.replay.schema import Column, ReplaySchema
from actors.replay.selection import (
    Fifo,
    Lifo,
    MixturePart,
    Prioritized,
    SubSequences,
    TopK,
    Uniform,
    WithoutReplacement,
    select,
    select_centralised,
    select_mixture,
)
from actors.replay.shard import ReplayShard
from actors.replay.shards import LostShard, ReplayShards
from actors.replay.step_priorities import StepPriorities
from actors.replay.store import ReplayStore, ReservedRow
from actors.replay.stream import BatchStream
from actors.replay.subscriptions import Gathered, Gatherer, Subscription, gather

__all__ = [
    "BatchStream",
    "Column",
    "Fifo",
    "Gathered",
    "Gatherer",
    "Hindsight",
    "HindsightGatherer",
    "Histogram",
    "Keys",
    "Lifo",
    "LimiterStatus",
    "LostShard",
    "MixturePart",
    "Prioritized",
    "RateLimit",
    "RateLimitedError",
    "ReplayBusyError",
    "ReplayCheckpointError",
    "ReplayCheckpointer",
    "ReplayError",
    "ReplayMeter",
    "ReplayMetrics",
    "ReplaySchema",
    "ReplayShard",
    "ReplayShards",
    "ReplayStore",
    "ReplayTimeoutError",
    "ReservedRow",
    "Restored",
    "Saved",
    "Selection",
    "ShardLostError",
    "StepPriorities",
    "SubSequences",
    "Subscription",
    "TopK",
    "Uniform",
    "WaitingRequest",
    "WithoutReplacement",
    "gather",
    "saved_schema",
    "select",
    "select_centralised",
    "select_mixture",
]
