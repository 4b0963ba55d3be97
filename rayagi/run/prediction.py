"""Predicted and measured throughput of a run: prediction.json of its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rayagi.envs.creators import NAMESPACE
from rayagi.run.atomic import replace_json

FILE = "prediction.json"


def no_prediction_text(env_id: str) -> str:
    """Why there is no prediction, and the command that makes one, if a command can make this environment."""
    text = "no prediction: this plan was not measured here"
    return text if env_id.startswith(NAMESPACE) else f"{text}; `rayagi search {env_id}` does"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Throughput of a run: predicted before the start, and measured."""

    predicted_steps_per_s: float
    source: str
    """Origin of the prediction."""
    own_work_steps_per_s: float | None = None
    """Of one GMI without its waiting for others; None: not known."""
    half_width: float | None = None
    """Half width of the 80 % prediction interval, relative to the prediction; None for a single measurement."""
    measured_steps_per_s: float | None = None
    measured_parts: tuple[float, float] | None = None
    """10th and 90th percentile of throughput over the run's parts of a few seconds each."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None before the measurement."""
        if not self.measured_steps_per_s:
            return None
        return (self.predicted_steps_per_s - self.measured_steps_per_s) / self.measured_steps_per_s

    @property
    def interval(self) -> tuple[float, float] | None:
        """80 % prediction interval in steps per second."""
        if self.half_width is None:
            return None
        speed = self.predicted_steps_per_s
        return max(0.0, speed * (1 - self.half_width)), speed * (1 + self.half_width)

    def text(self) -> str:
        """Line of the run's summary."""
        line = f"{self.predicted_steps_per_s:,.0f} steps/s"
        if self.interval is not None:
            line += f" ({_range(self.interval)} in 80 of 100 runs)"
        line += f" by {self.source}"
        if self.measured_steps_per_s is None or self.error is None:
            return line
        line += f"; measured {self.measured_steps_per_s:,.0f}"
        if self.measured_parts is not None:
            line += f" ({_range(self.measured_parts)} in its parts)"
        line += f", error {100 * self.error:+.1f} %"
        if self.interval is not None:
            low, high = self.interval
            line += (
                ", within the interval"
                if low <= self.measured_steps_per_s <= high
                else ", outside of the interval"
            )
        return line


def _range(interval: tuple[float, float]) -> str:
    return f"{interval[0]:,.0f} - {interval[1]:,.0f}"


def save_prediction(prediction: Prediction, run: Path) -> None:
    """Write prediction.json to a run's folder.

    Raises:
        DiskError: the file cannot be written.
    """
    replace_json(run / FILE, asdict(prediction) | {"error": prediction.error})


def record_measurement(
    run: Path, measured_steps_per_s: float, measured_parts: tuple[float, float] | None = None
) -> None:
    """Add the measurement to prediction.json, if there is one.

    Raises:
        DiskError: the file cannot be written.
    """
    expected = load_prediction(run)
    if expected is not None and measured_steps_per_s > 0:
        save_prediction(
            replace(expected, measured_steps_per_s=measured_steps_per_s, measured_parts=measured_parts), run
        )


def load_prediction(run: Path) -> Prediction | None:
    """Content of prediction.json; None if it is missing or damaged."""
    try:
        stored = json.loads((run / FILE).read_text())
        del stored["error"]
        if stored["measured_parts"] is not None:
            stored["measured_parts"] = tuple(stored["measured_parts"])
        found = Prediction(**stored)
        found.text()  # all that is shown of it is there
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None
    return found


PART_S = 4.0
"""Approximate length of a part: as of a validation round in the search."""
_FEWEST_PARTS = 3


def parts_range(steps: Sequence[float], seconds: Sequence[float]) -> tuple[float, float] | None:
    """Range of throughput over a run's parts, without the extreme tenths; None if the run was too short.

    Args:
        steps: of each iteration
        seconds: of each iteration, positive
    """
    speeds: list[float] = []
    part_steps = part_s = 0.0
    for own_steps, own_s in zip(steps, seconds, strict=True):
        part_steps, part_s = part_steps + own_steps, part_s + own_s
        if part_s >= PART_S:
            speeds.append(part_steps / part_s)
            part_steps = part_s = 0.0
    if len(speeds) < _FEWEST_PARTS:
        return None
    speeds.sort()
    cut = len(speeds) // 10
    return speeds[cut], speeds[-1 - cut]
