"""RLlib's PPO with the settings of its example for MuJoCo's tasks, in rayagi's own environment, which has RLlib.

The example (rllib/examples/algorithms/ppo/mujoco_ppo.py) has 64 environments on four env runners, and a learner in a process
of its own. Here there are as many env runners as threads, and the learner is in this process: they take turns.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.utils.spaces.space_utils import unsquash_action
from torch.nn.init import orthogonal_

from experiments.learning.peer import Clock, TimeUpError

ENVS = 64


def settings(given: argparse.Namespace) -> PPOConfig:
    """Those of the example, but for env runners and learners."""
    return (
        PPOConfig()
        .environment(given.task)
        .env_runners(
            num_env_runners=given.threads,
            num_envs_per_env_runner=ENVS // given.threads,
            rollout_fragment_length=32,
            env_to_module_connector=lambda env, spaces=None, device=None: MeanStdFilter(),
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=2048,
            minibatch_size=512,
            num_epochs=10,
            lr=3e-4,
            vf_loss_coeff=1.0,
            entropy_coeff=[[0, 0.01], [2_000_000, 0.0]],
            gamma=0.99,
            lambda_=0.95,
            kl_coeff=0.5,
            clip_param=0.2,
            vf_clip_param=10.0,
            grad_clip=50.0,
            grad_clip_by="global_norm",
        )
        .rl_module(
            model_config=DefaultModelConfig(
                vf_share_layers=False,
                fcnet_hiddens=[256, 256],
                fcnet_activation="tanh",
                fcnet_kernel_initializer=orthogonal_,
                head_fcnet_hiddens=[256],
                head_fcnet_activation=None,
                free_log_std=True,
            )
        )
        .debugging(seed=given.seed, log_level="ERROR")
    )


def observed(runner: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and standard deviation of an env runner's filter, (obs_dim,) each; None if it has no environments."""
    if runner.env is None:
        return None
    (found,) = (part for part in runner._env_to_module.connectors if isinstance(part, MeanStdFilter))
    stat = found._filters[None].running_stats
    return np.array(stat.mean), np.array(stat.std)


def mode(algo: Algorithm, obs: np.ndarray) -> np.ndarray:
    """Actions of the policy that the learner has, in the task's range."""
    # After each iteration all env runners have the statistics of all.
    mean, std = next(found for found in algo.env_runner_group.foreach_env_runner(observed) if found)
    normalised = np.clip((obs - mean) / (std + 1e-8), -10, 10).astype(np.float32)
    module = algo.learner_group._learner.module["default_policy"]
    with torch.no_grad():
        inputs = module.forward_inference({"obs": torch.from_numpy(normalised)})["action_dist_inputs"]
    distribution = module.get_inference_action_dist_cls().from_logits(inputs)
    actions: np.ndarray = distribution.to_deterministic().sample().numpy()
    return unsquash_action(actions, module.action_space)


def train(given: argparse.Namespace) -> Clock:
    """Until the time is over."""
    if not isinstance(gymnasium.make(given.task).action_space, gymnasium.spaces.Box):
        raise SystemExit(f"{given.task}: RLlib's example is for tasks with a box of actions")
    ray.init(address="local", num_cpus=given.threads + 1, include_dashboard=False, log_to_driver=False)
    algo = settings(given).build_algo()
    clock = Clock(given)
    with contextlib.suppress(TimeUpError):
        while True:
            found = algo.train()["env_runners"]
            clock.tick(int(found["num_env_steps_sampled_lifetime"]), lambda obs: mode(algo, obs))
    algo.stop()
    ray.shutdown()
    return clock
