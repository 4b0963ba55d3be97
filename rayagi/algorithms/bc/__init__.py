"""Behaviour cloning: its definition and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayagi.algorithms.definition import (
    INSTEAD_OF_RLLIBS_DATA,
    OFFLINE_NAMES,
    AlgorithmDefinition,
    LearningMetric,
    RllibFace,
)
from rayagi.config.offline import OFFLINE_PRESET, OfflineSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class BCSpec(OfflineSpec):
    """Settings of behaviour cloning."""

    imitates = True
    loss: Literal["log_likelihood", "mse"] = "log_likelihood"
    """log_likelihood: -log pi(a|s), of any head. mse: squared error of the mode, summed over a box's reals."""


BC = AlgorithmDefinition(
    name="bc",
    summary="offline, behaviour cloning: supervised learning of the dataset's actions",
    settings=BCSpec,
    templates=("offline",),
    learner="rayagi.algorithms.bc.learner:BCLearner",
    preset=OFFLINE_PRESET,
    metrics=(
        LearningMetric(
            name="action_error",
            unit="",
            help="squared error of the policy's mode, summed over the action; of choices, the share that differs",
        ),
    ),
    rllib=RllibFace(
        config="BCConfig",
        algorithm="BC",
        base="ray.rllib.algorithms.bc.bc:BCConfig",
        names=OFFLINE_NAMES,
        instead=INSTEAD_OF_RLLIBS_DATA,
    ),
)
