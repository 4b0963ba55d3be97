"""torch's streams as Warp sees them."""

from __future__ import annotations

from typing import Any

import torch
import warp as wp

_streams: dict[tuple[int, int], Any] = {}
"""By device and handle. Kept: when one of two Warp objects of the same stream goes, Warp forgets the stream itself."""


def current_stream(device: torch.device) -> Any:
    """torch's current stream of a CUDA device, as a Warp stream."""
    stream = torch.cuda.current_stream(device)
    key = stream.device_index, stream.cuda_stream
    if key not in _streams:
        _streams[key] = wp.stream_from_torch(stream)
    return _streams[key]
