"""Which learner an algorithm has."""

from __future__ import annotations

from typing import Any

from rayagi.algorithms.captured_ppo import CapturedPPOTraining
from rayagi.algorithms.impala import ImpalaTraining
from rayagi.algorithms.policy import NetworkPolicy
from rayagi.algorithms.ppo_rollouts import PPOTraining
from rayagi.algorithms.rollout_training import RolloutTraining
from rayagi.config.spec import RunSpec


def make_training(
    spec: RunSpec, policy: NetworkPolicy, *, captured: bool = False, **whose: Any
) -> RolloutTraining[Any]:
    """The learner of a run's algorithm.

    Args:
        spec: the run
        policy: acts where agent and trainer share a GMI; its model learns
        captured: whether rollouts are those of DeviceRollouts, on the policy's GPU, and the trainer is alone
        whose: ``communicator, num_envs, first_env_index, total_envs``, as RolloutTraining takes them
    """
    common = {"policy": policy, "seed": spec.seed, "total_env_steps": spec.total_env_steps, **whose}
    if spec.algorithm == "ppo":
        training = CapturedPPOTraining if captured else PPOTraining
        return training(spec=spec.ppo, **common)
    return ImpalaTraining(spec=spec.impala, corrects=spec.algorithm == "impala", **common)
