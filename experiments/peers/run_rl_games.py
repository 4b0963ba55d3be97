"""rl_games' a2c_continuous or a2c_discrete, which are its PPO, with EnvPool as an IVecEnv.

rl_games has an EnvPool of its own, which counts the steps that EnvPool spends on resets, and has float64 observations.
"""

from __future__ import annotations

import contextlib
import tempfile
from importlib.metadata import version
from typing import Any

import numpy as np
from rl_games.common import env_configurations, vecenv
from rl_games.common.algo_observer import AlgoObserver
from rl_games.common.ivecenv import IVecEnv
from rl_games.torch_runner import Runner

from experiments.peers.common import (
    CONVOLUTIONS,
    ENVS,
    EPOCHS,
    MINIBATCH,
    STEPS,
    Meter,
    Pool,
    TimeUpError,
    flags,
    widths,
)


class PoolVecEnv(IVecEnv):
    """EnvPool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def reset(self):
        """All of them."""
        return self._pool.reset()

    def step(self, actions):
        """With time limits apart."""
        obs, rewards, terminated, truncated, _ = self._pool.step(np.asarray(actions))
        return obs, rewards, terminated | truncated, {"time_outs": truncated}

    def get_env_info(self):
        """Spaces."""
        return {
            "action_space": self._pool.actions,
            "observation_space": self._pool.observations,
        }


class Clock(AlgoObserver):
    """Ends training when the time is up."""

    def __init__(self, meter: Meter, pool: Pool) -> None:
        self._meter, self._pool = meter, pool

    def after_print_stats(self, frame, epoch_num, total_time):
        """After each iteration."""
        self._meter.iteration(self._pool.steps)


def network(pool: Pool) -> dict[str, Any]:
    """In rl_games' words; for images the 512 units have ELU, too."""
    default = {"name": "default"}
    continuous = {
        "mu_activation": "None", "sigma_activation": "None", "mu_init": default,
        "sigma_init": {"name": "const_initializer", "val": 0}, "fixed_sigma": True,
    }  # fmt: skip
    units = list(widths(pool.obs_shape))
    mlp = {"units": units if pool.is_image else units[1:], "activation": "elu", "initializer": default}
    space = {"discrete": {}} if pool.is_discrete else {"continuous": continuous}
    found: dict[str, Any] = {"name": "actor_critic", "separate": True, "mlp": mlp, "space": space}
    if pool.is_image:
        convs = [
            {"filters": filters, "kernel_size": size, "strides": stride, "padding": 0}
            for filters, size, stride in CONVOLUTIONS
        ]
        cnn = {"type": "conv2d", "activation": "relu", "initializer": default, "convs": convs}
        found["cnn"] = {**cnn, "permute_input": False}
    return found


def settings(pool: Pool, seed: int, folder: str) -> dict[str, Any]:
    """rl_games', as its files have them."""
    config = {
        "name": "peers", "env_name": "pool", "device": "cpu", "device_name": "cpu", "multi_gpu": False, "ppo": True,
        "mixed_precision": False, "normalize_input": False, "normalize_value": False, "normalize_advantage": True,
        "value_bootstrap": True, "reward_shaper": {"scale_value": 1.0}, "gamma": 0.99, "tau": 0.95,
        "learning_rate": 3e-4, "lr_schedule": None, "grad_norm": 0.5, "truncate_grads": True, "entropy_coef": 0.0,
        "critic_coef": 1.0, "clip_value": False, "e_clip": 0.2, "bounds_loss_coef": 0.0, "num_actors": ENVS,
        "horizon_length": STEPS, "minibatch_size": MINIBATCH, "mini_epochs": EPOCHS, "max_epochs": 10**9,
        "print_stats": False, "save_best_after": 10**9, "train_dir": folder,
    }  # fmt: skip
    return {
        "seed": seed,
        "algo": {"name": "a2c_discrete" if pool.is_discrete else "a2c_continuous"},
        "model": {"name": "discrete_a2c" if pool.is_discrete else "continuous_a2c_logstd"},
        "network": network(pool),
        "config": config,
    }


def main() -> None:
    """Command line."""
    given = flags("rl_games")
    meter = Meter("rl-games", given)
    pool = Pool(given, meter)
    vecenv.register("POOL", lambda name, count, **_: PoolVecEnv(pool))
    made = {"env_creator": lambda **_: PoolVecEnv(pool), "vecenv_type": "POOL"}
    env_configurations.register("pool", made)
    runner = Runner(Clock(meter, pool))
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(TimeUpError):
        runner.load({"params": settings(pool, given.seed, folder)})
        runner.run({"train": True, "play": False})
    meter.report(
        version("rl-games"),
        "advantages normalised over the iteration; its KL divergence is computed all the same",
    )


if __name__ == "__main__":
    main()
