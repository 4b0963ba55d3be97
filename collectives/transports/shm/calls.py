"""What a member came for, in one word of 64 bits: members compare it at every barrier."""

from __future__ import annotations

from functools import lru_cache

import torch

from collectives.transports.base import ReduceOp

CALLS = (
    "connect",
    "barrier",
    "buffer",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "common",
)
OPS: tuple[ReduceOp, ...] = ("sum", "mean", "max")
ON_HOST, ON_DEVICE = 0, 255
"""Where the tensor is; 1 to 254 is the registered buffer of this number."""

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}

# call 4 bits, operator or source 8, type 7, place 8, elements 37
_NUMEL_BITS, _PLACE_BITS, _DTYPE_BITS, _DETAIL_BITS = 37, 8, 7, 8
_PLACE_AT = _NUMEL_BITS
_DTYPE_AT = _PLACE_AT + _PLACE_BITS
_DETAIL_AT = _DTYPE_AT + _DTYPE_BITS
_CALL_AT = _DETAIL_AT + _DETAIL_BITS


@lru_cache(maxsize=4096)
def encoded(
    call: str, detail: int = 0, dtype: torch.dtype = torch.uint8, numel: int = 0, place: int = ON_HOST
) -> int:
    """A call as a word. ``detail`` is the index of the operator in ``OPS``, or the source of a broadcast."""
    return (
        CALLS.index(call) << _CALL_AT
        | detail << _DETAIL_AT
        | _DTYPE_INDEX[dtype] << _DTYPE_AT
        | place << _PLACE_AT
        | numel
    )


def name(word: int) -> str:
    """The operation, e.g. ``all_reduce``."""
    return CALLS[word >> _CALL_AT]


def described(word: int) -> str:
    """The call as text: ``all_reduce(sum) of 7 float32 in buffer 1``."""
    call, detail = name(word), _field(word, _DETAIL_AT, _DETAIL_BITS)
    if call in ("connect", "barrier"):
        return call
    if call in ("all_reduce", "reduce", "reduce_scatter"):
        call = f"{call}({OPS[detail]})"
    elif call == "broadcast":
        call = f"broadcast(source={detail})"
    dtype = str(_DTYPES[_field(word, _DTYPE_AT, _DTYPE_BITS)]).removeprefix("torch.")
    place = _field(word, _PLACE_AT, _PLACE_BITS)
    where = {ON_HOST: "", ON_DEVICE: " on a device"}.get(place, f" in buffer {place}")
    return f"{call} of {_field(word, 0, _NUMEL_BITS)} {dtype}{where}"


def _field(word: int, at: int, bits: int) -> int:
    return word >> at & (1 << bits) - 1
