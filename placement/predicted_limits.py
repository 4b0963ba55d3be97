"""Predicted limits: the compute and memory limits that slices will have once their GPUs are partitioned."""

from __future__ import annotations

from collections.abc import Sequence

from placement.backends import get_backend
from placement.backends.base import SliceLimits
from placement.types import Machine, Slice


def predict_limits(machine: Machine, slices: Sequence[Slice]) -> tuple[SliceLimits, ...]:
    """Predict the limits of each slice, in order. ``slices`` must contain all slices of each GPU.

    Raises:
        PlanError: a GPU cannot be partitioned into these sizes; the text says what would fit.
    """
    by_gpu: dict[tuple[str, str], list[int]] = {}
    for index, gmi_slice in enumerate(slices):
        if gmi_slice.gpu_uuid is not None:
            by_gpu.setdefault((gmi_slice.node, gmi_slice.gpu_uuid), []).append(index)
    limits = [SliceLimits() for _ in slices]
    for (node_name, uuid), indices in by_gpu.items():
        node = machine.node(node_name)
        backend = get_backend(slices[indices[0]].backend)
        for gpu in node.gpus:
            if gpu.uuid == uuid:
                sizes = [slices[index].gpu_fraction for index in indices]
                for index, limit in zip(indices, backend.predict_limits(node, gpu, sizes), strict=True):
                    limits[index] = limit
    return tuple(limits)
