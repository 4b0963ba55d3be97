"""Training loops of libraries with their own defaults, annotated as in RL-Scope: inference, simulation, backpropagation.

    PEERS/base/bin/python -m experiments.profiler.stages sb3 td3 Walker2d-v5 --iterations 12

PEERS: the folder of experiments/peers/setup.sh; ``rllib`` runs in rayagi's own environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from rayagi import profiler

SEED = 1
STEPS = {"ppo": 2048, "a2c": 500, "ddpg": 100, "td3": 100, "sac": 100}
"""Environment steps of an iteration: PPO's are those of an update, the others update within it (A2C every 5, the off-policy
ones after each)."""
SIMULATE, INFER, LEARN = "simulation", "inference", "backpropagation"


def sb3(algorithm: str, task: str, iterations: int) -> None:
    """Stable-Baselines3 with its defaults: one environment."""
    import stable_baselines3

    made = getattr(stable_baselines3, algorithm.upper())
    model = made("MlpPolicy", gymnasium.make(task), seed=SEED, device="cpu")
    off_policy = hasattr(model, "learning_starts")
    if off_policy:
        model.learn(total_timesteps=model.learning_starts)
    else:
        model.policy.forward = profiler.operation(INFER)(model.policy.forward)
    # The wrappers of the vectorised environment are Python of the library: they count as simulation, as in the paper.
    model.env.step = profiler.operation(SIMULATE)(model.env.step)
    model.policy.predict = profiler.operation(INFER)(model.policy.predict)
    model.train = profiler.operation(LEARN)(model.train)
    for _ in range(iterations):
        with profiler.iteration():
            model.learn(total_timesteps=STEPS[algorithm], reset_num_timesteps=False)


def cleanrl(algorithm: str, task: str, iterations: int) -> None:
    """The loop of CleanRL's sac_continuous_action.py."""
    from experiments.learning.cleanrl import START, Sac

    if algorithm != "sac":
        raise SystemExit("cleanrl: only sac")
    env = gymnasium.make(task)
    env.action_space.seed(SEED)
    loop = Sac(env, SEED)
    obs, _ = env.reset(seed=SEED)
    explore = profiler.operation(INFER)(loop.explore)
    simulate = profiler.operation(SIMULATE)(env.step)
    update = profiler.operation(LEARN)(loop.update)

    def step(steps: int) -> None:
        nonlocal obs
        action = explore(obs, steps)
        next_obs, reward, terminated, truncated, _ = simulate(action)
        loop.rows[steps] = np.concatenate((obs, action, [reward, terminated], next_obs))
        obs = env.reset()[0] if terminated or truncated else next_obs

    for steps in range(START):
        step(steps)
    for first in range(START, START + iterations * STEPS[algorithm], STEPS[algorithm]):
        with profiler.iteration():
            for steps in range(first, first + STEPS[algorithm]):
                step(steps)
                update(steps, steps)


def rllib(algorithm: str, task: str, iterations: int) -> None:
    """RLlib with its defaults, runner and learner in this process."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.algorithms.sac import SACConfig

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    config: Any = {"ppo": PPOConfig, "sac": SACConfig}[algorithm]()
    config = config.environment(task).env_runners(num_env_runners=0).learners(num_learners=0)
    algo = config.debugging(seed=SEED).build_algo()
    if algorithm == "sac":
        # Until it learns: RLlib's SAC first fills its buffer.
        while (
            algo.train()["num_env_steps_sampled_lifetime"] <= config.num_steps_sampled_before_learning_starts
        ):
            pass
    runner, learner = algo.env_runner, algo.learner_group._learner
    # All of the runner but the environment: connectors, episodes and the module.
    runner.sample = profiler.operation(INFER)(runner.sample)
    runner.env.step = profiler.operation(SIMULATE)(runner.env.step)
    learner.update = profiler.operation(LEARN)(learner.update)
    for _ in range(iterations):
        with profiler.iteration():
            algo.train()
    ray.shutdown()


LIBRARIES: dict[str, Callable[[str, str, int], None]] = {"sb3": sb3, "cleanrl": cleanrl, "rllib": rllib}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", choices=tuple(LIBRARIES))
    parser.add_argument("algorithm", choices=tuple(STEPS))
    parser.add_argument("task")
    parser.add_argument("--iterations", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    LIBRARIES[given.library](given.algorithm, given.task, given.iterations)


if __name__ == "__main__":
    main()
