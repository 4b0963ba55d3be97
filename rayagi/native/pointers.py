"""Addresses of tensors, for programs in C."""

from __future__ import annotations

from torch import Tensor


def pointer(tensor: Tensor) -> int:
    """Of a contiguous tensor on the host.

    Raises:
        ValueError: it is not one.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a kernel needs contiguous memory of the host, not {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()
