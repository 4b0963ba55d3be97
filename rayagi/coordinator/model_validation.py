"""Validation of the throughput model: its error and its ranking against measurements, recorded beside it.

``python -m experiments.mapping.run --record`` measures and writes the record. On another processor, on more cores, for other
work or without a record, the model does not rank: what it forecasts first is measured before it is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from placement.types import Machine
from rayagi.profiler.machine import cpu_model

RECORD = Path(__file__).with_name("model_validation.json")
MIN_DIFFERENCE = 0.05
"""Pairs whose measurements differ by less are not compared."""
MIN_RIGHT = 0.9
"""Part of the other pairs that the model must order right, to rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelValidation:
    """Comparison of predictions with measurements on the cores of one machine."""

    date: str
    cpu: str
    """Name of the processor."""
    cores: int
    kinds: tuple[str, ...]
    """"serving", and the algorithms that were trained."""
    cases: int
    pairs: int
    """Pairs of a group that differ by more than ``MIN_DIFFERENCE``."""
    right: int
    """Those that the model orders as measured."""
    median_error: float
    """Of |predicted / measured - 1|."""
    p90_error: float
    """Nine of ten cases have at most this error."""

    @property
    def may_rank(self) -> bool:
        """Whether enough pairs are ordered right."""
        return self.pairs > 0 and self.right >= MIN_RIGHT * self.pairs

    def text(self) -> str:
        """The error and the ranking, as a sentence."""
        return (
            f"Error of the model: {self.median_error:.0%} in the median, {self.p90_error:.0%} at most in 9 of 10 of "
            f"{self.cases} measured layouts; {self.right} of {self.pairs} pairs ordered right ({self.cores} cores of "
            f"{self.cpu}, {self.date})."
        )


def load(path: Path = RECORD) -> ModelValidation | None:
    """The recorded validation; None if there is none."""
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    return ModelValidation(**{**stored, "kinds": tuple(stored["kinds"])})


def ranks(validation: ModelValidation | None, machine: Machine, kind: str, *, on_gpu: bool) -> bool:
    """Whether the model may rank layouts of a machine: it is validated there, and orders enough pairs right.

    Args:
        validation: the record
        machine: this machine
        kind: "serving", or an algorithm
        on_gpu: whether the GMIs are slices of GPUs
    """
    return (
        validation is not None and not _uncovered(validation, machine, kind, on_gpu) and validation.may_rank
    )


def may_compare(machine: Machine, *, on_gpu: bool) -> bool:
    """Whether the model's best candidates can be measured here: unit costs need two cores, and one host."""
    return not on_gpu and len(machine.nodes) == 1 and machine.num_cores > 1


def validation_text(validation: ModelValidation | None, machine: Machine, kind: str, *, on_gpu: bool) -> str:
    """What is known about the model's error on a machine, as a sentence or two; arguments as for ``ranks``."""
    where = _uncovered(validation, machine, kind, on_gpu)
    if where or validation is None:
        text = f"The model is not validated {where or 'on this version'}: this is a forecast, and no ranking."
        return text if validation is None or on_gpu else f"{text} {validation.text()}"
    return validation.text() + ("" if validation.may_rank else " That is too few: it does not rank.")


def _uncovered(validation: ModelValidation | None, machine: Machine, kind: str, on_gpu: bool) -> str:
    """What of a machine and a kind of work the record does not cover; empty if it covers all."""
    if on_gpu:
        return "on any GPU"
    if len(machine.nodes) > 1:
        return "on several hosts"
    if machine.num_cores < 2:
        return "on one core"  # nor can unit costs be measured there: messages need two GMIs
    if validation is None:
        return ""
    if machine.num_cores > validation.cores:
        return f"on {machine.num_cores} cores"
    if cpu_model() != validation.cpu:
        return f"on {cpu_model()}"
    return "" if kind in validation.kinds else f"for {kind}"
