"""Loads the C headers of this package, from which kernels are composed."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
