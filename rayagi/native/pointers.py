"""Addresses of tensors for C kernels."""

from __future__ import annotations

from torch import Tensor


def pointer(tensor: Tensor) -> int:
    """The address of a contiguous CPU tensor's data.

    Raises:
        ValueError: the tensor is not contiguous, or not on the CPU.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a kernel needs a contiguous CPU tensor, not strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()
