"""Other libraries' training loops on Ant-v5, annotated, with a fixed amount of work.

    PEERS/base/bin/python -m experiments.profiler.programs sb3-sac --iterations 40

PEERS: the folder of experiments/peers/setup.sh.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import gymnasium
import numpy as np
import torch

from experiments.learning.cleanrl import START, Sac
from experiments.peers.common import Pool
from experiments.peers.run_cleanrl import Loop
from rayagi import profiler

TASK, SEED = "Ant-v5", 1
SAC_STEPS = 10
"""Environment steps of an iteration of SAC, each with a gradient step."""


def sb3_ppo(iterations: int) -> None:
    """Stable-Baselines3's PPO with its defaults, but rollouts of 4 environments x 64 steps."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    model = PPO("MlpPolicy", make_vec_env(TASK, 4, seed=SEED), n_steps=64, seed=SEED, device="cpu")
    _learn(model, iterations, 4 * 64)


def sb3_sac(iterations: int) -> None:
    """Stable-Baselines3's SAC with its defaults."""
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", gymnasium.make(TASK), seed=SEED, device="cpu")
    model.learn(total_timesteps=model.learning_starts)
    _learn(model, iterations, SAC_STEPS)


def _learn(model, iterations: int, steps: int) -> None:
    """Iterations of so many environment steps."""
    model.collect_rollouts = profiler.operation("collect")(model.collect_rollouts)
    model.train = profiler.operation("learn")(model.train)
    for _ in range(iterations):
        with profiler.iteration():
            model.learn(total_timesteps=steps, reset_num_timesteps=False)


def cleanrl_ppo(iterations: int) -> None:
    """The loop of CleanRL's ppo_continuous_action.py on EnvPool."""
    loop = Loop(Pool(argparse.Namespace(task=TASK, threads=1, seed=SEED)))
    for _ in range(iterations):
        with profiler.iteration():
            with profiler.operation("collect"):
                loop.rollout()
            with profiler.operation("learn"):
                loop.update()


def cleanrl_sac(iterations: int) -> None:
    """The loop of CleanRL's sac_continuous_action.py."""
    env = gymnasium.make(TASK)
    env.action_space.seed(SEED)
    loop = Sac(env, SEED)
    obs, _ = env.reset(seed=SEED)

    def step(steps: int) -> None:
        nonlocal obs
        action = loop.explore(obs, steps)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        loop.rows[steps] = np.concatenate((obs, action, [reward, terminated], next_obs))
        obs = env.reset()[0] if terminated or truncated else next_obs

    for steps in range(START):
        step(steps)
    for first in range(START, START + iterations * SAC_STEPS, SAC_STEPS):
        with profiler.iteration():
            for steps in range(first, first + SAC_STEPS):
                with profiler.operation("collect"):
                    step(steps)
                with profiler.operation("learn"):
                    loop.update(steps, steps)


PROGRAMS: dict[str, Callable[[int], None]] = {
    "sb3-ppo": sb3_ppo,
    "sb3-sac": sb3_sac,
    "cleanrl-ppo": cleanrl_ppo,
    "cleanrl-sac": cleanrl_sac,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", choices=tuple(PROGRAMS))
    parser.add_argument("--iterations", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    PROGRAMS[given.program](given.iterations)


if __name__ == "__main__":
    main()
