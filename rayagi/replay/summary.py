"""What a dataset holds, by one pass over it; and statistics of a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayagi.replay.trajectories import FLAGS, Progress, Source, TrajectoryBatch


def summarize(source: Source, progress: Progress | None = None) -> dict[str, Any]:
    """Schema, rows, lengths, returns, ends, bytes and values that are not finite, as values of JSON.

    Raises:
        DatasetError: as of ``Source.read``.
    """
    lengths, returns = [np.empty(0, np.int64)], [np.empty(0)]
    ends = {"terminated": 0, "truncated": 0, "cut": 0}
    not_finite = dict.fromkeys((column.name for column in source.schema.columns), 0)
    done = 0
    for batch in source.batches():
        lengths.append(batch.lengths)
        if "reward" in batch.columns:
            returns.append(batch.returns())
        terminated, truncated = (_last_is_set(batch, name) for name in FLAGS)
        ends["terminated"] += int(terminated.sum())
        ends["truncated"] += int((truncated & ~terminated).sum())
        ends["cut"] += int((~truncated & ~terminated).sum())
        for name, values in batch.columns.items():
            not_finite[name] += int(values.size - np.isfinite(values).sum())
        done += batch.num_steps
        if progress is not None:
            progress(done, source.num_steps)
    steps_of_each = np.concatenate(lengths)
    count = len(steps_of_each)
    return {
        "path": str(source.path),
        "format": source.kind,
        "columns": [
            {
                "name": column.name,
                "type": column.dtype.name,
                "shape": list(column.shape),
                "extra_steps": column.extra,
                "not_finite": not_finite[column.name],
            }
            for column in source.schema.columns
        ],
        "left_out": list(source.left_out),
        "trajectories": count,
        "steps": done,
        "lengths": _spread(steps_of_each.astype(float)),
        "returns": _spread(np.concatenate(returns)),
        "ends": ends,
        "bytes": sum((done + count * column.extra) * column.step_bytes for column in source.schema.columns),
        "store_bytes": count * source.schema.row_bytes,
    }


def _last_is_set(batch: TrajectoryBatch, name: str) -> NDArray[np.bool_]:
    """Whether a flag is set on the last step of each trajectory, (n,). False without that column."""
    if name not in batch.columns:
        return np.zeros(len(batch.lengths), bool)
    last = batch.shifted(name)[batch.lasts]
    return np.asarray(last.reshape(len(last), -1).astype(bool).any(1))


def _spread(values: NDArray[Any]) -> dict[str, float | None]:
    """Minimum, mean and maximum; None where there is none, or it is not finite."""
    if not len(values):
        return {"min": None, "mean": None, "max": None}
    found = {"min": values.min(), "mean": values.mean(), "max": values.max()}
    return {name: float(value) if math.isfinite(value) else None for name, value in found.items()}


def column_statistics(values: NDArray[Any], mask: NDArray[np.bool_]) -> dict[str, float | None]:
    """Mean, standard deviation, minimum and maximum of a batch's steps that exist; None where not finite.

    Args:
        values: (n, length, *shape)
        mask: (n, length)
    """
    chosen = values[mask].astype(np.float64)
    if not chosen.size:
        return dict.fromkeys(("mean", "std", "min", "max"))
    found = {"mean": chosen.mean(), "std": chosen.std(), "min": chosen.min(), "max": chosen.max()}
    return {name: float(value) if math.isfinite(value) else None for name, value in found.items()}
