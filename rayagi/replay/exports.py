"""Writes trajectories in the formats that ``loading`` reads. Each output appears when it is complete, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rayagi.replay.episode_files import write_minari, write_rllib
from rayagi.replay.flat_files import write_d4rl, write_tensors
from rayagi.replay.table_files import write_lerobot, write_served
from rayagi.replay.trajectories import Progress, Source, Trajectory

_WRITERS: dict[str, Callable[[Source, Path, Iterator[Trajectory]], None]] = {
    "rayagi": write_served,
    "rayagi-arrow": partial(write_served, file_format="arrow"),
    "minari": write_minari,
    "minari-hdf5": partial(write_minari, data_format="hdf5"),
    "lerobot": write_lerobot,
    "rllib": write_rllib,
    "d4rl": write_d4rl,
    "torch": write_tensors,
}
EXPORTS = tuple(_WRITERS)
"""Formats of ``export``."""


def export(source: Source, out: Path | str, to: str, progress: Progress | None = None) -> int:
    """Write a source's trajectories. Returns how many.

    Args:
        source: of ``open_source`` or ``stored.store_source``
        out: file (d4rl, torch) or folder to create
        to: one of ``EXPORTS``
        progress: called after each trajectory

    Raises:
        ExportError: ``out`` exists, the format cannot have such columns, or its library is not installed.
        DatasetError: as of ``Source.read``.
        DiskError: it cannot be written; nothing of it is left.
    """
    count = steps = 0

    def counted() -> Iterator[Trajectory]:
        nonlocal count, steps
        for trajectory in source.read():
            yield trajectory
            count, steps = count + 1, steps + len(trajectory["action"])
            if progress is not None:
                progress(steps, source.num_steps)

    _WRITERS[to](source, Path(out), counted())
    return count
