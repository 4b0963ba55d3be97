"""Warp kernels that read a store's memory: copies of windows, and the check that no row was overwritten meanwhile.

A batch is: generations on the host (``located``), these kernels in the order of one stream, ``copy_windows`` for each
subscription, then ``check_generations``. So every block is read between two looks at its row's tag, as in a seqlock.
"""

# Warp's types of arrays are calls, which mypy does not take for types.
# mypy: disable-error-code="valid-type,misc"
from __future__ import annotations

from typing import Any

import warp as wp

from actors.replay import kernel

wp.config.quiet = True

SLOT, GENERATION, LENGTH, STEP, ROWS = range(5)
"""Rows of ``located``: of each selected row; the last is their number."""
_HEAD, _TAIL = wp.constant(kernel.PADDINGS.index("head")), wp.constant(kernel.PADDINGS.index("tail"))
_COMMITTED = wp.constant(wp.uint64(kernel.COMMITTED))


@wp.kernel(enable_backward=False)
def copy_windows(
    blocks: wp.array2d(dtype=Any),
    located: wp.array2d(dtype=wp.int64),
    first: wp.int32,
    step_units: wp.int32,
    extra: wp.int64,
    offset: wp.int64,
    length: wp.int32,
    padding: wp.int32,
    out: wp.array2d(dtype=Any),
    mask: wp.array2d(dtype=wp.uint8),
) -> None:
    """One unit (a word or byte) of window i. Consecutive threads read consecutive units.

    Args:
        blocks: of all slots, (slots, units of a row)
        located: SLOT, GENERATION, LENGTH and STEP of each selected row, (4, n)
        first: where the column begins in a row, in units
        step_units: of one timestep
        extra: timesteps of the column beyond the trajectory's length
        offset, length, padding: of the subscription
        out: (n, length * step_units)
        mask: (n, length)
    """
    i, unit = wp.tid()
    k = unit // step_units  # step of the window
    # 1. The steps max(0, t + offset) to min(t + offset + length, trajectory length) exist.
    trajectory = located[2, i]
    if trajectory > wp.int64(0):
        trajectory += extra
    start = located[3, i] + offset
    begin = wp.max(start, wp.int64(0))
    size = wp.max(wp.min(start + wp.int64(length), trajectory) - begin, wp.int64(0))
    # 2. Where the first of them goes: to its place in the window, to the end (padding at the head), or to the begin.
    at = begin - start
    if padding == _HEAD:
        at = wp.int64(length) - size
    if padding == _TAIL or size == wp.int64(0):
        at = wp.int64(0)
    # 3. Copy, or pad with zeros.
    inside = wp.int64(k) >= at and wp.int64(k) < at + size
    if inside:
        place = first + wp.int32(begin + wp.int64(k) - at) * step_units + unit % step_units
        out[i, unit] = blocks[wp.int32(located[0, i]), place]
    else:
        out[i, unit] = out.dtype(0)
    if unit % step_units == 0:
        mask[i, k] = wp.where(inside, wp.uint8(1), wp.uint8(0))


for _unit in (wp.uint8, wp.uint32):  # now, so that the module is compiled once
    wp.overload(
        copy_windows,
        {"blocks": wp.array2d(dtype=_unit), "out": wp.array2d(dtype=_unit)},
    )


@wp.kernel(enable_backward=False)
def check_generations(
    status: wp.array2d(dtype=wp.uint64),
    located: wp.array2d(dtype=wp.int64),
    current: wp.array(dtype=wp.uint8),
) -> None:
    """Whether row i still has its generation: tag = generation << 2 | state, the first word of its status."""
    i = wp.tid()
    tag = status[wp.int32(located[0, i]), 0]
    same = tag >> wp.uint64(2) == wp.uint64(located[1, i]) and (tag & wp.uint64(3)) >= _COMMITTED
    current[i] = wp.where(same and located[2, i] > wp.int64(0), wp.uint8(1), wp.uint8(0))
