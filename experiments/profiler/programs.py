"""Programs of other libraries that do the same work each time: what the profiler's cost is measured with.

    PEERS/base/bin/python -m experiments.profiler.programs sb3-ppo --task Ant-v5 --steps 4096

PEERS: the folder of experiments/peers/setup.sh.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import gymnasium
import numpy as np
import torch


def sb3_ppo(given: argparse.Namespace) -> None:
    """Stable-Baselines3's PPO with its defaults but for rollouts of 1024 steps."""
    from stable_baselines3 import PPO

    PPO("MlpPolicy", gymnasium.make(given.task), n_steps=1024, seed=0, device="cpu").learn(given.steps)


def sb3_sac(given: argparse.Namespace) -> None:
    """Stable-Baselines3's SAC with its defaults."""
    from stable_baselines3 import SAC

    SAC("MlpPolicy", gymnasium.make(given.task), seed=0, device="cpu").learn(given.steps)


def cleanrl_ppo(given: argparse.Namespace) -> None:
    """CleanRL's PPO loop on EnvPool."""
    from experiments.peers.common import BATCH, Pool
    from experiments.peers.run_cleanrl import Loop

    loop = Loop(Pool(argparse.Namespace(task=given.task, threads=given.threads, seed=1)))
    for _ in range(given.steps // BATCH):
        loop.rollout()
        loop.update()


def cleanrl_sac(given: argparse.Namespace) -> None:
    """CleanRL's SAC loop, without the random steps before it trains."""
    from experiments.off_policy.peer import START, CleanRL

    env = gymnasium.make(given.task)
    env.action_space.seed(0)
    loop = CleanRL(env, 0)
    obs, _ = env.reset(seed=0)
    for step in range(given.steps):
        action = loop.explore(obs, START + step)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        loop.rows[step] = np.concatenate((obs, action, [reward, terminated], next_obs))
        obs = env.reset()[0] if terminated or truncated else next_obs
        loop.update(step + 1, step)


PROGRAMS: dict[str, Callable[[argparse.Namespace], None]] = {
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
    parser.add_argument("--task", default="Ant-v5")
    parser.add_argument("--steps", type=int, default=2048, help="of the environment")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    PROGRAMS[given.program](given)


if __name__ == "__main__":
    main()
