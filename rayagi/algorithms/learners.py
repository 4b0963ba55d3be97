"""Factory of learners: from an algorithm's definition to the learner of a run."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from rayagi.algorithms.merged_learner import MergedLearner
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.spec import RunSpec
from rayagi.models.policy import NetworkPolicy

Captured = Literal["nothing", "steps", "update"]


def make_learner(
    spec: RunSpec, policy: NetworkPolicy, *, captured: Captured = "nothing", **whose: Any
) -> MergedLearner[Any]:
    """The learner of a run's algorithm.

    Args:
        spec: the run
        policy: its model is trained; it also acts if agent and trainer share a GMI
        captured: what a GPU repeats as one graph, if the algorithm has such a learner, for a single trainer: the steps, or
            the whole update of rollouts that come from DeviceRollouts
        whose: ``communicator, num_envs, first_env_index, total_envs``, as MergedLearner takes them
    """
    definition = DEFINITIONS[spec.algorithm]
    place = {"steps": definition.captured_steps, "update": definition.captured_learner}.get(captured)
    if spec.data.path is not None:
        # Imported here: it loads readers of datasets.
        from rayagi.algorithms.recorded_transitions import RecordedTransitions

        whose["recorded"] = RecordedTransitions(spec.data.path, policy.info)
    module, _, name = (place or definition.learner).partition(":")
    training: type[MergedLearner[Any]] = getattr(importlib.import_module(module), name)
    return training(
        policy=policy,
        spec=spec.learning,
        seed=spec.seed,
        total_env_steps=spec.total_env_steps,
        **whose,
    )
