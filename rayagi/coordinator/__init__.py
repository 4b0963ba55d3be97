"""The loop over actors: opens a run's GMIs, asks them for iterations, merges what they answer."""

from __future__ import annotations

from rayagi.coordinator.cluster import ClusterUnreachableError
from rayagi.coordinator.session import Session, SessionClosedError

__all__ = ["ClusterUnreachableError", "Session", "SessionClosedError"]
