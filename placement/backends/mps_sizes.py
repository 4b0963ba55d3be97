"""Sizes of MPS shares: converts fractions of a GPU to SMs and bytes. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from placement.types import Gpu

FIRST_STATIC = (13, 1)
"""First CUDA version with static SM partitions."""

MIB = 2**20


def sms_per_chunk(gpu: Gpu) -> int | None:
    """SMs of the smallest static partition; None for a MIG instance, a GPU before Ampere, or an unknown SM count."""
    if gpu.uuid.startswith("MIG-"):
        return None
    if gpu.compute_capability is None or gpu.compute_capability < (8, 0) or gpu.sm_count is None:
        return None
    return 8 if gpu.compute_capability >= (9, 0) else 4


def chunk_for(gpu: Gpu, sizes: Sequence[float]) -> int | None:
    """The chunk size in SMs if each share gets at least one chunk; else None."""
    chunk = sms_per_chunk(gpu)
    return chunk if chunk is not None and all(sms_of(gpu, size, chunk) for size in sizes) else None


def sms_of(gpu: Gpu, size: float, chunk: int | None) -> int | None:
    """SMs of a share, in whole chunks if ``chunk`` is given; None if the GPU's SM count is unknown."""
    if gpu.sm_count is None:
        return None
    return max(1, floor(gpu.sm_count * size)) if chunk is None else floor(gpu.sm_count * size / chunk) * chunk


def memory_of(gpu: Gpu, size: float) -> int:
    """Bytes of a share, in whole MiB, the unit of MPS's memory limit."""
    return floor(gpu.memory_total_bytes * size) // MIB * MIB
