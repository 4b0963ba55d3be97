"""Shared memory among processes of one host.

Rank 0 calls ``Segment.host(world_size)`` and publishes its ``endpoint``; the others call ``Segment.attach(endpoint,
world_size, rank)``. Each then makes its ``SharedMemoryTransport(segment, members, rank, timeout_s)``, which waits for all.
"""

from collectives.transports.shm.memory import Segment
from collectives.transports.shm.transport import SharedMemoryTransport

__all__ = ["Segment", "SharedMemoryTransport"]
