"""What a run was expected to be as fast as, and what it then showed: prediction.json of its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rayagi.run.atomic import replace_json

_FILE = "prediction.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Throughput of a run: predicted before it began, and measured."""

    predicted_steps_per_s: float
    relative_error: float
    """Half of the prediction's 95 % confidence interval, relative to it."""
    source: str
    """What the prediction comes from."""
    measured_steps_per_s: float | None = None

    @property
    def error(self) -> float | None:
        """How far the prediction was off, relative to what was measured; None before that."""
        if not self.measured_steps_per_s:
            return None
        return (self.predicted_steps_per_s - self.measured_steps_per_s) / self.measured_steps_per_s

    def text(self) -> str:
        """For a run's summary."""
        told = f"{self.predicted_steps_per_s:,.0f} steps/s by {self.source}"
        if self.error is None:
            return told
        return f"{told}; measured {self.measured_steps_per_s:,.0f}, error {100 * self.error:+.1f} %"


def keep(prediction: Prediction, run: Path) -> None:
    """Write it into a run's folder.

    Raises:
        DiskError: the file cannot be written.
    """
    replace_json(run / _FILE, asdict(prediction) | {"error": prediction.error})


def conclude(run: Path, measured_steps_per_s: float) -> None:
    """Add what a run showed to what its folder expects of it, if it expects anything.

    Raises:
        DiskError: the file cannot be written.
    """
    expected = kept(run)
    if expected is not None and measured_steps_per_s > 0:
        keep(replace(expected, measured_steps_per_s=measured_steps_per_s), run)


def kept(run: Path) -> Prediction | None:
    """What a run's folder says; None where it says nothing."""
    try:
        stored = json.loads((run / _FILE).read_text())
        del stored["error"]
        return Prediction(**stored)
    except (OSError, ValueError, KeyError, TypeError):
        return None
