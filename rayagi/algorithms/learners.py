"""Makes what learns from the rollouts of a run, by its algorithm's definition."""

from __future__ import annotations

import importlib
from typing import Any

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.algorithms.rollout_learner import RolloutLearner
from rayagi.config.spec import RunSpec
from rayagi.models.policy import NetworkPolicy


def make_learner(
    spec: RunSpec, policy: NetworkPolicy, *, captured: bool = False, **whose: Any
) -> RolloutLearner[Any]:
    """The learner of a run's algorithm.

    Args:
        spec: the run
        policy: acts where agent and trainer share a GMI; its model learns
        captured: whether rollouts are those of DeviceRollouts, on the policy's GPU, and the trainer is alone
        whose: ``communicator, num_envs, first_env_index, total_envs``, as RolloutLearner takes them
    """
    definition = DEFINITIONS[spec.algorithm]
    place = definition.captured_learner if captured and definition.captured_learner else definition.learner
    module, _, name = place.partition(":")
    training: type[RolloutLearner[Any]] = getattr(importlib.import_module(module), name)
    return training(
        policy=policy,
        spec=spec.learning,
        seed=spec.seed,
        total_env_steps=spec.total_env_steps,
        **definition.options,
        **whose,
    )
