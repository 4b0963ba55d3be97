"""The C that programs share."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def shared(name: str) -> str:
    """A header of this package, for programs to begin with."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def numbers(real: torch.dtype) -> str:
    """The type of reals, float32 or float64, and functions of them."""
    bits = 8 * real.itemsize
    return "\n".join(
        [
            f"#define REAL_BITS {bits}",
            shared("real.h"),
            shared("denormals.h"),
            *([shared("numbers.h")] if bits == 32 else ()),
        ]
    )
