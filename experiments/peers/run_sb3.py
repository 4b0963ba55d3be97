"""Stable-Baselines3's PPO with EnvPool as a VecEnv."""

from __future__ import annotations

import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from experiments.peers.common import ENVS, EPOCHS, MINIBATCH, STEPS, Meter, Pool, flags, widths


class PoolVecEnv(VecEnv):
    """EnvPool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        super().__init__(
            ENVS,
            pool.observations,
            pool.actions,
        )

    def reset(self):
        """All of them."""
        return self.pool.reset()

    def step_async(self, actions):
        """Kept until ``step_wait``."""
        self._actions = actions

    def step_wait(self):
        """Episodes' ends as SB3 wants to be told."""
        returns, lengths = self.pool.returns.copy(), self.pool.lengths.copy()
        obs, rewards, terminated, truncated, final = self.pool.step(self._actions)
        done, infos = terminated | truncated, [{} for _ in range(ENVS)]
        for i in np.flatnonzero(done):
            infos[i] = {
                "terminal_observation": final[i],
                "TimeLimit.truncated": bool(truncated[i]),
                "episode": {"r": returns[i] + rewards[i], "l": lengths[i] + 1, "t": 0.0},
            }
        return obs, rewards, done, infos

    def close(self):
        """Nothing to close."""

    def get_attr(self, attr_name, indices=None):
        """SB3 asks for the render mode: none."""
        return [getattr(self, attr_name, None)] * ENVS

    def set_attr(self, attr_name, value, indices=None):
        """Not needed."""
        raise NotImplementedError

    def env_method(self, method_name, *arguments, indices=None, **named):
        """Not needed."""
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class, indices=None):
        """None is."""
        return [False] * ENVS


class Clock(BaseCallback):
    """Ends training when the time is up."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter, self._over = meter, False

    def _on_rollout_start(self) -> None:  # the end of the iteration before, its update included
        self._over = self.num_timesteps > 0 and self._meter.over(self.num_timesteps)

    def _on_step(self) -> bool:
        self._meter.returns.extend(info["episode"]["r"] for info in self.locals["infos"] if "episode" in info)
        return not self._over


def main() -> None:
    """Command line."""
    given = flags("Stable-Baselines3")
    meter = Meter("sb3-envpool", given)
    pool = Pool(given)
    hidden = list(widths(pool.obs_shape)[1:])
    model = PPO(
        "CnnPolicy" if pool.is_image else "MlpPolicy",
        PoolVecEnv(pool),
        n_steps=STEPS,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        learning_rate=3e-4,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        vf_coef=0.5,
        ent_coef=0.0,
        max_grad_norm=0.5,
        seed=given.seed,
        policy_kwargs={
            "net_arch": {"pi": hidden, "vf": hidden},
            "activation_fn": torch.nn.ELU,
            "share_features_extractor": False,
        },
        device="cpu",
    )
    model.learn(total_timesteps=10**9, callback=Clock(meter))
    meter.report(stable_baselines3.__version__, "")


if __name__ == "__main__":
    main()
