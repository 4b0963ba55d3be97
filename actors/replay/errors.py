"""Errors of replay stores. Each is one sentence: what was wrong, and what to do."""

from __future__ import annotations


class ReplayError(ValueError):
    """A store cannot be made, or a request does not fit it."""


class ReplayDamagedError(ReplayError):
    """A store's shared memory holds what no store writes."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"the shared memory of replay store {endpoint} is damaged: a program has written where only stores may; make "
            "it again, from a checkpoint"
        )


class ReplayBusyError(RuntimeError):
    """Other processes hold what a request needs: the lock, or all rows."""


class ShardLostError(ReplayError):
    """A shard's process has ended, or does not respond."""


class RateLimitedError(ReplayBusyError):
    """A request that waited for the rate limiter was given up, because its caller said so."""


class ReplayTimeoutError(ReplayBusyError, TimeoutError):
    """A request has waited for the rate limiter for longer than its timeout."""


class ReplayCheckpointError(ReplayError):
    """A checkpoint is damaged, or of another store; or it cannot be written."""
