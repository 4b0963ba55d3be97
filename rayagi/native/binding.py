"""C sources of this package, from which kernels are composed, and addresses of tensors for them."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def shared(name: str) -> str:
    """The text of a header of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def numbers(real: torch.dtype) -> str:
    """The type ``real``, float32 or float64, its elementary functions, and denormals.h."""
    bits = 8 * real.itemsize
    return "\n".join(
        [
            f"#define REAL_BITS {bits}",
            shared("real.h"),
            shared("denormals.h"),
            *([shared("numbers.h")] if bits == 32 else ()),
        ]
    )


def pointer(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """The address of a contiguous CPU tensor's data.

    Args:
        tensor: the tensor
        dtype: that the kernel takes; None: the caller knows that it fits

    Raises:
        ValueError: the tensor is not contiguous, not on the CPU, or of another type.
    """
    if dtype is not None and tensor.dtype != dtype:
        raise wrong_dtype(tensor, dtype)
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a kernel needs a contiguous CPU tensor, not strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()


def wrong_dtype(tensor: Tensor, dtype: torch.dtype) -> ValueError:
    """The error of a tensor that has not the type that the kernel takes: it would read, or write, other numbers."""
    return ValueError(
        f"a kernel takes {dtype}, not {tensor.dtype}: does an environment or model call torch.set_default_dtype?"
    )
