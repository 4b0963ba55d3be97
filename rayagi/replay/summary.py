"""What a dataset holds, by one pass over it; and statistics of a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayagi.replay.trajectories import Progress, Source, steps_of


def summarize(source: Source, progress: Progress | None = None) -> dict[str, Any]:
    """Schema, rows, lengths, returns, ends, bytes and values that are not finite, as values of JSON.

    Raises:
        DatasetError: as of ``Source.read``.
    """
    lengths, returns = list[int](), list[float]()
    ends = {"terminated": 0, "truncated": 0, "cut": 0}
    not_finite = dict.fromkeys((column.name for column in source.schema.columns), 0)
    done = 0
    for steps in source.read():
        lengths.append(steps_of(steps, source.schema))
        if "reward" in steps:
            returns.append(float(steps["reward"].sum(dtype=np.float64)))
        end = next((name for name in ("terminated", "truncated") if name in steps and steps[name][-1]), "cut")
        ends[end] += 1
        for name, values in steps.items():
            not_finite[name] += int(values.size - np.isfinite(values).sum())
        done += lengths[-1]
        if progress is not None:
            progress(done, source.num_steps)
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
        "trajectories": len(lengths),
        "steps": sum(lengths),
        "lengths": _spread(np.array(lengths, float)),
        "returns": _spread(np.array(returns)),
        "ends": ends,
        "bytes": sum(
            (length + column.extra) * column.step_bytes
            for length in lengths
            for column in source.schema.columns
        ),
        "store_bytes": len(lengths) * source.schema.row_bytes,
    }


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
