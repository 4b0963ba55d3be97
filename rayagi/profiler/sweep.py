"""The Python side of sweep.c: the time of every set of categories, by cell and in all."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.resources import files

import numpy as np

from collectives.kernels import Kernel
from collectives.mirrors import Mirrors
from rayagi.profiler.intervals import Ints, Part, Times, distinct, overlap_times

SWEEP = Kernel(
    name="overlap of intervals",
    module=__name__,
    reference="rayagi.profiler.intervals:overlap_times",
    without="profiles are evaluated with NumPy, which is slower",
)
BITS = 16
"""Categories at most."""
_TABLE_SIZE = 1 << 14
"""Of the table of sums, at first."""

_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class _SweepStruct(ctypes.Structure):
    """Sweep of sweep.c."""

    _fields_ = (
        *((name, _I64) for name in ("lanes", "cells", "table_size")),
        *(
            (name, _ADDRESS)
            for name in (
                "first",
                "bits",
                "cell",
                "starts",
                "ends",
                "active",
                "masks",
                "since",
                "at",
                "heap",
                "table",
            )
        ),
    )


SUM = np.dtype([("cell", np.int64), ("mask", np.int64), ("ns", np.int64)])
_MIRRORS: Mirrors = {"Sweep": _SweepStruct, "BITS": BITS, "sizeof(Sum)": SUM.itemsize, "sizeof(Next)": 16}


@cache
def sweep() -> Callable[[Sequence[Part]], Times]:
    """What adds up times: in C, or the reference where it cannot be compiled."""
    return SWEEP.made_or_none(_compiled) or overlap_times


def _compiled() -> Callable[[Sequence[Part]], Times]:
    program = files(__package__).joinpath("sweep.c").read_text(encoding="utf-8")
    function = SWEEP.load(program, mirrors=_MIRRORS).overlap_sweep
    function.argtypes, function.restype = (_ADDRESS,), _I64

    return partial(_swept, lambda struct: bool(function(ctypes.addressof(struct))))


def _swept(run: Callable[[_SweepStruct], bool], parts: Sequence[Part]) -> Times:
    lanes = [lane for part in parts for lane in _lanes(part)]
    return _times(lanes, run) if lanes else Times({}, {})


def _lanes(part: Part) -> list[Part]:
    """The same intervals, in lists of disjoint ascending ones."""
    if not len(part.starts):
        return []
    if (part.starts[1:] >= part.ends[:-1]).all():
        return [part]
    order = np.lexsort((part.starts, part.cells))
    fields = [each[order] for each in (part.categories, part.cells, part.starts, part.ends)]
    cuts = np.flatnonzero(np.diff(fields[1])) + 1
    return [Part(*each) for each in zip(*(np.split(field, cuts) for field in fields), strict=True)]


def _times(lanes: Sequence[Part], run: Callable[[_SweepStruct], bool]) -> Times:
    """Lay out a sweep's memory, run it, and read its table."""
    bits, numbers, starts, ends = (
        np.concatenate([getattr(lane, name) for lane in lanes]).astype(np.int64, copy=False)
        for name in ("categories", "cells", "starts", "ends")
    )
    cells = distinct(numbers)
    first = np.concatenate([[0], np.cumsum([len(lane.starts) for lane in lanes])])
    numbers = np.searchsorted(cells, numbers)
    size = _TABLE_SIZE
    while True:
        rows = len(cells) + 1
        active, table = np.zeros(rows * BITS, np.int32), np.zeros(size, SUM)
        states = np.zeros(2 * rows + 3 * len(lanes), np.int64)
        masks, since, at, heap = np.split(states, np.cumsum([rows, rows, len(lanes)]))
        arrays = (first, bits, numbers, starts, ends, active, masks, since, at, heap, table)
        if run(_SweepStruct(len(lanes), len(cells), size, *(array.ctypes.data for array in arrays))):
            return _read(table[table["mask"] > 0], cells)
        size *= 4


def _read(sums: np.ndarray, cells: Ints) -> Times:
    """The sums of a table by cell, and those of all cells."""
    by_cell, total = {}, {}
    for cell, mask, ns in sums.tolist():
        if cell == len(cells):
            total[mask] = ns
        else:
            by_cell[int(cells[cell]), mask] = ns
    return Times(by_cell, total)
