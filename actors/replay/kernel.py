"""The Python side of kernel.c: its structs, and its functions with their types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib.resources import files

import numpy as np

from actors.replay.errors import ReplayError
from collectives.compiler import CompilerError
from collectives.kernels import Kernel
from collectives.mirrors import Mirrors

REPLAY = Kernel(
    name="replay stores",
    module=__name__,
    reference="actors.replay.tree:descend",
    without="replay stores need a C compiler",
    # No fused multiply-add: a draw is the same in C, in NumPy, and on every shard.
    flags=("-ffp-contract=off", "-pthread"),
)

FREE, WRITING, COMMITTED, DELETED = range(4)
"""State of an index: the lower two bits of its tag."""
REMOVALS = ("fifo", "lifo", "oldest", "lowest_priority", "random", "user")
ROWS, WINDOWS, PRIORITIES, TIMESTAMPS, LEAST_PRIORITIES = range(5)
"""Kinds of trees: what a leaf is."""
TREES_OF_REMOVALS = {"oldest": TIMESTAMPS, "lowest_priority": LEAST_PRIORITIES, "random": ROWS}
"""Kind of the tree that a removal finds its row by."""
PADDINGS = ("in_place", "head", "tail")
STALE, VALID, OUTSIDE = range(3)
(
    LOCK_TIMEOUT,
    ALL_WRITING,
    NEED_VICTIM,
    NOT_OWNED,
    EMPTY,
    NO_SLOT,
    IO_ERROR,
    NO_MEMORY,
    FOREIGN,
    NO_IDENTITY,
    LIMITED,
    DAMAGED,
    NO_STEP,
    TOO_LARGE,
) = range(-1, -15, -1)
FANOUT, MAX_LEVELS = 8, 14
WAITERS, BINS = 32, 64
INSERT, SAMPLE = range(2)
"""Kinds of requests that the rate limiter knows."""
LOCK_BYTES, LOCK_AT = 64, 3072
"""Of the lock in a store's first file, behind the header."""

_I64, _ADDRESS, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_U64, _I32, _U32 = ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32


class _RowStruct(ctypes.Structure):
    """Row of kernel.c."""

    _fields_ = (
        *((name, _U64) for name in ("tag", "owner")),
        ("priority", _DOUBLE),
        ("timestamp", _I64),
        ("sequence", _U64),
        ("length", _U32),
        ("slot", _I32),
        ("sampled", _U64),
        ("next", _I32),
        ("prev", _I32),
    )


ROW = np.dtype(_RowStruct)
"""A row of the status table, as NumPy sees it."""


class LimitStruct(ctypes.Structure):
    """Limit of kernel.c."""

    _fields_ = (
        *((name, _DOUBLE) for name in ("samples_per_insert", "below", "above", "offset", "timeout_s")),
        *((name, _I64) for name in ("min_size", "inserts", "samples")),
    )


class WaiterStruct(ctypes.Structure):
    """Waiter of kernel.c."""

    _fields_ = (("owner", _U64), *((name, _I64) for name in ("kind", "rows", "since_ns")))


class WarmthStruct(ctypes.Structure):
    """Warmth of kernel.c."""

    _fields_ = (
        ("filed", _U64),
        ("moves", _U32),
        *((name, ctypes.c_uint16) for name in ("heat", "unused")),
    )


class HeaderStruct(ctypes.Structure):
    """Header of kernel.c."""

    _fields_ = (
        ("magic", _U64),
        *((name, _I64) for name in ("removal", "max_sampled", "count", "writing", "high")),
        *((name, _I64) for name in ("free", "first_free", "last_free")),
        *((name, _I64) for name in ("oldest", "newest", "writers")),
        *((name, _U64) for name in ("sequence", "random")),
        *((name, _I64) for name in ("hand", "next_reap_ns")),
        *((name, _I64) for name in ("inserted", "selected", "evicted", "deleted")),
        *((name, _I64) for name in ("reclaimed", "spilled", "recovered")),
        *((name, _I64) for name in ("promoted", "read", "read_from_file", "thawed")),
        ("version", _U64),
        *((name, _I64) for name in ("in_file", "limit")),
        ("limits", LimitStruct * 2),
        ("asleep", _U32 * 2),
        *((name, _I64 * 2) for name in ("waits", "waited_ns")),
        ("waiters", WaiterStruct * WAITERS),
        *((name, _I64 * BINS) for name in ("ages", "staleness")),
    )


class TreeStruct(ctypes.Structure):
    """Tree of kernel.c."""

    _fields_ = (
        ("level", _ADDRESS * MAX_LEVELS),
        ("first", _I64 * MAX_LEVELS),
        ("nodes", _I64 * MAX_LEVELS),
        *((name, _I64) for name in ("levels", "kind", "window", "stride")),
        ("exponent", _DOUBLE),
    )


class ColumnStruct(ctypes.Structure):
    """Column of kernel.c."""

    _fields_ = tuple((name, _I64) for name in ("offset", "step_bytes", "row_bytes", "extra"))


class StoreStruct(ctypes.Structure):
    """Store of kernel.c."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("header", "lock", "rows", "slot_rows", "data", "columns", "trees")),
        *((name, _I64) for name in ("capacity", "base", "slots", "num_columns", "num_trees", "removal_tree")),
        ("max_length", _I64),
        ("warmth", _ADDRESS),
        *((name, _I64) for name in ("spill", "limit_ns", "on_disk")),
        ("scratch", _ADDRESS),
        ("scratch_size", _I64),
        ("damaged", _I64),
    )


class FormStruct(ctypes.Structure):
    """Form of kernel.c."""

    _fields_ = (("format", _I64), ("ndim", _I64), ("shape", _ADDRESS))


class StatisticsStruct(ctypes.Structure):
    """Statistics of kernel.c."""

    _fields_ = tuple((name, _ADDRESS) for name in ("lengths", "priorities", "timestamps"))


class PartStruct(ctypes.Structure):
    """Part of kernel.c."""

    _fields_ = (
        *((name, _I64) for name in ("column", "offset", "length", "padding")),
        *((name, _ADDRESS) for name in ("out", "mask")),
    )


_MIRRORS: Mirrors = {
    "Row": _RowStruct,
    "Limit": LimitStruct,
    "Waiter": WaiterStruct,
    "Warmth": WarmthStruct,
    "Header": HeaderStruct,
    "Tree": TreeStruct,
    "Column": ColumnStruct,
    "Store": StoreStruct,
    "Part": PartStruct,
    "Form": FormStruct,
    "Statistics": StatisticsStruct,
    f"sizeof(pthread_mutex_t) <= {LOCK_BYTES}": 1,
    f"sizeof(Header) <= {LOCK_AT}": 1,
    **{name.upper(): value for value, name in enumerate(REMOVALS)},
    **{name.upper(): value for value, name in enumerate(PADDINGS)},
    **{
        name: value
        for name, value in globals().items()
        if name.isupper() and isinstance(value, int) and name not in ("LOCK_BYTES", "LOCK_AT")
    },
}

_ARGUMENTS = {
    "create": "p", "release": "p", "reap": "p", "identity": "",
    "allocate": "pip", "commit": "pippppi", "cancel": "pip", "insert": "piippppipp", "evict": "piu",
    "delete": "pipp", "update": "pippp", "snapshot": "pp", "mark": "pippp", "unmark": "pipp",
    "choose_steps": "iiippppp", "update_steps": "pippppdpp",
    "wait": "pii", "wait_begin": "pii", "wait_end": "piii", "waiters": "pp", "limit": "ppi", "shift_error": "pd",
    "times_sampled": "pip",
    "uniforms": "uuuuiip", "draws_left": "pii", "edges": "pip", "leaves": "pipp",
    "descend": "piippppppp",
    "prefetch": "pip",
    "freeze": "pppp", "pack": "pippppp", "unpack": "pippppp", "thaw": "pppp",
    "tree_layout": "ppiii", "tree_build": "p", "tree_set": "pippp", "tree_draw": "pipp", "tree_descend": "pipppp",
}  # fmt: skip
_WITH_ARRAYS = {"insert": "popipoo", "draw": "piuuuuo", "gather": "piiipo"}
"""Arguments of each function: p pointer, i int64, u uint64, d double, o a Python object."""
_TYPES = {"p": _ADDRESS, "i": _I64, "u": _U64, "d": _DOUBLE, "o": ctypes.py_object}


@cache
def library() -> ctypes.CDLL:
    """The compiled program. Raises ReplayError where it cannot be compiled here."""
    try:
        return _load()
    except CompilerError as error:
        raise ReplayError(f"{REPLAY.without}: {error}") from error


def _load() -> ctypes.CDLL:
    program = files(__package__).joinpath("kernel.c").read_text(encoding="utf-8")
    loaded = REPLAY.load(program, mirrors=_MIRRORS)
    for name, kinds in _ARGUMENTS.items():
        function = getattr(loaded, f"replay_{name}")
        function.argtypes, function.restype = tuple(_TYPES[kind] for kind in kinds), _I64
    return loaded


@cache
def with_arrays(name: str) -> Callable[..., int]:
    """The function of this name that takes arrays. ctypes gives Python's lock away before a call, except of a PyDLL."""
    function = getattr(ctypes.PyDLL(None, handle=library()._handle), f"replay_{name}_arrays")
    function.argtypes, function.restype = tuple(_TYPES[kind] for kind in _WITH_ARRAYS[name]), _I64
    return function


def address(array: np.ndarray) -> int:
    """Address of an array's data."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (
        TypeError,
        ValueError,
        BufferError,
    ):  # read-only, empty or not contiguous: the same, but four times as slow
        found: int = array.__array_interface__["data"][0]
        return found
