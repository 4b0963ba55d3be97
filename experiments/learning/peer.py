"""A MuJoCo task as another library trains it, with the settings that its users take for it.

    PEERS/base/bin/python -m experiments.learning.peer sb3-ppo --task Ant-v5 --seconds 240 --seed 0

``sb3-sac``: Stable-Baselines3's defaults. ``sb3-ppo``: what RL Zoo, its collection of tuned settings, has for the task, else
its defaults with normalised observations and rewards. ``cleanrl-sac``, ``cleanrl-ppo``: cleanrl.py. ``rl-games-ppo``: what
its package has for the task (with_rl_games.py). ``sf-ppo``, in PEERS/sf: Sample Factory's examples (with_sample_factory.py).
``rllib-ppo``, in rayagi's own environment: RLlib's example (with_rllib.py). TorchRL's and PufferLib's examples have
CleanRL's settings but for details; skrl and rsl_rl have none for these tasks.
Prints the curve as JSON: rows of [training seconds, environment steps, mean return, its standard deviation]. Evaluations are
of the policy's mode; the clock stands still meanwhile, and while the library is imported and its networks are made.
PEERS: the folder of experiments/peers/setup.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from experiments.learning.cleanrl import Act, train_ppo, train_sac

WIDE = {"activation_fn": nn.ReLU, "net_arch": {"pi": [256, 256], "vf": [256, 256]}}
NARROW_START = {"policy_kwargs": {"log_std_init": -2, "ortho_init": False, **WIDE}}
TUNED: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "n_steps": 32, "batch_size": 256, "gamma": 0.98, "learning_rate": lambda left: 0.001 * left, "ent_coef": 0.0,
        "clip_range": lambda left: 0.2 * left, "n_epochs": 20, "gae_lambda": 0.8,
    },
    "HalfCheetah-v5": {
        "n_steps": 512, "batch_size": 64, "gamma": 0.98, "learning_rate": 2.0633e-05, "ent_coef": 0.000401762,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096,
        **NARROW_START,
    },
    "Hopper-v5": {
        "n_steps": 512, "batch_size": 32, "gamma": 0.999, "learning_rate": 9.80828e-05, "ent_coef": 0.00229519,
        "clip_range": 0.2, "n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671,
        **NARROW_START,
    },
    "Walker2d-v5": {
        "n_steps": 512, "batch_size": 32, "gamma": 0.99, "learning_rate": 5.05041e-05, "ent_coef": 0.000585045,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.95, "max_grad_norm": 1.0, "vf_coef": 0.871923,
    },
    "Humanoid-v5": {
        "n_steps": 512, "batch_size": 256, "gamma": 0.95, "learning_rate": 3.56987e-05, "ent_coef": 0.00238306,
        "clip_range": 0.3, "n_epochs": 5, "gae_lambda": 0.9, "max_grad_norm": 2.0, "vf_coef": 0.431892,
        **NARROW_START,
    },
    "HumanoidStandup-v5": {
        "n_steps": 512, "batch_size": 32, "gamma": 0.99, "learning_rate": 2.55673e-05, "ent_coef": 3.62109e-06,
        "clip_range": 0.3, "n_epochs": 20, "gae_lambda": 0.9, "max_grad_norm": 0.7, "vf_coef": 0.430793,
        **NARROW_START,
    },
}  # fmt: skip
"""RL Zoo's settings of PPO (hyperparams/ppo.yml), tuned for version 3 of MuJoCo's tasks; Ant has the defaults there."""
CARTPOLE_ENVS, CARTPOLE_STEPS = 8, 100_000
"""RL Zoo normalises nothing there, and ends with a step size of 0. In the other tasks one environment trains for ever."""


class TimeUpError(Exception):
    """The training time is over."""


class Clock:
    """Training time, and evaluations at equal intervals of it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._envs = gymnasium.make_vec(given.task, given.episodes, vectorization_mode="sync")
        self.rows: list[list[float]] = []
        self._next_s, self._paused_s, self._started = given.every, 0.0, time.perf_counter()

    def tick(self, steps: int, act: Act) -> None:
        """Call it after every environment step.

        Raises:
            TimeUpError: the training time is over; the last evaluation was made.
        """
        now = time.perf_counter()
        trained_s = now - self._started - self._paused_s
        if trained_s < self._next_s:
            return
        self._next_s += self._given.every
        self.add(trained_s, steps, act)
        self._paused_s += time.perf_counter() - now
        if trained_s >= self._given.seconds:
            raise TimeUpError

    def add(self, trained_s: float, steps: int, act: Act) -> None:
        """Evaluate a policy that was there after so many seconds and steps."""
        returns = self._evaluate(act)
        self.rows.append([trained_s, steps, float(returns.mean()), float(returns.std())])

    def _evaluate(self, act: Act) -> np.ndarray:
        """Undiscounted returns of one episode of each environment."""
        obs, _ = self._envs.reset(seed=10_000 + self._given.seed)
        returns, running = np.zeros(self._given.episodes), np.ones(self._given.episodes, bool)
        while running.any():
            obs, rewards, terminated, truncated, _ = self._envs.step(act(obs))
            returns += rewards * running
            running &= ~(terminated | truncated)
        return returns


def sb3_sac(given: argparse.Namespace) -> Clock:
    """Stable-Baselines3's SAC with its defaults."""
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", gymnasium.make(given.task), seed=given.seed, device="cpu")
    return sb3(model, given, lambda obs: model.predict(obs, deterministic=True)[0])


def sb3_ppo(given: argparse.Namespace) -> Clock:
    """Stable-Baselines3's PPO with RL Zoo's settings."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    settings = TUNED.get(given.task, {})
    if given.task == "CartPole-v1":
        envs = make_vec_env(given.task, CARTPOLE_ENVS, seed=given.seed)
        model = PPO("MlpPolicy", envs, seed=given.seed, device="cpu", **settings)
        return sb3(model, given, lambda obs: model.predict(obs, deterministic=True)[0], CARTPOLE_STEPS)
    envs = VecNormalize(make_vec_env(given.task, 1, seed=given.seed), gamma=settings.get("gamma", 0.99))
    model = PPO("MlpPolicy", envs, seed=given.seed, device="cpu", **settings)
    return sb3(model, given, lambda obs: model.predict(envs.normalize_obs(obs), deterministic=True)[0])


def sb3(model: Any, given: argparse.Namespace, act: Act, num_steps: int = 10**9) -> Clock:
    """Train until the time is over, or for so many environment steps."""
    from stable_baselines3.common.callbacks import BaseCallback

    clock = Clock(given)

    class Tick(BaseCallback):
        def _on_step(self) -> bool:
            clock.tick(self.num_timesteps, act)
            return True

    with contextlib.suppress(TimeUpError):
        model.learn(total_timesteps=num_steps, callback=Tick())
    return clock


def cleanrl(train: Callable[[str, int, Clock], None]) -> Callable[[argparse.Namespace], Clock]:
    """One of CleanRL's loops, until the time is over."""

    def run(given: argparse.Namespace) -> Clock:
        clock = Clock(given)
        with contextlib.suppress(TimeUpError):
            train(given.task, given.seed, clock)
        return clock

    return run


def rl_games_ppo(given: argparse.Namespace) -> Clock:
    """rl_games."""
    from experiments.learning.with_rl_games import train

    return train(given)


def sf_ppo(given: argparse.Namespace) -> Clock:
    """Sample Factory."""
    from experiments.learning.with_sample_factory import train

    return train(given)


def rllib_ppo(given: argparse.Namespace) -> Clock:
    """RLlib."""
    from experiments.learning.with_rllib import train

    return train(given)


PEERS = {
    "sb3-sac": sb3_sac,
    "sb3-ppo": sb3_ppo,
    "cleanrl-sac": cleanrl(train_sac),
    "cleanrl-ppo": cleanrl(train_ppo),
    "rl-games-ppo": rl_games_ppo,
    "sf-ppo": sf_ppo,
    "rllib-ppo": rllib_ppo,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=tuple(PEERS))
    parser.add_argument("--task", default="Ant-v5")
    parser.add_argument("--seconds", type=float, default=240.0, help="of training")
    parser.add_argument("--every", type=float, default=20.0, help="seconds of training between evaluations")
    parser.add_argument("--episodes", type=int, default=10, help="of an evaluation")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    print(json.dumps(PEERS[given.peer](given).rows))


if __name__ == "__main__":
    main()
