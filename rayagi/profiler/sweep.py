"""The Python side of sweep.c: the time of every set of categories, by process, by cell and in all."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.resources import files

import numpy as np

from collectives.kernels import Kernel
from collectives.mirrors import Mirrors
from rayagi.profiler.intervals import MASK_BITS, Ints, Part, Times, overlap_by_process, ranks
from rayagi.profiler.keyed_sums import NOTHING, add_up

SWEEP = Kernel(
    name="overlap of intervals",
    module=__name__,
    reference="rayagi.profiler.intervals:overlap_by_process",
    without="profiles are evaluated with NumPy, which is slower",
)
_TABLE_SIZE = 1 << 14
"""Of the table of sums, at first."""

_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p


class _SweepStruct(ctypes.Structure):
    """Sweep of sweep.c."""

    _fields_ = (
        *((name, _I64) for name in ("lanes", "processes", "cells", "table_size")),
        *(
            (name, _ADDRESS)
            for name in (
                "process",
                "length",
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


SUM = np.dtype([("row", np.int64), ("mask", np.int64), ("ns", np.int64)])
_MIRRORS: Mirrors = {
    "Sweep": _SweepStruct,
    "BITS": MASK_BITS,
    "sizeof(Sum)": SUM.itemsize,
    "sizeof(Next)": 16,
}


Sweep = Callable[[Sequence[Sequence[Part]]], list[Times]]
"""Times of each process, from its parts, and then of all together."""


@cache
def sweep() -> Sweep:
    """What adds up times: in C, or the reference where it cannot be compiled."""
    return SWEEP.made_or_none(_compiled) or overlap_by_process


def _compiled() -> Sweep:
    program = files(__package__).joinpath("sweep.c").read_text(encoding="utf-8")
    function = SWEEP.load(program, mirrors=_MIRRORS).overlap_sweep
    function.argtypes, function.restype = (_ADDRESS,), _I64

    return partial(_swept, lambda struct: bool(function(ctypes.addressof(struct))))


def _swept(run: Callable[[_SweepStruct], bool], processes: Sequence[Sequence[Part]]) -> list[Times]:
    lanes = [
        (number, lane) for number, parts in enumerate(processes) for part in parts for lane in _lanes(part)
    ]
    if not lanes:
        return [Times(NOTHING, NOTHING)] * (len(processes) + 1)
    return _times(np.array([number for number, _ in lanes]), [lane for _, lane in lanes], len(processes), run)


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


def _times(
    process: Ints, lanes: Sequence[Part], processes: int, run: Callable[[_SweepStruct], bool]
) -> list[Times]:
    """Lay out a sweep's memory, run it, and read its table."""
    cells, numbers = _numbered([lane.cells for lane in lanes])
    length = np.array([len(lane.starts) for lane in lanes])
    columns = [
        numbers,
        *([getattr(lane, name) for lane in lanes] for name in ("categories", "starts", "ends")),
    ]
    kept = [[np.ascontiguousarray(each, np.int64) for each in column] for column in columns]
    cell, bits, starts, ends = (np.array([each.ctypes.data for each in column]) for column in kept)
    rows = (processes + (processes > 1)) * (len(cells) + 1)
    size = _TABLE_SIZE
    while True:
        active, table = np.zeros(rows * MASK_BITS, np.int32), np.zeros(size, SUM)
        states = np.zeros(2 * rows + 3 * len(lanes), np.int64)
        masks, since, at, heap = np.split(states, np.cumsum([rows, rows, len(lanes)]))
        arrays = (process, length, bits, cell, starts, ends, active, masks, since, at, heap, table)
        counts = (len(lanes), processes, len(cells), size)
        if run(_SweepStruct(*counts, *(array.ctypes.data for array in arrays))):
            break
        size *= 4
    found = _read(table[table["mask"] > 0], cells, processes)
    return found if processes > 1 else found * 2


def _numbered(lanes: Sequence[Ints]) -> tuple[Ints, list[Ints]]:
    """Distinct cells of all lanes, ascending, and which of them each lane's are."""
    ranked = [ranks(cells) for cells in lanes]
    cells = np.unique(np.concatenate([distinct for distinct, _ in ranked]))
    return cells, [np.searchsorted(cells, distinct)[index] for distinct, index in ranked]


def _read(sums: np.ndarray, cells: Ints, processes: int) -> list[Times]:
    """The sums of a table, of each process and, of several, of all together."""
    process, cell = np.divmod(sums["row"], len(cells) + 1)
    of_all = cell == len(cells)
    keys = np.append(cells, 0)[cell] << MASK_BITS | sums["mask"]
    found = []
    for number in range(processes + (processes > 1)):
        own = process == number
        by_cell, total = (
            add_up(keys[chosen], sums["ns"][chosen]) for chosen in (own & ~of_all, own & of_all)
        )
        found.append(Times(by_cell, total))
    return found
