"""rsl_rl's PPO with EnvPool as a VecEnv."""

from __future__ import annotations

import contextlib
from importlib.metadata import version
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

from experiments.peers import DISCRETE
from experiments.peers.common import (
    ENVS,
    EPOCHS,
    HIDDEN,
    MINIBATCHES,
    STEPS,
    Meter,
    Pool,
    TimeUpError,
    flags,
)


class PoolVecEnv(VecEnv):
    """EnvPool."""

    num_envs, max_episode_length, device = ENVS, 1000, "cpu"

    def __init__(self, pool: Pool) -> None:
        self.pool, self.num_actions, self.cfg = pool, pool.outputs, dict[str, Any]()
        self._obs = pool.reset()

    @property
    def episode_length_buf(self):
        """Steps of each environment's episode."""
        return torch.as_tensor(self.pool.lengths)

    def get_observations(self):
        """Those of now."""
        return TensorDict({"policy": torch.as_tensor(self._obs)}, batch_size=[ENVS])

    def step(self, actions):
        """With time limits apart."""
        self._obs, rewards, terminated, truncated, _ = self.pool.step(actions.numpy())
        done, extras = (
            torch.as_tensor(terminated | truncated),
            {"time_outs": torch.as_tensor(truncated)},
        )
        return self.get_observations(), torch.as_tensor(rewards), done, extras


def settings() -> dict[str, Any]:
    """rsl_rl's."""
    network = {
        "class_name": "MLPModel",
        "hidden_dims": HIDDEN,
        "activation": "elu",
        "obs_normalization": False,
    }
    normal = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    algorithm = {
        "class_name": "PPO", "num_learning_epochs": EPOCHS, "num_mini_batches": MINIBATCHES, "clip_param": 0.2,
        "gamma": 0.99, "lam": 0.95, "value_loss_coef": 0.5, "entropy_coef": 0.0, "learning_rate": 3e-4,
        "max_grad_norm": 0.5, "use_clipped_value_loss": False, "schedule": "fixed", "desired_kl": None,
        "normalize_advantage_per_mini_batch": True,
    }  # fmt: skip
    return {
        "num_steps_per_env": STEPS,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": normal},
        "critic": dict(network),
        "algorithm": algorithm,
    }


def main() -> None:
    """Command line."""
    given = flags("rsl_rl")
    meter = Meter("rsl-rl", given)
    if given.task in DISCRETE:
        raise SystemExit(f"{given.task}: rsl_rl has no policy that chooses among actions")
    pool = Pool(given, meter)
    runner = OnPolicyRunner(PoolVecEnv(pool), settings(), log_dir=None, device="cpu")
    log = runner.logger.log

    def tick(**kwargs: Any) -> None:
        """Called at the end of each iteration."""
        log(**kwargs)
        meter.iteration(pool.steps)

    runner.logger.log = tick
    with contextlib.suppress(TimeUpError):
        runner.learn(10**9)
    meter.report(
        version("rsl-rl-lib"), "time limits are bootstrapped from the observation before the last step"
    )


if __name__ == "__main__":
    main()
