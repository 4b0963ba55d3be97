"""Encodes a call in a 64-bit word, which members compare before data moves, over every transport."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from collectives.errors import MismatchedCallError
from collectives.rendezvous import Member
from collectives.transports.base import ReduceOp

_OF_A_LIST = " of a list"

CALLS = (
    "connect",
    "barrier",
    "buffer",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    *(f"{call}{_OF_A_LIST}" for call in ("all_reduce", "reduce", "broadcast")),
)
OPS: tuple[ReduceOp, ...] = ("sum", "mean", "max")
ON_HOST, ON_DEVICE = 0, 255
"""Location of the tensor; 1 to 254: number of its registered buffer."""

_MOST_SHAPES = 8
"""Shapes of a list that an error shows."""
_SHAPES: dict[int, str] = {}
"""Text of this process's lists of shapes, by digest."""

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}

# Bits, from the highest: call 4, operator or source 8, dtype 7, place 8, number of elements (or digest of shapes) 37.
_NUMEL_BITS, _PLACE_BITS, _DTYPE_BITS, _DETAIL_BITS = 37, 8, 7, 8
_PLACE_AT = _NUMEL_BITS
_DTYPE_AT = _PLACE_AT + _PLACE_BITS
_DETAIL_AT = _DTYPE_AT + _DTYPE_BITS
_CALL_AT = _DETAIL_AT + _DETAIL_BITS


@lru_cache(maxsize=4096)
def encode_call(
    call: str,
    detail: int = 0,
    dtype: torch.dtype = torch.uint8,
    numel: int = 0,
    place: int = ON_HOST,
    layout: int = 0,
) -> int:
    """Encode a call.

    Args:
        call: one of CALLS
        detail: index of the operator in ``OPS``, or source of a broadcast
        dtype, numel: of the tensor
        place: ON_HOST, ON_DEVICE, or the number of a registered buffer
        layout: ``shapes_digest`` of the tensors in the bucket; 0 for a single tensor
    """
    if layout:
        call, numel = call + _OF_A_LIST, layout
    return (
        CALLS.index(call) << _CALL_AT
        | detail << _DETAIL_AT
        | _DTYPE_INDEX[dtype] << _DTYPE_AT
        | place << _PLACE_AT
        | numel
    )


def call_name(word: int) -> str:
    """Name of the operation, e.g. ``all_reduce``."""
    return CALLS[word >> _CALL_AT].removesuffix(_OF_A_LIST)


def shapes_digest(tensors: Sequence[Tensor]) -> int:
    """Digest of several tensors' shapes, which distinguishes lists with equal totals; 0 for one tensor."""
    return _digest(tuple(tuple(tensor.shape) for tensor in tensors)) if len(tensors) > 1 else 0


@lru_cache(maxsize=4096)
def _digest(shapes: tuple[tuple[int, ...], ...]) -> int:
    digest = blake2b(repr(shapes).encode(), digest_size=8).digest()
    layout = int.from_bytes(digest, "little") & (1 << _NUMEL_BITS) - 1 or 1
    shown = ", ".join(map(str, shapes[:_MOST_SHAPES]))
    more = f" and {len(shapes) - _MOST_SHAPES} more" if len(shapes) > _MOST_SHAPES else ""
    _SHAPES[layout] = f"of shapes {shown}{more}"
    return layout


def mismatch_message(rank: int, word: int, other_rank: int, other_word: int) -> str:
    """Error text for two members that made different calls."""
    return (
        f"rank {rank} called {describe_call(word)}, and rank {other_rank} {describe_call(other_word)}; "
        "every member must call the same operations in the same order"
    )


def signature(word: int, number: int) -> Tensor:
    """Signature of an operation, which members compare: encoded call and number of the operation; (16,) bytes."""
    return torch.from_numpy(np.array([word, number], dtype=np.uint64)).view(torch.uint8)


def refuse_difference(signatures: Tensor, rank: int, members: Sequence[Member]) -> None:
    """Compare the signatures of all members, (world_size, 16) bytes; ``rank`` is this member's among them.

    Raises:
        MismatchedCallError: a member has another one than this.
    """
    table = signatures.cpu().contiguous().numpy().view(np.uint64).tolist()
    word, number = table[rank]
    for (other_word, other_number), other in zip(table, members, strict=True):
        if (other_word, other_number) != (word, number):
            text = mismatch_message(members[rank].rank, word, other.rank, other_word)
            if other_number != number:
                text += f" (operations {number} and {other_number} of the group)"
            raise MismatchedCallError(call_name(word), members[rank].rank, str(other), 0.0, text)


def describe_call(word: int) -> str:
    """The call as text: ``all_reduce(sum) of 7 float32 in buffer 1``."""
    call, detail, numel = (
        call_name(word),
        _field(word, _DETAIL_AT, _DETAIL_BITS),
        _field(word, 0, _NUMEL_BITS),
    )
    if call in ("connect", "barrier"):
        return call
    if call in ("all_reduce", "reduce", "reduce_scatter"):
        call = f"{call}({OPS[detail]})"
    elif call == "broadcast":
        call = f"broadcast(source={detail})"
    dtype = str(_DTYPES[_field(word, _DTYPE_AT, _DTYPE_BITS)]).removeprefix("torch.")
    place = _field(word, _PLACE_AT, _PLACE_BITS)
    where = {ON_HOST: "", ON_DEVICE: " on a device"}.get(place, f" in buffer {place}")
    if CALLS[word >> _CALL_AT].endswith(_OF_A_LIST):
        return f"{call} of a list of {dtype} {_SHAPES.get(numel, 'of other shapes')}{where}"
    return f"{call} of {numel} {dtype}{where}"


def _field(word: int, at: int, bits: int) -> int:
    return word >> at & (1 << bits) - 1
